"""The decode core: events in, effects out. Read `phases` first."""

from collections.abc import Collection, Mapping
from typing import assert_never

from baton_core.admission import capacity_verdict
from baton_core.agreement import KVPoll, Watch, ready_and_failed
from baton_core.chunks import take_chunk, take_token
from baton_core.decode.farewells import Farewells
from baton_core.decode.line import PageLine
from baton_core.decode.memory import DecodeMemory
from baton_core.decode.phases import DECODE
from baton_core.decode.planning import DecodeBatch
from baton_core.decode.prealloc import DecodePreallocQueue
from baton_core.decode.reentry import AWAITS_PREFILL, Reentry
from baton_core.decode.transfer import DecodeTransferQueue
from baton_core.digest import bytes_of_ledger, numbers_of_ledger, numbers_of_queue
from baton_core.effects import Effect, LookUp
from baton_core.errors import Reason, Verdict
from baton_core.events import (
    Abort,
    AbortAll,
    AgreedPoll,
    Continue,
    DrainBegan,
    Event,
    FlushCache,
    LookupFailed,
    Observed,
    Pause,
    PauseMode,
    PeerGone,
    PeerSaid,
    Resolved,
    StopHere,
    Submit,
)
from baton_core.kv_layout import UnitLayout
from baton_core.ledger import Ledger, is_fake
from baton_core.limits import Limits, Millis
from baton_core.machine import Handoff, Phase, move
from baton_core.messages import Accepted, Hello, NotYet, Rejected, RoomFailed
from baton_core.pages import PagePool
from baton_core.plan import StepPlan, StepResult
from baton_core.prefix import PrefixCache
from baton_core.ranks import unit_of
from baton_core.request import Finish, FinishType, Request, RequestId, Room
from baton_core.steps import Steps
from baton_core.trace import digest_of

_NOBODY = numbers_of_queue(())


