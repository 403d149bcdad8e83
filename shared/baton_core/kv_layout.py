"""How KV pages are laid out over the ranks of a unit, and which byte runs carry one unit's pages into another's.

A page is `[layer][k|v][kv_head][token][dim]`: all layers of `page_tokens` tokens in one contiguous run. So a rank that
holds fewer heads or fewer layers needs a few large runs of the same page, and equal ranks need one; other page sizes
need a run a head. `plan` is the only place that knows this; everything else moves runs.

Every byte has exactly one writer among the ranks of the source unit: of the ranks that hold a head, the lowest; of the
context-parallel ranks, which all hold all pages, the one whose number is the page's ordinal modulo their count.

    source page ordinal        0      1      2      3          16 tokens each, --cp 2
    its writer               cp 0   cp 1   cp 0   cp 1
    target page ordinal        0      0      1      1          32 tokens each

The first pages of a prompt may be *held*: decode has them in its prefix cache, and nobody writes them, not even with the
same bytes. So what is *wanted* is a range of target pages, from the first that is not held to the last of the prompt.

What no plan can translate is in the two *fingerprints* (`fingerprint`): they must be equal. What `plan` can translate
(page size, and the layers and heads of a rank) is not part of them.
"""

import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache

from baton_core.ranks import RANKS_MAX, Member, share

