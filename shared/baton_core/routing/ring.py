"""A consistent hash ring: names spread over targets so that a target that comes or goes moves only its own share."""

import hashlib
from bisect import bisect
from collections.abc import Mapping

POINTS_EACH = 64
"""Points of one target: its share differs from the mean by some 12 %."""
STALE_RATIO = 4
"""The ring is built anew when it holds this many times as many targets as there are."""


class HashRing:
    """Knows every target it was ever asked about; those that are no candidate are walked over."""

    def __init__(self) -> None:
        self._points: list[tuple[int, str]] = []
        self._known: dict[str, None] = {}
        self._last: Mapping[str, object] | None = None

    def owner(self, name: str, candidates: Mapping[str, object]) -> str:
        """Which of `candidates` (at least one key) the name belongs to."""
        self._learn(candidates)
        start = bisect(self._points, (position(name), ""))
        for step in range(len(self._points)):
            key = self._points[(start + step) % len(self._points)][1]
            if key in candidates:
                return key
        raise AssertionError("the ring holds every candidate")

    def _learn(self, candidates: Mapping[str, object]) -> None:
        if len(self._known) > STALE_RATIO * len(candidates) + STALE_RATIO:
            self._points.clear()
            self._known.clear()
            self._last = None
        fresh = [key for key in candidates if key not in self._known] if self._is_new(candidates) else ()
        for key in fresh:
            self._known[key] = None
            self._points += ((position(f"{key}#{number}"), key) for number in range(POINTS_EACH))
        if fresh:
            self._points.sort()

    def _is_new(self, candidates: Mapping[str, object]) -> bool:
        """Whether these are others than the last time, in which case any of them may be unknown."""
        if candidates is self._last:
            return False
        self._last = candidates
        return True


def position(text: str) -> int:
    """Where a name stands on the ring: 64 bits."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
