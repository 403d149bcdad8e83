"""A model's `config.json`, as Transformers writes it, understood as a `ModelConfig`.

What the decoder lacks is refused by name.
"""

from pathlib import Path
from typing import Literal

import msgspec

from baton_core.errors import EngineError
from baton_engine.model_config import (
    ARCHITECTURES,
    ModelConfig,
    SlidingWindow,
    lacking,
    refuse_features,
    refuse_unknown_architecture,
)
from baton_engine.rope import Linear, Llama3, RopeScaling, Unscaled, Yarn

CONFIG_FILE = "config.json"
_CLASSES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_MISTRAL_WINDOW_TOKENS = 4_096
_QWEN_WINDOW_LAYERS = 28
_QWEN3_HEAD_DIM = 128
_CONTEXT_TOKENS = {"llama": 2_048, "mistral": 131_072, "qwen2": 32_768, "qwen3": 32_768}
_THETA = 10_000.0


class RopeParameters(msgspec.Struct, kw_only=True, frozen=True):
    """`rope_parameters`, or `rope_scaling` of older files."""

    rope_type: str | None = None
    type: str | None = None  # the older name
    rope_theta: float | None = None
    partial_rotary_factor: float = 1.0
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None


class ConfigFile(msgspec.Struct, kw_only=True, frozen=True):
    """The keys that shape a decoder of the Llama family; all others are left alone."""

    model_type: str
    architectures: list[str] | None = None
    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    vocab_size: int
    max_position_embeddings: int | None = None
    original_max_position_embeddings: int | None = None
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    rope_theta: float | None = None
    rope_scaling: RopeParameters | None = None
    rope_parameters: RopeParameters | None = None
    partial_rotary_factor: float = 1.0
    use_sliding_window: bool = False
    sliding_window: int | msgspec.UnsetType | None = msgspec.UNSET
    max_window_layers: int = _QWEN_WINDOW_LAYERS
    layer_types: list[Literal["full_attention", "sliding_attention"]] | None = None
    quantization_config: dict[str, object] | None = None


def read_config(folder: Path) -> ModelConfig:
    """The config of the model in `folder`. Raises EngineError naming the file, and what the decoder lacks."""
    path = folder / CONFIG_FILE
    try:
        raw = path.read_bytes()
        kind = msgspec.json.decode(raw, type=_Kind)
        # Other architectures have other keys: they are refused for what they are, not for what they leave out.
        refuse_unknown_architecture(_architecture(kind))
        return _model_config(msgspec.json.decode(raw, type=ConfigFile))
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise EngineError(f"{path} cannot be used: {error}") from error


class _Kind(msgspec.Struct, kw_only=True, frozen=True):
    model_type: str = "unnamed"
    architectures: list[str] | None = None


def _architecture(kind: "_Kind | ConfigFile") -> str:
    names = kind.architectures or []
    known = [_CLASSES[name] for name in names if name in _CLASSES]
    if known:
        return known[0]
    return names[0] if names else kind.model_type