PAGE_TOKENS_MAX = 65_536
_PLANS_MAX = 1_024


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One rank's share of a page: layers `first_layer … end_layer-1`, KV heads `first_head … end_head-1` of the model."""

    page_tokens: int
    first_layer: int
    end_layer: int
    first_head: int
    end_head: int
    head_dim: int
    element_bytes: int

    def __post_init__(self) -> None:
        if not (0 <= self.first_layer < self.end_layer and 0 <= self.first_head < self.end_head):
            raise ValueError(f"layout has no layers or no heads: {self}")
        if min(self.page_tokens, self.head_dim, self.element_bytes) < 1:
            raise ValueError(f"layout has an empty dimension: {self}")

    @property
    def token_bytes(self) -> int:
        """One token of one head of one layer's keys (or values)."""
        return self.head_dim * self.element_bytes

    @property
    def head_bytes(self) -> int:
        """One head of one layer's keys (or values) in one page."""
        return self.page_tokens * self.token_bytes

    @property
    def page_bytes(self) -> int:
        """One page of this rank."""
        return 2 * (self.end_layer - self.first_layer) * (self.end_head - self.first_head) * self.head_bytes

    def offset(self, layer: int, value: int, head: int) -> int:
        """Byte offset, inside a page, of `head` (model numbering) of `layer`; `value` is 0 for keys, 1 for values."""
        heads = self.end_head - self.first_head
        return (((layer - self.first_layer) * 2 + value) * heads + (head - self.first_head)) * self.head_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitLayout:
    """How the ranks of one unit share the pages. Members are numbered as in `ranks`: by (pp, cp, tp), tp fastest.

    Raises ValueError, naming both numbers, where heads or layers cannot be shared that way.
    """

    layers: int
    kv_heads: int
    head_dim: int
    element_bytes: int
    page_tokens: int
    tp: int = 1
    pp: int = 1
    cp: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) is not int or value < 1:
                raise ValueError(f"layout's {field.name} must be a number of at least 1, not {value!r}")
        if self.page_tokens > PAGE_TOKENS_MAX:
            raise ValueError(f"a page has at most {PAGE_TOKENS_MAX} tokens, not {self.page_tokens}")
        if self.members > RANKS_MAX:
            raise ValueError(f"tp {self.tp} * pp {self.pp} * cp {self.cp} is over {RANKS_MAX} ranks")
        if self.kv_heads % self.tp and self.tp % self.kv_heads:
            raise ValueError(f"{self.kv_heads} KV heads cannot be shared by tp {self.tp}: neither divides the other")
        if self.pp > self.layers:
            raise ValueError(f"{self.layers} layers cannot be shared by pp {self.pp}")

    @property
    def members(self) -> int:
        """Ranks of the unit."""
        return self.pp * self.cp * self.tp

    @property
    def holders(self) -> int:
        """How many neighbouring ranks hold the same head."""
        return max(1, self.tp // self.kv_heads)

    def place(self, member: Member) -> tuple[int, int, int]:
        """Its (pp, cp, tp) ranks."""
        assert 0 <= member < self.members, f"member {member} of {self.members}"
        stage, inside = divmod(member, self.cp * self.tp)
        return stage, *divmod(inside, self.tp)

    def member(self, member: Member) -> Layout:
        """The share of one rank."""
        stage, _, tp_rank = self.place(member)
        layers = share(self.layers, stage, self.pp)
        first_head = tp_rank * self.kv_heads // self.tp
        return Layout(
            page_tokens=self.page_tokens,
            first_layer=layers.start,
            end_layer=layers.stop,
            first_head=first_head,
            end_head=first_head + max(1, self.kv_heads // self.tp),
            head_dim=self.head_dim,
            element_bytes=self.element_bytes,
        )

    def pages(self, tokens: int) -> int:
        """Pages of a prompt of `tokens`."""
        return -(-tokens // self.page_tokens)

    @lru_cache(maxsize=64)  # noqa: B019 — it is said in every hello, and layouts are few and small
    def to_text(self) -> str:
        """Canonical text, for hellos, their answers and page orders."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @staticmethod
    def from_text(text: str) -> "UnitLayout":
        """The layout in `text`. Raises ValueError if it is none."""
        try:
            return UnitLayout(**json.loads(text))
        except (TypeError, RecursionError) as error:
            raise ValueError(f"not a KV layout: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """`nbytes` at `source_offset` of a source page belong at `target_offset` of a target page.

    `target_ordinal` counts the target pages of a plan's period.
    """

    source_offset: int
    target_ordinal: int
    target_offset: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stripe:
    """`count` runs of `nbytes` each, at steady distances: the heads of a rank in all layers of a page, for example."""

    source_offset: int
    target_ordinal: int
    target_offset: int
    nbytes: int
    count: int
    source_step: int
    target_step: int


class LayoutMismatch(ValueError):
    """Two layouts that no plan translates; the text names both values."""


class Plan:
    """What one source rank writes to one target rank; `plan` makes it.

    Page sizes meet again every least common multiple of them: after a *period* of pages on either side.
    """

    def __init__(self, source: Layout, target: Layout, *, speaks: bool, cp: int, cp_rank: int) -> None:
        self._source, self._target = source, target
        self.turns, self._cp_rank = cp, cp_rank
        """Every how many source pages this writer sends one."""
        tokens = math.lcm(source.page_tokens, target.page_tokens)
        self._source_pages, self._target_pages = tokens // source.page_tokens, tokens // target.page_tokens
        self._layers = range(max(source.first_layer, target.first_layer), min(source.end_layer, target.end_layer))
        self._heads = range(max(source.first_head, target.first_head), min(source.end_head, target.end_head))
        # By the source page's number in its period; made when asked for.
        self._runs: dict[int, tuple[Run, ...]] = {}
        self._stripes: dict[int, tuple[Stripe, ...]] = {}
        self.token_bytes = 2 * len(self._layers) * len(self._heads) * source.token_bytes if speaks else 0
        """Bytes of one token that this writer sends, of the pages that are its own to send; 0 if it sends none."""

    def pieces(self, ordinals: range, wanted: range) -> Iterator[tuple[int, int, Run]]:
        """What to send of these source pages, by ordinal in the prompt: source ordinal, target ordinal, run.

        Left out are pages that another rank sends, and runs that belong to other target pages than the `wanted` ones.
        """
        for ordinal, number, first in self._own(ordinals, wanted.start):
            for run in self._runs.get(number) or self._of_page(number):
                if first + run.target_ordinal in wanted:
                    yield ordinal, first + run.target_ordinal, run

    def stripes(self, ordinals: range, wanted: range) -> Iterator[tuple[int, int, tuple[Stripe, ...]]]:
        """The pieces, page by page, with those at steady distances taken together.

        Source ordinal, the target ordinal that its stripes' ordinals are added to, stripes.
        """
        for ordinal, number, first in self._own(ordinals, wanted.start):
            stripes = self._stripes.get(number)
            if stripes is None:
                stripes = self._stripes[number] = _striped(self._runs.get(number) or self._of_page(number))
            if first < wanted.start or first + self._target_pages > wanted.stop:
                stripes = tuple(stripe for stripe in stripes if first + stripe.target_ordinal in wanted)
            yield ordinal, first, stripes

    def _own(self, ordinals: range, held_pages: int) -> list[tuple[int, int, int]]:
        """Those that this rank sends, with their number in their period and that period's first target page."""
        if not self.token_bytes:
            return []
        source_pages, target_pages = self._source_pages, self._target_pages
        first = max(ordinals.start, self._first_own(held_pages))
        own = range(first + (self._cp_rank - first) % self.turns, ordinals.stop, self.turns)
        if source_pages == 1:
            return [(ordinal, 0, ordinal * target_pages) for ordinal in own]
        return [(one, one % source_pages, one // source_pages * target_pages) for one in own]

    def _first_own(self, held_pages: int) -> int:
        """The first source page of which this rank sends something, where so many target pages are held."""
        first = held_pages * self._target.page_tokens // self._source.page_tokens
        return first + (self._cp_rank - first) % self.turns

    def _held_tokens(self, held_pages: int) -> int:
        """Tokens at the head of its first own source page that are held: that page may straddle the border."""
        return max(0, held_pages * self._target.page_tokens - self._first_own(held_pages) * self._source.page_tokens)

    def owed_bytes(self, prompt_tokens: int, held_pages: int = 0) -> int:
        """Bytes of all pieces of a prompt, less those of the first `held_pages` target pages."""
        source_size, target_size = self._source.page_tokens, self._target.page_tokens
        source_pages, target_pages = self.source_pages(prompt_tokens), -(-prompt_tokens // target_size)
        tokens = len(range(self._first_own(held_pages), source_pages, self.turns)) * source_size
        if tokens:
            tokens -= self._held_tokens(held_pages)
            if (source_pages - 1) % self.turns == self._cp_rank:
                # The last source page may reach beyond the last target page.
                tokens -= max(0, source_pages * source_size - target_pages * target_size)
        return tokens * self.token_bytes

    def source_pages(self, prompt_tokens: int) -> int:
        """Pages of a prompt on the source's side, other ranks' included."""
        return -(-prompt_tokens // self._source.page_tokens)

    @property
    def is_one_run(self) -> bool:
        """Whether a source page is sent as a single run."""
        return self.token_bytes > 0 and len(self._runs.get(0) or self._of_page(0)) == 1

    @property
    def source_page_bytes(self) -> int:
        """What is sent of one whole source page."""
        return self._source.page_tokens * self.token_bytes

    def leading_pages(self, sent_bytes: int, held_pages: int = 0) -> int:
        """Source pages, from the first on, of which nothing is left to send after the first `sent_bytes` of all pieces.

        Only for less than all that is owed.
        """
        sent_bytes += self._held_tokens(held_pages) * self.token_bytes
        return self._first_own(held_pages) + sent_bytes // self.source_page_bytes * self.turns

    def _of_page(self, number: int) -> tuple[Run, ...]:
        """The runs of source page `number` of a period, neighbours joined, in order of target page and offset."""
        first_token, size = number * self._source.page_tokens, self._target.page_tokens
        end_token = first_token + self._source.page_tokens
        runs: list[Run] = []
        for ordinal in range(first_token // size, -(-end_token // size)):
            tokens = range(max(first_token, ordinal * size), min(end_token, (ordinal + 1) * size))
            runs += self._of_tokens(ordinal, tokens, first_token)
        self._runs[number] = tuple(runs)
        return self._runs[number]

    def _of_tokens(self, ordinal: int, tokens: range, first_token: int) -> list[Run]:
        """The runs that carry `tokens` of a source page into target page `ordinal`."""
        source, target = self._source, self._target
        source_skip = (tokens.start - first_token) * source.token_bytes
        target_skip = (tokens.start - ordinal * target.page_tokens) * target.token_bytes
        nbytes = len(tokens) * source.token_bytes
        runs: list[Run] = []
        for layer, value, head in itertools.product(self._layers, (0, 1), self._heads):
            run = Run(
                source_offset=source.offset(layer, value, head) + source_skip,
                target_ordinal=ordinal,
                target_offset=target.offset(layer, value, head) + target_skip,
                nbytes=nbytes,
            )
            if runs and _continues(runs[-1], run):
                last = runs.pop()
                run = replace(last, nbytes=last.nbytes + nbytes)
            runs.append(run)
        return runs


def require_translatable(source: UnitLayout, target: UnitLayout) -> None:
    """Raise LayoutMismatch, naming both values, unless every byte of a target page is somewhere in the source."""
    for name in ("layers", "kv_heads", "head_dim", "element_bytes"):
        ours, theirs = getattr(source, name), getattr(target, name)
        if ours != theirs:
            raise LayoutMismatch(f"{name} is {ours} on prefill and {theirs} on decode")


@lru_cache(_PLANS_MAX)
def plan(source: UnitLayout, source_member: Member, target: UnitLayout, target_member: Member) -> Plan:
    """What rank `source_member` of prefill's unit writes to rank `target_member` of decode's. Raises LayoutMismatch."""
    require_translatable(source, target)
    _, cp_rank, tp_rank = source.place(source_member)
    return Plan(
        source.member(source_member),
        target.member(target_member),
        speaks=tp_rank % source.holders == 0,  # the lowest of those that hold the same head
        cp=source.cp,
        cp_rank=cp_rank,
    )


@lru_cache(_PLANS_MAX)
def writers(source: UnitLayout, target: UnitLayout, target_member: Member) -> tuple[Member, ...]:
    """The ranks of prefill's unit that write to this rank of decode's. Raises LayoutMismatch."""
    members = range(source.members)
    return tuple(one for one in members if plan(source, one, target, target_member).token_bytes)


@lru_cache(_PLANS_MAX)
def readers(source: UnitLayout, target: UnitLayout, source_member: Member) -> tuple[Member, ...]:
    """The ranks of decode's unit that this rank of prefill's writes to; perhaps none. Raises LayoutMismatch."""
    members = range(target.members)
    return tuple(one for one in members if plan(source, source_member, target, one).token_bytes)


def row_writer(source: UnitLayout, target: UnitLayout, target_member: Member) -> Member:
    """The one rank that writes this target rank's metadata row: of the last stage that feeds it, the lowest."""
    feeding = writers(source, target, target_member)
    last = source.place(feeding[-1])[0]
    return next(one for one in feeding if source.place(one)[0] == last)


def bytes_fed(
    source: UnitLayout,
    source_member: Member,
    target: UnitLayout,
    target_member: Member,
    prompt_tokens: int,
    held_pages: int = 0,
) -> int:
    """The bytes that this writer owes this reader for a prompt of which the reader holds its first pages."""
    return plan(source, source_member, target, target_member).owed_bytes(prompt_tokens, held_pages)


def _striped(runs: Sequence[Run]) -> tuple[Stripe, ...]:
    stripes: list[Stripe] = []
    for run in runs:
        last = stripes[-1] if stripes else None
        if last is not None and (last.target_ordinal, last.nbytes) == (run.target_ordinal, run.nbytes):
            rows = last.count - 1
            steps = (
                run.source_offset - last.source_offset - rows * last.source_step,
                run.target_offset - last.target_offset - rows * last.target_step,
            )
            if not rows or steps == (last.source_step, last.target_step):
                stripes[-1] = replace(last, count=last.count + 1, source_step=steps[0], target_step=steps[1])
                continue
        stripes.append(
            Stripe(
                source_offset=run.source_offset,
                target_ordinal=run.target_ordinal,
                target_offset=run.target_offset,
                nbytes=run.nbytes,
                count=1,
                source_step=0,
                target_step=0,
            )
        )
    return tuple(stripes)


def _continues(last: Run, run: Run) -> bool:
    return (
        last.source_offset + last.nbytes == run.source_offset and last.target_offset + last.nbytes == run.target_offset
    )
