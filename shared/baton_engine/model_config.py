"""What a decoder of the Llama family looks like: sizes and switches, read from the model's files, fixed for a process.

Llama, SmolLM2, Mistral, Qwen2 and Qwen3 differ by the switches below; everything else is refused by name at load.
"""

from dataclasses import dataclass, field

from baton_core.errors import EngineError
from baton_engine.rope import RopeScaling, Unscaled


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindow:
    """In these layers a token sees itself and the `tokens - 1` before it, and nothing older."""

    tokens: int
    layers: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One decoder of the Llama family. Sizes are of the whole model; a rank's share follows from its own layout."""

    architecture: str  # a key of ARCHITECTURES
    layers: int
    hidden: int
    intermediate: int
    query_heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context_tokens: int
    rope_theta: float
    norm_eps: float
    tied_embeddings: bool
    qkv_bias: bool = False
    output_bias: bool = False  # of the attention's output projection
    mlp_bias: bool = False
    qk_norm: bool = False
    rope_scaling: RopeScaling = field(default_factory=Unscaled)
    sliding_window: SlidingWindow | None = None

    def __post_init__(self) -> None:
        refuse_unknown_architecture(self.architecture)
        for size in ("layers", "hidden", "intermediate", "query_heads", "kv_heads", "head_dim", "vocab"):
            if getattr(self, size) < 1:
                raise lacking(self.architecture, f"{getattr(self, size)} as {size}")
        if self.sliding_window is not None and self.sliding_window.tokens < 1:
            raise lacking(self.architecture, f"a sliding window of {self.sliding_window.tokens} tokens")
        if self.query_heads % self.kv_heads:
            raise lacking(self.architecture, f"{self.query_heads} query heads over {self.kv_heads} KV heads")
        if self.head_dim % 2:
            raise lacking(self.architecture, f"an odd head size, {self.head_dim}")

    @property
    def queries_per_kv(self) -> int:
        """Query heads that share one KV head."""
        return self.query_heads // self.kv_heads

    @property
    def parameters(self) -> int:
        """Number of weights of the matrices, for memory estimates; norms and biases are noise."""
        embeddings = self.vocab * self.hidden * (1 if self.tied_embeddings else 2)
        return self.layers * self.layer_parameters + embeddings

    @property
    def layer_parameters(self) -> int:
        """Number of weights of one layer's matrices."""
        attention = self.hidden * self.head_dim * (2 * self.query_heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate

    def window_tokens(self, layer: int) -> int | None:
        """How far back a token of `layer` sees, itself included; None: as far as there is."""
        window = self.sliding_window
        return window.tokens if window is not None and layer in window.layers else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """How one member of the family differs from plain Llama."""

    qk_norm: bool = False
    permuted_in_gguf: bool = False  # llama.cpp stores its q and k rows in interleaved RoPE order


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(permuted_in_gguf=True),  # SmolLM2 too; Mistral's GGUF files also say "llama"
    "mistral": Architecture(permuted_in_gguf=True),
    "qwen2": Architecture(),
    "qwen3": Architecture(qk_norm=True),
}
"""The decoders there are, under the names that GGUF files and `config.json` give them."""


def refuse_unknown_architecture(name: str) -> None:
    """Raise EngineError where there is no decoder for `name`."""
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise lacking(name, f"a decoder of its own; Baton has decoders for {known}")


def refuse_features(architecture: str, features: dict[str, bool]) -> None:
    """Raise EngineError naming every feature that the model uses (True) and the decoder does not have."""
    used = [feature for feature, is_used in features.items() if is_used]
    if used:
        raise lacking(architecture, ", ".join(used))


def lacking(architecture: str, what: str) -> EngineError:
    """The refusal of a model that needs what the decoder does not have."""
    return EngineError(f"cannot serve a model of architecture {architecture!r}: it needs {what}")
