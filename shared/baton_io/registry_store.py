"""Where a registry's writes go: straight into its table, or, with replicas, through a log that all of them apply.

A write is a value. Applied to equal tables in the same order, with the same times, it leaves equal tables: that is all a
replicated store relies on.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from baton_core.errors import PeerError, Reason
from baton_core.limits import Millis
from baton_core.registration import RankRegistration
from baton_core.registry import Accepted, Instance, NeedsProbe, Refused, RegistryTable
from baton_core.request import Incarnation, Room
from baton_io.codec import Codec


@dataclass(frozen=True, slots=True, kw_only=True)
class Register:
    """A rank announces itself."""

    rank: RankRegistration


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """A life of a worker was found to be gone."""

    instance: str
    incarnation: Incarnation | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Renew:
    """A worker still lives."""

    instance: str
    incarnation: Incarnation | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Deregister:
    """A worker leaves, or only one DP rank of it."""

    instance: str
    incarnation: Incarnation | None
    dp_rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PutRooms:
    """Rooms run on DP ranks; others that ran are over."""

    instance: str | None
    rooms: tuple[tuple[Room, int], ...]
    over: tuple[tuple[Room, int], ...] = ()


Write = Register | Drop | Renew | Deregister | PutRooms
Outcome = Accepted | Refused | NeedsProbe | Instance | bool | None

WRITES = Codec({1: Register, 2: Drop, 3: Renew, 4: Deregister, 5: PutRooms})
"""Writes as bytes, for a log."""


class StoreAway(PeerError):
    """The store that replicas share does not answer: nothing can be written now."""

    default_reason = Reason.LOOKUP_FAILED


class Store(Protocol):
    """A table, its clock, and the way to change it."""

    generation: int  # grows when the table is replaced by another

    @property
    def table(self) -> RegistryTable:
        """For reading only."""
        ...

    @property
    def is_up(self) -> bool:
        """Whether writes can be had."""
        ...

    def now(self) -> Millis:
        """The clock of the table's leases."""
        ...

    async def write(self, write: Write) -> Outcome:
        """Apply, and say what came of it. Raises StoreAway."""
        ...


class OwnStore:
    """Of a registry by itself."""

    generation = 0
    is_up = True

    def __init__(self, table: RegistryTable, clock: Callable[[], Millis]) -> None:
        self.table = table
        self.now = clock

    async def write(self, write: Write) -> Outcome:
        """See `Store`."""
        return apply(self.table, write, self.now())


def apply(table: RegistryTable, write: Write, now: Millis) -> Outcome:
    """Mutates the table."""
    match write:
        case Register():
            return table.register(write.rank, now)
        case Drop():
            return table.drop(write.instance, write.incarnation)
        case Renew():
            return table.renew(write.instance, write.incarnation, now)
        case Deregister(dp_rank=None):
            return table.deregister(write.instance, write.incarnation, now)
        case Deregister():
            assert write.dp_rank is not None
            return table.deregister_unit(write.instance, write.incarnation, write.dp_rank, now)
        case PutRooms():
            for room, dp_rank in write.over:
                table.close_room(room, dp_rank, write.instance)
            told = [table.put_room(room, dp_rank, write.instance, now) for room, dp_rank in write.rooms]
            return next((one for one in told if one is not None), None)


def history(table: RegistryTable, now: Millis, room_ms: Millis) -> Iterator[tuple[Millis, Write]]:
    """Writes that turn an empty table into this one, each with the time at which to apply it."""
    for instance in table.instances(now):
        began = (
            now if instance.lease_ms is None or instance.expires_at is None else instance.expires_at - instance.lease_ms
        )
        for (dp_rank, cp_rank, tp_rank, pp_rank), endpoint in instance.endpoints.items():
            rank = RankRegistration(
                layout=instance.layout,
                dp_rank=dp_rank,
                cp_rank=cp_rank,
                tp_rank=tp_rank,
                pp_rank=pp_rank,
                endpoint=endpoint,
                prefill_http_port=instance.http_port,
                http_host=instance.http_host,
                instance=instance.name,
                incarnation=instance.incarnation,
                fingerprint=instance.fingerprint,
                lease_ms=instance.lease_ms,
                bootstrap_host=instance.bootstrap_host,
                bootstrap_port=instance.bootstrap_port,
            )
            yield began, Register(rank=rank)
        for dp_rank in instance.lost_units:
            yield began, Deregister(instance=instance.name, incarnation=instance.incarnation, dp_rank=dp_rank)
    for name, room, dp_rank, expires_at in table.rooms():
        yield expires_at - room_ms, PutRooms(instance=name, rooms=((room, dp_rank),))
