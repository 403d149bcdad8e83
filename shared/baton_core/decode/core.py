"""The decode core: events in, effects out. Read `phases` first."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import assert_never

from baton_core.admission import capacity_verdict
from baton_core.agreement import Watch
from baton_core.chunks import take_chunk, take_token
from baton_core.decode.phases import DECODE
from baton_core.decode.planning import DecodeBatch
from baton_core.decode.prealloc import DecodePreallocQueue
from baton_core.decode.transfer import DecodeTransferQueue
from baton_core.effects import Connect, Effect, LookUp, Tell
from baton_core.errors import Verdict
from baton_core.events import (
    Abort,
    AbortAll,
    AgreedPoll,
    DrainBegan,
    Event,
    FlushCache,
    LookupFailed,
    Observed,
    PeerGone,
    PeerSaid,
    Resolved,
    StopHere,
    Submit,
)
from baton_core.ledger import Ledger, is_fake
from baton_core.limits import Limits, Millis
from baton_core.machine import Handoff, Phase, move
from baton_core.messages import Accepted, Hello, NotYet, Rejected, RoomFailed
from baton_core.pages import PagePool
from baton_core.plan import StepPlan, StepResult
from baton_core.request import Finish, FinishType, Request, RequestId, Room

_ARRIVED = (Phase.ARRIVED, Phase.RUNNING)
"""The KV cache is here: such a request depends on nobody else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Farewell:
    """A leg that ended here before prefill could be told: it is told when the look-up answers."""

    room: Room
    attempt: int
    verdict: Verdict
    expires_at: Millis


