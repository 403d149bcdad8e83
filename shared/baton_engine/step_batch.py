"""A plan as tensors: everything about a step that is the same in all layers, built once.

Rows are the plan's tokens, regrouped: slices of one token first, those of similar context length next to each other so
that they share one padded gather, then the prompt chunks one by one. Only `sampled_rows` and `scored_rows` remember the
plan's order.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from baton_core.plan import SequenceSlice, StepPlan
from baton_engine.kv_pool import PoolShape
from baton_engine.model_config import ModelConfig
from baton_engine.portion import Portion
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
    be seen, -inf where the padding is; None in a group of one, which has no padding. `near` is the same group in a layer
    with a sliding window, gathering nothing but the pages of the window; None where that is no less.
    """

    first_row: int
    rows: int
    gather: Tensor
    gathered: Tensor
    keys: Tensor
    values: Tensor
    bias: Tensor | None
    near: "DecodeGroup | None" = None

    def in_layer(self, windowed: bool) -> "DecodeGroup":
        """The group as a layer with or without a sliding window sees it."""
        return self.near if windowed and self.near is not None else self


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptChunk:
    """A slice of several tokens. At the start of its sequence it needs nothing but itself: the tensors are None.

    Otherwise `gather` and `gathered` are as in `DecodeGroup` with one row, `context` `[2, 1, kv_heads, tokens, head_dim]`
    is a view of the keys and values there, and `bias` `[rows, tokens]` admits what precedes a token. The first
    `past_tokens` of them are seen by the whole chunk; None: not so. `near` as in `DecodeGroup`.
    """

    first_row: int
    rows: int
    past_tokens: int | None
    gather: Tensor | None
    gathered: Tensor | None
    context: Tensor | None
    bias: Tensor | None
    near: "PromptChunk | None" = None

    def in_layer(self, windowed: bool) -> "PromptChunk":
        """The chunk as a layer with or without a sliding window sees it."""
        return self.near if windowed and self.near is not None else self


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """The tensors of a step, on the model's device.

    `token_ids` `[rows]` int64; `turns` `[rows, 1, head_dim / 2]` complex64: RoPE's factors of a row's pairs; `write`
    `[rows, 2 * kv_heads]` int64 says where keys and values go; `sampled_rows` `[samples]` and `scored_rows` `[scores]`
    int64, in plan order; `scored_rows` is None where nothing is to be scored.

    Where several CP ranks share the rows, everything but `write` is about this rank's own rows; `write` is about those of
    all ranks, one rank after the other, `rows_by_rank` of each.
    """

    token_ids: Tensor
    turns: Tensor
    write: Tensor
    sampled_rows: Tensor
    scored_rows: Tensor | None
    decode_groups: tuple[DecodeGroup, ...]
    prompt_chunks: tuple[PromptChunk, ...]
    rows_by_rank: tuple[int, ...] | None = None


