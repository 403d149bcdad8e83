"""The prefill core: events in, effects out. Read `phases` first.

How the two legs of a room meet is in `handshake`, and whom this unit serves at all in `rules`.
"""

from collections.abc import Collection, Mapping
from typing import assert_never

from baton_core.agreement import KVPoll, Watch, ready_and_failed
from baton_core.chunks import take_chunk
from baton_core.digest import bytes_of_ledger, numbers_of_ledger, numbers_of_queue
from baton_core.effects import Effect, Push, RegisterRank
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
from baton_core.messages import TOKEN_MAX, Accepted, Hello, MetadataRow, NotYet, Rejected, RoomFailed
from baton_core.pages import PagePool
from baton_core.plan import StepPlan, StepResult
from baton_core.prefill.handshake import Handshake
from baton_core.prefill.phases import PREFILL
from baton_core.prefill.planning import PrefillWaitingQueue
from baton_core.prefill.queue import PrefillBootstrapQueue, PrefillInflightQueue, transfer_verdict
from baton_core.prefill.rules import PrefillRules
from baton_core.prefix import PrefixCache
from baton_core.ranks import unit_of
from baton_core.registration import FOLLOW
from baton_core.request import Finish, FinishType, Incarnation, Request, RequestId
from baton_core.steps import Steps
from baton_core.trace import digest_of


