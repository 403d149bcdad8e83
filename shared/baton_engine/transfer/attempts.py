"""What one end keeps about its attempts: status by the lattice of S0, progress, and who is touching pages right now."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from baton_core.agreement import KVPoll, Observation, merge_status
from baton_core.errors import Reason
from baton_core.request import Incarnation, PageId, Room
from baton_engine.transfer.protocol import Poke

Key = tuple[Room, int]


@dataclass(slots=True, kw_only=True)
class Attempt:
    """One attempt on one end. Guarded by the lock of its `AttemptTable`."""

    room: Room
    attempt: int
    peer: Incarnation
    status: KVPoll
    pages_total: int
    pages: tuple[PageId, ...] = ()
    row: int | None = None
    progress: int = 0
    landed_bytes: dict[int, int] = field(default_factory=dict)
    busy: int = 0  # threads that touch its pages right now
    revoked: bool = False
    reason: Reason | None = None
    text: str = ""
    carrier: object | None = None  # the stream that carries it
    cut: Callable[[], None] | None = None  # closes the stream that touches it now


class AttemptTable:
    """All attempts of one end. Thread-safe; every visible change pokes the driver."""

    def __init__(self, poke: Poke) -> None:
        self.lock = threading.Lock()
        self._attempts: dict[Key, Attempt] = {}
        self._poke = poke

    def open(self, attempt: Attempt) -> None:
        """A new attempt; wipes what an older one of the same name left."""
        assert merge_status(None, attempt.status) is not None, "an attempt begins waiting"
        with self.lock:
            self._attempts[(attempt.room, attempt.attempt)] = attempt

    def get(self, room: Room, attempt: int) -> Attempt | None:
        """The attempt, if it is known."""
        return self._attempts.get((room, attempt))

    def observe(self, room: Room, attempt: int) -> Observation:
        """This end's view. An attempt that is not known is over: nothing touches its pages."""
        with self.lock:
            one = self._attempts.get((room, attempt))
            if one is None:
                return Observation(poll=KVPoll.Failed, writers_stopped=True, reason=Reason.TRANSFER_FAILED)
            return Observation(
                poll=one.status,
                writers_stopped=one.revoked and one.busy == 0,
                reason=one.reason,
                text=one.text,
                progress=one.progress,
            )

    def advance(self, one: Attempt, status: KVPoll, progress: int | None = None) -> None:
        """News of an attempt. Failed is sticky."""
        with self.lock:
            merged = merge_status(one.status, status)
            assert merged is not None
            one.status = merged
            if progress is not None:
                one.progress = max(one.progress, progress)
        self._poke()

    def fail(self, one: Attempt, reason: Reason, text: str) -> None:
        """The attempt cannot succeed any more; the first reason stays. Success stays success."""
        with self.lock:
            if one.status in (KVPoll.Failed, KVPoll.Success):
                return
            one.status, one.reason, one.text = KVPoll.Failed, reason, text
        self._poke()

    def carrier_lost(self, carrier: object, text: str) -> None:
        """A stream ended: what it carried and had not finished fails."""
        with self.lock:
            hit = [one for one in self._attempts.values() if one.carrier is carrier]
        for one in hit:
            self.fail(one, Reason.TRANSFER_FAILED, text)

    def peer_lost(self, peer: Incarnation, text: str) -> None:
        """A peer is gone: every attempt with it fails."""
        with self.lock:
            hit = [one for one in self._attempts.values() if one.peer == peer]
        for one in hit:
            self.fail(one, Reason.PEER_LOST, text)

    def enter(self, one: Attempt, carrier: object, cut: Callable[[], None]) -> bool:
        """A thread is about to touch the attempt's pages for `carrier`; False if it may not. `cut` ends its doing so."""
        with self.lock:
            if one.revoked or one.status is KVPoll.Failed:
                return False
            one.busy += 1
            one.carrier, one.cut = carrier, cut
            return True

    def leave(self, one: Attempt) -> None:
        """The thread is done with the pages."""
        with self.lock:
            one.busy -= 1
            if one.busy == 0:
                one.cut = None
        self._poke()

    def revoke(self, room: Room, attempt: int) -> None:
        """Nobody may begin to touch the attempt's pages."""
        with self.lock:
            one = self._attempts.get((room, attempt))
            if one is not None:
                one.revoked = True
        self._poke()

    def fence(self, room: Room, attempt: int) -> None:
        """Cut the stream that still touches the attempt's pages."""
        with self.lock:
            one = self._attempts.get((room, attempt))
            cut = None if one is None else one.cut
        if cut is not None:
            cut()

    def forget(self, room: Room, attempt: int) -> None:
        """Drop the attempt."""
        with self.lock:
            self._attempts.pop((room, attempt), None)

    def __len__(self) -> int:
        return len(self._attempts)


@dataclass(frozen=True, slots=True)
class TablePoller:
    """`Poller` over a table."""

    table: AttemptTable
    room: Room
    attempt: int

    def poll(self) -> Observation:
        """The state right now."""
        return self.table.observe(self.room, self.attempt)
