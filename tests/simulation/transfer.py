"""A tcp-like transfer backend over simulated pools, rank to rank: the receiver's own thread checks, then writes.

    decode rank                                  prefill ranks that feed it (`kv_layout.writers`)
    Expect: zero the row, open    -- order --->  (offered to this unit, not revoked: pages may go)
    check, write, land            <-- page ----  read one page at a time, in order
    write the row, room word last <-- row -----  after the last page, from the one row writer
    Success: all that was owed    -- landed -->  Success: every rank it feeds has everything

`writers_stopped` is said once and for good: after a revoke (or a broken stream), when nothing is under way any more. A
thread that is stuck in the middle of a page is freed by `fence`, which breaks the streams.
"""

from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

from baton_core.agreement import KVPoll, Observation, Watch
from baton_core.effects import Expect, Fence, Forget, Offer, Push, Revoke
from baton_core.errors import Reason
from baton_core.kv_layout import Plan, UnitLayout
from baton_core.messages import MetadataRow
from baton_core.ranks import Member, member_name, unit_of, worker_of
from baton_core.request import Incarnation, PageId, RequestId, Room
from simulation.invariants import Broken

if TYPE_CHECKING:
    from simulation.network import Stream
    from simulation.rank import Rank
    from simulation.world import World

BROKEN = "the stream broke"

layout_of = lru_cache(UnitLayout.from_text)
"""The layout in a text; worlds have few different ones."""

Bytes = tuple[int, int, bytes]
"""A target page (ordinal in the prompt), an offset in it, and what belongs there."""


@dataclass(slots=True, kw_only=True)
class Way:
    """One attempt between this rank and one rank of the peer. `busy`: a page is being read or written right now."""

    owed: int  # bytes
    plan: Plan
    wanted: range  # target pages that may be written
    writes_row: bool
    stream: "Stream | None" = None
    ordered: bool = False
    busy: bool = False
    moved: int = 0  # bytes that are there, as far as this end knows
    row_done: bool = False
    queue: deque[tuple[int, PageId]] = field(default_factory=deque)  # prefill: pages to send
    last: MetadataRow | None = None  # prefill: the row to send after the last page
    ends: dict[int, int] = field(default_factory=dict)  # prefill: pages of the prompt to send, and `moved` after each

    @property
    def whole(self) -> bool:
        """All bytes are there."""
        return self.moved >= self.owed

    @property
    def over(self) -> bool:
        """Nothing more will come this way."""
        return self.whole and (self.row_done or not self.writes_row)


@dataclass(slots=True, kw_only=True)
class Attempt:
    """What a backend keeps about one attempt."""

    rid: RequestId
    room: Room
    attempt: int
    peer: str = ""
    pages: tuple[PageId, ...] = ()
    pages_total: int = 0  # of this side
    prompt_tokens: int = 0
    row: int = 0  # decode: where the row goes
    row_from: Member | None = None  # decode: who wrote it
    ways: dict[Member, Way] = field(default_factory=dict)
    begun: bool = False
    magic: bool = False  # the fake backend: there is nothing to wait for
    progress: int = 0
    revoked: bool = False
    stopped: bool = False
    failed: tuple[Reason, str] | None = None
    seen: Observation | None = None  # by the last poll; most find what that found

    @property
    def dead(self) -> bool:
        """Nothing more may begin."""
        return self.revoked or self.failed is not None

    @property
    def busy(self) -> bool:
        """A page is being read or written right now."""
        return any(way.busy for way in self.ways.values())

    def poll(self) -> Observation:
        """The state right now."""
        if self.failed is not None or self.revoked:
            reason, text = self.failed or (None, "")
            return Observation(
                poll=KVPoll.Failed, writers_stopped=self.stopped, reason=reason, text=text, progress=self.progress
            )
        ordered = whole = True
        for way in self.ways.values():
            ordered = ordered and way.ordered
            whole = whole and way.moved >= way.owed
        state = KVPoll.Bootstrapping
        if self.magic or (ordered and whole):
            state = KVPoll.Success
        elif self.begun:
            state = KVPoll.Transferring
        elif ordered:
            state = KVPoll.WaitingForInput
        seen = self.seen
        if seen is None or seen.poll is not state or seen.progress != self.progress:
            seen = self.seen = Observation(poll=state, progress=self.progress)
        return seen


