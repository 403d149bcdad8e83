"""A consistent hash ring: names spread over targets so that a target that comes or goes moves only its own share."""

import hashlib
from bisect import bisect, insort
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

    def owner(self, name: str, candidates: Mapping[str, object]) -> str:
        """Which of `candidates` (at least one key) the name belongs to."""
        self._learn(candidates)
        start = bisect(self._points, (_position(name), ""))
        for step in range(len(self._points)):
            key = self._points[(start + step) % len(self._points)][1]
            if key in candidates:
                return key
        raise AssertionError("the ring holds every candidate")

    def _learn(self, candidates: Mapping[str, object]) -> None:
        if len(self._known) > STALE_RATIO * len(candidates) + STALE_RATIO:
            self._points.clear()
            self._known.clear()
        for key in candidates:
            if key not in self._known:
                self._known[key] = None
                for number in range(POINTS_EACH):
                    insort(self._points, (_position(f"{key}#{number}"), key))


def _position(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
