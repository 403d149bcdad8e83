"""A digest of a history, kept up as it happens: siblings that did the same things in the same order have the same one.

Comparing what a large structure (a pool, a cache, a table of rooms) *did* costs nothing when digests are compared, where
walking through it would stop the streams.
"""

import hashlib
from array import array
from collections.abc import Iterable

DIGEST_MASK = (1 << 62) - 1
"""A digest and its negative both fit into a signed 64-bit word, so that one minimum compares them."""


def digest_of(numbers: Iterable[int], raw: bytes = b"") -> int:
    """A digest of these numbers, each within 64 bits, signed, and of `raw`: the same in every process."""
    whole = hashlib.blake2b(array("q", numbers).tobytes(), digest_size=8)
    whole.update(raw)
    return int.from_bytes(whole.digest(), "little") & DIGEST_MASK


class Trace:
    """Remembers, in eight bytes, everything that it was told, and in which order."""

    def __init__(self) -> None:
        self._told = hashlib.blake2b(digest_size=8)
        self._digest: int | None = None  # of what it was told so far; most states are compared more often than changed

    def note(self, what: str, *numbers: int) -> None:
        """This happened, to these: each number within 64 bits, signed."""
        self._digest = None
        self._told.update(what.encode())
        self._told.update(array("q", numbers).tobytes())

    def digest(self) -> int:
        """Everything so far."""
        if self._digest is None:
            self._digest = int.from_bytes(self._told.digest(), "little") & DIGEST_MASK
        return self._digest
