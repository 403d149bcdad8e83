"""Data-parallel ranks as targets: how the ranks that were chosen for a pair reach its workers.

    follow     prefill runs a room on rank `room mod dp_size`: the room says it all, to workers that know no field of it
    inject     `routed_dp_rank` on each leg is that worker's own rank; decode is told prefill's too
    register   prefill's rank is published at the registry that the request names, where decode looks it up

Whatever the mode, a room is drawn so that it leads to the chosen rank: no worker can read another rank out of it.
"""

from dataclasses import dataclass
from enum import Enum

from baton_core.routing.pair import Pair
from baton_core.routing.workers import Worker


class DpMode(Enum):
    """How a chosen rank reaches the workers."""

    AUTO = "auto"  # follow where prefill says that it follows the room, else inject
    OFF = "off"  # workers choose their ranks themselves
    FOLLOW = "follow"
    INJECT = "inject"
    REGISTER = "register"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """What a leg is told about data-parallel ranks: its own, and for decode that of prefill."""

    routed: int | None = None
    prefill: int | None = None


UNTOLD = Ranks()


def mode_for(mode: DpMode, prefill: Worker) -> DpMode:
    """The mode for a pair with that prefill worker. One that says nothing follows the room, unless it is ours."""
    if mode is not DpMode.AUTO:
        return mode
    follows = not prefill.fingerprint if prefill.follows_room is None else prefill.follows_room
    return DpMode.FOLLOW if follows else DpMode.INJECT


def ranks_told(mode: DpMode, pair: Pair) -> tuple[Ranks, Ranks]:
    """What prefill's and decode's bodies say about ranks."""
    if mode is DpMode.OFF:
        return UNTOLD, UNTOLD
    prefill = None if pair.prefill is None else pair.prefill.dp_rank
    if prefill is None and pair.decode.dp_rank is None:
        return UNTOLD, UNTOLD
    if pair.prefill is not None:
        mode = mode_for(mode, pair.prefill.worker)
    return (
        UNTOLD if mode is DpMode.FOLLOW else Ranks(routed=prefill),
        Ranks(routed=pair.decode.dp_rank, prefill=prefill if mode is DpMode.INJECT else None),
    )
