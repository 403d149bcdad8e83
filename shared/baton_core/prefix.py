"""The prefix cache: pages of finished prompts in a radix tree, so that a prompt that begins alike need not compute them.

        root
         └─ page 4  "You are a helpful assistant. Answer"
              ├─ page 9   " in French." …
              └─ page 2   " briefly: what is" …

A node is one full page, keyed by its tokens below its parent. A node in use (`locks`) is never evicted; of the rest the
leaf that was used longest ago goes first; time is a count of uses. So everything depends on agreed facts only, and every
rank keeps the same tree. (RadixAttention, Zheng et al. 2023, at the granularity of pages.)
"""

import heapq
from collections.abc import Sequence
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
    children: dict[PageTokens, "Node"] = field(default_factory=dict)


class PrefixCache:
    """Owns the pages in its tree. Mutated by every method but `match`."""

    def __init__(self, pool: PagePool, page_tokens: int) -> None:
        self._pool = pool
        self.page_tokens = page_tokens
        self._roots: dict[PageTokens, Node] = {}
        self._born = 0
        self._uses = 0
        self.trace = Trace()
        self.pages = 0
        self.locked = 0  # pages that somebody reads
        self.hit_tokens = 0
        self.asked_tokens = 0

    def match(self, prompt: Sequence[int]) -> list[Node]:
        """The cached pages that `prompt` begins with, short of the whole: its last token must be computed."""
        nodes: list[Node] = []
        level = self._roots
        for key in self._keys(prompt, (len(prompt) - 1) // self.page_tokens):
            node = level.get(key)
            if node is None:
                break
            nodes.append(node)
            level = node.children
        return nodes

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
            self.locked -= node.locks == 0

    def insert(self, tokens: Sequence[int], pages: Sequence[PageId]) -> list[PageId]:
        """Take over the full pages of a computed prompt; returns the pages that it does not keep.

        `pages[i]` holds `tokens[i * page_tokens : …]`. A page whose tokens are cached already (by this very page or by
        another) is not kept twice.
        """
        self._uses += 1
        kept = len(tokens) // self.page_tokens
        left: list[PageId] = list(pages[kept:])
        level, parent = self._roots, None
        for key, page in zip(self._keys(tokens, kept), pages, strict=False):
            node = level.get(key)
            if node is None:
                self._born += 1
                node = level[key] = Node(key, page, parent, self._born, self._uses)
                self.pages += 1
            elif node.page != page:
                left.append(page)
            node.used_at = self._uses
            level, parent = node.children, node
        self.trace.note("insert", self._born, *pages)
        return left

    def evict(self, pages: int) -> int:
        """Return up to `pages` unlocked pages to the pool, leaves first, least recently used first; how many it was."""
        heap = [(node.used_at, node.ordinal, node) for node in self._leaves() if not node.locks]
        heapq.heapify(heap)
        evicted = 0
        while heap and evicted < pages:
            _, _, node = heapq.heappop(heap)
            siblings = self._roots if node.parent is None else node.parent.children
            del siblings[node.key]
            self._pool.release((node.page,))  # whose own trace notes it
            self.pages -= 1
            evicted += 1
            parent = node.parent
            if parent is not None and not parent.children and not parent.locks:
                heapq.heappush(heap, (parent.used_at, parent.ordinal, parent))
        return evicted

    def flush(self) -> int:
        """Return every unlocked page to the pool; how many it was."""
        return self.evict(self.pages)

    def _keys(self, tokens: Sequence[int], count: int) -> list[PageTokens]:
        size = self.page_tokens
        return [tuple(tokens[index * size : (index + 1) * size]) for index in range(count)]

    def _leaves(self) -> list[Node]:
        leaves: list[Node] = []
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            if node.children:
                stack += node.children.values()
            else:
                leaves.append(node)
        return leaves
