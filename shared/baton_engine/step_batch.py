"""A plan as tensors: everything about a step that is the same in all layers, built once.

Rows are the plan's tokens, regrouped: slices of one token first, those of similar context length next to each other so
that they share one padded gather, then the prompt chunks one by one. Only `sampled_rows` and `scored_rows` remember the
plan's order.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from baton_core.plan import SequenceSlice, StepPlan
from baton_engine.kv_pool import PoolShape
from baton_engine.model_config import ModelConfig
from baton_engine.rope import attention_factor, inverse_frequencies

_SMALLEST_GROUP_PAGES = 8
_GROUP_BYTES = 2**20
"""What a group gathers at once on a CPU: read again while it is still in a core's own cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeGroup:
    """One-token slices of similar context, attended together.

    `gather` `[2 * rows * kv_heads * pages]` int64 picks page-sized runs of one head; `gathered` `[2 * rows * kv_heads *
    pages, page_tokens * head_dim]` is the memory they go to, the same one for all groups, chunks and layers; `keys` and
    `values` `[rows, kv_heads, context, head_dim]` are views of it. `bias` `[rows, 1, 1, context]` is 0 where a token may
    be seen, -inf where the padding is; None in a group of one, which has no padding. `window_bias` also hides what lies
    before the sliding window, and is None where nothing does.
    """

    first_row: int
    rows: int
    gather: Tensor
    gathered: Tensor
    keys: Tensor
    values: Tensor
    bias: Tensor | None
    window_bias: Tensor | None

    def seen(self, windowed: bool) -> Tensor | None:
        """The bias that counts in a layer with or without a sliding window."""
        return self.window_bias if windowed and self.window_bias is not None else self.bias


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptChunk:
    """A slice of several tokens. At the start of its sequence it needs nothing but itself: the tensors are None.

    Otherwise `gather` and `gathered` are as in `DecodeGroup` with one row, `context` `[2, 1, kv_heads, start + rows,
    head_dim]` is a view of the keys and values there, and `bias` `[rows, start + rows]` admits what precedes a token.
    `window_bias` as in `DecodeGroup`.
    """

    first_row: int
    rows: int
    start: int
    gather: Tensor | None
    gathered: Tensor | None
    context: Tensor | None
    bias: Tensor | None
    window_bias: Tensor | None

    def seen(self, windowed: bool) -> Tensor | None:
        """The bias that counts in a layer with or without a sliding window."""
        return self.window_bias if windowed and self.window_bias is not None else self.bias


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """The tensors of a step, on the model's device.

    `token_ids` `[rows]` int64; `turns` `[rows, 1, head_dim / 2]` complex64: RoPE's factors of a row's pairs; `write`
    `[rows, 2 * kv_heads]` int64 says where keys and values go; `sampled_rows` `[samples]` and `scored_rows` `[scores]`
    int64, in plan order; `scored_rows` is None where nothing is to be scored.
    """

    token_ids: Tensor
    turns: Tensor
    write: Tensor
    sampled_rows: Tensor
    scored_rows: Tensor | None
    decode_groups: tuple[DecodeGroup, ...]
    prompt_chunks: tuple[PromptChunk, ...]


