"""The prefix cache: pages of finished sequences in a radix tree, so that a prompt that begins alike need not be computed.

        root
         └─ page 4  "You are a helpful assistant. Answer"
              ├─ page 9   " in French." …
              └─ page 2   " briefly: what is" …

A node is one full page, keyed by its tokens below its parent. Whoever reads a page *locks* it and all above it. A page in
use is never evicted; of the rest the leaf that was used longest ago goes first; time is a count of uses. So everything
depends on agreed facts only, and every rank keeps the same tree. A flush forgets all of it: what is in use then is found
by nobody any more, and goes back to the pool with its last reader. (RadixAttention, Zheng et al. 2023, at the granularity
of pages.)
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from baton_core.pages import PagePool
from baton_core.request import PageId
from baton_core.trace import Trace

PageTokens = tuple[int, ...]


@dataclass(slots=True, eq=False)
class Node:
    """One cached page. `used_at` is the use count of the cache at its last use; `ordinal` is its place by birth."""

    key: PageTokens
    page: PageId
    parent: "Node | None"
    ordinal: int
    used_at: int
    locks: int = 0
    forgotten: bool = False  # the cache was flushed: nobody finds it any more
    children: dict[PageTokens, "Node"] = field(default_factory=dict)

    @property
    def may_go(self) -> bool:
        """Whether it may be evicted right now."""
        return not self.locks and not self.children and not self.forgotten


_STALE_MOST = 64
"""Entries of the queue of leaves beyond two a page; then those that are out of date are dropped."""


class PrefixCache:
    """Owns the pages in its tree. Mutated by every method but `match`, `in_use` and `found`."""

    def __init__(self, pool: PagePool, page_tokens: int) -> None:
        self._pool = pool
        self.page_tokens = page_tokens
        self._roots: dict[PageTokens, Node] = {}
        # Every page that may go stands here with its last use; so do entries that are out of date.
        self._leaves: list[tuple[int, int, Node]] = []
        self._born = 0
        self._uses = 0
        self.trace = Trace()
        self.pages = 0
        self.locked = 0  # pages that somebody reads
        # How often a page became one that nobody reads, less the pages evicted: with what came back to the pool, it grows
        # exactly when more pages may be allocated.
        self.spared = 0
        self.hit_tokens = 0
        self.asked_tokens = 0

    def match(self, tokens: Sequence[int], usable_tokens: int | None = None) -> list[Node]:
        """The cached pages that hold the first of these tokens, no more than `usable_tokens`.

        Unless that is given, all but the last token count: its page must be computed.
        """
        usable = len(tokens) - 1 if usable_tokens is None else usable_tokens
        return list(self._path(tokens, usable // self.page_tokens))

    def in_use(self, tokens: Sequence[int]) -> int:
        """How many of the first pages of these tokens somebody reads already: to share them takes nothing from anybody."""
        count = 0
        for node in self._path(tokens, len(tokens) // self.page_tokens):
            if not node.locks:
                break
            count += 1
        return count

    def lock(self, nodes: Sequence[Node]) -> None:
        """Somebody reads these pages: keep them."""
        self._uses += 1
        self.trace.note("lock", *(node.ordinal for node in nodes))
        for node in nodes:
            self.locked += node.locks == 0
            node.locks += 1
            node.used_at = self._uses

    def count(self, hit_tokens: int, asked_tokens: int) -> None:
        """A prompt of `asked_tokens` was admitted with `hit_tokens` of it from the cache."""
        self.hit_tokens += hit_tokens
        self.asked_tokens += asked_tokens

    def unlock(self, nodes: Sequence[Node]) -> None:
        """The reader is done. Asserts that it had locked them."""
        self.trace.note("unlock", *(node.ordinal for node in nodes))
        for node in nodes:
            assert node.locks > 0, f"page {node.page} was not locked"
            node.locks -= 1
            if node.locks:
                continue
            self.locked -= 1
            if node.forgotten:
                self.pages -= 1
                self._pool.release((node.page,))
            else:
                self.spared += 1
                self._queue(node)

    def insert(self, tokens: Sequence[int], pages: Sequence[PageId]) -> list[PageId]:
        """Take over the full pages of a computed sequence; returns the pages that it does not keep.

        `pages[i]` holds `tokens[i * page_tokens : …]`. A page whose tokens are cached already (by this very page or by
        another) is not kept twice.
        """
        self._uses += 1
        kept = len(tokens) // self.page_tokens
        left: list[PageId] = list(pages[kept:])
        level, node = self._roots, None
        for key, page in zip(self._keys(tokens, kept), pages, strict=False):
            parent, node = node, level.get(key)
            if node is None:
                self._born += 1
                node = level[key] = Node(key, page, parent, self._born, self._uses)
                self.pages += 1
                self.spared += 1
            elif node.page != page:
                left.append(page)
            node.used_at = self._uses
            level = node.children
        if node is not None:
            self._queue(node)
        self.trace.note("insert", self._born, *pages)
        return left

    def evict(self, pages: int) -> int:
        """Return up to `pages` unlocked pages to the pool, leaves first, least recently used first; how many it was."""
        evicted = 0
        while self._leaves and evicted < pages:
            used_at, _, node = heapq.heappop(self._leaves)
            if not node.may_go or used_at != node.used_at:
                continue
            parent = node.parent
            del (self._roots if parent is None else parent.children)[node.key]
            node.forgotten = True
            self._pool.release((node.page,))  # whose own trace notes it
            evicted += 1
            if parent is not None:
                self._queue(parent)
        self.pages -= evicted
        self.spared -= evicted
        return evicted

    def flush(self) -> int:
        """Forget every page; the unlocked ones return to the pool now, the others when they are unlocked. How many now."""
        freed: list[PageId] = []
        for node in self._nodes():
            node.forgotten = True
            if not node.locks:
                freed.append(node.page)
        self._roots, self._leaves = {}, []
        self._pool.release(freed)
        self.pages -= len(freed)
        self.spared -= len(freed)
        self.trace.note("flush", len(freed))
        return len(freed)

    def found(self) -> list[PageId]:
        """Every page that a prompt may match."""
        return [node.page for node in self._nodes()]

    def _nodes(self) -> list[Node]:
        nodes = list(self._roots.values())
        for node in nodes:  # which grows
            nodes += node.children.values()
        return nodes

    def _path(self, tokens: Sequence[int], count: int) -> Iterator[Node]:
        level = self._roots
        for key in self._keys(tokens, count):
            node = level.get(key)
            if node is None:
                return
            yield node
            level = node.children

    def _keys(self, tokens: Sequence[int], count: int) -> Iterator[PageTokens]:
        size = self.page_tokens
        return (tuple(tokens[index * size : (index + 1) * size]) for index in range(count))

    def _queue(self, node: Node) -> None:
        """It may have become one that may go, or was used again."""
        if not node.may_go:
            return
        heapq.heappush(self._leaves, (node.used_at, node.ordinal, node))
        if len(self._leaves) > 2 * self.pages + _STALE_MOST:
            current = {entry[1]: entry for entry in self._leaves if entry[2].may_go and entry[0] == entry[2].used_at}
            self._leaves = list(current.values())
            heapq.heapify(self._leaves)
