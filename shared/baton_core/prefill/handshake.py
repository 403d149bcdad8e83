"""How the two legs of a room meet on the prefill side: the app's request and decode's hello, in either order.

What matches is accepted, what does not is refused to both, and whichever leg comes late finds the verdict of the other.
"""

from collections import OrderedDict
from dataclasses import dataclass, replace

from baton_core.effects import Offer, Tell
from baton_core.errors import Reason, Verdict
from baton_core.ledger import Ledger
from baton_core.limits import Millis
from baton_core.machine import Handoff, Phase, move
from baton_core.messages import Accepted, Hello, NotYet, Rejected, RoomFailed
from baton_core.pages import pages_for
from baton_core.prefill.rules import PrefillRules
from baton_core.ranks import unit_of
from baton_core.request import Incarnation, Request, Room


@dataclass(frozen=True, slots=True, kw_only=True)
class Orphan:
    """A hello whose request has not arrived."""

    peer: Incarnation
    hello: Hello
    expires_at: Millis


class Handshake:
    """Joins legs. `orphans` are hellos without a request, the oldest first."""

    def __init__(self, ledger: Ledger, rules: PrefillRules) -> None:
        self._ledger = ledger
        self._limits = ledger.limits
        self._rules = rules
        self._layout_text = rules.layout.to_text()
        self.orphans: OrderedDict[Room, Orphan] = OrderedDict()

    def arrived(self, req: Handoff, now: Millis) -> None:
        """The app's leg is past the door: join it to decode's hello if that is here."""
        orphan = self.orphans.pop(req.room, None)
        if orphan is not None:
            self.join(req, orphan.peer, orphan.hello, now)

    def refuse(self, req: Handoff, now: Millis) -> bool:
        """The app's leg is rejected: decode hears it now if its hello is here, else when it comes.

        Returns whether it is still to come.
        """
        assert req.to_finish is not None
        if self._ledger.rooms.holder(req.room) is not None:
            return False  # the room belongs to a live request, which this one must not harm
        if self._ledger.rooms.verdict_for_app(req.room, now) is not None:
            return False  # decode's leg ended first, and knows
        orphan = self.orphans.pop(req.room, None)
        if orphan is not None:
            self.reject(orphan.peer, orphan.hello, req.to_finish)
        self._ledger.rooms.bury(req.room, req.to_finish, now, app_answered=True, peer_answered=orphan is not None)
        return orphan is None

    def hello(self, peer: Incarnation, hello: Hello, now: Millis) -> None:
        """Decode's leg: join it to the app's, refuse it, or keep it until the app's comes."""
        rid = self._ledger.rooms.holder(hello.room)
        if rid is not None:
            req = self._ledger.live[rid]
            if req.phase is Phase.BOOTSTRAPPING:
                self.join(req, peer, hello, now)
            elif req.peer != peer or req.attempt != hello.attempt:
                self._reject_in_use(peer, hello)
            return
        stored = self._ledger.rooms.verdict_for_peer(hello.room, now)
        if stored is not None:
            self.reject(peer, hello, stored)
        elif hello.room in self.orphans and self.orphans[hello.room].peer != peer:
            self._reject_in_use(peer, hello)
        elif len(self.orphans) >= self._limits.orphan_hellos_max:
            text = f"{len(self.orphans)} rooms wait here for their prefill leg (orphan_hellos_max); retry later"
            verdict = Verdict(reason=Reason.WAITING_FULL, text=text)
            self.reject(peer, hello, verdict)
            self._ledger.rooms.bury(hello.room, verdict, now, app_answered=False, peer_answered=True)
        else:
            self._keep_orphan(peer, hello, now)

    def leg_of(self, peer: Incarnation, hello: Hello) -> Request | None:
        """Prefill's leg as it came along with decode's hello, under an id of this side's own; None where it cannot be.

        Then its room is in use, by another request or by an earlier attempt that prefill has not closed yet, and decode
        hears so.
        """
        assert hello.again is not None
        rid = f"{peer}~{hello.room}.{hello.attempt}"
        if rid in self._ledger.live or self._ledger.rooms.holder(hello.room) is not None or hello.room in self.orphans:
            self._reject_in_use(peer, hello)
            return None
        assert hello.again.bootstrap is not None, "checked by Hello"
        bootstrap = replace(hello.again.bootstrap, prefill_dp_rank=hello.dp_rank)
        return replace(hello.again, rid=rid, bootstrap=bootstrap)

    def _reject_in_use(self, peer: Incarnation, hello: Hello) -> None:
        text = f"room {hello.room} is in use here, by another decode worker or an earlier attempt; draw another room"
        self.reject(peer, hello, Verdict(reason=Reason.DUPLICATE_ROOM, text=text))

    def _keep_orphan(self, peer: Incarnation, hello: Hello, now: Millis) -> None:
        self.orphans.pop(hello.room, None)
        self._ledger.rooms.wipe(hello.room)
        self.orphans[hello.room] = Orphan(peer=peer, hello=hello, expires_at=now + self._limits.other_leg_ms)
        self._ledger.effects.append(Tell(peer=peer, message=NotYet(room=hello.room, attempt=hello.attempt)))

    def join(self, req: Handoff, peer: Incarnation, hello: Hello, now: Millis) -> None:
        """Both legs of a room are here: accept them together or refuse them together."""
        req.peer, req.attempt, req.peer_layout = peer, hello.attempt, hello.layout
        verdict = self._conflict(req.request, hello)
        if verdict is not None:
            self.reject(peer, hello, verdict)
            self._ledger.fail(req, verdict, now, peer_knows=True)
            return
        self._ledger.transfer_begins(req)
        move(req, Phase.ACCEPTED, self._ledger.effects)
        offer = Offer(
            rid=req.rid,
            room=req.room,
            attempt=req.attempt,
            peer=peer,
            target=hello.layout,
            prompt_tokens=len(req.request.prompt),
            pages_total=pages_for(len(req.request.prompt), self._rules.layout.page_tokens),
        )
        accepted = Accepted(room=req.room, attempt=req.attempt, dp_rank=self._rules.dp_rank, layout=self._layout_text)
        self._ledger.effects += (offer, Tell(peer=peer, message=accepted))

    def _conflict(self, request: Request, hello: Hello) -> Verdict | None:
        if (hello.room, hello.attempt) in self._ledger.transfers:
            text = f"an earlier life of room {hello.room} is still being closed here; draw another room"
            return Verdict(reason=Reason.DUPLICATE_ROOM, text=text)
        return self._rules.conflict(request, hello)

    def reject(self, peer: Incarnation, hello: Hello, verdict: Verdict) -> None:
        """Say that this room will not be served."""
        message = Rejected(room=hello.room, attempt=hello.attempt, reason=verdict.reason, text=verdict.text)
        self._ledger.effects.append(Tell(peer=peer, message=message))

    def room_failed(self, peer: Incarnation, message: RoomFailed, now: Millis) -> None:
        """Decode's leg ended: so does ours, now or when it comes."""
        rid = self._ledger.rooms.holder(message.room)
        orphan = self.orphans.get(message.room)
        if rid is not None:
            req = self._ledger.live[rid]
            unmet = req.peer is None and not message.greeted
            if unmet or (req.peer == peer and req.attempt == message.attempt):
                self._ledger.fail(req, message.verdict, now, peer_knows=True)
        elif orphan is not None and (orphan.peer == peer and orphan.hello.attempt == message.attempt):
            del self.orphans[message.room]
            self._ledger.rooms.bury(message.room, message.verdict, now, app_answered=False, peer_answered=True)
        elif orphan is None and not message.greeted and self._ledger.rooms.verdict_for_peer(message.room, now) is None:
            # Our own leg is yet to come. (Had it failed, the tombstone that waits for decode's leg is now spent.)
            self._ledger.rooms.bury(message.room, message.verdict, now, app_answered=False, peer_answered=True)

    def peer_gone(self, unit: Incarnation, verdict: Verdict, now: Millis) -> None:
        """That decode unit is gone, and with it the hellos it said."""
        for room, orphan in list(self.orphans.items()):
            if unit_of(orphan.peer) == unit:
                del self.orphans[room]
                self._ledger.rooms.bury(room, verdict, now, app_answered=False, peer_answered=True)

    def expire(self, now: Millis) -> None:
        """Refuse hellos whose request did not come in time."""
        while self.orphans:
            room, orphan = next(iter(self.orphans.items()))
            if orphan.expires_at > now:
                return
            del self.orphans[room]
            text = f"prefill: its own leg of room {room} did not arrive within {self._limits.other_leg_ms} ms"
            verdict = Verdict(reason=Reason.OTHER_LEG_MISSING, text=text)
            self.reject(orphan.peer, orphan.hello, verdict)
            self._ledger.rooms.bury(room, verdict, now, app_answered=False, peer_answered=True)
