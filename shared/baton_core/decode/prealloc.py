"""The prealloc queue: from the door to ordered pages. Nothing is reserved before prefill accepted the room.

With one pipeline stage a request leaves as soon as its pages are ordered. With several it stays a *waiter* until a
consensus says that every stage holds the order (good) or that one failed (bad); nobody is polled again here (S1).
"""

from collections.abc import Collection, Mapping
from dataclasses import replace

from baton_core.admission import is_unadmitted_reject
from baton_core.agreement import KVPoll, poll_and_all_reduce_pp
from baton_core.decode.reentry import Reentry
from baton_core.effects import Connect, Expect, LookUp, Tell
from baton_core.errors import Reason, Verdict
from baton_core.events import AgreedPoll, BootstrapInfos
from baton_core.kv_layout import UnitLayout, require_translatable
from baton_core.ledger import Ledger
from baton_core.limits import Millis
from baton_core.machine import Handoff, Phase, move
from baton_core.messages import Accepted, Hello, Rejected, RoomFailed, RoomMessage
from baton_core.pages import pages_for
from baton_core.prefill.queue import in_order, transfer_verdict
from baton_core.request import Request, RequestId, prompt_digest


class DecodePreallocQueue:
    """`queue`: requests without reserved KV, in order of arrival. `waiters`: ordered, not yet known to be so everywhere.

    `draining` holds waiters whose transfer failed on this pipeline stage before all stages knew of them. Here its I/O is
    stopped; for everything that stages share it is a waiter still, until a consensus names it.
    """

    def __init__(
        self, ledger: Ledger, reentry: Reentry, *, layout: UnitLayout, fingerprint: str, pp_size: int = 1
    ) -> None:
        self._ledger = ledger
        self._reentry = reentry
        self._layout = layout
        self._page_tokens = layout.page_tokens
        self._fingerprint = fingerprint
        self._pp_size = pp_size
        self.accepted = 0  # requests that prefill accepted, ever
        self.queue: dict[RequestId, Handoff] = {}
        self.waiters: dict[RequestId, Handoff] = {}
        self.draining: dict[RequestId, Handoff] = {}

    def add(self, req: Handoff, now: Millis, *, is_retracted: bool = False, is_rebootstrap: bool = False) -> bool:
        """Past the door into RESOLVING. A request rejected at intake is retired here and never reserves anything.

        The caller says whether the request re-enters: after a retraction it owns nothing, so ownership cannot tell it
        from a rejected one. With `is_rebootstrap` it has its room still, goes to the DP rank that served it, and stands
        first. Returns whether the request is queued.
        """
        if not is_retracted and not is_rebootstrap and is_unadmitted_reject(req):
            self._ledger.retire_unadmitted_request(req)
            return False
        if not is_rebootstrap and not self._ledger.claim_room(req, now):
            return False
        bootstrap = req.request.bootstrap
        assert bootstrap is not None, "a request without a room does not come here"
        if req.infos is not None:
            bootstrap = replace(bootstrap, prefill_dp_rank=req.infos.dp_rank)
        move(req, Phase.RESOLVING, self._ledger.effects, stage_deadline_at=now + self._ledger.limits.lookup_ms)
        self._ledger.effects.append(LookUp(rid=req.rid, bootstrap=bootstrap))
        self.queue[req.rid] = req
        if is_rebootstrap:
            self.queue = {req.rid: req, **self.queue}
        return True

    def greet(self, req: Handoff, infos: BootstrapInfos, now: Millis) -> None:
        """The prefill worker is known: say hello. A request that failed meanwhile is not here any more (S4)."""
        req.infos, req.peer = infos, infos.leader
        deadline = now + self._ledger.limits.other_leg_ms
        move(req, Phase.GREETING, self._ledger.effects, stage_deadline_at=deadline)
        tokens = req.known_tokens(0, req.known)
        hello = Hello(
            room=req.room,
            attempt=req.attempt,
            prompt_tokens=len(tokens),
            digest=prompt_digest(tokens),
            fingerprint=self._fingerprint,
            dp_rank=infos.dp_rank,
            layout=self._layout.to_text(),
            again=_rest_of(req, tokens, now) if req.is_retracted else None,
        )
        self._ledger.effects += (Connect(infos=infos), Tell(peer=infos.leader, message=hello))

    def answered(self, req: Handoff, message: RoomMessage, now: Millis) -> None:
        """Prefill's leader answered this request's hello (not with NotYet): go on to reservation, or end."""
        if isinstance(message, Accepted) and req.phase is Phase.GREETING:
            verdict = self._unlike(req, message)
            if verdict is not None:
                self._abort_handshake(req, verdict, now, peer_knows=False)
                return
            req.peer_layout = message.layout
            self.accepted += 1
            move(req, Phase.PREALLOC, self._ledger.effects)
        elif isinstance(message, Rejected | RoomFailed):
            self._abort_handshake(req, message.verdict, now, peer_knows=True)

    def _unlike(self, req: Handoff, accepted: Accepted) -> Verdict | None:
        """Why the prefill unit cannot write here, whatever it believes itself."""
        assert req.infos is not None
        known = len(req.infos.endpoints)
        try:
            source = UnitLayout.from_text(accepted.layout)
            require_translatable(source, self._layout)
        except ValueError as error:
            return Verdict(reason=Reason.LAYOUT_MISMATCH, text=f"prefill and decode cannot share KV: {error}")
        if source.members != known:
            text = f"the prefill unit says it has {source.members} ranks, the registry knows {known}"
            return Verdict(reason=Reason.LAYOUT_MISMATCH, text=text)
        return None

    def _abort_handshake(self, req: Handoff, verdict: Verdict, now: Millis, *, peer_knows: bool) -> None:
        """End a request whose handshake failed; one that re-enters is computed here."""
        self._reentry.fail(req, verdict, now, peer_knows=peer_knows)

    def order_pages(self, req: Handoff) -> None:
        """Its turn has come (`line`), and there are pages for what is known of it and a row: TRANSFERRING now.

        What the prefix cache holds of it is shared with others, and not ordered.
        """
        rows = self._ledger.rows
        assert rows is not None and req.peer is not None
        tokens = req.known
        granted = self._ledger.take_pages(req, pages_for(tokens, self._page_tokens), tokens)
        row = rows.allocate(1)
        assert granted and row is not None, f"{req.rid} was granted what is not there"
        req.row = row[0]
        if self._ledger.cache is not None:
            self._ledger.cache.count(req.computed, tokens)
        self._ledger.transfer_begins(req)
        expect = Expect(
            rid=req.rid,
            room=req.room,
            attempt=req.attempt,
            peer=req.peer,
            source=req.peer_layout,
            prompt_tokens=tokens,
            pages=req.pages,
            row=row[0],
            held_pages=len(req.shared),
        )
        self._ledger.effects.append(expect)
        del self.queue[req.rid]
        self.waiters[req.rid] = req
        move(req, Phase.TRANSFERRING, self._ledger.effects)

    def pop_preallocated(
        self,
        pp_good_rids: Collection[RequestId] | None = None,
        pp_bad_rids: Collection[RequestId] | None = None,
        *,
        polls: Mapping[RequestId, AgreedPoll],
        uncovered_polls: Mapping[RequestId, int],
        now: Millis,
    ) -> list[Handoff]:
        """Waiters whose order every stage holds leave; with one stage all of them do.

        Raises ValueError where there are waiters, several stages, and no consensus.
        """
        if not self.waiters and not self.draining:
            return []
        if self._pp_size > 1:
            ready = self._update_handshake_waiters(pp_good_rids, pp_bad_rids, polls, uncovered_polls, now)
        else:
            ready = list(self.waiters.values())
        for req in ready:
            self.leave(req)
        return ready

    def _update_handshake_waiters(
        self,
        pp_good_rids: Collection[RequestId] | None,
        pp_bad_rids: Collection[RequestId] | None,
        polls: Mapping[RequestId, AgreedPoll],
        uncovered_polls: Mapping[RequestId, int],
        now: Millis,
    ) -> list[Handoff]:
        """Apply the consensus: end the bad, return the good, and of what it does not cover drain what failed here."""
        ready: list[Handoff] = []
        waiters = in_order(self.waiters, self.draining)
        consensus = poll_and_all_reduce_pp(
            (req.rid for req in waiters), KVPoll.WaitingForInput, pp_good_rids, pp_bad_rids
        )
        for req, poll in zip(waiters, consensus, strict=True):
            if poll is None:
                if uncovered_polls.get(req.rid) == KVPoll.Failed:
                    self._drain(req)
            elif poll == KVPoll.Failed:
                verdict = transfer_verdict(polls.get(req.rid), "decode transfer")
                self._abort_handshake(req, verdict, now, peer_knows=False)
            else:
                ready.append(req)
        return ready

    def _drain(self, req: Handoff) -> None:
        self._ledger.revoke_here(req)
        self.draining[req.rid] = req
        self.waiters.pop(req.rid, None)

    def leave(self, req: Handoff) -> None:
        """The request is ordered everywhere, or ended."""
        for queue in (self.queue, self.waiters, self.draining):
            queue.pop(req.rid, None)


def _rest_of(req: Handoff, tokens: tuple[int, ...], now: Millis) -> Request:
    """What is left of a request that was retracted: `tokens` are its prompt and its answer so far."""
    sampling, left_ms = req.request.sampling.after(len(req.outputs)), max(1, req.deadline_at - now)
    return replace(req.request, prompt=tokens, sampling=sampling, budget_ms=left_ms)
