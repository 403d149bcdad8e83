"""What both sides do alike with a request: open it at the door, end it exactly once, and give back what it holds.

The ledger owns the live handoffs, the rooms and the page pool of one side, and collects the effects of the event being
handled. `PrefillCore` and `DecodeCore` are built on it; they decide, it keeps the books. The law of pages lives in
`_release_if_quiet`, the only place that returns pages.
"""

from collections.abc import Callable, Iterable

from baton_core.admission import is_unadmitted_reject
from baton_core.agreement import KVPoll, Watch
from baton_core.effects import Backup, Effect, Emit, Fence, Forget, Restore, Revoke, Tell
from baton_core.errors import Reason, Verdict
from baton_core.events import AgreedPoll
from baton_core.limits import Limits, Millis
from baton_core.machine import Handoff, Phase, PhaseTable, deadlines, move, overdue
from baton_core.messages import RoomFailed
from baton_core.pages import PagePool
from baton_core.prefix import PrefixCache
from baton_core.request import FAKE_HOST, Finish, FinishType, PageId, Request, RequestId, Room
from baton_core.rooms import RoomTable


class Ledger:
    """Books of one side of one unit. Mutated by every method; `take_effects` hands over what they asked for."""

    def __init__(
        self, table: PhaseTable, limits: Limits, pool: PagePool, rows: PagePool | None, slots: PagePool | None = None
    ) -> None:
        self.table = table
        self.limits = limits
        self.pool = pool
        self.rows = rows
        self.slots = slots or PagePool(0)  # pages of the host, for backups
        self.cache: PrefixCache | None = None
        self.epoch = 0  # flushes of the cache: what is older never enters it again
        self.stale_before = 0  # KV caches of an epoch before this one are of no use any more (decode)
        self.rooms = RoomTable(limits)
        self.live: dict[RequestId, Handoff] = {}
        # Attempts that the transfer backend knows, the oldest first. A room may be used again while its old life is still
        # being revoked.
        self.transfers: dict[tuple[Room, int], Watch] = {}
        # Copies between pool and host that are not known to be complete everywhere, by number.
        self.copies: dict[int, Watch] = {}
        self.copies_begun = 0
        self.arrivals = 0
        self.draining = False
        self.prioritised = False  # some request had a priority of its own
        self.effects: list[Effect] = []
        self.rejections: dict[Reason, int] = {}
        # A core adds what it must forget about a request that left its queues.
        self.on_leave: Callable[[Handoff], None] = lambda handoff: None

    def take_effects(self) -> list[Effect]:
        """The effects collected since the last call."""
        effects, self.effects = self.effects, []
        return effects

    def intake(self, request: Request, now: Millis, attempt: int = 1) -> Handoff | None:
        """A record for `request`, with the verdict it may bring along; it is live, and owns nothing.

        None, and a 409, if its id is that of a request that has been answered but whose pages are not free yet.
        """
        older = self.live.get(request.rid)
        if older is not None:
            assert older.answered, f"{request.rid} is live: the app lets no id in twice"
            text = f"request id {request.rid} is still in use; send another, or none"
            verdict = Verdict(reason=Reason.DUPLICATE_RID, text=text)
            self.effects.append(Emit(rid=request.rid, finish=Finish(type=FinishType.ABORT, verdict=verdict)))
            return None
        self.arrivals += 1
        self.prioritised = self.prioritised or request.priority != 0
        budget_ms = min(request.budget_ms, self.limits.request_budget_ms)
        handoff = Handoff(
            request=request,
            serial=self.arrivals,
            table=self.table,
            arrived_at=now,
            deadline_at=now + budget_ms,
            attempt=attempt,
            to_finish=request.rejected,
        )
        self.live[request.rid] = handoff
        if handoff.to_finish is None and len(self.live) > self.limits.waiting_max:
            text = f"{self.limits.waiting_max} requests are waiting or running here (waiting_max); retry later"
            handoff.to_finish = Verdict(reason=Reason.WAITING_FULL, text=text)
        if handoff.to_finish is None and self.draining:
            handoff.to_finish = Verdict(reason=Reason.DRAINING, text="this worker is draining; retry with another")
        return handoff

    def claim_room(self, handoff: Handoff, now: Millis) -> bool:
        """Give the handoff its room, unless another live request holds it or the room's other leg failed already.

        False: the handoff was ended with the verdict that applies.
        """
        room = handoff.room
        if self.rooms.holder(room) is not None and not is_fake(handoff):
            text = f"room {room} is in use by a live request; draw another room"
            self.retire_unadmitted_request(handoff, Verdict(reason=Reason.DUPLICATE_ROOM, text=text))
            return False
        stored = self.rooms.verdict_for_app(room, now)
        if stored is not None:
            self.retire_unadmitted_request(handoff, stored)
            return False
        if not is_fake(handoff):
            self.rooms.open(room, handoff.rid)
        return True

    def retire_unadmitted_request(self, handoff: Handoff, verdict: Verdict | None = None) -> None:
        """Finish a request that never got past the door, with the verdict it was rejected with (S5). It owns nothing."""
        handoff.to_finish = verdict or handoff.to_finish
        assert handoff.to_finish is not None
        assert is_unadmitted_reject(handoff), f"{handoff.rid} owns {handoff.owned()}"
        self.rejections[handoff.to_finish.reason] = self.rejections.get(handoff.to_finish.reason, 0) + 1
        self._answer(handoff, handoff.to_finish)
        self._leave(handoff, Phase.FAILED, handoff.to_finish)

    def fail(self, handoff: Handoff, verdict: Verdict, now: Millis, *, peer_knows: bool = False) -> None:
        """End a request without its answer: client and peer hear it now, pages stay until nobody can touch them."""
        if handoff.phase in (Phase.REVOKING, Phase.DONE, Phase.FAILED):
            return
        handoff.to_finish = verdict
        self._answer(handoff, verdict)
        self._bury(handoff, verdict, now, peer_knows=peer_knows)
        self._end(handoff, Phase.FAILED, now, verdict)

    def finish(self, handoff: Handoff, finish: Finish, now: Millis, tokens: tuple[int, ...] = ()) -> None:
        """End a request with its answer."""
        if not handoff.answered:
            handoff.answered = True
            self.effects.append(self.emit(handoff, tokens, finish))
        if handoff.room and not is_fake(handoff):
            self.rooms.close(handoff.room)
        self._end(handoff, Phase.DONE, now, None)

    def emit(self, handoff: Handoff, tokens: tuple[int, ...], finish: Finish | None = None) -> Emit:
        """What the client hears of new tokens; the prompt's logprobs come with the first of them."""
        logprob = handoff.newest_logprob
        scores, handoff.prompt_logprobs = tuple(handoff.prompt_logprobs), []
        return Emit(
            rid=handoff.rid,
            tokens=tokens,
            finish=finish,
            cached_tokens=handoff.cached_tokens,
            logprobs=() if logprob is None or not tokens else (logprob,),
            prompt_logprobs=scores,
        )

    def current(self, polls: Iterable[AgreedPoll]) -> dict[RequestId, AgreedPoll]:
        """The polls by request, without those of an earlier life of its id: a consensus may be some positions old."""
        found: dict[RequestId, AgreedPoll] = {}
        for poll in polls:
            handoff = self.live.get(poll.rid)
            if handoff is not None and handoff.serial == poll.serial and handoff.attempt == poll.attempt:
                found[poll.rid] = poll
        return found

    def revoked(self, handoff: Handoff, agreed: AgreedPoll) -> None:
        """An agreed observation of a handoff in REVOKING."""
        if agreed.writers_stopped:
            self.transfer_over(handoff)
            self._release_if_quiet(handoff)

    def step_left(self, handoff: Handoff) -> None:
        """A plan that named this handoff is committed."""
        handoff.in_step -= 1
        if handoff.phase is Phase.REVOKING:
            self._release_if_quiet(handoff)

    def transfer_begins(self, handoff: Handoff) -> None:
        """The transfer backend hears of this attempt (Offer or Expect): its name is taken until it is forgotten."""
        key, bootstrap = (handoff.room, handoff.attempt), handoff.request.bootstrap
        assert key not in self.transfers, f"room {key[0]} attempt {key[1]} is open for {self.transfers[key].rid}"
        assert bootstrap is not None, "a request without a room transfers nothing"
        self.transfers[key] = Watch(
            rid=handoff.rid,
            room=handoff.room,
            attempt=handoff.attempt,
            host=bootstrap.host,
            row=handoff.row,
            serial=handoff.serial,
        )
        handoff.opened = True

    def revoke_here(self, handoff: Handoff) -> None:
        """This stage's part of the transfer failed for good, before all stages agreed on anything: stop it here.

        What all stages share changes when the consensus says so, and not before (S1).
        """
        if not handoff.revoked_here:
            handoff.revoked_here = True
            self.effects.append(Revoke(room=handoff.room, attempt=handoff.attempt))

    def transfer_over(self, handoff: Handoff) -> None:
        """The attempt's transfer ended well everywhere: nobody reads or writes its pages any more."""
        handoff.opened = False
        del self.transfers[handoff.room, handoff.attempt]
        self.effects.append(Forget(room=handoff.room, attempt=handoff.attempt))

    @property
    def watched(self) -> list[Watch]:
        """What must be observed and agreed: transfers and copies, each in the order in which they began."""
        return [*self.transfers.values(), *self.copies.values()]

    def back_up(self, handoff: Handoff, pages: int) -> bool:
        """Begin to copy its first pages to the host. False, and nothing done, if there is no room."""
        slots = self.slots.allocate(pages)
        if slots is None:
            return False
        handoff.slots = slots
        copy = self._copy_begins(handoff)
        self.effects.append(Backup(rid=handoff.rid, copy=copy, pages=handoff.pages[:pages], slots=slots))
        return True

    def restore(self, handoff: Handoff) -> None:
        """Begin to copy its backup into the first of its pages."""
        copy, pages = self._copy_begins(handoff), handoff.pages[: len(handoff.slots)]
        self.effects.append(Restore(rid=handoff.rid, copy=copy, slots=handoff.slots, pages=pages))

    def _copy_begins(self, handoff: Handoff) -> int:
        assert not handoff.copy and not handoff.in_step and not handoff.opened
        self.copies_begun += 1
        handoff.copy = self.copies_begun
        self.copies[handoff.copy] = copy_watch(handoff)
        return handoff.copy

    def copied(self, polls: Iterable[AgreedPoll]) -> list[tuple[Handoff, bool]]:
        """Copies that are over on every rank: requests that go on, and whether the copy is good everywhere.

        Requests that ended meanwhile give back what they hold.
        """
        found = []
        for poll in polls if self.copies else ():
            watch = self.copies.get(copy_of(poll))
            if watch is None or not poll.writers_stopped:
                continue
            del self.copies[copy_of(poll)]
            handoff = self.live[watch.rid]
            handoff.copy = 0
            if handoff.phase is Phase.REVOKING:
                self._release_if_quiet(handoff)
            else:
                found.append((handoff, poll.poll != KVPoll.Failed))
        return found

    def give_up_pages(self, handoff: Handoff) -> None:
        """Its pages return to pool and cache: no transfer, step or copy has them in hand. Nothing of it is computed now."""
        assert not handoff.opened and not handoff.in_step and not handoff.copy
        self.pool.release(self._pages_to_free(handoff))
        handoff.pages = handoff.shared = ()
        handoff.planned = handoff.computed = 0

    def give_up_slots(self, handoff: Handoff) -> None:
        """Its backup is of no use any more."""
        assert not handoff.copy
        self.slots.release(handoff.slots)
        handoff.slots = ()

    @property
    def spare(self) -> int:
        """Pages that may be allocated."""
        return self.pool.free + (0 if self.cache is None else self.cache.pages - self.cache.locked)

    @property
    def returned(self) -> int:
        """How much `spare` has grown, ever: only then is it worth to look for pages again."""
        return self.pool.returned + (0 if self.cache is None else self.cache.spared)

    def take_pages(self, handoff: Handoff, pages: int, usable_tokens: int) -> bool:
        """Give it `pages` pages: those that the cache has for its first tokens (`usable_tokens` at most), and new ones.

        What the cache has counts as computed. False, and nothing done, if there are not enough.
        """
        cache = self.cache
        shared = () if cache is None else tuple(cache.match(handoff.known_tokens(0, usable_tokens), usable_tokens))
        if cache is not None:
            cache.lock(shared)
        own = self.allocate(pages - len(shared))
        if own is None:
            if cache is not None:
                cache.unlock(shared)
            return False
        handoff.shared, handoff.epoch = shared, self.epoch
        handoff.pages = tuple(node.page for node in shared) + own
        handoff.planned = handoff.computed = 0 if cache is None else len(shared) * cache.page_tokens
        return True

    def flush_cache(self) -> None:
        """Forget what is cached; what was computed before now is never cached."""
        self.epoch += 1
        if self.cache is not None:
            self.cache.flush()

    def allocate(self, pages: int) -> tuple[PageId, ...] | None:
        """Pages from the pool, at the expense of cached ones that nobody uses; None, and none lost, if they do not do."""
        missing = pages - self.pool.free
        if self.cache is not None and 0 < missing <= self.cache.pages - self.cache.locked:
            self.cache.evict(missing)
        return self.pool.allocate(pages)

    def free_row(self, handoff: Handoff) -> None:
        """Give back the metadata row: it was read, and its one writer is done."""
        if handoff.row is not None and self.rows is not None:
            self.rows.release((handoff.row,))
            handoff.row = None

    def overdue(self, now: Millis) -> list[Handoff]:
        """Live handoffs one of whose deadlines has passed."""
        return overdue(self.live.values(), now)

    def expire(self, handoff: Handoff, now: Millis) -> None:
        """A deadline passed: name the stage and end the request, or fence the peer that does not stop."""
        if handoff.phase is Phase.REVOKING:
            handoff.fenced = True
            if handoff.opened:
                self.effects.append(Fence(room=handoff.room, attempt=handoff.attempt))
            return
        stage = self.table.stages[handoff.phase]
        own = handoff.stage_deadline_at is not None and handoff.stage_deadline_at <= now
        what = "its own deadline" if own and handoff.deadline_at > now else "the request's budget"
        reason = Reason.DEADLINE
        if handoff.phase in (Phase.BOOTSTRAPPING, Phase.GREETING) and handoff.deadline_at > now:
            reason = Reason.OTHER_LEG_MISSING
        text = f"{self.table.side}: {stage} took {now - handoff.arrived_at} ms and ran out of {what}"
        self.fail(handoff, Verdict(reason=reason, text=text), now)

    def next_deadline(self) -> Millis | None:
        """When `tick` has something to do next."""
        dues = deadlines(self.live.values())
        expiry = self.rooms.next_expiry()
        return min(dues + ([] if expiry is None else [expiry]), default=None)

    def _answer(self, handoff: Handoff, verdict: Verdict) -> None:
        if handoff.answered:
            return
        handoff.answered = True
        self.effects.append(Emit(rid=handoff.rid, finish=Finish(type=FinishType.ABORT, verdict=verdict)))

    def _bury(self, handoff: Handoff, verdict: Verdict, now: Millis, *, peer_knows: bool) -> None:
        if not handoff.room or is_fake(handoff) or self.rooms.holder(handoff.room) != handoff.rid:
            return
        told = peer_knows
        if handoff.peer is not None and not peer_knows:
            message = RoomFailed(room=handoff.room, attempt=handoff.attempt, reason=verdict.reason, text=verdict.text)
            self.effects.append(Tell(peer=handoff.peer, message=message))
            told = True
        self.rooms.bury(handoff.room, verdict, now, app_answered=True, peer_answered=told)

    def _end(self, handoff: Handoff, end: Phase, now: Millis, verdict: Verdict | None) -> None:
        self.on_leave(handoff)
        if handoff.opened and not handoff.revoked_here:
            self.effects.append(Revoke(room=handoff.room, attempt=handoff.attempt))
        if handoff.opened or handoff.in_step or handoff.copy:
            deadline = now + self.limits.revoking_ms if handoff.opened else None
            move(handoff, Phase.REVOKING, self.effects, stage_deadline_at=deadline, verdict=verdict)
            handoff.deadline_at = max(handoff.deadline_at, now + self.limits.revoking_ms)
        else:
            self._leave(handoff, end, verdict)

    def _release_if_quiet(self, handoff: Handoff) -> None:
        if handoff.opened or handoff.in_step or handoff.copy:
            return
        self._leave(handoff, Phase.FAILED if handoff.to_finish is not None else Phase.DONE, handoff.to_finish)

    def _leave(self, handoff: Handoff, end: Phase, verdict: Verdict | None) -> None:
        self.give_up_pages(handoff)
        self.give_up_slots(handoff)
        self.free_row(handoff)
        move(handoff, end, self.effects, verdict=verdict)
        del self.live[handoff.rid]

    def _pages_to_free(self, handoff: Handoff) -> list[PageId]:
        """Pages that go back to the pool now: what was computed well stays in the prefix cache, if there is one."""
        own = left = list(handoff.pages[len(handoff.shared) :])
        if self.cache is None:
            return own
        if handoff.epoch == self.epoch:
            faulty = handoff.to_finish is not None and handoff.to_finish.reason is Reason.DEVICE_FAULT
            whole = len(handoff.shared) if faulty else handoff.computed // self.cache.page_tokens
            tokens = handoff.known_tokens(0, whole * self.cache.page_tokens)
            left = self.cache.insert(tokens, handoff.pages[:whole]) + list(handoff.pages[whole:])
        self.cache.unlock(handoff.shared)
        assert len(left) <= len(own)
        return left


def copy_watch(handoff: Handoff) -> Watch:
    """How a copy is named among observations: by a negative attempt, which no transfer has."""
    return Watch(rid=handoff.rid, room=0, attempt=-handoff.copy, host="", serial=handoff.serial)


def copy_of(one: Watch | AgreedPoll) -> int:
    """The number of the copy that is observed; 0 where it is a transfer."""
    return -one.attempt if one.attempt < 0 else 0


def is_fake(handoff: Handoff) -> bool:
    """Whether the request has no peer (health probes use the fake host)."""
    bootstrap = handoff.request.bootstrap
    return bootstrap is not None and bootstrap.host == FAKE_HOST
