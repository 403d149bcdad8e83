"""What one registry is still to be told about the rooms of one prefill worker, and when: on which DP rank each runs, and
which are over.

    open ──► to tell ──► told ── a while later ──► to tell again
                          │
                close ────┴── it went well: nobody asks for it any more ─────────► to take back
                          └── it failed: decode's leg may still come, and ask ──► kept ── later ──► to take back

A room that is taken back in time can be used again on another DP rank without anybody being sent to the old one. Pure:
time comes in as `now`. Queues are in order of time because within each every room waits equally long.
"""

from collections import OrderedDict
from itertools import islice
from typing import TypeVar

from baton_core.limits import Millis, RegistrarLimits
from baton_core.request import Room

V = TypeVar("V")


class RoomNews:
    """The news for one registry; bounded by `rooms_max` each way."""

    def __init__(self, limits: RegistrarLimits) -> None:
        self._limits = limits
        self._untold: OrderedDict[Room, int] = OrderedDict()
        self._told: OrderedDict[Room, tuple[int, Millis]] = OrderedDict()  # DP rank, when to tell it again
        self._kept: OrderedDict[Room, tuple[int, Millis]] = OrderedDict()  # over; when to take it back
        self._over: OrderedDict[Room, int] = OrderedDict()  # to take back now

    @property
    def has_any(self) -> bool:
        """Whether there is something to tell at once."""
        return bool(self._untold or self._over)

    def open(self, room: Room, dp_rank: int) -> None:
        """Tell this room as soon as possible."""
        self._kept.pop(room, None)
        self._over.pop(room, None)
        self._put(self._untold, room, dp_rank)

    def close(self, room: Room, now: Millis, *, went_well: bool) -> None:
        """The room is over. One that failed before it was told is told once: decode's leg may still ask."""
        told = self._told.pop(room, None)
        if went_well:
            untold = self._untold.pop(room, None)
            if told is not None:
                self._put(self._over, room, told[0])
            elif untold is not None:
                self._put(self._over, room, untold)  # it may be on its way
        else:
            dp_rank = self._untold.get(room, told and told[0])
            if dp_rank is not None:
                self._put(self._kept, room, (dp_rank, now + self._limits.room_kept_ms))

    def due(self) -> Millis | None:
        """When there will be something to tell, as far as time alone brings it."""
        dues = [next(iter(queue.values()))[1] for queue in (self._told, self._kept) if queue]
        return min(dues, default=None)

    def take(self, now: Millis, most: int) -> tuple[dict[Room, int], dict[Room, int]]:
        """What to tell now: rooms that run, and rooms that are over, at most so many each; `heard` must follow."""
        while self._told and next(iter(self._told.values()))[1] <= now:
            room, (dp_rank, _) = self._told.popitem(last=False)
            self._untold[room] = dp_rank
        while self._kept and next(iter(self._kept.values()))[1] <= now:
            room, (dp_rank, _) = self._kept.popitem(last=False)
            if room not in self._untold:
                self._put(self._over, room, dp_rank)
        return dict(islice(self._untold.items(), most)), dict(islice(self._over.items(), most))

    def heard(self, running: dict[Room, int], over: dict[Room, int], now: Millis) -> None:
        """The registry has heard that; what was opened or closed meanwhile is still to be told."""
        for room, dp_rank in running.items():
            if self._untold.get(room) == dp_rank:
                del self._untold[room]
                if room not in self._kept:
                    self._told[room] = dp_rank, now + self._limits.room_renew_ms
                    self._told.move_to_end(room)
        for room, dp_rank in over.items():
            if self._over.get(room) == dp_rank:
                del self._over[room]

    def forgotten(self) -> None:
        """The registry knows nothing any more: what is over need not be taken back."""
        self._over.clear()

    def _put(self, queue: OrderedDict[Room, V], room: Room, value: V) -> None:
        queue[room] = value
        queue.move_to_end(room)
        if len(queue) > self._limits.rooms_max:  # a registry that is long gone
            queue.popitem(last=False)
