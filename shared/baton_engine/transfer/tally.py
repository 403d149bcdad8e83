"""What the transfers of one rank have come to, by the way they went. Guarded by the lock of the `AttemptTable`."""

from collections import Counter, deque

from baton_core.errors import Reason

WAYS = ("shm", "tcp", "none")
"""Labels of a way; `none`: nobody had chosen or taken one yet."""
REASONS = (Reason.TRANSFER_FAILED, Reason.PEER_LOST, Reason.LAYOUT_MISMATCH, Reason.METADATA_CORRUPT)
"""Why attempts fail here, shown at zero from the start."""
SHARES_MAX = 4_096
"""Finished shares kept between two snapshots; the oldest are dropped first."""


class Tally:
    """Bytes, failures, and of each share that was finished its bytes and the time somebody touched its pages."""

    def __init__(self) -> None:
        self._bytes: Counter[str] = Counter()
        self._failures: Counter[tuple[str, Reason]] = Counter()
        self._bad_frames: Counter[str] = Counter()
        self._shares: deque[tuple[str, int, float]] = deque(maxlen=SHARES_MAX)

    def moved(self, way: str, nbytes: int) -> None:
        """So many more bytes are there."""
        self._bytes[way] += nbytes

    def nonsense(self, way: str) -> None:
        """Something came that no writer says."""
        self._bad_frames[way] += 1

    def failed(self, way: str, reason: Reason) -> None:
        """An attempt failed."""
        self._failures[(way, reason)] += 1

    def finished(self, way: str, nbytes: int, seconds: float) -> None:
        """What one rank owed another is there."""
        self._shares.append((way, nbytes, seconds))

    def counters(self) -> dict[str, float]:
        """By metric key."""
        keys = {(way, reason) for way in WAYS for reason in REASONS} | self._failures.keys()
        return {
            **{f"transfer_bytes_total{{way={way}}}": self._bytes[way] for way in WAYS[:-1]},
            **{f"transfer_bad_frames_total{{way={way}}}": self._bad_frames[way] for way in WAYS[:-1]},
            **{
                f"transfer_failures_total{{reason={reason.name.lower()},way={way}}}": self._failures[way, reason]
                for way, reason in sorted(keys)
            },
        }

    def samples(self) -> dict[str, list[float]]:
        """Observations since the last call, by metric key; the keys are there without any, too."""
        shares = list(self._shares)
        self._shares.clear()
        found: dict[str, list[float]] = {}
        for way in WAYS[:-1]:
            own = [(nbytes, seconds) for name, nbytes, seconds in shares if name == way]
            found[f"transfer_seconds{{way={way}}}"] = [seconds for _, seconds in own]
            found[f"transfer_bytes_per_second{{way={way}}}"] = [
                nbytes / seconds for nbytes, seconds in own if seconds > 0
            ]
        return found
