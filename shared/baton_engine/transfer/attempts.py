"""What one end keeps about its attempts: how far each is by the lattice of S0, and who touches its pages right now.

An attempt has a *flow* for each rank of the other unit that writes here, or reads from here: several prefill ranks may
feed one decode rank, and one prefill rank several of decode's. Flows end one by one; the attempt has succeeded when all
of them have, and its pages are free when it is revoked and no flow touches them.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from baton_core.agreement import KVPoll, Observation, merge_status
from baton_core.errors import Reason
from baton_core.kv_layout import Plan
from baton_core.ranks import Member, unit_of
from baton_core.request import Incarnation, PageId, Room
from baton_engine.transfer.flow import Flow
from baton_engine.transfer.protocol import Poke
from baton_engine.transfer.tally import Tally

Key = tuple[Room, int]

WORD_GRACE_S = 0.3
"""As long as a word about a failure may take on a loaded machine (the table of times)."""


def sibling(name: Incarnation, member: Member) -> Incarnation:
    """The name of another rank of the same unit."""
    return f"{unit_of(name)}.{member}"


@dataclass(slots=True, kw_only=True, eq=False)
class Attempt(ABC):
    """One attempt on one end. Guarded by the lock of its `AttemptTable`."""

    room: Room
    attempt: int
    prompt_tokens: int
    held_pages: int = 0  # on decode: the first of the prompt, which nobody writes
    pages_total: int  # of this end
    status: KVPoll
    flows: dict[Incarnation, Flow] = field(default_factory=dict)
    progress: int = 0
    revoked: bool = False
    reason: Reason | None = None
    text: str = ""
    awaits_word: bool = False  # the other side gave it up, and will say why over the link

    def add_flow(self, peer: Incarnation, plan: Plan, *, carries_row: bool, must_verify: bool = False) -> None:
        """One more rank that writes or reads here."""
        owed_bytes = plan.owed_bytes(self.prompt_tokens, self.held_pages)
        self.flows[peer] = Flow(
            one=self, peer=peer, plan=plan, owed_bytes=owed_bytes, carries_row=carries_row, must_verify=must_verify
        )

    @property
    def is_idle(self) -> bool:
        """Whether nobody touches its pages."""
        return not any(flow.busy for flow in self.flows.values())

    @property
    def is_given_up(self) -> bool:
        """Whether nobody may begin to touch its pages."""
        return self.revoked or self.status is KVPoll.Failed

    def is_complete(self) -> bool:
        """Whether all that this rank waits for is there."""
        return all(flow.complete for flow in self.flows.values())

    @abstractmethod
    def pages_moved(self) -> int:
        """How far it is, in pages of this end."""


@dataclass(slots=True, kw_only=True, eq=False)
class Incoming(Attempt):
    """On decode: into these pages and this row."""

    pages: tuple[PageId, ...]
    row: int
    pages_total: int = 0  # as many as `pages`
    status: KVPoll = KVPoll.WaitingForInput

    def __post_init__(self) -> None:
        self.pages_total = len(self.pages)

    @property
    def wanted(self) -> range:
        """The pages to be written, by ordinal in the prompt."""
        return range(self.held_pages, self.pages_total)

    def pages_moved(self) -> int:
        """The share of all bytes owed that is here, in pages."""
        flows = self.flows.values()
        owed_bytes = sum(flow.owed_bytes for flow in flows)
        if not owed_bytes:
            return self.pages_total
        return self.pages_total * sum(flow.moved_bytes for flow in flows) // owed_bytes


@dataclass(slots=True, kw_only=True, eq=False)
class Outgoing(Attempt):
    """On prefill."""

    status: KVPoll = KVPoll.Bootstrapping
    pushed_all: bool = False

    def is_complete(self) -> bool:
        """Not before the last push, even where this rank has little or nothing to send."""
        return self.pushed_all and all(flow.complete for flow in self.flows.values())

    def pages_moved(self) -> int:
        """The leading pages of which no reader lacks anything."""
        return min((self._leading_pages(flow) for flow in self.flows.values()), default=self.pages_total)

    def _leading_pages(self, flow: Flow) -> int:
        if flow.moved_bytes >= flow.owed_bytes:
            return self.pages_total
        return flow.plan.leading_pages(flow.moved_bytes, flow.held_pages)


class AttemptTable:
    """All attempts of one end. Thread-safe; every visible change pokes the driver."""

    def __init__(self, poke: Poke) -> None:
        self._lock = threading.Lock()
        self._attempts: dict[Key, Attempt] = {}
        self._poke = poke
        self._tally = Tally()
        self._refused: deque[tuple[float, Attempt, str]] = deque()  # until when each awaits the other side's word

    def open(self, one: Attempt) -> None:
        """A new attempt; wipes what an older one of the same name left."""
        assert merge_status(None, one.status) is not None, "an attempt begins waiting"
        one.progress = one.pages_moved()
        with self._lock:
            self._attempts[(one.room, one.attempt)] = one

    def get(self, room: Room, attempt: int) -> Attempt | None:
        """The attempt, if it is known."""
        return self._attempts.get((room, attempt))

    def observe(self, room: Room, attempt: int) -> Observation:
        """This end's view. An attempt that is not known is over: nothing touches its pages."""
        with self._lock:
            one = self._attempts.get((room, attempt))
            if one is None:
                return Observation(poll=KVPoll.Failed, writers_stopped=True, reason=Reason.TRANSFER_FAILED)
            return Observation(
                poll=one.status,
                writers_stopped=one.revoked and one.is_idle,
                reason=one.reason,
                text=one.text,
                progress=one.progress,
            )

    def ordered(self, flow: Flow, held_pages: int) -> None:
        """On prefill: what one reader holds of the prompt already is neither owed to it nor outstanding."""
        with self._lock:
            flow.held_pages = held_pages
            flow.owed_bytes = flow.plan.owed_bytes(flow.one.prompt_tokens, held_pages)
            flow.one.progress = max(flow.one.progress, flow.one.pages_moved())

    def advance(self, one: Attempt, status: KVPoll) -> None:
        """News of an attempt. Failed is sticky; what is complete has succeeded."""
        with self._lock:
            self._advance(one, status)
        self._poke()

    def moved(self, flow: Flow, moved_bytes: int, *, row: bool = False) -> None:
        """So many bytes of a flow are there by now, and perhaps its row."""
        with self._lock:
            was_whole = flow.is_whole
            self._tally.moved(flow.way, max(0, moved_bytes - flow.moved_bytes))
            flow.moved_bytes = max(flow.moved_bytes, moved_bytes)
            flow.row_moved = flow.row_moved or row
            if flow.is_whole and not was_whole:
                busy_s = flow.busy_s + (time.perf_counter() - flow.busy_since_s if flow.busy else 0.0)
                self._tally.finished(flow.way, flow.moved_bytes, busy_s)
            flow.one.progress = max(flow.one.progress, flow.one.pages_moved())
            self._advance(flow.one, KVPoll.Transferring)
        self._poke()

    def _advance(self, one: Attempt, status: KVPoll) -> None:
        merged = merge_status(one.status, KVPoll.Success if one.is_complete() else status)
        assert merged is not None
        one.status = merged

    def fail(self, one: Attempt, reason: Reason, text: str) -> None:
        """The attempt cannot succeed any more; the first reason stays. Success stays success."""
        with self._lock:
            self._fail(one, reason, text)
        self._poke()

    def _fail(self, one: Attempt, reason: Reason, text: str) -> None:
        if one.status in (KVPoll.Failed, KVPoll.Success):
            return
        one.status, one.reason, one.text = KVPoll.Failed, reason, text
        ways = [flow.way for flow in one.flows.values() if not flow.complete]
        self._tally.failed(ways[0] if ways else "none", reason)

    def refused(self, one: Attempt, text: str) -> None:
        """The other side will not go on, and says why over the link: the attempt fails for `text` only if that word does
        not come soon. Without the grace whichever is faster would be the reason that the client hears.
        """
        with self._lock:
            if one.awaits_word:
                return
            one.awaits_word = True
            self._refused.append((time.monotonic() + WORD_GRACE_S, one, text))
            if len(self._refused) == 1:
                self._when_grace_ends()

    def _when_grace_ends(self) -> None:
        """Set the clock for the first of `_refused`, which stand in order of time; the lock is held."""
        left_s = self._refused[0][0] - time.monotonic()
        timer = threading.Timer(max(0.0, left_s), self._grace_ended)
        timer.daemon = True
        timer.start()

    def _grace_ended(self) -> None:
        with self._lock:
            while self._refused and self._refused[0][0] <= time.monotonic():
                _, one, text = self._refused.popleft()
                if self._attempts.get((one.room, one.attempt)) is one:  # else the word came, and all is over
                    self._fail(one, Reason.TRANSFER_FAILED, text)
            if self._refused:
                self._when_grace_ends()
        self._poke()

    def nonsense(self, way: str) -> None:
        """Something that no writer says came in; it is counted, and whoever said it alone suffers."""
        with self._lock:
            self._tally.nonsense(way)

    def carrier_lost(self, carrier: object, text: str) -> None:
        """A stream ended: what it carried and had not finished fails."""
        with self._lock:
            flows = [flow for one in self._attempts.values() for flow in one.flows.values()]
            hit = [flow.one for flow in flows if flow.carrier is carrier and not flow.complete]
        for one in hit:
            self.fail(one, Reason.TRANSFER_FAILED, text)

    def peer_lost(self, peer: Incarnation, text: str) -> None:
        """A rank of another unit is gone: every attempt that it feeds, or reads from here, fails."""
        with self._lock:
            hit = [one for one in self._attempts.values() if peer in one.flows]
        for one in hit:
            self.fail(one, Reason.PEER_LOST, text)

    def enter(
        self,
        flow: Flow,
        carrier: object,
        *,
        halt: Callable[[], None] | None = None,
        cut: Callable[[], None] | None = None,
        way: str | None = None,
    ) -> bool:
        """Somebody is about to touch the flow's pages for `carrier`; False if they may not.

        `halt` asks them to stop when the attempt is revoked; `cut` ends it by force. `way`: by which they came.
        """
        with self._lock:
            if flow.one.is_given_up:
                return False
            if not flow.busy:
                flow.busy_since_s = time.perf_counter()
            flow.busy += 1
            # Two may be at work: one receives, one scatters what came before.
            flow.carrier, flow.halt, flow.cut = carrier, halt or flow.halt, cut or flow.cut
            flow.way = way or flow.way
            return True

    def leave(self, flow: Flow) -> None:
        """They are done with the pages."""
        with self._lock:
            flow.busy -= 1
            if flow.busy == 0:
                flow.busy_s += time.perf_counter() - flow.busy_since_s
                flow.halt = flow.cut = None
        self._poke()

    def revoke(self, room: Room, attempt: int) -> None:
        """Nobody may begin to touch the attempt's pages; whoever does now is asked to stop."""
        with self._lock:
            one = self._attempts.get((room, attempt))
            halts = []
            if one is not None:
                # With `enter` under one lock: either it sees the revocation, or its `halt` is seen here.
                one.revoked = True
                halts = [flow.halt for flow in one.flows.values() if flow.halt is not None]
        for halt in halts:
            halt()
        self._poke()

    def fence(self, room: Room, attempt: int) -> None:
        """Cut off whoever still touches the attempt's pages."""
        with self._lock:
            one = self._attempts.get((room, attempt))
            cuts = [] if one is None else [flow.cut for flow in one.flows.values() if flow.cut is not None]
        for cut in cuts:
            cut()

    def forget(self, room: Room, attempt: int) -> None:
        """Drop the attempt."""
        with self._lock:
            self._attempts.pop((room, attempt), None)

    def tally(self) -> tuple[dict[str, float], dict[str, list[float]]]:
        """Counters, and new samples of histograms, by metric key."""
        with self._lock:
            return self._tally.counters(), self._tally.samples()

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


class TableEnd:
    """What all ends do alike: the table knows."""

    def __init__(self, table: AttemptTable) -> None:
        self._table = table

    def poller(self, room: Room, attempt: int) -> TablePoller:
        """This rank's view of the attempt."""
        return TablePoller(self._table, room, attempt)

    def revoke(self, room: Room, attempt: int) -> None:
        """Let nobody begin to touch the attempt's pages any more."""
        self._table.revoke(room, attempt)

    def fence(self, room: Room, attempt: int) -> None:
        """Cut off whoever still touches the attempt's pages."""
        self._table.fence(room, attempt)

    def forget(self, room: Room, attempt: int) -> None:
        """Drop the attempt."""
        self._table.forget(room, attempt)

    def tally(self) -> tuple[dict[str, float], dict[str, list[float]]]:
        """What all transfers have come to."""
        return self._table.tally()

    def peer_gone(self, peer: Incarnation) -> None:
        """What this rank of the other unit feeds, or reads, fails."""
        self._table.peer_lost(peer, f"rank {peer} is gone")
