"""Legs that ended on decode before prefill could be told: they are told when the look-up answers."""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from baton_core.effects import Connect, Effect, Tell
from baton_core.errors import Verdict
from baton_core.events import BootstrapInfos
from baton_core.limits import Limits, Millis
from baton_core.machine import Handoff
from baton_core.messages import RoomFailed
from baton_core.request import RequestId, Room


@dataclass(frozen=True, slots=True, kw_only=True)
class Farewell:
    """What one prefill worker is still to be told."""

    room: Room
    attempt: int
    verdict: Verdict
    expires_at: Millis


class Farewells:
    """By request, the oldest first; bounded, and kept no longer than a look-up may take."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._kept: OrderedDict[RequestId, Farewell] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[RequestId]:
        return iter(self._kept)

    def keep(self, req: Handoff, verdict: Verdict, now: Millis) -> None:
        """`req` ended while its prefill worker was being looked up."""
        expires_at = now + self._limits.lookup_ms
        self._kept.pop(req.rid, None)  # the oldest stands first
        self._kept[req.rid] = Farewell(room=req.room, attempt=req.attempt, verdict=verdict, expires_at=expires_at)
        while len(self._kept) > self._limits.tombstones_max:
            self._kept.popitem(last=False)

    def drop(self, rid: RequestId) -> None:
        """There is nobody to tell."""
        self._kept.pop(rid, None)

    def said(self, rid: RequestId, infos: BootstrapInfos) -> tuple[Effect, ...]:
        """The prefill worker of this request is known: what is to be done so that it hears of the end."""
        farewell = self._kept.pop(rid, None)
        if farewell is None:
            return ()
        message = RoomFailed(
            room=farewell.room,
            attempt=farewell.attempt,
            reason=farewell.verdict.reason,
            text=farewell.verdict.text,
            greeted=False,
        )
        return (Connect(infos=infos), Tell(peer=infos.leader, message=message))

    def expire(self, now: Millis) -> None:
        """Forget what no look-up answers any more."""
        while self._kept and next(iter(self._kept.values())).expires_at <= now:
            self._kept.popitem(last=False)

    def next_expiry(self) -> Millis | None:
        """When the oldest is forgotten."""
        return next((farewell.expires_at for farewell in self._kept.values()), None)

    def numbers(self) -> list[int]:
        """For the digest."""
        found: list[int] = []
        for one in self._kept.values():
            found += (one.room, one.attempt, one.verdict.reason, one.expires_at)
        return found
