"""The metadata of a GGUF file, understood as a `ModelConfig`. What the decoder lacks is refused by name."""

from pathlib import Path

from baton_core.errors import EngineError
from baton_engine.gguf_names import is_known, kind_of
from baton_engine.model_config import (
    ARCHITECTURES,
    ModelConfig,
    SlidingWindow,
    lacking,
    refuse_features,
    refuse_unknown_architecture,
)
from baton_engine.rope import Divided, Linear, RopeScaling, Unscaled, Yarn
from baton_io.gguf_metadata import GgufHeader

ROPE_DIVISORS = "rope_freqs.weight"
"""A tensor that is none of the weights: Llama 3.1's RoPE scaling."""


def read_config(path: Path, header: GgufHeader, rope_divisors: tuple[float, ...] | None) -> ModelConfig:
    """The config of the model in the file at `path`. Raises EngineError."""
    return _Config(path, header).model_config(rope_divisors)


class _Config:
    """Typed access to the metadata of one architecture."""

    def __init__(self, path: Path, header: GgufHeader) -> None:
        self._path = path
        self._values = header.values
        self._shapes = {tensor.name: tensor.shape for tensor in header.tensors}
        self._name = self._text("general.architecture")
        refuse_unknown_architecture(self._name)

    def model_config(self, rope_divisors: tuple[float, ...] | None) -> ModelConfig:
        """All of it."""
        if "token_embd.weight" not in self._shapes:
            raise EngineError(f"{self._path} has no tensor token_embd.weight")
        hidden, vocab = self._shapes["token_embd.weight"]  # the fastest dimension first
        query_heads = self._integer("attention.head_count")
        head_dim = self._integer("attention.key_length", hidden // max(1, query_heads))
        layers = self._integer("block_count")
        self._refuse_features(head_dim)
        return ModelConfig(
            architecture=self._name,
            layers=layers,
            hidden=hidden,
            intermediate=self._integer("feed_forward_length"),
            query_heads=query_heads,
            kv_heads=self._integer("attention.head_count_kv", query_heads),
            head_dim=head_dim,
            vocab=vocab,
            context_tokens=self._integer("context_length"),
            rope_theta=self._number("rope.freq_base", 10_000.0),
            norm_eps=self._number("attention.layer_norm_rms_epsilon"),
            tied_embeddings="output.weight" not in self._shapes,
            qkv_bias="blk.0.attn_q.bias" in self._shapes,
            output_bias="blk.0.attn_output.bias" in self._shapes,
            mlp_bias="blk.0.ffn_up.bias" in self._shapes,
            qk_norm=ARCHITECTURES[self._name].qk_norm,
            rope_scaling=self._rope_scaling() if rope_divisors is None else Divided(divisors=rope_divisors),
            sliding_window=self._sliding_window(layers),
        )

    def _refuse_features(self, head_dim: int) -> None:
        unknown = sorted({kind_of(name) for name in self._shapes if not is_known(name) and name != ROPE_DIVISORS})
        rotated = self._integer("rope.dimension_count", head_dim)
        value_dim = self._integer("attention.value_length", head_dim)
        parts = self._values.get("split.count", 1)
        refuse_features(
            self._name,
            {
                f"the other {parts} parts of its file: join them with llama-gguf-split --merge": parts not in (0, 1),
                "mixture of experts": self._integer("expert_count", 0) > 0,
                f"rotation of {rotated} of {head_dim} dimensions of each head": rotated != head_dim,
                f"values of {value_dim} dimensions beside keys of {head_dim}": value_dim != head_dim,
                f"tensors that the decoder does not know ({', '.join(unknown)})": bool(unknown),
            },
        )

    def _rope_scaling(self) -> RopeScaling:
        kind = self._values.get(f"{self._name}.rope.scaling.type", "none")
        if kind == "none":
            return Unscaled()
        factor = self._number("rope.scaling.factor", 1.0)
        if kind == "linear":
            return Linear(factor=factor)
        if kind == "yarn":
            return Yarn(
                factor=factor,
                original_context_tokens=self._integer(
                    "rope.scaling.original_context_length", self._integer("context_length")
                ),
                attention_factor=self._number("rope.scaling.attn_factor", 1.0) * Yarn.default_attention_factor(factor),
                beta_fast=self._number("rope.scaling.yarn_beta_fast", 32.0),
                beta_slow=self._number("rope.scaling.yarn_beta_slow", 1.0),
            )
        raise lacking(self._name, f"RoPE scaling {kind!r}; Baton has linear, yarn and Llama 3.1's {ROPE_DIVISORS}")

    def _sliding_window(self, layers: int) -> SlidingWindow | None:
        tokens = self._integer("attention.sliding_window", 0)
        if not tokens:
            return None
        if f"{self._name}.attention.sliding_window_pattern" in self._values:
            raise lacking(self._name, "a pattern of sliding windows, which only its config.json describes to Baton")
        return SlidingWindow(tokens=tokens, layers=frozenset(range(layers)))

    def _integer(self, key: str, default: int | None = None) -> int:
        value = self._value(key, default)
        if not isinstance(value, int):
            raise lacking(self._name, f"{self._name}.{key} = {value!r}; Baton takes one whole number for all layers")
        return value

    def _number(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        if not isinstance(value, int | float):
            raise EngineError(f"{self._path}: {self._name}.{key} is no number but {value!r}")
        return float(value)

    def _text(self, key: str) -> str:
        value = self._values.get(key)
        if not isinstance(value, str):
            raise EngineError(f"{self._path} does not say {key}")
        return value

    def _value(self, key: str, default: object) -> object:
        value = self._values.get(f"{self._name}.{key}", default)
        if value is None:
            raise EngineError(f"{self._path} does not say {self._name}.{key}")
        return value
