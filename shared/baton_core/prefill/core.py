"""The prefill core: events in, effects out. Read `phases` first.

The two legs of a room meet here: the app's request and decode's hello, in either order. What matches is accepted, what
does not is refused to both, and whichever leg comes late finds the verdict of the other.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import assert_never

from baton_core.admission import capacity_verdict
from baton_core.agreement import KVPoll, Watch
from baton_core.chunks import take_chunk
from baton_core.effects import Effect, Offer, Push, Tell
from baton_core.errors import Reason, Verdict
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
from baton_core.kv_layout import mismatches
from baton_core.ledger import Ledger, is_fake
from baton_core.limits import Limits, Millis
from baton_core.machine import Handoff, Phase, move
from baton_core.messages import Accepted, Hello, MetadataRow, NotYet, Rejected, RoomFailed
from baton_core.pages import PagePool, pages_for
from baton_core.plan import StepPlan, StepResult
from baton_core.prefill.phases import PREFILL
from baton_core.prefill.planning import PrefillWaitingQueue
from baton_core.prefill.queue import PrefillBootstrapQueue, PrefillInflightQueue, transfer_verdict
from baton_core.prefix import PrefixCache
from baton_core.request import Finish, FinishType, Incarnation, Request, Room, prompt_digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Orphan:
    """A hello whose request has not arrived."""

    peer: Incarnation
    hello: Hello
    expires_at: Millis


class PrefillCore:
    """All decisions of one prefill unit. `step`, `tick` and `commit` return effects; `plan` freezes the next batch."""

    def __init__(
        self,
        *,
        limits: Limits,
        pool_pages: int,
        page_tokens: int,
        context_tokens: int,
        fingerprint: str,
        prefix_cache: bool = True,
        dp_rank: int = 0,
    ) -> None:
        self.limits = limits
        self.page_tokens = page_tokens
        self.context_tokens = context_tokens
        self.fingerprint = fingerprint
        self.dp_rank = dp_rank
        self.ledger = Ledger(PREFILL, limits, PagePool(pool_pages), rows=None)
        self.ledger.on_leave = self._on_leave
        if prefix_cache:
            self.ledger.cache = PrefixCache(self.ledger.pool, page_tokens)
        self.bootstrap = PrefillBootstrapQueue(self.ledger)
        self.waiting = PrefillWaitingQueue(self.ledger, page_tokens)
        self.inflight = PrefillInflightQueue(self.ledger)
        self.orphans: OrderedDict[Room, Orphan] = OrderedDict()
        self.running: StepPlan | None = None
        self.steps = 0

    # -- the four calls of a driver

    def step(self, event: Event, now: Millis) -> list[Effect]:
        """An agreed event happened."""
        match event:
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
            case Observed():
                self._observed(event, now)
            case DrainBegan():
                self.ledger.draining = True
            case FlushCache():
                if self.ledger.cache is not None:
                    self.ledger.cache.flush()
            case StopHere() | Resolved() | LookupFailed():
                pass  # decode's business: prefill answers with one token and looks nothing up
            case _:
                assert_never(event)
        return self.ledger.take_effects()

    def tick(self, now: Millis) -> list[Effect]:
        """Deadlines; needs no new work to fire."""
        for handoff in self.ledger.overdue(now):
            self.ledger.expire(handoff, now)
        self._expire_orphans(now)
        self.ledger.rooms.sweep(now)
        return self.ledger.take_effects()

    def plan(self) -> StepPlan | None:
        """The next batch of prompt chunks, or None: a step is running, or there is nothing to compute."""
        if self.running is not None:
            return None
        slices = self.waiting.next_slices(self.limits.running_max)
        if not slices:
            return None
        self.steps += 1
        self.running = StepPlan(step=self.steps, slices=slices)
        for piece in slices:
            self._push_shared(self.ledger.live[piece.rid])
        return self.running

    def commit(self, result: StepResult, now: Millis) -> list[Effect]:
        """The running plan is computed: push what is finished, and release what was aborted meanwhile."""
        plan, self.running = self.running, None
        assert plan is not None and plan.step == result.step, f"step {result.step} is not the one that runs"
        results = {one.rid: one for one in result.results}
        for piece in plan.slices:
            handoff = self.ledger.live[piece.rid]
            if result.failed is not None:
                self.ledger.fail(handoff, result.failed, now)
            self.ledger.step_left(handoff)
            if handoff.phase is Phase.FORWARDING:
                take_chunk(handoff, piece, results.get(piece.rid))
                self._computed(handoff, now)
        return self.ledger.take_effects()

    # -- what a driver may ask

    def watched(self) -> list[Watch]:
        """Handoffs whose transfers must be observed and agreed, in order of arrival."""
        return [
            Watch(rid=one.rid, room=one.room, attempt=one.attempt, host=one.request.bootstrap.host)
            for one in self.ledger.live.values()
            if one.opened and one.request.bootstrap is not None
        ]

    def next_deadline(self) -> Millis | None:
        """When `tick` has something to do next."""
        due = self.ledger.next_deadline()
        for orphan in self.orphans.values():
            return orphan.expires_at if due is None else min(due, orphan.expires_at)
        return due

    # -- inputs

    def _submit(self, request: Request, now: Millis) -> None:
        req = self.ledger.intake(request, now)
        if req is None:
            return
        if req.to_finish is None:
            req.to_finish = self._refusal(request)
        if req.to_finish is not None and request.bootstrap is not None and not is_fake(req):
            self._refuse_hello(req, now)
        if is_fake(req) and req.to_finish is None:
            move(req, Phase.QUEUED, self.ledger.effects)
            self.waiting.add(req)
        elif self.bootstrap.add(req, now):
            orphan = self.orphans.pop(req.room, None)
            if orphan is not None:
                self._join(req, orphan.peer, orphan.hello, now)

    def _refusal(self, request: Request) -> Verdict | None:
        if request.bootstrap is None:
            text = "this is a prefill worker: the request needs bootstrap_host, bootstrap_port and bootstrap_room"
            return Verdict(reason=Reason.INVALID_REQUEST, text=text)
        return capacity_verdict(
            request,
            context_tokens=self.context_tokens,
            pool_pages=self.ledger.pool.total,
            page_tokens=self.page_tokens,
        )

    def _refuse_hello(self, req: Handoff, now: Millis) -> None:
        """The app's leg is rejected: decode hears it now if its hello is here, else when it comes."""
        assert req.to_finish is not None
        if self.ledger.rooms.holder(req.room) is not None:
            return  # the room belongs to a live request, which this one must not harm
        if self.ledger.rooms.verdict_for_app(req.room, now) is not None:
            return  # decode's leg ended first, and knows
        orphan = self.orphans.pop(req.room, None)
        if orphan is not None:
            self._reject(orphan.peer, orphan.hello, req.to_finish)
        self.ledger.rooms.bury(req.room, req.to_finish, now, app_answered=True, peer_answered=orphan is not None)

    def _abort(self, rid: str, verdict: Verdict, now: Millis) -> None:
        handoff = self.ledger.live.get(rid)
        if handoff is not None:
            self.ledger.fail(handoff, verdict, now)

    def _peer_said(self, event: PeerSaid, now: Millis) -> None:
        match event.message:
            case Hello():
                self._hello(event.peer, event.message, now)
            case RoomFailed():
                self._room_failed(event.peer, event.message, now)
            case Accepted() | NotYet() | Rejected():
                pass  # only prefill says these
            case _:
                assert_never(event.message)

    def _hello(self, peer: Incarnation, hello: Hello, now: Millis) -> None:
        rid = self.ledger.rooms.holder(hello.room)
        if rid is not None:
            req = self.ledger.live[rid]
            if req.phase is Phase.BOOTSTRAPPING:
                self._join(req, peer, hello, now)
            elif req.peer != peer or req.attempt != hello.attempt:
                text = f"room {hello.room} is in use by another decode worker; draw another room"
                self._reject(peer, hello, Verdict(reason=Reason.DUPLICATE_ROOM, text=text))
            return
        stored = self.ledger.rooms.verdict_for_peer(hello.room, now)
        if stored is not None:
            self._reject(peer, hello, stored)
        elif hello.room in self.orphans and self.orphans[hello.room].peer != peer:
            text = f"room {hello.room} is in use by another decode worker; draw another room"
            self._reject(peer, hello, Verdict(reason=Reason.DUPLICATE_ROOM, text=text))
        elif len(self.orphans) >= self.limits.orphan_hellos_max:
            text = f"{len(self.orphans)} rooms wait here for their prefill leg (orphan_hellos_max); retry later"
            verdict = Verdict(reason=Reason.WAITING_FULL, text=text)
            self._reject(peer, hello, verdict)
            self.ledger.rooms.bury(hello.room, verdict, now, app_answered=False, peer_answered=True)
        else:
            self._keep_orphan(peer, hello, now)

    def _keep_orphan(self, peer: Incarnation, hello: Hello, now: Millis) -> None:
        self.orphans.pop(hello.room, None)
        self.ledger.rooms.wipe(hello.room)
        self.orphans[hello.room] = Orphan(peer=peer, hello=hello, expires_at=now + self.limits.other_leg_ms)
        self.ledger.effects.append(Tell(peer=peer, message=NotYet(room=hello.room, attempt=hello.attempt)))

    def _join(self, req: Handoff, peer: Incarnation, hello: Hello, now: Millis) -> None:
        """Both legs of a room are here: accept them together or refuse them together."""
        req.peer, req.attempt = peer, hello.attempt
        verdict = self._conflict(req.request, hello)
        if verdict is not None:
            self._reject(peer, hello, verdict)
            self.ledger.fail(req, verdict, now, peer_knows=True)
            return
        pages = pages_for(len(req.request.prompt), self.page_tokens)
        self.ledger.transfer_begins(req)
        move(req, Phase.ACCEPTED, self.ledger.effects)
        self.ledger.effects += (
            Offer(rid=req.rid, room=req.room, attempt=req.attempt, peer=peer, pages_total=pages),
            Tell(peer=peer, message=Accepted(room=req.room, attempt=req.attempt, dp_rank=self.dp_rank)),
        )

    def _conflict(self, request: Request, hello: Hello) -> Verdict | None:
        if (hello.room, hello.attempt) in self.ledger.transfers:
            text = f"an earlier life of room {hello.room} is still being closed here; draw another room"
            return Verdict(reason=Reason.DUPLICATE_ROOM, text=text)
        unlike = mismatches(self.fingerprint, hello.fingerprint)
        if unlike:
            text = f"prefill and decode cannot share KV: {'; '.join(unlike)}. Start both with the same settings."
            return Verdict(reason=Reason.LAYOUT_MISMATCH, text=text)
        digest = prompt_digest(request.prompt)
        if (len(request.prompt), digest) != (hello.prompt_tokens, hello.digest):
            text = (
                f"the legs of room {hello.room} hold different prompts: {len(request.prompt)} tokens "
                f"(digest {digest:016x}) on prefill, {hello.prompt_tokens} (digest {hello.digest:016x}) on decode"
            )
            return Verdict(reason=Reason.PROMPT_MISMATCH, text=text)
        if hello.dp_rank != self.dp_rank:
            text = f"room {hello.room} runs on prefill DP rank {self.dp_rank}, decode asked rank {hello.dp_rank}"
            return Verdict(reason=Reason.DP_CONFLICT, text=text)
        return None

    def _reject(self, peer: Incarnation, hello: Hello, verdict: Verdict) -> None:
        message = Rejected(room=hello.room, attempt=hello.attempt, reason=verdict.reason, text=verdict.text)
        self.ledger.effects.append(Tell(peer=peer, message=message))

    def _room_failed(self, peer: Incarnation, message: RoomFailed, now: Millis) -> None:
        rid = self.ledger.rooms.holder(message.room)
        orphan = self.orphans.get(message.room)
        if rid is not None:
            req = self.ledger.live[rid]
            unmet = req.peer is None and not message.greeted
            if unmet or (req.peer == peer and req.attempt == message.attempt):
                self.ledger.fail(req, message.verdict, now, peer_knows=True)
        elif orphan is not None and (orphan.peer == peer and orphan.hello.attempt == message.attempt):
            del self.orphans[message.room]
            self.ledger.rooms.bury(message.room, message.verdict, now, app_answered=False, peer_answered=True)
        elif orphan is None and not message.greeted and self.ledger.rooms.verdict_for_peer(message.room, now) is None:
            # Our own leg is yet to come. (Had it failed, the tombstone that waits for decode's leg is now spent.)
            self.ledger.rooms.bury(message.room, message.verdict, now, app_answered=False, peer_answered=True)

    def _peer_gone(self, event: PeerGone, now: Millis) -> None:
        for req in list(self.ledger.live.values()):
            if req.peer == event.peer:
                self.ledger.fail(req, event.verdict, now, peer_knows=True)
        for room, orphan in list(self.orphans.items()):
            if orphan.peer == event.peer:
                del self.orphans[room]
                self.ledger.rooms.bury(room, event.verdict, now, app_answered=False, peer_answered=True)

    # -- observations, results, time

    def _observed(self, event: Observed, now: Millis) -> None:
        polls: dict[str, AgreedPoll] = {poll.rid: poll for poll in event.polls}
        for req in self.bootstrap.pop_bootstrapped(polls, now):
            self.waiting.add(req)
        self.inflight.process(polls, now)
        for req in list(self.waiting.queue.values()):
            agreed = polls.get(req.rid)
            if agreed is not None and agreed.poll == KVPoll.Failed:
                self.ledger.fail(req, transfer_verdict(agreed, "prefill transfer"), now)
        for poll in event.polls:
            handoff = self.ledger.live.get(poll.rid)
            if handoff is not None and handoff.phase is Phase.REVOKING and handoff.opened:
                self.ledger.revoked(handoff, poll)

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
            pages = req.pages[req.pushed : whole]
            push = Push(room=req.room, attempt=req.attempt, first=req.pushed, pages=pages, row=row)
            self.ledger.effects.append(push)
            req.pushed = whole
            self.inflight.add(req)
        if done:
            deadline = now + self.limits.transfer_stall_ms
            move(req, Phase.INFLIGHT, self.ledger.effects, stage_deadline_at=deadline)

    def _push_shared(self, req: Handoff) -> None:
        """Cached pages need not wait for the first chunk."""
        if req.shared and req.pushed == 0 and not is_fake(req):
            pages = req.pages[: len(req.shared)]
            self.ledger.effects.append(Push(room=req.room, attempt=req.attempt, first=0, pages=pages))
            req.pushed = len(pages)
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

    def _expire_orphans(self, now: Millis) -> None:
        while self.orphans:
            room, orphan = next(iter(self.orphans.items()))
            if orphan.expires_at > now:
                return
            del self.orphans[room]
            text = f"prefill: its own leg of room {room} did not arrive within {self.limits.other_leg_ms} ms"
            verdict = Verdict(reason=Reason.OTHER_LEG_MISSING, text=text)
            self._reject(orphan.peer, orphan.hello, verdict)
            self.ledger.rooms.bury(room, verdict, now, app_answered=False, peer_answered=True)

    def _on_leave(self, req: Handoff) -> None:
        self.bootstrap.leave(req)
        self.waiting.leave(req)
        self.inflight.leave(req)