class BatchBuilder:
    """Builds the `StepBatch` of a plan for one model and one pool."""

    def __init__(self, config: ModelConfig, shape: PoolShape, device: torch.device) -> None:
        self._shape = shape
        self._device = device
        self._inverse_frequency = inverse_frequencies(config.rope_theta, config.head_dim, config.rope_scaling)
        self._rotation_scale = attention_factor(config.rope_scaling)
        page_bytes = 2 * shape.kv_heads * shape.page_tokens * shape.head_dim * shape.dtype.itemsize
        self._group_pages = _GROUP_BYTES // page_bytes if device.type == "cpu" else None
        window = config.sliding_window
        self._window_tokens = None if window is None else window.tokens
        self._has_full_layers = window is None or len(window.layers) < config.layers

    def build(self, plan: StepPlan) -> StepBatch:
        """The batch of `plan`. Pure."""
        return self._build(plan.slices, None)

    def build_portion(self, portions: tuple[Portion, ...], part: int) -> StepBatch:
        """The batch of portion number `part` of a plan, which writes the keys and values of all of them. Pure.

        It may have no rows of its own.
        """
        written = [item for one in portions for item in self._ordered(one.slices)]
        batch = self._build(portions[part].slices, written)
        return replace(batch, rows_by_rank=tuple(one.rows for one in portions))

    def _ordered(self, slices: tuple[SequenceSlice, ...]) -> list[SequenceSlice]:
        groups, chunks = _regroup(slices, self._shape.page_tokens, self._group_pages)
        return [item for group in groups for item in group] + chunks

    def _build(self, slices: tuple[SequenceSlice, ...], written: list[SequenceSlice] | None) -> StepBatch:
        groups, chunks = _regroup(slices, self._shape.page_tokens, self._group_pages)
        ordered = [item for group in groups for item in group] + chunks
        first_rows = _first_rows(ordered)
        scored = _scored_rows(slices, first_rows)
        gathered = self._room(groups, chunks)
        return StepBatch(
            token_ids=self._indices([token for item in ordered for token in item.tokens]),
            turns=self._turns(ordered),
            write=self._write(ordered if written is None else written),
            sampled_rows=self._indices(_sampled_rows(slices, first_rows)),
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

    def _first_page(self, item: SequenceSlice, window: int | None) -> int:
        """The number, in the sequence, of the first page of which the slice sees something."""
        return 0 if window is None else max(0, item.start + 1 - window) // self._shape.page_tokens

    def _gathered_pages(self, item: SequenceSlice) -> int:
        """Pages of a slice that some layer gathers."""
        return self._used_pages(item) - self._first_page(item, None if self._has_full_layers else self._window_tokens)

    def _room(self, groups: list[list[SequenceSlice]], chunks: list[SequenceSlice]) -> Tensor:
        """Memory for the largest gather of the step: fresh memory for each would cost more than the copying."""
        shape = self._shape
        pages = [len(group) * max(map(self._gathered_pages, group)) for group in groups]
        pages += [self._gathered_pages(item) for item in chunks if item.start > 0]
        rows = 2 * shape.kv_heads * max(pages, default=0)
        return torch.empty(rows, shape.page_tokens * shape.head_dim, dtype=shape.dtype, device=self._device)

    def _decode_groups(self, groups: list[list[SequenceSlice]], gathered: Tensor) -> tuple[DecodeGroup, ...]:
        built: list[DecodeGroup] = []
        first_row = 0
        for group in groups:
            window = self._window_of(group)
            near = None if window is None else self._decode_group(group, first_row, gathered, window)
            if near is None or self._has_full_layers:
                built.append(self._decode_group(group, first_row, gathered, None, near))
            else:
                built.append(near)
            first_row += len(group)
        return tuple(built)

    def _window_of(self, slices: list[SequenceSlice]) -> int | None:
        """The sliding window, where it hides something of what is before one of `slices`."""
        last = max(item.start + len(item.tokens) - 1 for item in slices)
        return None if self._window_tokens is None or last < self._window_tokens else self._window_tokens

    def _decode_group(
        self,
        group: list[SequenceSlice],
        first_row: int,
        gathered: Tensor,
        window: int | None,
        near: DecodeGroup | None = None,
    ) -> DecodeGroup:
        shape = self._shape
        firsts = [self._first_page(item, window) for item in group]
        tables = [list(item.pages[first : self._used_pages(item)]) for item, first in zip(group, firsts, strict=True)]
        longest = max(map(len, tables))
        for item, table in zip(group, tables, strict=True):
            # A short table is padded with a page of its own sequence, so that no row ever looks at another request.
            table += [item.pages[0]] * (longest - len(table))
        room = gathered[: 2 * len(group) * shape.kv_heads * longest]
        is_one = len(group) == 1
        skipped = firsts[0] * shape.page_tokens
        end = group[0].start + 1 - skipped if is_one else longest * shape.page_tokens
        seen = self._context(room, len(group), end)
        if is_one and window is not None:
            seen = seen[:, :, :, max(0, end - window) :]
        return DecodeGroup(
            first_row=first_row,
            rows=len(group),
            gather=self._gather(tables),
            gathered=room,
            keys=seen[0],
            values=seen[1],
            bias=None if is_one else self._decode_bias(group, firsts, end, window),
            near=near,
        )

    def _decode_bias(self, group: list[SequenceSlice], firsts: list[int], tokens: int, window: int | None) -> Tensor:
        positions = torch.tensor([item.start for item in group]).view(-1, 1, 1, 1)
        keys = torch.arange(tokens)
        if window is not None:
            keys = keys + torch.tensor(firsts).view(-1, 1, 1, 1) * self._shape.page_tokens
        return self._bias(keys, positions, window)

    def _prompt_chunks(self, chunks: list[SequenceSlice], first_row: int, gathered: Tensor) -> tuple[PromptChunk, ...]:
        built: list[PromptChunk] = []
        for item in chunks:
            window = self._window_of([item])
            near = None if window is None else self._prompt_chunk(item, first_row, gathered, window)
            if near is None or self._has_full_layers:
                built.append(self._prompt_chunk(item, first_row, gathered, None, near))
            else:
                built.append(near)
            first_row += len(item.tokens)
        return tuple(built)

    def _prompt_chunk(
        self,
        item: SequenceSlice,
        first_row: int,
        gathered: Tensor,
        window: int | None,
        near: PromptChunk | None = None,
    ) -> PromptChunk:
        rows, end = len(item.tokens), item.start + len(item.tokens)
        first_page = self._first_page(item, window)
        skipped = first_page * self._shape.page_tokens
        gather, room, bias = None, None, None
        if item.start > 0:
            gather = self._gather([list(item.pages[first_page : self._used_pages(item)])])
            room = gathered[: len(gather)]
        if item.start > 0 or window is not None:
            bias = self._bias(torch.arange(skipped, end), torch.arange(item.start, end)[:, None], window)
        return PromptChunk(
            first_row=first_row,
            rows=rows,
            past_tokens=item.start if window is None else None,
            gather=gather,
            gathered=room,
            context=None if room is None else self._context(room, 1, end - skipped),
            bias=bias,
            near=near,
        )

    def _context(self, room: Tensor, rows: int, tokens: int) -> Tensor:
        """The first `tokens` keys and values of what is gathered into `room`."""
        return room.view(2, rows, self._shape.kv_heads, -1, self._shape.head_dim)[:, :, :, :tokens]

    def _bias(self, keys: Tensor, positions: Tensor, window: int | None) -> Tensor:
        """-inf where a key follows its row's position, or lies before the window of it, else 0."""
        hidden = keys > positions
        if window is not None:
            hidden |= keys <= positions - window
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
