"""The loop of one scheduler rank: drain inputs, agree on observations, tick, perform effects, keep the engine busy.

    wait ──► drain (app, links) ──► step each ──► agree ──► step ──► tick ──► commit ──► plan ──► perform ──► wait
             ▲                                                                                          │
             └────────── input, a poke from a transfer or the compute thread, or the next deadline ◄────┘

It waits neither for I/O nor for a forward, and it decides nothing: the core does. A `Side` performs the effects that
differ between prefill and decode.
"""

import os
import threading
import time
from collections.abc import Sequence
from typing import Protocol, assert_never

import structlog
import zmq

from baton_core.agreement import (
    GateArgs,
    Group,
    MetadataRows,
    Poller,
    Staging,
    Watch,
    agreed_polls,
    poll_and_all_reduce,
    poll_and_all_reduce_with_staging,
)
from baton_core.decode.core import DecodeCore
from baton_core.effects import Connect, Effect, Emit, Expect, Fence, Forget, LookUp, Moved, Offer, Push, Revoke, Tell
from baton_core.errors import Reason, Verdict
from baton_core.events import Event, Observed, PeerGone, PeerSaid
from baton_core.limits import Limits, Millis
from baton_core.messages import PageOrder
from baton_core.plan import StepPlan
from baton_core.prefill.core import PrefillCore
from baton_core.request import Incarnation
from baton_engine.compute import Compute
from baton_engine.gauges import Gauges
from baton_engine.transfer.protocol import Attempts
from baton_io.codec import FrameError
from baton_io.ipc import TO_APP, TO_RANK, Emits, LookUps, PeersLost, Ping, Stop
from baton_io.links import Links, Lost, News

log = structlog.get_logger(__name__)

SNAPSHOT_MS: Millis = 1_000


def now_ms() -> Millis:
    """The clock of this host, in milliseconds; the only one the scheduler reads."""
    return time.monotonic_ns() // 1_000_000


class Poker:
    """Wakes the loop from any thread, through an eventfd; remembers since when it has been due."""

    def __init__(self) -> None:
        self.file_descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._since: Millis | None = None

    def __call__(self) -> None:
        """Wake the loop."""
        with self._lock:
            if self._since is None:
                self._since = now_ms()
                # Inside the lock: whoever drains sees the note and the event together, or neither.
                os.eventfd_write(self.file_descriptor, 1)

    def drain(self) -> Millis | None:
        """Forget the pokes; since when the first of them stood."""
        with self._lock:
            since, self._since = self._since, None
            if since is not None:
                os.eventfd_read(self.file_descriptor)
            return since


class Side(Protocol):
    """What differs between a prefill and a decode rank."""

    @property
    def attempts(self) -> Attempts:
        """The transfer backend's end."""
        ...

    @property
    def rows(self) -> MetadataRows | None:
        """The metadata rows that the gate looks at (decode)."""
        ...

    @property
    def staging(self) -> Staging | None:
        """The staging ring, where one is in use."""
        ...

    def perform(self, effect: Expect | Offer | Push | Connect, now: Millis) -> None:
        """An effect that only this side knows."""
        ...

    def order(self, peer: Incarnation, order: PageOrder) -> None:
        """A page order came in."""
        ...

    def peer_gone(self, peer: Incarnation) -> None:
        """The conversation with a peer ended."""
        ...


