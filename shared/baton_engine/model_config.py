"""What a decoder of the Llama family looks like: sizes and switches, read from the weights file, fixed for a process.

Llama, SmolLM2, Mistral, Qwen2 and Qwen3 differ by the switches below; everything else is refused by name at load.
"""

from dataclasses import dataclass

from baton_core.errors import EngineError


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
    qk_norm: bool = False
    rope_scaling: str = "none"  # the only one the decoder knows

    def __post_init__(self) -> None:
        refuse_unknown_architecture(self.architecture)
        if self.rope_scaling != "none":
            raise _lacking(self.architecture, f"RoPE scaling {self.rope_scaling!r}; only unscaled RoPE is implemented")
        if self.query_heads % self.kv_heads:
            raise _lacking(self.architecture, f"{self.query_heads} query heads over {self.kv_heads} KV heads")
        if self.head_dim % 2:
            raise _lacking(self.architecture, f"an odd head size, {self.head_dim}")

    @property
    def queries_per_kv(self) -> int:
        """Query heads that share one KV head."""
        return self.query_heads // self.kv_heads

    @property
    def parameters(self) -> int:
        """Number of weights of the matrices, for memory estimates; norms and biases are noise."""
        attention = self.hidden * self.head_dim * (2 * self.query_heads + 2 * self.kv_heads)
        embeddings = self.vocab * self.hidden * (1 if self.tied_embeddings else 2)
        return self.layers * (attention + 3 * self.hidden * self.intermediate) + embeddings


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """How one member of the family differs from plain Llama."""

    qkv_bias: bool = False
    qk_norm: bool = False
    permuted_in_gguf: bool = False  # llama.cpp stores its q and k rows in interleaved RoPE order


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(permuted_in_gguf=True),  # Mistral and SmolLM2 too: their GGUF files say "llama"
    "qwen2": Architecture(qkv_bias=True),
    "qwen3": Architecture(qk_norm=True),
}
"""The decoders there are, under the names that GGUF gives them."""


def refuse_unknown_architecture(name: str) -> None:
    """Raise EngineError where there is no decoder for `name`."""
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise _lacking(name, f"a decoder of its own; Baton has decoders for {known}")


def refuse_features(architecture: str, features: dict[str, bool]) -> None:
    """Raise EngineError naming every feature that the model uses (True) and the decoder does not have."""
    used = [feature for feature, is_used in features.items() if is_used]
    if used:
        raise _lacking(architecture, ", ".join(used))


def _lacking(architecture: str, what: str) -> EngineError:
    return EngineError(f"cannot serve a model of architecture {architecture!r}: it needs {what}")
