"""What a role adds to the common worker."""

from typing import Protocol

from baton_core.effects import LookUp, RegisterRank
from baton_core.errors import Verdict
from baton_core.events import LookupFailed, Resolved
from baton_core.request import Incarnation, Room
from baton_io.ipc import RankReady


class Companion(Protocol):
    """What each role has."""

    def check_host(self, host: str, port: int) -> Verdict | None:
        """Why requests may not name this bootstrap address; None if they may."""

    def unready(self) -> list[str]:
        """Why the worker is not ready yet, for people; empty when nothing is missing."""

    async def attend(self, readies: tuple[RankReady, ...]) -> None:
        """Run while the ranks serve. Cancelled after the last request: the time to say goodbye to others."""

    async def look_up(self, lookup: LookUp) -> Resolved | LookupFailed:
        """Find the prefill worker of a room."""

    def forget(self, peers: tuple[Incarnation, ...]) -> None:
        """What is cached about the workers of these ranks is stale."""


class Announcer(Protocol):
    """What a role has that registries know (prefill)."""

    def register(self, rooms: tuple[RegisterRank, ...]) -> None:
        """These rooms run on these DP ranks; never blocks."""

    def close_room(self, room: Room, *, went_well: bool) -> None:
        """The room's request is over: register it no more. Where it went well nobody will ask for it."""

    def unit_lost(self, dp_rank: int) -> None:
        """A unit is gone for good, while others still serve."""