def member_name_beside(leader: Incarnation, member: Member) -> Incarnation:
    """The name of another member of a unit, from its leader's."""
    return member_name(worker_of(leader), int(unit_of(leader).rpartition("/")[2]), member)


class Transfer(ABC):
    """What both sides' backends do alike; what only one side does is a fault of the core's where the other is asked."""

    def __init__(self, rank: "Rank") -> None:
        self.rank = rank
        self.world: World = rank.world
        self.layout: UnitLayout = rank.unit.layout
        self.attempts: dict[tuple[Room, int], Attempt] = {}

    def poller(self, watch: Watch) -> Attempt:
        """The attempt that a core watches."""
        return self.attempts[watch.room, watch.attempt]

    def kept(self) -> list[tuple[Room, int]]:
        """Attempts that are not forgotten."""
        return list(self.attempts)

    def begin(self, attempt: Attempt) -> None:
        """Keep a new attempt; its name must be free, or late messages of another life would hit it."""
        key = attempt.room, attempt.attempt
        if key in self.attempts:
            raise Broken("law of pages", f"{self.rank} opens room, attempt {key} twice at once")
        self.attempts[key] = attempt
        self.changed()

    def changed(self) -> None:
        """An observation changed: poke the scheduler."""
        self.rank.nudge()

    def revoke(self, effect: Revoke) -> None:
        """Begin nothing more; say when nothing is under way."""
        attempt = self.attempts[effect.room, effect.attempt]
        attempt.revoked = True
        for way in attempt.ways.values():
            way.queue.clear()
        if not attempt.busy:
            self.world.at(int(self.world.random.random() * 6), self._stop, attempt)
        self.changed()

    def fence(self, effect: Fence) -> None:
        """Break the peer's streams, which frees the threads that are stuck in them."""
        attempt = self.attempts[effect.room, effect.attempt]
        for way in attempt.ways.values():
            if way.stream is not None:
                way.stream.close()
                self.closed(way.stream)
        self._stop(attempt)

    def forget(self, effect: Forget) -> None:
        """The attempt's pages are back in the pool."""
        self.attempts.pop((effect.room, effect.attempt), None)

    def closed(self, stream: "Stream") -> None:
        """A stream broke: what was under way will never end otherwise, so it ended."""
        for attempt in list(self.attempts.values()):
            for way in attempt.ways.values():
                if way.stream is stream and not way.over:
                    way.busy = False
                    self.break_off(attempt, BROKEN)

    def break_off(self, attempt: Attempt, text: str) -> None:
        """The attempt fails by the world's fault, on this rank."""
        if attempt.failed is None:
            attempt.failed = (Reason.TRANSFER_FAILED, text)
        for way in attempt.ways.values():
            way.queue.clear()
        if not attempt.busy:
            self._stop(attempt)
        self.changed()

    def _stop(self, attempt: Attempt) -> None:
        if not attempt.busy and not attempt.stopped:
            attempt.stopped = True
            self.changed()

    @abstractmethod
    def heard(self, stream: "Stream", message: tuple[object, ...]) -> None:
        """Something arrived on a stream."""

    def expect(self, effect: Expect) -> None:
        """Decode only."""
        self._misasked(effect)

    def offer(self, effect: Offer) -> None:
        """Prefill only."""
        self._misasked(effect)

    def push(self, effect: Push) -> None:
        """Prefill only."""
        self._misasked(effect)

    def _misasked(self, effect: Expect | Offer | Push) -> None:
        raise Broken("sides", f"{self.rank} was asked to {effect}")
