"""Attention over the paged pool, for one layer of one step.

Keys and values are written first, then read back through page tables, so that a sequence's own new tokens and its old
ones are found in the same way. Both paths fold the query heads that share a KV head together instead of repeating the
KV head (grouped-query attention, 2305.13245).
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from baton_engine.kv_pool import KVPool
from baton_engine.model_config import ModelConfig
from baton_engine.step_batch import DecodeGroup, PromptChunk, StepBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerView:
    """One layer of the pool, seen as rows; the indices of `StepBatch` fit every layer's view."""

    token_rows: Tensor  # [row, head_dim]: one token of one head
    page_rows: Tensor  # [row, page_tokens * head_dim]: one page of one head


def layer_views(pool: KVPool) -> tuple[LayerView, ...]:
    """A view for each layer of `pool`, sharing its memory."""
    shape = pool.shape
    tokens = pool.tensor.view(-1, shape.head_dim)
    pages = pool.tensor.view(-1, shape.page_tokens * shape.head_dim)
    heads = 2 * shape.kv_heads
    return tuple(
        LayerView(token_rows=tokens[layer * heads * shape.page_tokens :], page_rows=pages[layer * heads :])
        for layer in range(shape.layers)
    )


class PagedAttention:
    """Scaled dot-product attention of a model's heads; holds sizes only."""

    def __init__(self, config: ModelConfig) -> None:
        self._kv_heads = config.kv_heads
        self._query_heads = config.query_heads
        self._shared_by = config.queries_per_kv
        self._head_dim = config.head_dim
        self._scale = config.head_dim**-0.5

    def attend(self, qkv: Tensor, batch: StepBatch, view: LayerView, *, windowed: bool) -> Tensor:
        """Write the step's keys and values, attend, and return `[rows, query_heads * head_dim]`.

        `qkv` is `[rows, query_heads + 2 * kv_heads, head_dim]`, rotated; `windowed`: see no further back than the model's
        sliding window. Mutates the pool under `view`.
        """
        assert qkv.shape[1:] == (self._query_heads + 2 * self._kv_heads, self._head_dim)
        view.token_rows[batch.write] = qkv[:, self._query_heads :]
        parts = [self._decode(qkv, group, view, group.seen(windowed)) for group in batch.decode_groups]
        parts += [self._prompt(qkv, chunk, view, chunk.seen(windowed)) for chunk in batch.prompt_chunks]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _decode(self, qkv: Tensor, group: DecodeGroup, view: LayerView, bias: Tensor) -> Tensor:
        heads = group.rows * self._kv_heads
        query = qkv[group.first_row : group.first_row + group.rows, : self._query_heads]
        query = query.reshape(heads, self._shared_by, self._head_dim)
        gathered = view.page_rows.index_select(0, group.gather)
        keys, values = gathered.view(2, heads, group.context, self._head_dim)
        scores = torch.baddbmm(bias, query, keys.transpose(1, 2), alpha=self._scale)
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(qkv.dtype)
        return torch.bmm(weights, values).view(group.rows, self._query_heads * self._head_dim)

    def _prompt(self, qkv: Tensor, chunk: PromptChunk, view: LayerView, bias: Tensor | None) -> Tensor:
        own = qkv[chunk.first_row : chunk.first_row + chunk.rows]
        query = own[:, : self._query_heads].view(chunk.rows, self._kv_heads, self._shared_by, -1).permute(1, 2, 0, 3)
        if chunk.gather is None:
            keys, values = own[:, self._query_heads :].view(chunk.rows, 2, self._kv_heads, -1).permute(1, 2, 0, 3)
        else:
            gathered = view.page_rows.index_select(0, chunk.gather)
            keys, values = gathered.view(2, self._kv_heads, -1, self._head_dim)[:, :, : chunk.context]
        # query [kv_heads, shared_by, rows, head_dim]; a KV head is lent to its query heads by a stride of 0.
        attended = functional.scaled_dot_product_attention(
            query,
            keys[:, None].expand(-1, self._shared_by, -1, -1),
            values[:, None].expand(-1, self._shared_by, -1, -1),
            attn_mask=bias,
            is_causal=bias is None,
            scale=self._scale,
        )
        return attended.permute(2, 0, 1, 3).reshape(chunk.rows, self._query_heads * self._head_dim)
