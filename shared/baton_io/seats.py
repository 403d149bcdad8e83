"""Who is who at a ROUTER where a known number of siblings meet.

A name that a peer gives itself, any stranger can give itself, too; and libzmq keeps the connection of the second of a name,
unread and for ever (`ZMQ_ROUTER_HANDOVER` off), or lets it have the first one's messages (on). So siblings give themselves
no name: the ROUTER draws one for each connection, which nobody else learns, and who has it says so in its first message.
Handover is on for the sake of names that strangers give themselves: whoever takes one ends the other.
"""

from collections.abc import Iterable

import zmq


class Seats:
    """The siblings that have come, by the name of their connection. A seat is taken once."""

    def __init__(self, seats: Iterable[int]) -> None:
        self._free = set(seats)
        self._by_name: dict[bytes, int] = {}
        self._names: dict[int, bytes] = {}

    @property
    def missing(self) -> list[int]:
        """Who has not come yet."""
        return sorted(self._free)

    @property
    def names(self) -> dict[int, bytes]:
        """The name of each sibling that has come."""
        return self._names

    def of(self, name: bytes) -> int | None:
        """Who has this name; None for a stranger."""
        return self._by_name.get(name)

    def take(self, name: bytes, seat: int) -> bool:
        """Whoever has this name says it is `seat`; whether it is: a stranger's claim to no seat, or a taken one, is none."""
        if seat not in self._free or name in self._by_name:
            return False
        self._free.remove(seat)
        self._by_name[name], self._names[seat] = seat, name
        return True


def open_router(context: "zmq.Context[zmq.Socket[bytes]]") -> "zmq.Socket[bytes]":
    """A ROUTER that names its peers itself and says where one is gone (EHOSTUNREACH) or takes nothing (EAGAIN)."""
    router: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    router.setsockopt(zmq.ROUTER_HANDOVER, 1)
    return router