class PrefillCore:
    """All decisions of one prefill unit. `step`, `tick` and `commit` return effects; `plan` freezes the next batch."""

    def __init__(
        self,
        *,
        limits: Limits,
        pool_pages: int,
        context_tokens: int,
        fingerprint: str,
        layout: UnitLayout,
        vocab_size: int = TOKEN_MAX + 1,
        prefix_cache: bool = True,
        pp_size: int = 1,
        dp_rank: int = 0,
        dp_size: int = 1,
        load_balance_method: str = FOLLOW,
        force_query_dp_rank: bool = False,
    ) -> None:
        self.limits = limits
        self.page_tokens = layout.page_tokens
        self.pp_size = pp_size
        self.dp_rank = dp_rank
        self.rules = PrefillRules(
            layout=layout,
            fingerprint=fingerprint,
            context_tokens=context_tokens,
            pool_pages=pool_pages,
            vocab_size=vocab_size,
            dp_rank=dp_rank,
            dp_size=dp_size,
            load_balance_method=load_balance_method,
            force_query_dp_rank=force_query_dp_rank,
        )
        self.ledger = Ledger(PREFILL, limits, PagePool(pool_pages), rows=None)
        self.ledger.on_leave = self._on_leave
        if prefix_cache:
            self.ledger.cache = PrefixCache(self.ledger.pool, self.page_tokens)
        self.bootstrap = PrefillBootstrapQueue(self.ledger, pp_size)
        self.waiting = PrefillWaitingQueue(self.ledger, self.page_tokens)
        self.inflight = PrefillInflightQueue(self.ledger)
        self.handshake = Handshake(self.ledger, self.rules)
        self.orphans = self.handshake.orphans
        self.steps = Steps(self.ledger, pp_size)
        self.paused = False
        self.rebootstraps = 0  # legs that decode asked for, and that began, ever

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
                for handoff in list(self.ledger.live.values()):
                    self.ledger.fail(handoff, event.verdict, now)
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
                self.paused = False
            case StopHere() | Resolved() | LookupFailed():
                pass  # decode's business: prefill answers with one token and looks nothing up
            case _:
                assert_never(event)
        return self.ledger.take_effects()

    def tick(self, now: Millis) -> list[Effect]:
        """Deadlines; needs no new work to fire."""
        for handoff in self.ledger.overdue(now):
            self.ledger.expire(handoff, now)
        self.handshake.expire(now)
        self.ledger.rooms.sweep(now)
        return self.ledger.take_effects()

    def plan(self) -> StepPlan | None:
        """The next batch of prompt chunks, or None: as many run as may, nothing is to be computed, or we are paused.

        Planning moves requests: `take_effects` has what that asks for.
        """
        if self.steps.full or self.paused:
            return None
        plan = self.steps.begin(self.waiting.next_slices(self.limits.running_max))
        for piece in plan.slices if plan is not None else ():
            self._push_shared(self.ledger.live[piece.rid])
        return plan

    @property
    def has_work(self) -> bool:
        """Whether there may be something to compute; planning alone knows for sure."""
        return bool(self.waiting.queue)

    def take_effects(self) -> list[Effect]:
        """What the calls that return none have asked for."""
        return self.ledger.take_effects()

    def commit(self, result: StepResult, now: Millis) -> list[Effect]:
        """The oldest running plan is computed: push what is finished, and release what was aborted meanwhile."""
        for handoff, piece, made in self.steps.commit(result, now):
            take_chunk(handoff, piece, made)
            self._computed(handoff, now)
        return self.ledger.take_effects()

    # -- what a driver may ask

    def watched(self) -> list[Watch]:
        """Handoffs whose transfers must be observed and agreed, in the order in which they began."""
        return list(self.ledger.transfers.values())

    def next_deadline(self) -> Millis | None:
        """When `tick` has something to do next."""
        due = self.ledger.next_deadline()
        for orphan in self.orphans.values():
            return orphan.expires_at if due is None else min(due, orphan.expires_at)
        return due

    def digest(self) -> int:
        """62 bits of `state`."""
        return digest_of(*self.state())

    def state(self) -> tuple[list[int], bytes]:
        """Everything that the unit's ranks must agree on, as numbers and names; see `digest`."""
        numbers = numbers_of_ledger(self.ledger)
        numbers += (self.steps.count, len(self.steps.running), self.paused)
        numbers += numbers_of_queue(self.waiting.queue.values())
        numbers += numbers_of_queue(self.inflight.queue.values())
        for room, orphan in self.orphans.items():
            numbers += (room, orphan.hello.attempt, orphan.expires_at)
        peers = [orphan.peer for orphan in self.orphans.values()]
        return numbers, bytes_of_ledger(self.ledger, peers)

    # -- inputs

    def _submit(self, request: Request, now: Millis) -> None:
        req = self.ledger.intake(request, now)
        if req is None:
            return
        if req.to_finish is None:
            req.to_finish = self.rules.refusal(request)
        if req.to_finish is not None and request.bootstrap is not None and not is_fake(req):
            if self.handshake.refuse(req, now):
                self._register_rank(req)  # or decode would never find out where to hear of it
        if is_fake(req) and req.to_finish is None:
            move(req, Phase.QUEUED, self.ledger.effects)
            self.waiting.add(req)
        elif self.bootstrap.add(req, now):
            self._register_rank(req)
            self.handshake.arrived(req, now)

    def _register_rank(self, req: Handoff) -> None:
        bootstrap = req.request.bootstrap
        if self.rules.registers and bootstrap is not None:
            effect = RegisterRank(rid=req.rid, room=req.room, dp_rank=self.dp_rank, bootstrap=bootstrap)
            self.ledger.effects.append(effect)

    def _abort(self, rid: str, verdict: Verdict, now: Millis) -> None:
        handoff = self.ledger.live.get(rid)
        if handoff is not None:
            self.ledger.fail(handoff, verdict, now)

    def _pause(self, mode: PauseMode, now: Millis) -> None:
        """Compute no further chunk. What is half computed keeps its pages: its prompt is on its way to decode."""
        self.paused = True
        if mode is PauseMode.ABORT:
            verdict = Verdict(reason=Reason.ABORTED, text="generation was paused, and what ran was aborted")
            for handoff in list(self.ledger.live.values()):
                self.ledger.fail(handoff, verdict, now)
        elif mode is PauseMode.RETRACT:
            self.ledger.flush_cache()

    def _peer_said(self, event: PeerSaid, now: Millis) -> None:
        match event.message:
            case Hello(again=None):
                self.handshake.hello(event.peer, event.message, now)
            case Hello():
                self._compute_again(event.peer, event.message, now)
            case RoomFailed():
                self.handshake.room_failed(event.peer, event.message, now)
            case Accepted() | NotYet() | Rejected():
                pass  # only prefill says these
            case _:
                assert_never(event.message)

    def _compute_again(self, peer: Incarnation, hello: Hello, now: Millis) -> None:
        """Decode has given a KV cache up, and asks for it once more: a leg that no client of this worker waits for."""
        request = self.handshake.leg_of(peer, hello)
        req = None if request is None else self.ledger.intake(request, now)
        if req is None:
            return
        req.answered = True  # on decode, that is
        req.to_finish = req.to_finish or self.rules.refusal_again(req.request, self.limits)
        if self.bootstrap.add(req, now):
            self.rebootstraps += 1
            self.handshake.join(req, peer, hello, now)
        else:
            assert req.to_finish is not None
            self.handshake.reject(peer, hello, req.to_finish)

    def _peer_gone(self, event: PeerGone, now: Millis) -> None:
        unit = unit_of(event.peer)
        for req in list(self.ledger.live.values()):
            if req.peer is not None and unit_of(req.peer) == unit:
                self.ledger.fail(req, event.verdict, now, peer_knows=True)
        self.handshake.peer_gone(unit, event.verdict, now)

    # -- observations, results, time

    def _observed(self, event: Observed, now: Millis) -> None:
        polls = self.ledger.current(event.polls)
        uncovered = {poll.rid: poll.poll for poll in event.uncovered}  # seen just now: never stale
        several = self.pp_size > 1
        good, bad = ready_and_failed(polls.values(), KVPoll.WaitingForInput) if several else ((), ())
        self.process_bootstrapped_queue(good, bad, polls=polls, uncovered_polls=uncovered, now=now)
        self.inflight.process(polls, now)
        for req in list(self.waiting.queue.values()):
            agreed = polls.get(req.rid)
            if agreed is not None and agreed.poll == KVPoll.Failed:
                self.ledger.fail(req, transfer_verdict(agreed, "prefill transfer"), now)
        for rid, poll in polls.items():
            handoff = self.ledger.live.get(rid)
            if handoff is not None and handoff.phase is Phase.REVOKING and handoff.opened:
                self.ledger.revoked(handoff, poll)

    def process_bootstrapped_queue(
        self,
        pp_good_rids: Collection[RequestId],
        pp_bad_rids: Collection[RequestId],
        *,
        polls: Mapping[RequestId, AgreedPoll],
        uncovered_polls: Mapping[RequestId, int],
        now: Millis,
    ) -> None:
        """Let requests whose orders all ranks hold wait for their turn. Nobody is polled again here (S1)."""
        ready = self.bootstrap.pop_bootstrapped(
            False, pp_good_rids, pp_bad_rids, polls=polls, uncovered_polls=uncovered_polls, now=now
        )
        for req in ready:
            self.waiting.add(req)

    def _computed(self, req: Handoff, now: Millis) -> None:
        done = req.computed == len(req.request.prompt)
        if done:
            self.waiting.leave(req)
        if is_fake(req):
            if done:
                self.ledger.finish(req, Finish(type=FinishType.LENGTH), now, tokens=tuple(req.outputs))
            return
        whole = len(req.pages) if done else req.computed // self.page_tokens
        if whole > req.pushed or done:
            row = self._row(req) if done else None
            self._push(req, whole, row)
        if done:
            deadline = now + self.limits.transfer_stall_ms
            move(req, Phase.INFLIGHT, self.ledger.effects, stage_deadline_at=deadline)

    def _push_shared(self, req: Handoff) -> None:
        """Cached pages need not wait for the first chunk."""
        if req.shared and req.pushed == 0 and not is_fake(req):
            self._push(req, len(req.shared), row=None)

    def _push(self, req: Handoff, whole: int, row: MetadataRow | None) -> None:
        """Send the pages before number `whole` that were not sent yet; a stage that stopped its transfer only counts."""
        if not req.revoked_here:
            pages = req.pages[req.pushed : whole]
            push = Push(room=req.room, attempt=req.attempt, first=req.pushed, pages=pages, row=row)
            self.ledger.effects.append(push)
        req.pushed = whole
        self.inflight.add(req)

    def _row(self, req: Handoff) -> MetadataRow:
        return MetadataRow(
            room=req.room,
            attempt=req.attempt,
            first_token=req.outputs[0],
            cached_tokens=req.cached_tokens,
            prompt_tokens=len(req.request.prompt),
            logprob=req.newest_logprob,
        )

    def _on_leave(self, req: Handoff) -> None:
        self.bootstrap.leave(req)
        self.waiting.leave(req)
        self.inflight.leave(req)