class Driver:
    """One rank's loop. Built once, run once."""

    def __init__(
        self,
        *,
        core: PrefillCore | DecodeCore,
        side: Side,
        links: Links,
        app: "zmq.Socket[bytes]",
        compute: Compute,
        poker: Poker,
        group: Group,
        gate: GateArgs,
        limits: Limits,
        gauges: Gauges,
    ) -> None:
        self._core, self._side, self._links, self._app = core, side, links, app
        self._compute, self._poker, self._group, self._gate = compute, poker, group, gate
        self._limits, self._gauges = limits, gauges
        self._stopping = False
        self._emits: list[Emit] = []
        self._lookups: list[LookUp] = []
        self._lost: list[Incarnation] = []
        self._snapshot_at = now_ms()

    def run(self) -> None:
        """Turn until the app says stop. Raises what ends the worker (a dead compute thread, a step beyond its limit)."""
        due: Millis | None = None
        while not self._stopping:
            poked_at = self._wait(due)
            now = now_ms()
            since = [at for at in (due if due is not None and due <= now else None, poked_at) if at is not None]
            if since:
                self._gauges.tick_lag(now - min(since))
            due = self.turn(now)

    def turn(self, now: Millis) -> Millis | None:
        """One turn of the loop; returns when the next one is due without further news."""
        for event in self._inputs(now):
            self._perform(self._core.step(event, now), now)
        self._agree(now)
        self._perform(self._core.tick(now), now)
        self._commit(now)
        # Tokens leave before the next step begins to compete for the processor.
        self._report(now)
        self._work(now)
        return self._next_due(now)

    # -- waiting

    def _wait(self, due: Millis | None) -> Millis | None:
        poller = zmq.Poller()
        poller.register(self._poker.file_descriptor, zmq.POLLIN)
        poller.register(self._app, zmq.POLLIN)
        for socket in self._links.sockets:
            poller.register(socket, zmq.POLLIN)
        timeout_ms = None if due is None else max(0, due - now_ms())
        if timeout_ms != 0:
            poller.poll(timeout_ms)
        return self._poker.drain()

    def _next_due(self, now: Millis) -> Millis | None:
        dues = [self._core.next_deadline(), self._links.next_due(), self._snapshot_at]
        if self._compute.busy_since_ms is not None:
            dues.append(self._compute.busy_since_ms + self._limits.step_ms)
        return min(due for due in dues if due is not None)

    # -- inputs and observations

    def _inputs(self, now: Millis) -> list[Event]:
        events: list[Event] = []
        while True:
            try:
                frame = self._app.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            self._take(frame, events)
        self._hear(self._links.receive(now), events)
        self._hear(self._links.tick(now), events)
        return events

    def _take(self, frame: bytes, events: list[Event]) -> None:
        try:
            message = TO_RANK.decode(frame)
        except FrameError as error:
            log.error("ipc.bad_frame", error=str(error))
            return
        if isinstance(message, Ping):
            self._snapshot_at = 0
        elif isinstance(message, Stop):
            self._stopping = True
        else:
            events.append(message)

    def _hear(self, news: Sequence[News], events: list[Event]) -> None:
        for one in news:
            if isinstance(one, Lost):
                log.info("link.lost", peer=one.peer, reason=one.text)
                self._side.peer_gone(one.peer)
                self._lost.append(one.peer)
                text = f"lost the link to worker {one.peer}: {one.text}"
                events.append(PeerGone(peer=one.peer, verdict=Verdict(reason=Reason.PEER_LOST, text=text)))
            elif isinstance(one.payload, PageOrder):
                self._side.order(one.peer, one.payload)
            else:
                events.append(PeerSaid(peer=one.peer, message=one.payload))

    def _agree(self, now: Millis) -> None:
        watches = self._core.watched()
        if not watches:
            return
        pollers: list[Poller] = [self._side.attempts.poller(watch.room, watch.attempt) for watch in watches]
        rows, gated = self._side.rows, self._gated(watches)
        if self._side.staging is None:
            reduced = poll_and_all_reduce(pollers, self._group, gated, rows, self._gate)
        else:
            staging = self._side.staging
            reduced = poll_and_all_reduce_with_staging(pollers, self._group, staging, gated, rows, self._gate)
        self._perform(self._core.step(Observed(polls=agreed_polls(watches, reduced, rows)), now), now)

    def _gated(self, watches: list[Watch]) -> list[Watch] | None:
        return None if self._side.rows is None else watches

    # -- work

    def _commit(self, now: Millis) -> None:
        result = self._compute.finished()
        if result is not None:
            self._gauges.step_over(time.monotonic())
            self._perform(self._core.commit(result, now), now)

    def _work(self, now: Millis) -> None:
        busy_since = self._compute.busy_since_ms
        if busy_since is not None and now - busy_since > self._limits.step_ms:
            raise RuntimeError(f"a step has run for {now - busy_since} ms (step_ms {self._limits.step_ms})")
        plan = self._core.plan() if busy_since is None else None
        if plan is not None:
            self._start(plan, now)

    def _start(self, plan: StepPlan, now: Millis) -> None:
        self._gauges.step_began(plan, time.monotonic())
        # Planning moves requests too; its effects come with the next call.
        self._perform(self._core.ledger.take_effects(), now)
        self._compute.start(plan)

    # -- effects

    def _perform(self, effects: Sequence[Effect], now: Millis) -> None:
        for effect in effects:
            match effect:
                case Emit():
                    self._emits.append(effect)
                case Tell():
                    self._links.send(effect.peer, effect.message, now)
                case LookUp():
                    self._lookups.append(effect)
                case Connect() | Expect() | Offer() | Push():
                    self._side.perform(effect, now)
                case Revoke():
                    self._side.attempts.revoke(effect.room, effect.attempt)
                case Fence():
                    log.warning("transfer.fenced", room=effect.room, attempt=effect.attempt)
                    self._side.attempts.fence(effect.room, effect.attempt)
                case Forget():
                    self._side.attempts.forget(effect.room, effect.attempt)
                case Moved():
                    self._moved(effect)
                case _:
                    assert_never(effect)

    def _moved(self, effect: Moved) -> None:
        self._gauges.moved(effect, time.monotonic())
        fields = {"rid": effect.rid, "room": effect.room, "was": effect.source, "now": effect.target}
        if effect.reason is None:
            log.debug("handoff.moved", **fields)
        else:
            log.info("handoff.failed", **fields, reason=effect.reason.name.lower(), text=effect.text)

    def _report(self, now: Millis) -> None:
        if self._emits:
            self._say(Emits(emits=tuple(self._emits)))
            self._emits.clear()
        if self._lookups:
            self._say(LookUps(lookups=tuple(self._lookups)))
            self._lookups.clear()
        if self._lost:
            self._say(PeersLost(peers=tuple(self._lost)))
            self._lost.clear()
        if now >= self._snapshot_at:
            self._snapshot_at = now + SNAPSHOT_MS
            self._say(self._gauges.snapshot(self._core, self._links))

    def _say(self, message: object) -> None:
        # The app is on this host and drains its socket; if it does not, it is dying, and so must this rank be.
        self._app.send(TO_APP.encode(message))
