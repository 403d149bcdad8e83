"""The decoder of the Llama family (2302.13971), once, for a ragged batch over a paged pool.

The same code computes prompt chunks and decode steps, float32 and bfloat16, on CPU and CUDA. Norms and rotations are
computed in float32 whatever the weights are. Projections that read the same input are fused into one product at load,
where that is fastest. Memory that all layers need in turn is taken once a step.

A rank of several has a shard of the weights, and a `team` that completes its products.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from baton_core.errors import EngineError
from baton_engine.attention import LayerView, PagedAttention
from baton_engine.model_config import ModelConfig
from baton_engine.projection import Projection, gated_projection, projection
from baton_engine.residual import ResidualStream, norm_weight
from baton_engine.rotation import Rotation, paired
from baton_engine.shard import Shard
from baton_engine.step_batch import StepBatch
from baton_engine.team import Team


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """The weights of one layer."""

    attention_norm: Tensor  # [hidden], as `norm_weight`
    qkv: Projection
    query_norm: Tensor | None  # [head_dim], `paired` as the rows of queries and keys in `qkv` are
    key_norm: Tensor | None
    attention_output: Projection
    mlp_norm: Tensor  # [hidden], as `norm_weight`
    gate_up: Projection  # with the SiLU and the gate
    down: Projection
    windowed: bool  # sees no further back than the model's sliding window


class LlamaModel:
    """A decoder on one device, with the weights of one rank."""

    def __init__(
        self, config: ModelConfig, weights: dict[str, Tensor], device: torch.device, team: Team | None = None
    ) -> None:
        """Move `weights` (Hugging Face names, one dtype) into the model; with a `team` those of its shard.

        Consumes the dict, so that at most one layer exists twice at a time. Raises EngineError naming what is missing,
        left over, or misshapen.
        """
        shard = Shard.whole(config) if team is None else team.shard
        self.config = shard.config
        """The model as it looks from this rank."""
        self.device = device
        self._team = team
        take = _Weights(weights, device)
        table, tied = (len(shard.vocab), config.hidden), config.tied_embeddings
        has_table = shard.embeds or (tied and shard.heads)
        self._embeddings = take("model.embed_tokens.weight", *table) if has_table else None
        self._layers = [_layer(shard, take, index, team) for index in shard.layers]
        self._norm = take("model.norm.weight", config.hidden) if shard.heads else None
        head = (self._embeddings if tied else take("lm_head.weight", *table)) if shard.heads else None
        self._head = None if head is None else projection(head)
        self.dtype = self._layers[0].attention_norm.dtype
        if weights:
            raise EngineError(f"weights that the decoder does not use: {', '.join(sorted(weights)[:5])}")

    def forward(self, batch: StepBatch, views: tuple[LayerView, ...], entering: Tensor | None = None) -> Tensor:
        """Compute the step, writing its keys and values under `views`; the last hidden states `[rows, hidden]`.

        `entering`: the states that the pipeline stage before this one computed; their memory is used up.
        """
        assert len(views) == len(self._layers)
        config = self.config
        stream = ResidualStream(self._embedded(batch.token_ids) if entering is None else entering, config.norm_eps)
        rotation = Rotation(batch.turns, config.query_heads, config.kv_heads, self.dtype)
        attention = PagedAttention(config, batch, rotation.queries, None if self._team is None else self._team.cp)
        for layer, view in zip(self._layers, views, strict=True):
            heads = layer.qkv(stream.normed(layer.attention_norm)).view(len(batch.token_ids), -1, config.head_dim)
            self._norm_heads(layer, heads)
            rotation.turn(heads)
            stream.add(layer.attention_output(attention.attend(heads, view, windowed=layer.windowed)))
            stream.add(layer.down(layer.gate_up(stream.normed(layer.mlp_norm))))
        return stream.hidden

    def accompany(self, batch: StepBatch | None, views: tuple[LayerView, ...], has_company: bool) -> None:
        """Take part in the step of other ranks with no rows of our own.

        `batch`: of a unit whose other CP ranks have rows, whose keys and values are written here too. `has_company`: rows
        of other units come to the MLP.
        """
        config, team = self.config, self._team
        assert team is not None
        nothing = torch.empty(0, config.hidden, dtype=self.dtype, device=self.device)
        heads = nothing.new_empty(0, config.query_heads + 2 * config.kv_heads, config.head_dim)
        attention = None
        if batch is not None:
            attention = PagedAttention(config, batch, heads[:, : config.query_heads], team.cp)
        for layer, view in zip(self._layers, views, strict=True):
            if attention is not None:
                attention.write(heads, view)
            if has_company:
                layer.down(layer.gate_up(nothing))

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits `[rows, vocab]` in float32 of last hidden states `[rows, hidden]`: only of those rows that matter."""
        return self.scores(hidden).float()

    def scores(self, hidden: Tensor) -> Tensor:
        """Logits of this rank's share of the vocabulary, `[rows, tokens]`, in the dtype of the weights."""
        assert self._head is not None and self._norm is not None, (
            "only the last pipeline stage has an output projection"
        )
        return self._head(self._normed(hidden, self._norm))

    def _embedded(self, token_ids: Tensor) -> Tensor:
        assert self._embeddings is not None, "only the first pipeline stage has embeddings"
        if self._team is None:
            return functional.embedding(token_ids, self._embeddings)
        return self._team.embedded(token_ids, self._embeddings)

    def _norm_heads(self, layer: Layer, heads: Tensor) -> None:
        """Norm the queries and keys of `heads` in place, where the model does."""
        if layer.query_norm is not None and layer.key_norm is not None:
            queries, end = self.config.query_heads, self.config.query_heads + self.config.kv_heads
            heads[:, :queries] = self._normed(heads[:, :queries], layer.query_norm)
            heads[:, queries:end] = self._normed(heads[:, queries:end], layer.key_norm)

    def _normed(self, values: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm (1910.07467) over the last dimension, computed in float32."""
        return functional.rms_norm(values, weight.shape, weight, self.config.norm_eps)


def _layer(shard: Shard, take: "_Weights", index: int, team: Team | None) -> Layer:
    config = shard.config
    prefix, head_dim = f"model.layers.{index}.", config.head_dim
    queries, keys = config.query_heads * head_dim, config.kv_heads * head_dim
    qkv_sizes = {"self_attn.q_proj": queries, "self_attn.k_proj": keys, "self_attn.v_proj": keys}
    turned = ("self_attn.q_proj", "self_attn.k_proj")
    gate_up_sizes = {"mlp.gate_proj": config.intermediate, "mlp.up_proj": config.intermediate}

    def rows(name: str, kind: str, *shape: int) -> Tensor:
        taken = take(f"{prefix}{name}.{kind}", *shape)
        return paired(taken, head_dim) if name in turned else taken

    def matrix(sizes: dict[str, int], inputs: int, has_bias: bool) -> tuple[Tensor, Tensor | None]:
        weights = [rows(name, "weight", size, inputs) for name, size in sizes.items()]
        biases = [rows(name, "bias", size) for name, size in sizes.items()] if has_bias else []
        return _joined(weights), _joined(biases) if biases else None

    def head_norm(name: str) -> Tensor | None:
        return paired(take(f"{prefix}self_attn.{name}.weight", head_dim), head_dim) if config.qk_norm else None

    output = projection(*matrix({"self_attn.o_proj": config.hidden}, queries, shard.adds_output_bias))
    gate_up = gated_projection(*matrix(gate_up_sizes, config.hidden, config.mlp_bias))
    down = projection(*matrix({"mlp.down_proj": config.hidden}, config.intermediate, shard.adds_down_bias))
    return Layer(
        attention_norm=norm_weight(take(f"{prefix}input_layernorm.weight", config.hidden)),
        qkv=projection(*matrix(qkv_sizes, config.hidden, config.qkv_bias)),
        query_norm=head_norm("q_norm"),
        key_norm=head_norm("k_norm"),
        attention_output=output if team is None else team.attention_output(output),
        mlp_norm=norm_weight(take(f"{prefix}post_attention_layernorm.weight", config.hidden)),
        gate_up=gate_up if team is None else team.gate_up(gate_up),
        down=down if team is None else team.down(down),
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