def _model_config(file: ConfigFile) -> ModelConfig:
    name = _architecture(file)
    _refuse_features(name, file)
    parameters = file.rope_parameters or file.rope_scaling or RopeParameters()
    scaling = _rope_scaling(name, file, parameters)
    head_dim = file.head_dim or (_QWEN3_HEAD_DIM if name == "qwen3" else file.hidden_size // file.num_attention_heads)
    context_tokens = file.max_position_embeddings or _CONTEXT_TOKENS[name]
    if isinstance(scaling, Yarn):
        context_tokens = max(context_tokens, int(scaling.original_context_tokens * scaling.factor))
    takes_bias = name in ("llama", "qwen3") and file.attention_bias
    return ModelConfig(
        architecture=name,
        layers=file.num_hidden_layers,
        hidden=file.hidden_size,
        intermediate=file.intermediate_size,
        query_heads=file.num_attention_heads,
        kv_heads=file.num_key_value_heads or file.num_attention_heads,
        head_dim=head_dim,
        vocab=file.vocab_size,
        context_tokens=context_tokens,
        rope_theta=parameters.rope_theta or file.rope_theta or _THETA,
        norm_eps=file.rms_norm_eps,
        tied_embeddings=file.tie_word_embeddings,
        qkv_bias=takes_bias or name == "qwen2",
        output_bias=takes_bias,
        mlp_bias=name == "llama" and file.mlp_bias,
        qk_norm=ARCHITECTURES[name].qk_norm,
        rope_scaling=scaling,
        sliding_window=_sliding_window(name, file),
    )


def _refuse_features(name: str, file: ConfigFile) -> None:
    parameters = file.rope_parameters or file.rope_scaling or RopeParameters()
    rotated = min(file.partial_rotary_factor, parameters.partial_rotary_factor)
    method = (file.quantization_config or {}).get("quant_method", "unnamed")
    refuse_features(
        name,
        {
            f"the activation {file.hidden_act!r}": file.hidden_act not in ("silu", "swish"),
            f"weights quantised by {method!r}": file.quantization_config is not None,
            f"rotation of {rotated:.0%} of each head": rotated != 1.0,
        },
    )


def _rope_scaling(name: str, file: ConfigFile, parameters: RopeParameters) -> RopeScaling:
    kind = parameters.rope_type or parameters.type or "default"
    if kind == "default":
        return Unscaled()
    factor = parameters.factor
    original = (
        file.original_max_position_embeddings
        or parameters.original_max_position_embeddings
        or file.max_position_embeddings
        or _CONTEXT_TOKENS[name]
    )
    if kind == "linear" and factor is not None:
        return Linear(factor=factor)
    if kind == "llama3" and factor is not None:
        low, high = parameters.low_freq_factor, parameters.high_freq_factor
        if low is not None and high is not None:
            return Llama3(
                factor=factor, low_frequency_factor=low, high_frequency_factor=high, original_context_tokens=original
            )
    if kind == "yarn" and factor is not None:
        return Yarn(
            factor=factor,
            original_context_tokens=original,
            attention_factor=_yarn_attention_factor(factor, parameters),
            beta_fast=parameters.beta_fast or 32.0,
            beta_slow=parameters.beta_slow or 1.0,
            truncate=parameters.truncate,
        )
    if kind in ("linear", "llama3", "yarn"):
        raise EngineError(f"{CONFIG_FILE} does not give all parameters of RoPE scaling {kind!r}")
    raise lacking(name, f"RoPE scaling {kind!r}; Baton has linear, llama3 and yarn")


def _yarn_attention_factor(factor: float, parameters: RopeParameters) -> float:
    if parameters.attention_factor is not None:
        return parameters.attention_factor
    if parameters.mscale and parameters.mscale_all_dim:
        weights = parameters.mscale, parameters.mscale_all_dim
        above, below = (Yarn.default_attention_factor(factor, weight) for weight in weights)
        return above / below
    return Yarn.default_attention_factor(factor)


def _sliding_window(name: str, file: ConfigFile) -> SlidingWindow | None:
    every = range(file.num_hidden_layers)
    if name == "mistral":
        tokens = _MISTRAL_WINDOW_TOKENS if file.sliding_window is msgspec.UNSET else file.sliding_window
        return None if tokens is None else SlidingWindow(tokens=tokens, layers=frozenset(every))
    if name not in ("qwen2", "qwen3") or not file.use_sliding_window or file.sliding_window is None:
        return None
    tokens = _MISTRAL_WINDOW_TOKENS if file.sliding_window is msgspec.UNSET else file.sliding_window
    if file.layer_types is None:
        layers = frozenset(layer for layer in every if layer >= file.max_window_layers)
    else:
        layers = frozenset(layer for layer, kind in enumerate(file.layer_types) if kind == "sliding_attention")
    return SlidingWindow(tokens=tokens, layers=layers) if layers else None