class BatchBuilder:
    """Builds the `StepBatch` of a plan for one model and one pool."""

    def __init__(self, config: ModelConfig, shape: PoolShape, device: torch.device) -> None:
        self._shape = shape
        self._device = device
        self._inverse_frequency = inverse_frequencies(config.rope_theta, config.head_dim, config.rope_scaling)
        self._rotation_scale = attention_factor(config.rope_scaling)
        page_bytes = 2 * shape.kv_heads * shape.page_tokens * shape.head_dim * shape.dtype.itemsize
        self._group_pages = _GROUP_BYTES // page_bytes if device.type == "cpu" else None
        self._window_tokens = None if config.sliding_window is None else config.sliding_window.tokens

    def build(self, plan: StepPlan) -> StepBatch:
        """The batch of `plan`. Pure."""
        groups, chunks = _regroup(plan.slices, self._shape.page_tokens, self._group_pages)
        ordered = [item for group in groups for item in group] + chunks
        first_rows = _first_rows(ordered)
        scored = _scored_rows(plan.slices, first_rows)
        gathered = self._room(groups, chunks)
        return StepBatch(
            token_ids=self._indices([token for item in ordered for token in item.tokens]),
            turns=self._turns(ordered),
            write=self._write(ordered),
            sampled_rows=self._indices(_sampled_rows(plan.slices, first_rows)),
            scored_rows=self._indices(scored) if scored else None,
            decode_groups=self._decode_groups(groups, gathered),
            prompt_chunks=self._prompt_chunks(chunks, sum(len(group) for group in groups), gathered),
        )

    def _turns(self, ordered: list[SequenceSlice]) -> Tensor:
        positions = [position for item in ordered for position in range(item.start, item.start + len(item.tokens))]
        angles = torch.tensor(positions, dtype=torch.float32)[:, None] * self._inverse_frequency
        turns = torch.complex(angles.cos() * self._rotation_scale, angles.sin() * self._rotation_scale)
        return turns[:, None].to(self._device)

    def _write(self, ordered: list[SequenceSlice]) -> Tensor:
        # Rows of head_dim, of layer 0: a layer's own are the same ones further along.
        shape = self._shape
        page_rows = shape.layers * 2 * shape.kv_heads * shape.page_tokens
        first = [
            item.pages[position // shape.page_tokens] * page_rows + position % shape.page_tokens
            for item in ordered
            for position in range(item.start, item.start + len(item.tokens))
        ]
        heads = torch.arange(2 * shape.kv_heads) * shape.page_tokens
        return (torch.tensor(first)[:, None] + heads).to(self._device)

    def _gather(self, tables: list[list[int]]) -> Tensor:
        # Rows of page_tokens * head_dim, of layer 0, in the order [k|v, row, kv_head, page].
        shape = self._shape
        pages = torch.tensor(tables)[None, :, None, :] * (shape.layers * 2 * shape.kv_heads)
        heads = torch.arange(2 * shape.kv_heads).view(2, 1, shape.kv_heads, 1)
        return (pages + heads).flatten().to(self._device)

    def _used_pages(self, item: SequenceSlice) -> int:
        return (item.start + len(item.tokens) - 1) // self._shape.page_tokens + 1

    def _room(self, groups: list[list[SequenceSlice]], chunks: list[SequenceSlice]) -> Tensor:
        """Memory for the largest gather of the step: fresh memory for each would cost more than the copying."""
        shape = self._shape
        pages = [len(group) * max(map(self._used_pages, group)) for group in groups]
        pages += [self._used_pages(item) for item in chunks if item.start > 0]
        rows = 2 * shape.kv_heads * max(pages, default=0)
        return torch.empty(rows, shape.page_tokens * shape.head_dim, dtype=shape.dtype, device=self._device)

    def _decode_groups(self, groups: list[list[SequenceSlice]], gathered: Tensor) -> tuple[DecodeGroup, ...]:
        built: list[DecodeGroup] = []
        first_row = 0
        for group in groups:
            built.append(self._decode_group(group, first_row, gathered))
            first_row += len(group)
        return tuple(built)

    def _decode_group(self, group: list[SequenceSlice], first_row: int, gathered: Tensor) -> DecodeGroup:
        shape = self._shape
        used = [self._used_pages(item) for item in group]
        # A short table is padded with a page of its own sequence, so that no row ever looks at another request.
        tables = [
            list(item.pages[:count]) + [item.pages[0]] * (max(used) - count)
            for item, count in zip(group, used, strict=True)
        ]
        room = gathered[: 2 * len(group) * shape.kv_heads * max(used)]
        is_one = len(group) == 1
        context = group[0].start + 1 if is_one else max(used) * shape.page_tokens
        seen = self._context(room, len(group), context)
        keys, positions = torch.arange(context), torch.tensor([item.start for item in group]).view(-1, 1, 1, 1)
        return DecodeGroup(
            first_row=first_row,
            rows=len(group),
            gather=self._gather(tables),
            gathered=room,
            keys=seen[0],
            values=seen[1],
            bias=None if is_one else self._bias(keys > positions),
            window_bias=self._window_bias(keys, positions),
        )

    def _prompt_chunks(self, chunks: list[SequenceSlice], first_row: int, gathered: Tensor) -> tuple[PromptChunk, ...]:
        built: list[PromptChunk] = []
        for item in chunks:
            rows, end = len(item.tokens), item.start + len(item.tokens)
            keys, positions = torch.arange(end), torch.arange(item.start, end)[:, None]
            gather, room = None, None
            if item.start > 0:
                gather = self._gather([list(item.pages[: self._used_pages(item)])])
                room = gathered[: len(gather)]
            built.append(
                PromptChunk(
                    first_row=first_row,
                    rows=rows,
                    start=item.start,
                    gather=gather,
                    gathered=room,
                    context=None if room is None else self._context(room, 1, end),
                    bias=None if room is None else self._bias(keys > positions),
                    window_bias=self._window_bias(keys, positions),
                )
            )
            first_row += rows
        return tuple(built)

    def _context(self, room: Tensor, rows: int, tokens: int) -> Tensor:
        """The first `tokens` keys and values of what is gathered into `room`."""
        return room.view(2, rows, self._shape.kv_heads, -1, self._shape.head_dim)[:, :, :, :tokens]

    def _window_bias(self, keys: Tensor, positions: Tensor) -> Tensor | None:
        """Hides what follows each of `positions` and what lies before its window; None where nothing does."""
        if self._window_tokens is None or int(positions.max()) < self._window_tokens:
            return None
        return self._bias((keys > positions) | (keys <= positions - self._window_tokens))

    def _bias(self, hidden: Tensor) -> Tensor:
        bias = torch.zeros(hidden.shape, dtype=self._shape.dtype)
        return bias.masked_fill_(hidden, float("-inf")).to(self._device)

    def _indices(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self._device)


def _regroup(
    slices: tuple[SequenceSlice, ...], page_tokens: int, group_pages: int | None
) -> tuple[list[list[SequenceSlice]], list[SequenceSlice]]:
    """One-token slices by context length, shortest group first, and the longer slices in plan order.

    A group's longest context is at most `_SMALLEST_GROUP_PAGES` pages, or less than twice its shortest: padding never
    doubles the work, and short contexts are not split into groups too small to be worth their overhead. A group of more
    than one looks at no more than `group_pages` pages.
    """
    by_size: dict[int, list[SequenceSlice]] = {}
    for item in sorted(slices, key=lambda item: item.start):
        if len(item.tokens) == 1:
            pages = max(_SMALLEST_GROUP_PAGES, item.start // page_tokens + 1)
            by_size.setdefault((pages - 1).bit_length(), []).append(item)
    groups: list[list[SequenceSlice]] = []
    for size in sorted(by_size):
        alike = by_size[size]
        rows = len(alike) if group_pages is None else max(1, group_pages // (alike[-1].start // page_tokens + 1))
        groups += [alike[first : first + rows] for first in range(0, len(alike), rows)]
    return groups, [item for item in slices if len(item.tokens) > 1]


def _first_rows(ordered: list[SequenceSlice]) -> dict[str, int]:
    first_rows: dict[str, int] = {}
    rows = 0
    for item in ordered:
        first_rows[item.rid] = rows
        rows += len(item.tokens)
    return first_rows


def _sampled_rows(slices: tuple[SequenceSlice, ...], first_rows: dict[str, int]) -> list[int]:
    return [first_rows[item.rid] + len(item.tokens) - 1 for item in slices if item.sample]


def _scored_rows(slices: tuple[SequenceSlice, ...], first_rows: dict[str, int]) -> list[int]:
    rows: list[int] = []
    for item in slices:
        first = first_rows[item.rid] + item.score_from
        rows += range(first, first + len(item.score))
    return rows
