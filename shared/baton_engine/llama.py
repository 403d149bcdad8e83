"""The decoder of the Llama family (2302.13971), once, for a ragged batch over a paged pool.

The same code computes prompt chunks and decode steps, float32 and bfloat16, on CPU and CUDA. Norms and rotations are
computed in float32 whatever the weights are. Projections that read the same input are fused into one product at load.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from baton_core.errors import EngineError
from baton_engine.attention import LayerView, PagedAttention
from baton_engine.model_config import ModelConfig
from baton_engine.projection import Projection, projection
from baton_engine.step_batch import StepBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """The weights of one layer."""

    attention_norm: Tensor  # [hidden]
    qkv: Projection
    query_norm: Tensor | None  # [head_dim]
    key_norm: Tensor | None  # [head_dim]
    attention_output: Projection
    mlp_norm: Tensor  # [hidden]
    gate_up: Projection
    down: Projection
    windowed: bool  # sees no further back than the model's sliding window


class LlamaModel:
    """A decoder on one device, with the weights of one rank."""

    def __init__(self, config: ModelConfig, weights: dict[str, Tensor], device: torch.device) -> None:
        """Move `weights` (Hugging Face names, one dtype) into the model.

        Consumes the dict, so that at most one layer exists twice at a time. Raises EngineError naming what is missing,
        left over, or misshapen.
        """
        self.config = config
        self.device = device
        take = _Weights(weights, device)
        self._embeddings = take("model.embed_tokens.weight", config.vocab, config.hidden)
        self._layers = [_layer(config, take, index) for index in range(config.layers)]
        self._norm = take("model.norm.weight", config.hidden)
        head = self._embeddings if config.tied_embeddings else take("lm_head.weight", config.vocab, config.hidden)
        self._head = projection(head)
        self._attention = PagedAttention(config)
        self.dtype = self._embeddings.dtype
        if weights:
            raise EngineError(f"weights that the decoder does not use: {', '.join(sorted(weights)[:5])}")

    def forward(self, batch: StepBatch, views: tuple[LayerView, ...]) -> Tensor:
        """Compute the step, writing its keys and values under `views`; the last hidden states `[rows, hidden]`."""
        assert len(views) == len(self._layers)
        hidden = functional.embedding(batch.token_ids, self._embeddings)  # [rows, hidden]
        for layer, view in zip(self._layers, views, strict=True):
            hidden = hidden + self._attend(layer, hidden, batch, view)
            hidden = hidden + self._mlp(layer, hidden)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits `[rows, vocab]` in float32 of last hidden states `[rows, hidden]`: only of those rows that matter."""
        return self._head(self._normed(hidden, self._norm)).float()

    def _attend(self, layer: Layer, hidden: Tensor, batch: StepBatch, view: LayerView) -> Tensor:
        config = self.config
        qkv = layer.qkv(self._normed(hidden, layer.attention_norm)).view(len(hidden), -1, config.head_dim)
        rotated = qkv[:, : config.query_heads + config.kv_heads]
        if layer.query_norm is not None and layer.key_norm is not None:
            queries, keys = rotated[:, : config.query_heads], rotated[:, config.query_heads :]
            normed = self._normed(queries, layer.query_norm), self._normed(keys, layer.key_norm)
            rotated.copy_(torch.cat(normed, dim=1))
        _rotate(rotated, batch)
        return layer.attention_output(self._attention.attend(qkv, batch, view, windowed=layer.windowed))

    def _mlp(self, layer: Layer, hidden: Tensor) -> Tensor:
        gate, up = layer.gate_up(self._normed(hidden, layer.mlp_norm)).chunk(2, dim=-1)
        return layer.down(functional.silu(gate).mul_(up))

    def _normed(self, values: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm (1910.07467) over the last dimension, computed in float32."""
        return functional.rms_norm(values, weight.shape, weight, self.config.norm_eps)


def _rotate(values: Tensor, batch: StepBatch) -> None:
    """Apply RoPE (2104.09864) to `values` `[rows, heads, head_dim]` in place: halves rotate against each other."""
    wide = values.float()
    swapped = wide.roll(values.shape[-1] // 2, dims=-1)
    values.copy_(torch.addcmul(wide * batch.cosine, swapped, batch.signed_sine))


def _layer(config: ModelConfig, take: "_Weights", index: int) -> Layer:
    prefix = f"model.layers.{index}."
    queries, keys = config.query_heads * config.head_dim, config.kv_heads * config.head_dim
    qkv_sizes = {"self_attn.q_proj": queries, "self_attn.k_proj": keys, "self_attn.v_proj": keys}
    gate_up_sizes = {"mlp.gate_proj": config.intermediate, "mlp.up_proj": config.intermediate}

    def project(sizes: dict[str, int], inputs: int, has_bias: bool) -> Projection:
        weights = [take(f"{prefix}{name}.weight", size, inputs) for name, size in sizes.items()]
        biases = [take(f"{prefix}{name}.bias", size) for name, size in sizes.items()] if has_bias else []
        return projection(_joined(weights), _joined(biases) if biases else None)

    return Layer(
        attention_norm=take(f"{prefix}input_layernorm.weight", config.hidden),
        qkv=project(qkv_sizes, config.hidden, config.qkv_bias),
        query_norm=take(f"{prefix}self_attn.q_norm.weight", config.head_dim) if config.qk_norm else None,
        key_norm=take(f"{prefix}self_attn.k_norm.weight", config.head_dim) if config.qk_norm else None,
        attention_output=project({"self_attn.o_proj": config.hidden}, queries, config.output_bias),
        mlp_norm=take(f"{prefix}post_attention_layernorm.weight", config.hidden),
        gate_up=project(gate_up_sizes, config.hidden, config.mlp_bias),
        down=project({"mlp.down_proj": config.hidden}, config.intermediate, config.mlp_bias),
        windowed=config.window_tokens(index) is not None,
    )


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class _Weights:
    """Takes weights out of a dict, one by one, onto a device."""

    def __init__(self, weights: dict[str, Tensor], device: torch.device) -> None:
        self._weights = weights
        self._device = device

    def __call__(self, name: str, *shape: int) -> Tensor:
        if name not in self._weights:
            raise EngineError(f"the model file has no weight {name}")
        weight = self._weights.pop(name)
        if weight.shape != shape:
            raise EngineError(f"weight {name} has shape {list(weight.shape)}, not {list(shape)}")
        return weight.to(self._device)
