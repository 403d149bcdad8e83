"""How KV pages are laid out on a rank, and which byte runs carry one rank's pages into another's.

A page is `[layer][k|v][kv_head][token][dim]`: all layers of `page_tokens` tokens in one contiguous run. So a rank that
holds fewer heads or fewer layers needs a few large runs of the same page, and equal ranks need one. `plan` is the only
place that knows this; everything else moves runs.

A *fingerprint* is the canonical text of everything that shapes KV. What `plan` can translate (heads, layers of a rank)
is not part of it; everything else must be equal, or the handshake refuses, naming both values.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass


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
    def head_bytes(self) -> int:
        """One head of one layer's keys (or values) in one page."""
        return self.page_tokens * self.head_dim * self.element_bytes

    @property
    def page_bytes(self) -> int:
        """One page of this rank."""
        return 2 * (self.end_layer - self.first_layer) * (self.end_head - self.first_head) * self.head_bytes

    def offset(self, layer: int, value: int, head: int) -> int:
        """Byte offset, inside a page, of `head` (model numbering) of `layer`; `value` is 0 for keys, 1 for values."""
        heads = self.end_head - self.first_head
        return (((layer - self.first_layer) * 2 + value) * heads + (head - self.first_head)) * self.head_bytes

    def to_text(self) -> str:
        """Canonical text, for page orders."""
        return json.dumps(asdict(self), sort_keys=True)

    @staticmethod
    def from_text(text: str) -> "Layout":
        """The layout in `text`. Raises ValueError if it is none."""
        try:
            return Layout(**json.loads(text))
        except TypeError as error:
            raise ValueError(f"not a KV layout: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """`nbytes` at `source_offset` of a source page belong at `target_offset` of the target page of the same tokens."""

    source_offset: int
    target_offset: int
    nbytes: int


class LayoutMismatch(ValueError):
    """Two layouts that no plan translates; the text names both values."""


def plan(source: Layout, target: Layout) -> tuple[Run, ...]:
    """The runs that carry the common layers and heads of one page from `source` to `target`, merged, in target order.

    Raises LayoutMismatch where token, dim or element size differ.
    """
    for name in ("page_tokens", "head_dim", "element_bytes"):
        ours, theirs = getattr(source, name), getattr(target, name)
        if ours != theirs:
            raise LayoutMismatch(f"{name} is {ours} on prefill and {theirs} on decode")
    first_layer, end_layer = max(source.first_layer, target.first_layer), min(source.end_layer, target.end_layer)
    first_head, end_head = max(source.first_head, target.first_head), min(source.end_head, target.end_head)
    runs: list[Run] = []
    if first_head >= end_head:
        return ()
    nbytes = (end_head - first_head) * source.head_bytes
    for layer in range(first_layer, end_layer):
        for value in (0, 1):
            run = Run(
                source_offset=source.offset(layer, value, first_head),
                target_offset=target.offset(layer, value, first_head),
                nbytes=nbytes,
            )
            if runs and _continues(runs[-1], run):
                last = runs.pop()
                run = Run(
                    source_offset=last.source_offset, target_offset=last.target_offset, nbytes=last.nbytes + nbytes
                )
            runs.append(run)
    return tuple(runs)


def _continues(last: Run, run: Run) -> bool:
    return (
        last.source_offset + last.nbytes == run.source_offset and last.target_offset + last.nbytes == run.target_offset
    )


def fingerprint(fields: Mapping[str, str | int | float | bool]) -> str:
    """Canonical text of everything that shapes KV."""
    return json.dumps(dict(fields), sort_keys=True, separators=(",", ":"))


def mismatches(prefill: str, decode: str) -> tuple[str, ...]:
    """The differences between two fingerprints, each naming both values; empty if they fit."""
    if prefill == decode:
        return ()
    try:
        ours, theirs = json.loads(prefill), json.loads(decode)
    except ValueError:
        return (f"fingerprint is {prefill!r} on prefill and {decode!r} on decode",)
    if not isinstance(ours, dict) or not isinstance(theirs, dict):
        return (f"fingerprint is {prefill!r} on prefill and {decode!r} on decode",)
    names = sorted(ours.keys() | theirs.keys())
    return tuple(
        f"{name} is {ours.get(name)!r} on prefill and {theirs.get(name)!r} on decode"
        for name in names
        if ours.get(name) != theirs.get(name)
    )