class DecodeCore:
    """All decisions of one decode unit. `step`, `tick` and `commit` return effects; `plan` freezes the next batch."""

    def __init__(
        self, *, limits: Limits, pool_pages: int, page_tokens: int, context_tokens: int, fingerprint: str
    ) -> None:
        self.limits = limits
        self.page_tokens = page_tokens
        self.context_tokens = context_tokens
        rows = PagePool(limits.metadata_rows)
        self.ledger = Ledger(DECODE, limits, PagePool(pool_pages), rows)
        self.ledger.on_leave = self._on_leave
        self.prealloc = DecodePreallocQueue(
            self.ledger, page_tokens=page_tokens, context_tokens=context_tokens, fingerprint=fingerprint
        )
        self.transfer = DecodeTransferQueue(self.ledger, page_tokens)
        self.batch = DecodeBatch(self.ledger)
        self.farewells: OrderedDict[RequestId, Farewell] = OrderedDict()
        self.running: StepPlan | None = None
        self.steps = 0
        # Every request is an attempt of its own, so that nothing said or written in an earlier life of its room fits it.
        self.attempts = 0

    # -- the four calls of a driver

    def step(self, event: Event, now: Millis) -> list[Effect]:
        """An agreed event happened."""
        match event:
            case Submit():
                self._submit(event.request, now)
            case Abort():
                self._abort(event.rid, event.verdict, now)
            case AbortAll():
                for rid in list(self.ledger.live):
                    self._abort(rid, event.verdict, now)
            case StopHere():
                self._stop_here(event.rid, now)
            case Resolved():
                self._resolved(event, now)
            case LookupFailed():
                self._abort(event.rid, event.verdict, now)
                self.farewells.pop(event.rid, None)
            case PeerSaid():
                self._peer_said(event, now)
            case PeerGone():
                self._peer_gone(event, now)
            case Observed():
                self._observed(event, now)
            case DrainBegan():
                self.ledger.draining = True
            case FlushCache():
                pass  # decode keeps no cache yet
            case _:
                assert_never(event)
        self._order_pages(now)
        return self.ledger.take_effects()

    def tick(self, now: Millis) -> list[Effect]:
        """Deadlines; needs no new work to fire."""
        for handoff in self.ledger.overdue(now):
            resolving = handoff.phase is Phase.RESOLVING
            self.ledger.expire(handoff, now)
            if resolving and handoff.to_finish is not None:
                self._keep_farewell(handoff, handoff.to_finish, now)
        while self.farewells and next(iter(self.farewells.values())).expires_at <= now:
            self.farewells.popitem(last=False)
        self.ledger.rooms.sweep(now)
        self._order_pages(now)
        return self.ledger.take_effects()

    def plan(self) -> StepPlan | None:
        """The next batch, or None: a step is running, or there is nothing to compute."""
        if self.running is not None:
            return None
        slices = self.batch.next_slices(self.prealloc.pages_wanted)
        if not slices:
            return None
        self.steps += 1
        self.running = StepPlan(step=self.steps, slices=slices)
        return self.running

    def commit(self, result: StepResult, now: Millis) -> list[Effect]:
        """The running plan is computed: stream its tokens, and release what was ended meanwhile."""
        plan, self.running = self.running, None
        assert plan is not None and plan.step == result.step, f"step {result.step} is not the one that runs"
        results = {one.rid: one for one in result.results}
        for piece in plan.slices:
            handoff = self.ledger.live[piece.rid]
            if result.failed is not None:
                self.ledger.fail(handoff, result.failed, now)
            self.ledger.step_left(handoff)
            if handoff.phase is Phase.COMPUTING:
                take_chunk(handoff, piece, results.get(piece.rid))
                if piece.sample:
                    self.batch.seat_computed(handoff)
                    self._stream(handoff, now)
            elif handoff.phase is Phase.RUNNING:
                take_token(handoff, results[piece.rid])
                self._stream(handoff, now)
        self._order_pages(now)
        return self.ledger.take_effects()

    # -- what a driver may ask

    def watched(self) -> list[Watch]:
        """Handoffs whose transfers must be observed and agreed, in order of arrival."""
        return [
            Watch(rid=one.rid, room=one.room, attempt=one.attempt, host=one.request.bootstrap.host, row=one.row)
            for one in self.ledger.live.values()
            if one.opened and one.request.bootstrap is not None
        ]

    def next_deadline(self) -> Millis | None:
        """When `tick` has something to do next."""
        due = self.ledger.next_deadline()
        for farewell in self.farewells.values():
            return farewell.expires_at if due is None else min(due, farewell.expires_at)
        return due

    # -- inputs

    def _submit(self, request: Request, now: Millis) -> None:
        self.attempts += 1
        req = self.ledger.intake(request, now, self.attempts)
        if req is None:
            return
        if req.to_finish is None:
            req.to_finish = capacity_verdict(
                request,
                context_tokens=self.context_tokens,
                pool_pages=self.ledger.pool.total,
                page_tokens=self.page_tokens,
            )
        if req.to_finish is not None and request.bootstrap is not None and not is_fake(req):
            self._farewell_at_door(req, now)
        if request.bootstrap is not None and not is_fake(req):
            self.prealloc.add(req, now)
        elif req.to_finish is not None:
            self.ledger.retire_unadmitted_request(req)
        else:
            move(req, Phase.LOCAL, self.ledger.effects)
            self.batch.add_local(req)

    def _farewell_at_door(self, req: Handoff, now: Millis) -> None:
        """This leg is rejected: find prefill only to tell it so."""
        bootstrap = req.request.bootstrap
        assert bootstrap is not None and req.to_finish is not None
        if self.ledger.rooms.holder(req.room) is not None:
            return  # the room belongs to a live request, which this one must not harm
        self._keep_farewell(req, req.to_finish, now)
        self.ledger.effects.append(LookUp(rid=req.rid, bootstrap=bootstrap))

    def _keep_farewell(self, req: Handoff, verdict: Verdict, now: Millis) -> None:
        expires_at = now + self.limits.lookup_ms
        self.farewells.pop(req.rid, None)  # the oldest stands first
        self.farewells[req.rid] = Farewell(room=req.room, attempt=req.attempt, verdict=verdict, expires_at=expires_at)
        while len(self.farewells) > self.limits.tombstones_max:
            self.farewells.popitem(last=False)

    def _abort(self, rid: RequestId, verdict: Verdict, now: Millis) -> None:
        handoff = self.ledger.live.get(rid)
        if handoff is not None:
            if handoff.phase is Phase.RESOLVING:
                self._keep_farewell(handoff, verdict, now)  # it owes prefill a word, once that is found
            self.ledger.fail(handoff, verdict, now)

    def _stop_here(self, rid: RequestId, now: Millis) -> None:
        handoff = self.ledger.live.get(rid)
        if handoff is None or handoff.phase not in _ARRIVED:
            return  # it ended meanwhile
        self.ledger.finish(handoff, Finish(type=FinishType.STOP), now)

    def _resolved(self, event: Resolved, now: Millis) -> None:
        handoff = self.ledger.live.get(event.rid)
        farewell = self.farewells.pop(event.rid, None)
        if handoff is not None and handoff.phase is Phase.RESOLVING:
            self.prealloc.greet(handoff, event.infos, now)
        elif farewell is not None:
            message = RoomFailed(
                room=farewell.room,
                attempt=farewell.attempt,
                reason=farewell.verdict.reason,
                text=farewell.verdict.text,
                greeted=False,
            )
            peer = event.infos.incarnation
            self.ledger.effects += (Connect(infos=event.infos), Tell(peer=peer, message=message))

    def _peer_said(self, event: PeerSaid, now: Millis) -> None:
        message = event.message
        match message:
            case Accepted() | Rejected() | RoomFailed():
                req = self._handoff_of(message.room)
                ours = req is not None and req.peer == event.peer and req.attempt == message.attempt
                # What has arrived needs prefill no more: its leg may fail on a lost acknowledgement alone.
                if ours and req is not None and req.phase not in _ARRIVED:
                    self.prealloc._update_handshake_waiters(req, message, now)
            case NotYet() | Hello():
                pass  # the hello is kept there; a hello is only ever sent by decode
            case _:
                assert_never(message)

    def _handoff_of(self, room: Room) -> Handoff | None:
        rid = self.ledger.rooms.holder(room)
        return None if rid is None else self.ledger.live[rid]

    def _peer_gone(self, event: PeerGone, now: Millis) -> None:
        for req in list(self.ledger.live.values()):
            if req.peer == event.peer and req.phase not in _ARRIVED:
                self.ledger.fail(req, event.verdict, now, peer_knows=True)

    # -- observations and results

    def _observed(self, event: Observed, now: Millis) -> None:
        polls: dict[RequestId, AgreedPoll] = {poll.rid: poll for poll in event.polls}
        for req in self.transfer.pop_transferred(polls, now):
            self.batch.add(req)
            self._stream(req, now)
        for poll in event.polls:
            handoff = self.ledger.live.get(poll.rid)
            if handoff is not None and handoff.phase is Phase.REVOKING and handoff.opened:
                self.ledger.revoked(handoff, poll)

    def _order_pages(self, now: Millis) -> None:
        for req in self.prealloc.pop_preallocated(now):
            self.transfer.add(req)

    def _stream(self, req: Handoff, now: Millis) -> None:
        """Hand the newest token to the client, and end the request if it is the last."""
        token = req.outputs[-1]
        finish = self._finish_of(req, token)
        # The first token crosses the handoff even for a client that wants none.
        tokens = (token,) if req.request.sampling.max_new_tokens else ()
        if finish is None:
            self.ledger.effects.append(self.ledger.emit(req, tokens))
        else:
            self.ledger.finish(req, finish, now, tokens=tokens)

    def _finish_of(self, req: Handoff, token: int) -> Finish | None:
        sampling = req.request.sampling
        made = len(req.outputs)
        longest = self.prealloc.tokens_most(req) - len(req.request.prompt)
        if longest == 0:
            return Finish(type=FinishType.LENGTH)
        if token in sampling.stop_token_ids and made > sampling.min_new_tokens:
            return Finish(type=FinishType.STOP, matched=token)
        if made >= longest:
            return Finish(type=FinishType.LENGTH)
        return None

    def _on_leave(self, req: Handoff) -> None:
        self.prealloc.leave(req)
        self.transfer.leave(req)
        self.batch.leave(req)
