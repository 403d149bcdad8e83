"""The way of a retracted request without a backup: through prefill a second time, and where that fails not at all.

    RETRACTED ──► RESOLVING ──► GREETING ──► PREALLOC ──► TRANSFERRING ──► ARRIVED    (a rebootstrap)
        ▲             │             │            │              │
        └─────────────┴─────────────┴────────────┴──────────────┘   prefill is gone, refuses or is late: computed here

Prefill computes the prompt and the answer so far, and draws the token that follows; so nothing is drawn twice, and whatever
comes of a rebootstrap the client sees a pause. Each is an attempt of its own: what is said or written of an earlier one
fits nothing. An attempt that fails while its pages are ordered leaves *remains*: a record that holds pages, row and attempt
until nobody can write them (the law of pages), so that the request itself waits for no silent writer.
"""

from dataclasses import replace

from baton_core.decode.memory import DecodeMemory
from baton_core.effects import Revoke, Tell
from baton_core.errors import Reason, Verdict
from baton_core.ledger import Ledger
from baton_core.limits import Millis
from baton_core.machine import Handoff, Phase, move
from baton_core.messages import RoomFailed

AWAITS_PREFILL = (Phase.GREETING, Phase.PREALLOC, Phase.TRANSFERRING)
"""Phases in which a prefill worker that is gone is missed."""


class Reentry:
    """Ends what waits for prefill in vain: a fresh request for good, one that re-enters only here."""

    def __init__(self, ledger: Ledger, memory: DecodeMemory) -> None:
        self._ledger = ledger
        self._memory = memory
        self.arrivals = 0  # rebootstraps that ended well, ever

    @staticmethod
    def is_away(req: Handoff) -> bool:
        """Whether `req` is on its way through prefill a second time."""
        return req.is_retracted and (req.phase is Phase.RESOLVING or req.phase in AWAITS_PREFILL)

    def due(self) -> list[Handoff]:
        """Retracted requests that prefill shall compute anew, in order."""
        return [req for req in self._memory.retracted.values() if self._memory.wants_prefill(req)]

    def leaves(self, req: Handoff, attempt: int) -> None:
        """`req` is on its way, as `attempt`."""
        del self._memory.retracted[req.rid]
        req.attempt, req.peer, req.progress = attempt, None, 0
        req.rebootstraps += 1

    def watch(self, req: Handoff, now: Millis) -> None:
        """Prefill has the page orders of `req`; if it re-enters it must be here again within `rebootstrap_ms`."""
        if req.is_retracted and req.stage_deadline_at is None:
            req.stage_deadline_at = now + self._ledger.limits.rebootstrap_ms

    def fail(self, req: Handoff, verdict: Verdict, now: Millis, *, peer_knows: bool = False) -> None:
        """The handoff of `req` failed: the request ends, or where it re-enters is computed here."""
        if not self.is_away(req):
            self._ledger.fail(req, verdict, now, peer_knows=peer_knows)
            return
        self._memory.fallbacks += 1
        self.withdraw(req, verdict, now, peer_knows=peer_knows)

    def expire(self, req: Handoff, now: Millis) -> bool:
        """Whether a deadline of a request that re-enters passed, and not its own: then it is computed here."""
        if not self.is_away(req) or req.deadline_at <= now:
            return False
        text = f"decode: {self._ledger.table.stages[req.phase]} once more took too long; it computes the request itself"
        self.fail(req, Verdict(reason=Reason.DEADLINE, text=text), now)
        return True

    def withdraw(self, req: Handoff, verdict: Verdict, now: Millis, *, peer_knows: bool = False) -> None:
        """Give this rebootstrap up: `req` is RETRACTED again, and holds nothing."""
        if req.peer is not None and not peer_knows:
            message = RoomFailed(room=req.room, attempt=req.attempt, reason=verdict.reason, text=verdict.text)
            self._ledger.effects.append(Tell(peer=req.peer, message=message))
        self._ledger.on_leave(req)
        if req.opened:
            self._leave_remains(req, verdict, now)
        req.peer, req.computes_here = None, True
        self._memory.wait(req, verdict)

    def _leave_remains(self, req: Handoff, verdict: Verdict, now: Millis) -> None:
        ledger = self._ledger
        rid = f"{req.rid}~{req.attempt}"
        while rid in ledger.live:  # clients choose their ids
            rid += "~"
        ledger.arrivals += 1
        revoked_at = now + ledger.limits.revoking_ms
        remains = Handoff(
            request=replace(req.request, rid=rid, prompt=req.known_tokens(0, req.known)),
            serial=ledger.arrivals,
            table=ledger.table,
            arrived_at=now,
            deadline_at=revoked_at,
            attempt=req.attempt,
            pages=req.pages,
            shared=req.shared,
            computed=req.computed,
            epoch=req.epoch,
            row=req.row,
            opened=True,
            revoked_here=req.revoked_here,
            to_finish=verdict,
            answered=True,  # there is no client of its own
        )
        ledger.live[rid] = remains
        key = req.room, req.attempt
        ledger.transfers[key] = replace(ledger.transfers[key], rid=rid, serial=remains.serial)
        if not req.revoked_here:
            ledger.effects.append(Revoke(room=req.room, attempt=req.attempt))
        move(remains, Phase.REVOKING, ledger.effects, stage_deadline_at=revoked_at)
        req.pages, req.shared, req.row = (), (), None
        req.planned = req.computed = 0
        req.opened = req.revoked_here = False
