"""Rooms of one side: which live request holds a room, and what became of rooms that failed.

A failed room leaves a *tombstone*: it knows which of its two legs has been answered. The leg not yet answered (the app's
request, or the peer's message) gets the stored verdict; a leg already answered that comes again opens a new room and
wipes the tombstone. Tombstones are bounded and short-lived; losing one early costs a deadline, never correctness.
"""

from collections import OrderedDict
from dataclasses import dataclass

from baton_core.errors import Verdict
from baton_core.limits import Limits, Millis
from baton_core.request import RequestId, Room
from baton_core.trace import Trace


@dataclass(slots=True, kw_only=True)
class Tombstone:
    """What is left of a failed room."""

    verdict: Verdict
    app_answered: bool
    peer_answered: bool
    expires_at: Millis


class RoomTable:
    """Live rooms and tombstones of one side. Every method is O(1)."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._live: dict[Room, RequestId] = {}
        self._tombstones: OrderedDict[Room, Tombstone] = OrderedDict()
        self.trace = Trace()

    def holder(self, room: Room) -> RequestId | None:
        """The live request that holds `room`."""
        return self._live.get(room)

    def open(self, room: Room, rid: RequestId) -> None:
        """A new life of `room`: wipes what an older one left. Asserts that no live request holds it."""
        assert room not in self._live, f"room {room} is held by {self._live.get(room)}"
        self._tombstones.pop(room, None)
        self._live[room] = rid
        self.trace.note("open", room)

    def wipe(self, room: Room) -> None:
        """The peer's leg came again: what an older life left says nothing about this one."""
        self._tombstones.pop(room, None)
        self.trace.note("wipe", room)

    def close(self, room: Room) -> None:
        """The room ended well on this side; it may be reused at once."""
        self._live.pop(room, None)
        self.trace.note("close", room)

    def bury(self, room: Room, verdict: Verdict, now: Millis, *, app_answered: bool, peer_answered: bool) -> None:
        """The room failed: remember the verdict for each leg that has not heard it."""
        self._live.pop(room, None)
        self._tombstones.pop(room, None)
        self.trace.note("bury", room, now, verdict.reason, app_answered, peer_answered)
        if app_answered and peer_answered:
            return
        self._tombstones[room] = Tombstone(
            verdict=verdict,
            app_answered=app_answered,
            peer_answered=peer_answered,
            expires_at=now + self._limits.tombstone_ms,
        )
        while len(self._tombstones) > self._limits.tombstones_max:
            self._tombstones.popitem(last=False)

    def verdict_for_app(self, room: Room, now: Millis) -> Verdict | None:
        """The stored verdict, if the app's leg has not had it yet; taking it ends the tombstone's duty to that leg."""
        stone = self._fresh(room, now)
        if stone is None or stone.app_answered:
            return None
        stone.app_answered = True
        self.trace.note("app", room)
        return self._spent(room, stone)

    def verdict_for_peer(self, room: Room, now: Millis) -> Verdict | None:
        """The stored verdict, if the peer's leg has not had it yet."""
        stone = self._fresh(room, now)
        if stone is None or stone.peer_answered:
            return None
        stone.peer_answered = True
        self.trace.note("peer", room)
        return self._spent(room, stone)

    def sweep(self, now: Millis) -> None:
        """Drop expired tombstones. They were buried in order of time, so the oldest stands first."""
        while self._tombstones:
            room, stone = next(iter(self._tombstones.items()))
            if stone.expires_at > now:
                return
            del self._tombstones[room]

    def next_expiry(self) -> Millis | None:
        """When the oldest tombstone expires."""
        for stone in self._tombstones.values():
            return stone.expires_at
        return None

    @property
    def tombstones(self) -> int:
        """How many tombstones stand."""
        return len(self._tombstones)

    def _fresh(self, room: Room, now: Millis) -> Tombstone | None:
        stone = self._tombstones.get(room)
        return None if stone is None or stone.expires_at <= now else stone

    def _spent(self, room: Room, stone: Tombstone) -> Verdict:
        if stone.app_answered and stone.peer_answered:
            del self._tombstones[room]
        return stone.verdict