class DecodeCore:
    """All decisions of one decode unit. `step`, `tick` and `commit` return effects; `plan` freezes the next batch."""

    def __init__(
        self,
        *,
        limits: Limits,
        pool_pages: int,
        context_tokens: int,
        fingerprint: str,
        layout: UnitLayout,
        prefix_cache: bool = True,
        pp_size: int = 1,
        vocab_size: int | None = None,
    ) -> None:
        self.limits = limits
        self.page_tokens = layout.page_tokens
        self.pp_size = pp_size
        self.context_tokens = context_tokens
        rows = PagePool(limits.metadata_rows)
        self.ledger = Ledger(DECODE, limits, PagePool(pool_pages), rows, PagePool(limits.backup_pages))
        self.ledger.on_leave = self._on_leave
        if prefix_cache:
            self.ledger.cache = PrefixCache(self.ledger.pool, self.page_tokens)
        self.memory = DecodeMemory(self.ledger, self.page_tokens, context_tokens)
        self.reentry = Reentry(self.ledger, self.memory)
        self.prealloc = DecodePreallocQueue(
            self.ledger, self.reentry, layout=layout, fingerprint=fingerprint, pp_size=pp_size
        )
        self.transfer = DecodeTransferQueue(self.ledger, self.reentry, self.page_tokens, vocab_size)
        self.batch = DecodeBatch(self.ledger, self.memory, pp_size)
        self.line = PageLine(self.ledger, self.memory, self.prealloc, self.transfer, self.batch)
        self.paused: PauseMode | None = None
        self.farewells = Farewells(limits)
        self.steps = Steps(self.ledger, pp_size)
        # Every request, and every rebootstrap, is an attempt of its own, so that nothing said or written in an earlier life
        # of its room fits it.
        self.attempts = 0
        self._now: Millis = 0  # of the last call that said it

    # -- the four calls of a driver

    def step(self, event: Event, now: Millis) -> list[Effect]:
        """An agreed event happened."""
        match event:
            case Observed():  # first, because it is by far the commonest
                self._observed(event, now)
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
                self._look_up_failed(event, now)
            case PeerSaid():
                self._peer_said(event, now)
            case PeerGone():
                self._peer_gone(event, now)
            case DrainBegan():
                self.ledger.draining = True
            case FlushCache():
                self.ledger.flush_cache()
            case Pause():
                self._pause(event.mode, now)
            case Continue():
                self.paused = None
            case _:
                assert_never(event)
        self._order_pages(now)
        return self.ledger.take_effects()

    def tick(self, now: Millis) -> list[Effect]:
        """Deadlines; needs no new work to fire."""
        for handoff in self.ledger.overdue(now):
            if self.reentry.expire(handoff, now):
                continue
            resolving = handoff.phase is Phase.RESOLVING and not handoff.is_retracted
            self.ledger.expire(handoff, now)
            if resolving and handoff.to_finish is not None:
                self.farewells.keep(handoff, handoff.to_finish, now)
        self.farewells.expire(now)
        self.ledger.rooms.sweep(now)
        self._order_pages(now)
        return self.ledger.take_effects()

    def plan(self) -> StepPlan | None:
        """The next batch, or None: as many run as may, there is nothing to compute, or generation is paused.

        Planning moves requests: `take_effects` has what that asks for.
        """
        if self.steps.full or self.paused is not None:
            return None
        self.line.admit()
        plan = self.steps.begin(self.batch.next_slices()) if self.has_work else None
        self._reenter(self._now)
        return plan

    @property
    def has_work(self) -> bool:
        """Whether there may be something to compute; planning alone knows for sure."""
        return bool(self.batch.running or self.batch.arrived or self.batch.local)

    def take_effects(self) -> list[Effect]:
        """What the calls that return none have asked for."""
        return self.ledger.take_effects()

    def commit(self, result: StepResult, now: Millis) -> list[Effect]:
        """The oldest running plan is computed: stream its tokens, and release what was ended meanwhile."""
        for handoff, piece, made in self.steps.commit(result, now):
            if handoff.phase is Phase.COMPUTING:
                take_chunk(handoff, piece, made)
                if piece.sample:
                    self.batch.seat_computed(handoff)
                    self._stream(handoff, now)
            else:
                assert made is not None, f"step {result.step} drew no token for {handoff.rid}"
                handoff.computed += len(piece.tokens)
                take_token(handoff, made)
                self._stream(handoff, now)
        self._order_pages(now)
        return self.ledger.take_effects()

    # -- what a driver may ask

    def watched(self) -> list[Watch]:
        """Handoffs whose transfers must be observed and agreed, in the order in which they began."""
        return self.ledger.watched

    def next_deadline(self) -> Millis | None:
        """When `tick` has something to do next."""
        dues = (self.ledger.next_deadline(), self.farewells.next_expiry())
        return min((due for due in dues if due is not None), default=None)

    def digest(self) -> int:
        """62 bits of `state`."""
        return digest_of(*self.state())

    def state(self) -> tuple[list[int], bytes]:
        """Everything that the unit's ranks must agree on, as numbers and names; see `digest`."""
        numbers = numbers_of_ledger(self.ledger)
        numbers += (self.steps.count, len(self.steps.running), self.attempts, *self.memory.numbers())
        numbers.append(0 if self.paused is None else 1 + list(PauseMode).index(self.paused))
        for queue in (self.prealloc.queue, self.transfer.queue, *self.batch.queues, *self.memory.queues):
            numbers += numbers_of_queue(queue.values()) if queue else _NOBODY
        numbers += self.farewells.numbers()
        return numbers, bytes_of_ledger(self.ledger, self.farewells)

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
        self.farewells.keep(req, req.to_finish, now)
        self.ledger.effects.append(LookUp(rid=req.rid, bootstrap=bootstrap))

    def _abort(self, rid: RequestId, verdict: Verdict, now: Millis) -> None:
        handoff = self.ledger.live.get(rid)
        if handoff is not None:
            if handoff.phase is Phase.RESOLVING and not handoff.is_retracted:
                self.farewells.keep(handoff, verdict, now)  # it owes prefill a word, once that is found
            self.ledger.fail(handoff, verdict, now)

    def _stop_here(self, rid: RequestId, now: Millis) -> None:
        handoff = self.ledger.live.get(rid)
        if handoff is not None and handoff.outputs and handoff.phase is not Phase.REVOKING:
            if self.reentry.is_away(handoff):
                verdict = Verdict(reason=Reason.ABORTED, text="decode needs no more: its answer is complete")
                self.reentry.withdraw(handoff, verdict, now)
            self._finish(handoff, Finish(type=FinishType.STOP), now)

    def _pause(self, mode: PauseMode, now: Millis) -> None:
        self.paused = mode
        if mode is PauseMode.RETRACT:
            self.memory.outdate()
        if mode is PauseMode.ABORT:
            verdict = Verdict(reason=Reason.ABORTED, text="generation was paused, and what ran was aborted")
            for rid in list(self.ledger.live):
                self._abort(rid, verdict, now)

    def _resolved(self, event: Resolved, now: Millis) -> None:
        handoff = self.ledger.live.get(event.rid)
        if handoff is None or handoff.phase is not Phase.RESOLVING:
            self.ledger.effects += self.farewells.said(event.rid, event.infos)
            return
        self.farewells.drop(event.rid)
        if handoff.infos is not None and handoff.infos.leader != event.infos.leader:
            text = (
                f"prefill {handoff.infos.leader}, which computed the prompt, is gone; now {event.infos.leader} is there"
            )
            self.reentry.fail(handoff, Verdict(reason=Reason.PEER_LOST, text=text), now)
            return
        self.prealloc.greet(handoff, event.infos, now)

    def _look_up_failed(self, event: LookupFailed, now: Millis) -> None:
        handoff = self.ledger.live.get(event.rid)
        if handoff is not None and handoff.phase is Phase.RESOLVING:  # one that re-enters may have gone on long since
            self.reentry.fail(handoff, event.verdict, now)
        self.farewells.drop(event.rid)

    def _peer_said(self, event: PeerSaid, now: Millis) -> None:
        message = event.message
        match message:
            case Accepted() | Rejected() | RoomFailed():
                req = self._handoff_of(message.room)
                ours = req is not None and req.peer == event.peer and req.attempt == message.attempt
                # What has arrived needs prefill no more: its leg may fail on a lost acknowledgement alone.
                if ours and req is not None and req.phase in AWAITS_PREFILL:
                    self.prealloc.answered(req, message, now)
            case NotYet() | Hello():
                pass  # the hello is kept there; a hello is only ever sent by decode
            case _:
                assert_never(message)

    def _handoff_of(self, room: Room) -> Handoff | None:
        rid = self.ledger.rooms.holder(room)
        return None if rid is None else self.ledger.live[rid]

    def _peer_gone(self, event: PeerGone, now: Millis) -> None:
        unit = unit_of(event.peer)
        for req in list(self.ledger.live.values()):
            if req.peer is not None and unit_of(req.peer) == unit and req.phase in AWAITS_PREFILL:
                self.reentry.fail(req, event.verdict, now, peer_knows=True)

    # -- observations and results

    def _observed(self, event: Observed, now: Millis) -> None:
        for req, copied_well in self.ledger.copied(event.polls):
            if self.memory.copied(req, copied_well):
                self.batch.add_first(req)
        polls = self.ledger.current(event.polls)
        if self.pp_size > 1:
            good, bad = ready_and_failed(polls.values(), KVPoll.WaitingForInput)
            uncovered = {poll.rid: poll.poll for poll in event.uncovered}  # seen just now: never stale
            self.process_prealloc_queue(good, bad, polls=polls, uncovered_polls=uncovered, now=now)
        for req in self.transfer.pop_transferred(polls, now):
            self.batch.add_first(req) if req.retractions else self.batch.add(req)
            self._stream(req, now)
        for rid, poll in polls.items():
            handoff = self.ledger.live.get(rid)
            if handoff is not None and handoff.phase is Phase.REVOKING and handoff.opened:
                self.ledger.revoked(handoff, poll)

    def process_prealloc_queue(
        self,
        pp_good_rids: Collection[RequestId],
        pp_bad_rids: Collection[RequestId],
        *,
        polls: Mapping[RequestId, AgreedPoll],
        uncovered_polls: Mapping[RequestId, int],
        now: Millis,
    ) -> None:
        """Requests whose pages every stage has ordered wait for them from now on. Nobody is polled again here (S1)."""
        ready = self.prealloc.pop_preallocated(
            pp_good_rids, pp_bad_rids, polls=polls, uncovered_polls=uncovered_polls, now=now
        )
        for req in ready:
            self.transfer.add(req)

    def _order_pages(self, now: Millis) -> None:
        """Pages may have become free, or a request may have been accepted."""
        self._now = now
        if self.memory.outdated:
            self.memory.retract_outdated((*self.batch.between_steps(), *self.batch.computing.values()))
        if self.paused is not PauseMode.RETRACT:
            self.line.admit()
            self._reenter(now)
        if self.pp_size == 1 and self.prealloc.waiters:
            self.process_prealloc_queue((), (), polls={}, uncovered_polls={}, now=now)

    def _reenter(self, now: Millis) -> None:
        """Whoever was retracted and had a prefill worker goes back to it, past both doors untouched (S5)."""
        if not self.memory.retracted and not self.prealloc.waiters:
            return
        for req in self.reentry.due():
            self.attempts += 1
            self.reentry.leaves(req, self.attempts)
            self.prealloc.add(req, now, is_retracted=True, is_rebootstrap=True)
        for req in self.prealloc.waiters.values():
            self.reentry.watch(req, now)

    def _stream(self, req: Handoff, now: Millis) -> None:
        """Hand the newest token to the client, and end the request if it is the last."""
        token = req.outputs[-1]
        finish = self._finish_of(req, token)
        # The first token crosses the handoff even for a client that wants none.
        tokens = (token,) if req.request.sampling.max_new_tokens else ()
        if finish is None:
            self.ledger.effects.append(self.ledger.emit(req, tokens))
        else:
            self._finish(req, finish, now, tokens)

    def _finish(self, req: Handoff, finish: Finish, now: Millis, tokens: tuple[int, ...] = ()) -> None:
        allowed = self.memory.tokens_most(req) - len(req.request.prompt)
        self.memory.share.ended(min(len(req.outputs), allowed), allowed)
        self.ledger.finish(req, finish, now, tokens=tokens)

    def _finish_of(self, req: Handoff, token: int) -> Finish | None:
        sampling = req.request.sampling
        made = len(req.outputs)
        longest = self.memory.tokens_most(req) - len(req.request.prompt)
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
        self.memory.leave(req)
