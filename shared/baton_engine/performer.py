"""What one rank does with the world on behalf of its core: effects, observations, agreement, steps.

A `Replica` decides when; nothing here decides anything. Only the leader speaks for the unit: to clients (through the app),
to the leaders of other units, and to the registry. Transfers are every rank's own.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, assert_never

import structlog
import zmq

from baton_core.agreement import (
    GateArgs,
    Group,
    MetadataRows,
    Observation,
    Poller,
    SoloGroup,
    Staging,
    Watch,
    poll_and_all_reduce,
    poll_and_all_reduce_attn_cp_tp_group,
    poll_and_all_reduce_with_staging,
)
from baton_core.effects import (
    Backup,
    Connect,
    Effect,
    Emit,
    Expect,
    Fence,
    Forget,
    LookUp,
    Moved,
    Offer,
    Push,
    RegisterRank,
    Restore,
    Revoke,
    Tell,
)
from baton_core.ledger import copy_of
from baton_core.limits import Millis
from baton_core.messages import PageOrder
from baton_core.plan import StepPlan
from baton_core.request import Incarnation
from baton_core.unit_log import Report, divergence
from baton_engine.backup import HostStore
from baton_engine.compute import Compute
from baton_engine.gauges import Gauges
from baton_engine.transfer.protocol import Attempts
from baton_io.ipc import TO_APP, Emits, LookUps, PeersLost, RegisterRanks
from baton_io.links import Links

log = structlog.get_logger(__name__)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Who agrees with this rank: its stage (attention CP x TP), and the two of which that is made."""

    stage: Group
    cp: Group
    tp: Group

    @staticmethod
    def solo() -> "Groups":
        """A rank by itself."""
        return Groups(stage=SoloGroup(), cp=SoloGroup(), tp=SoloGroup())


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """How a rank reaches everybody else."""

    side: Side
    links: Links
    app: "zmq.Socket[bytes]"
    compute: Compute
    groups: Groups
    gate: GateArgs
    leads: bool
    report: Callable[[Report], None]
    """How a stage's report gets to the leader."""
    backup: HostStore | None = None
    """Where the KV cache of retracted requests waits (decode)."""


class Performer:
    """`Site` and `Stage` of `baton_core.unit_log`, over real links, transfers, groups and a compute thread."""

    def __init__(self, reach: Reach, gauges: Gauges) -> None:
        self._reach, self._gauges = reach, gauges
        self._emits: list[Emit] = []
        self._lookups: list[LookUp] = []
        self._registrations: list[RegisterRank] = []
        self._lost: list[Incarnation] = []

    @property
    def rows(self) -> MetadataRows | None:
        """This rank's metadata rows (decode)."""
        return self._reach.side.rows

    # -- agreement

    def observe(self, watches: Sequence[Watch]) -> list[Observation]:
        """One fused minimum over the stage."""
        reach, began = self._reach, time.perf_counter()
        side, stage = reach.side, reach.groups.stage
        pollers = self._pollers(watches)
        gated = None if side.rows is None else watches
        if side.staging is None:
            seen = poll_and_all_reduce(pollers, stage, gated, side.rows, reach.gate)
        else:
            seen = poll_and_all_reduce_with_staging(pollers, stage, side.staging, gated, side.rows, reach.gate)
        self._gauges.agreed(time.perf_counter() - began)
        return seen

    def observe_uncovered(self, watches: Sequence[Watch]) -> list[int]:
        """Of requests that the consensus does not cover: over attention CP, then TP."""
        groups = self._reach.groups
        return poll_and_all_reduce_attn_cp_tp_group(self._pollers(watches), groups.cp, groups.tp)

    def compare(self, digest: int) -> None:
        """Raise Divergence unless every rank of the stage holds this digest."""
        least, negated = self._reach.groups.stage.all_reduce_min((digest, -digest))
        if least != digest or -negated != digest:
            raise divergence(self._gauges.position, {"the least": least, "the greatest": -negated, "this rank": digest})

    def report(self, report: Report) -> None:
        """What this stage sees, to the leader."""
        self._reach.report(report)

    def _pollers(self, watches: Sequence[Watch]) -> list[Poller]:
        return [self._poller(watch) for watch in watches]

    def _poller(self, watch: Watch) -> Poller:
        copy, backup = copy_of(watch), self._reach.backup
        if copy and backup is not None:
            return backup.poller(copy)
        return self._reach.side.attempts.poller(watch.room, watch.attempt)

    # -- steps

    def start(self, plan: StepPlan) -> None:
        """Compute this plan after those that were started before."""
        self._gauges.step_began(plan, time.monotonic())
        self._reach.compute.start(plan)

    def idle(self) -> None:
        """Take part in a round of the other units."""
        self._reach.compute.start_idle()

    # -- effects

    def perform(self, effects: Sequence[Effect], now: Millis) -> None:
        """Do what the core asks for, in order."""
        attempts, leads = self._reach.side.attempts, self._reach.leads
        for effect in effects:
            match effect:
                case Emit():
                    self._emits.append(effect)
                case Tell():
                    if leads:
                        self._reach.links.send(effect.peer, effect.message, now)
                case LookUp():
                    self._lookups.append(effect)
                case RegisterRank():
                    self._registrations.append(effect)
                case Connect() | Expect() | Offer() | Push():
                    self._reach.side.perform(effect, now)
                case Revoke():
                    attempts.revoke(effect.room, effect.attempt)
                case Fence():
                    log.warning("transfer.fenced", room=effect.room, attempt=effect.attempt)
                    attempts.fence(effect.room, effect.attempt)
                case Forget():
                    attempts.forget(effect.room, effect.attempt)
                case Backup() | Restore():
                    assert self._reach.backup is not None, f"a rank without a host store was asked to {effect}"
                    self._reach.backup.start(effect)
                case Moved():
                    self._moved(effect)
                case _:
                    assert_never(effect)

    def ordered(self, peer: Incarnation, order: PageOrder) -> None:
        """A page order came in: an observation, not an input."""
        self._reach.side.order(peer, order)

    def lost(self, peer: Incarnation) -> None:
        """A conversation ended: what is kept about that peer is stale."""
        self._reach.side.peer_gone(peer)
        self._lost.append(peer)

    def flush(self) -> None:
        """Say to the app what the effects so far have to say to it."""
        emits, self._emits = self._emits, []
        lookups, self._lookups = self._lookups, []
        registrations, self._registrations = self._registrations, []
        lost, self._lost = self._lost, []
        if self._reach.leads:
            if emits:
                self.say(Emits(emits=tuple(emits)))
            if lookups:
                self.say(LookUps(lookups=tuple(lookups)))
            if registrations:
                self.say(RegisterRanks(rooms=tuple(registrations)))
        if lost:
            self.say(PeersLost(peers=tuple(lost)))

    def say(self, message: object) -> None:
        """One message to the app."""
        # The app is on this host and drains its socket; if it does not, it is dying, and so must this rank be.
        self._reach.app.send(TO_APP.encode(message))

    def _moved(self, effect: Moved) -> None:
        self._gauges.moved(effect, time.monotonic())
        if not self._reach.leads:
            return
        fields = {"rid": effect.rid, "room": effect.room, "was": effect.source, "now": effect.target}
        if effect.reason is None:
            log.debug("handoff.moved", **fields)
        else:
            log.info("handoff.failed", **fields, reason=effect.reason.name.lower(), text=effect.text)
