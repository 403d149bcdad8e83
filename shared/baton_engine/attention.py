"""Attention over the paged pool, for one layer of one step.

Keys and values are written first, then read back through page tables, so that a sequence's own new tokens and its old
ones are found in the same way. No path repeats a KV head for the query heads that share it (grouped-query attention,
2305.13245).
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from baton_engine.groups import RankGroup
from baton_engine.kv_pool import KVPool, PoolShape
from baton_engine.model_config import ModelConfig
from baton_engine.step_batch import DecodeGroup, PromptChunk, StepBatch
from baton_engine.team import RowExchange

_SPLIT_FROM_TOKENS = 256
"""From this many tokens before a chunk on, attending to them apart and without a mask saves more than merging costs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerView:
    """One layer of the pool, seen as rows; the indices of `StepBatch` fit every layer's view."""

    token_rows: Tensor  # [row, head_dim in units of `_copied_as`]: one token of one head
    page_rows: Tensor  # [row, page_tokens * head_dim]: one page of one head


def layer_views(pool: KVPool) -> tuple[LayerView, ...]:
    """A view for each layer of `pool`, sharing its memory."""
    shape = pool.shape
    tokens = pool.tensor.view(-1, shape.head_dim).view(_copied_as(shape))
    pages = pool.tensor.view(-1, shape.page_tokens * shape.head_dim)
    heads = 2 * shape.kv_heads
    return tuple(
        LayerView(token_rows=tokens[layer * heads * shape.page_tokens :], page_rows=pages[layer * heads :])
        for layer in range(shape.layers)
    )


def _copied_as(shape: PoolShape) -> torch.dtype:
    """The widest type that a head of a token is a whole number of: torch scatters one element at a time."""
    size = shape.head_dim * shape.dtype.itemsize
    return next(wide for wide in (torch.complex128, torch.int64, torch.int32) if size % wide.itemsize == 0)


class PagedAttention:
    """Scaled dot-product attention for all layers of one step, and the memory its result is in."""

    def __init__(self, config: ModelConfig, batch: StepBatch, queries: Tensor, cp: RankGroup | None = None) -> None:
        """`queries` `[rows, query_heads, head_dim]`, contiguous: where a layer's rotated queries will be.

        `cp`: the ranks that share the rows of `batch`, whose keys and values all of them write.
        """
        self._batch = batch
        self._exchange: RowExchange | None = None
        if cp is not None and batch.rows_by_rank is not None:
            written_heads = queries.new_empty(0, 2 * config.kv_heads * config.head_dim)
            self._exchange = RowExchange(cp, batch.rows_by_rank, written_heads)
        self._heads_shape = (config.query_heads + 2 * config.kv_heads, config.head_dim)
        self._query_heads, self._kv_heads = config.query_heads, config.kv_heads
        self._scale = config.head_dim**-0.5
        self._attended = queries.new_empty(len(queries), config.query_heads * config.head_dim)
        # The query heads of one KV head are the rows of one small matrix.
        folded = (-1, config.kv_heads, config.queries_per_kv, config.head_dim)
        self._decodes = [
            (group, queries[rows].view(folded), self._attended[rows].view(folded))
            for group in batch.decode_groups
            for rows in [slice(group.first_row, group.first_row + group.rows)]
        ]
        by_heads = self._attended.view(queries.shape)
        self._prompts = [
            (chunk, queries[rows].transpose(0, 1)[None], by_heads[rows].transpose(0, 1)[None])
            for chunk in batch.prompt_chunks
            for rows in [slice(chunk.first_row, chunk.first_row + chunk.rows)]
        ]

    def attend(self, heads: Tensor, view: LayerView, *, windowed: bool) -> Tensor:
        """Write a layer's keys and values, attend, and return `[rows, query_heads * head_dim]`, good until the next call.

        `heads` is `[rows, query_heads + 2 * kv_heads, head_dim]` with the rotated keys and the values last. `windowed`:
        see no further back than the model's sliding window. Mutates the pool under `view`.
        """
        assert heads.shape[1:] == self._heads_shape
        self.write(heads, view)
        for group, query, attended in self._decodes:
            attended.copy_(self._decode(query, group.in_layer(windowed), view))
        for chunk, query, attended in self._prompts:
            result = self._prompt(query, heads, chunk.in_layer(windowed), view)
            if chunk.rows == len(heads):
                return result[0].transpose(0, 1).reshape(self._attended.shape)  # nearly always without a copy
            attended.copy_(result)
        return self._attended

    def write(self, heads: Tensor, view: LayerView) -> None:
        """Write the keys and values of `heads`, see `attend`; with `cp` those of all its ranks. Mutates the pool."""
        if self._exchange is None:
            written = heads.view(view.token_rows.dtype)[:, self._query_heads :]
        else:
            rows = self._exchange.gather(heads[:, self._query_heads :].flatten(1))
            written = rows.view(view.token_rows.dtype).view(len(rows), 2 * self._kv_heads, -1)
        view.token_rows.index_put_((self._batch.write,), written)

    def _decode(self, query: Tensor, group: DecodeGroup, view: LayerView) -> Tensor:
        """`query` and the result are `[rows, kv_heads, queries_per_kv, head_dim]`."""
        torch.index_select(view.page_rows, 0, group.gather, out=group.gathered)
        return functional.scaled_dot_product_attention(
            query, group.keys, group.values, attn_mask=group.bias, scale=self._scale
        )

    def _prompt(self, query: Tensor, heads: Tensor, chunk: PromptChunk, view: LayerView) -> Tensor:
        """`query` and the result are `[1, query_heads, rows, head_dim]`."""
        own = heads[chunk.first_row : chunk.first_row + chunk.rows, self._query_heads :]
        own = own.view(chunk.rows, 2, 1, self._kv_heads, -1).permute(1, 2, 3, 0, 4)
        if chunk.gather is None or chunk.gathered is None or chunk.context is None:
            return self._sdpa(query, own, chunk.bias)
        torch.index_select(view.page_rows, 0, chunk.gather, out=chunk.gathered)
        past = chunk.past_tokens
        if past is not None and past >= _SPLIT_FROM_TOKENS and query.device.type == "cpu":
            return self._split(query, own, chunk.context[:, :, :, :past])
        return self._sdpa(query, chunk.context, chunk.bias)

    def _sdpa(self, query: Tensor, context: Tensor, bias: Tensor | None) -> Tensor:
        """`query` over `context` `[2, 1, kv_heads, tokens, head_dim]`; without a bias each row sees what precedes it."""
        return functional.scaled_dot_product_attention(
            query,
            context[0],
            context[1],
            attn_mask=bias,
            is_causal=bias is None,
            scale=self._scale,
            enable_gqa=True,
        )

    def _split(self, query: Tensor, own: Tensor, past: Tensor) -> Tensor:
        """Attend to the chunk itself and to the past apart, and merge by how much weight each had (2205.14135)."""
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        merged: Tensor
        merged, own_weight = flash(query, own[0], own[1], 0.0, True, scale=self._scale)
        attended, past_weight = flash(query, past[0], past[1], 0.0, False, scale=self._scale)
        share = torch.sigmoid_(past_weight.sub_(own_weight))[..., None]  # of log-sum-exps, [1, query_heads, rows]
        return merged.lerp_(attended, share.to(query.dtype))
