"""The prealloc queue: from the door to reserved pages. Nothing is reserved before prefill accepted the room."""

from baton_core.admission import is_unadmitted_reject
from baton_core.effects import Connect, Expect, LookUp, Tell
from baton_core.errors import Verdict
from baton_core.events import BootstrapInfos
from baton_core.ledger import Ledger
from baton_core.limits import Millis
from baton_core.machine import Handoff, Phase, move
from baton_core.messages import Accepted, Hello, Rejected, RoomFailed, RoomMessage
from baton_core.pages import pages_for
from baton_core.request import RequestId, prompt_digest


class DecodePreallocQueue:
    """Requests without reserved KV, in order of arrival."""

    def __init__(self, ledger: Ledger, *, page_tokens: int, context_tokens: int, fingerprint: str) -> None:
        self._ledger = ledger
        self._page_tokens = page_tokens
        self._context_tokens = context_tokens
        self._fingerprint = fingerprint
        self.queue: dict[RequestId, Handoff] = {}

    def add(self, req: Handoff, now: Millis, *, is_retracted: bool = False, is_rebootstrap: bool = False) -> bool:
        """Past the door into RESOLVING. A request rejected at intake is retired here and never reserves anything.

        The caller says whether the request re-enters: after a retraction it owns nothing, so ownership cannot tell it
        from a rejected one. Returns whether the request is queued.
        """
        if not is_retracted and not is_rebootstrap and is_unadmitted_reject(req):
            self._ledger.retire_unadmitted_request(req)
            return False
        if not self._ledger.claim_room(req, now):
            return False
        bootstrap = req.request.bootstrap
        assert bootstrap is not None, "a request without a room does not come here"
        move(req, Phase.RESOLVING, self._ledger.effects, stage_deadline_at=now + self._ledger.limits.lookup_ms)
        self._ledger.effects.append(LookUp(rid=req.rid, bootstrap=bootstrap))
        self.queue[req.rid] = req
        return True

    def greet(self, req: Handoff, infos: BootstrapInfos, now: Millis) -> None:
        """The prefill worker is known: say hello. A request that failed meanwhile is not here any more (S4)."""
        req.infos, req.peer = infos, infos.incarnation
        deadline = now + self._ledger.limits.other_leg_ms
        move(req, Phase.GREETING, self._ledger.effects, stage_deadline_at=deadline)
        hello = Hello(
            room=req.room,
            attempt=req.attempt,
            prompt_tokens=len(req.request.prompt),
            digest=prompt_digest(req.request.prompt),
            fingerprint=self._fingerprint,
            dp_rank=infos.dp_rank,
        )
        self._ledger.effects += (Connect(infos=infos), Tell(peer=infos.incarnation, message=hello))

    def _update_handshake_waiters(self, req: Handoff, message: RoomMessage, now: Millis) -> None:
        """Prefill's leader answered this request's hello (not with NotYet): go on to reservation, or end."""
        if isinstance(message, Accepted) and req.phase is Phase.GREETING:
            move(req, Phase.PREALLOC, self._ledger.effects)
        elif isinstance(message, Rejected | RoomFailed):
            self._abort_handshake(req, message.verdict, now)

    def _abort_handshake(self, req: Handoff, verdict: Verdict, now: Millis) -> None:
        """End a request whose handshake failed, with prefill's verdict; prefill knows already."""
        self._ledger.fail(req, verdict, now, peer_knows=True)

    def pop_preallocated(self, now: Millis) -> list[Handoff]:
        """Reserve pages and a row for accepted requests, in order, as far as they go; those leave, TRANSFERRING.

        The reservation covers the longest possible answer, so that a running request never runs out of pages.
        """
        popped: list[Handoff] = []
        for req in list(self.queue.values()):
            if req.phase is not Phase.PREALLOC:
                continue
            if not self._reserve(req):
                break
            del self.queue[req.rid]
            move(req, Phase.TRANSFERRING, self._ledger.effects)
            popped.append(req)
        return popped

    def leave(self, req: Handoff) -> None:
        """The request ended."""
        self.queue.pop(req.rid, None)

    def _reserve(self, req: Handoff) -> bool:
        rows = self._ledger.rows
        assert rows is not None and req.peer is not None
        if rows.free == 0:
            return False
        pages = self._ledger.pool.allocate(self.pages_wanted(req))
        if pages is None:
            return False
        row = rows.allocate(1)
        assert row is not None
        req.pages, req.row = pages, row[0]
        self._ledger.transfer_begins(req)
        ordered = pages[: pages_for(len(req.request.prompt), self._page_tokens)]
        self._ledger.effects.append(
            Expect(rid=req.rid, room=req.room, attempt=req.attempt, peer=req.peer, pages=ordered, row=row[0])
        )
        return True

    def pages_wanted(self, req: Handoff) -> int:
        """Pages for the prompt and the longest answer that context and pool allow."""
        return pages_for(self.tokens_most(req), self._page_tokens)

    def tokens_most(self, req: Handoff) -> int:
        """Longest prompt + answer of this request, clipped to context and pool."""
        prompt = len(req.request.prompt)
        most = min(self._context_tokens, self._ledger.pool.total * self._page_tokens)
        return min(prompt + req.request.sampling.max_new_tokens, most)
