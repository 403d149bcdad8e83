"""The page pool: who holds which page of the KV cache (or which metadata row), decided the same way on every rank."""

from collections import deque
from collections.abc import Iterable

from baton_core.request import PageId
from baton_core.trace import Trace


def pages_for(tokens: int, page_tokens: int) -> int:
    """Pages that hold `tokens` tokens."""
    return -(-tokens // page_tokens)


class PagePool:
    """A pool of `total` numbered pages, handed out oldest-free first so that every rank hands out the same ones.

    A page is either free or held by exactly one owner; freeing a free page is our bug and asserts.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._free: deque[PageId] = deque(range(total))
        self._held = bytearray(total)
        self.trace = Trace()
        self.returned = 0  # pages that came back, ever: who waits for pages need look again only when this grows

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def allocate(self, count: int) -> tuple[PageId, ...] | None:
        """`count` pages, or None (and nothing taken) if there are not as many."""
        if count > len(self._free):
            return None
        pages = tuple(self._free.popleft() for _ in range(count))
        for page in pages:
            self._held[page] = 1
        self.trace.note("allocate", *pages)
        return pages

    def release(self, pages: Iterable[PageId]) -> None:
        """Return pages to the pool. Asserts that each was held."""
        returned = tuple(pages)
        for page in returned:
            assert self._held[page], f"page {page} freed twice"
            self._held[page] = 0
            self._free.append(page)
        self.returned += len(returned)
        self.trace.note("release", *returned)

    def holds(self, page: PageId) -> bool:
        """Whether somebody holds `page`."""
        return bool(self._held[page])
