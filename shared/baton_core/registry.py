"""The registry's table: which prefill workers live, how their ranks are laid out, which room runs on which DP rank.

    PUT /route ── register ──> Accepted                            the rank is in the table
                          ├──> Refused(status, text)               conflicting layout, table full
                          └──> NeedsProbe(instance, address)       another life holds this name or address: the driver
                                                                   asks whether it still answers there, then either
                                                                   `drop`s it and registers again, or refuses (409)

An instance is one life (incarnation) of one prefill worker. It is *ready* when every distinct rank of its layout has
registered. It leaves by `deregister`, by `drop` (superseded), or when its lease runs out; without a lease (plain
SGLang) it stays. One DP rank of it may leave before the others (`deregister_unit`). Pure: time comes in as `now`, in
milliseconds of any monotonic clock.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from baton_core.limits import Millis, RegistryLimits
from baton_core.registration import (
    Endpoint,
    Layout,
    RankKey,
    RankRegistration,
    synthetic_incarnation,
    topology_body,
)
from baton_core.request import ROOM_MAX, Incarnation, Room


@dataclass(slots=True, kw_only=True)
class Instance:
    """One life of one prefill worker, as far as it has registered. Changed by the table only."""

    name: str
    incarnation: Incarnation | None  # None: the worker did not name its life
    layout: Layout
    fingerprint: str
    http_host: str
    http_port: int | None
    bootstrap_host: str | None
    bootstrap_port: int | None
    lease_ms: Millis | None
    expires_at: Millis | None
    topology: dict[str, object]
    endpoints: dict[RankKey, Endpoint] = field(default_factory=dict)
    lost_units: dict[int, None] = field(default_factory=dict)  # DP ranks that left while the others stay
    _synthetic: Incarnation | None = None

    @property
    def ready(self) -> bool:
        """Whether every distinct rank of the layout is here, or has left with its unit (keys are checked on the way in)."""
        return len(self.endpoints) + len(self.lost_units) * self.layout.unit_ranks == self.layout.ranks_total

    @property
    def life(self) -> Incarnation:
        """The incarnation, or one made from the rank addresses where the worker named none."""
        if self.incarnation is not None:
            return self.incarnation
        if self._synthetic is None:
            self._synthetic = synthetic_incarnation(self.endpoints[key] for key in sorted(self.endpoints))
        return self._synthetic

    def put(self, key: RankKey, endpoint: Endpoint) -> None:
        """Mutates: the rank listens here from now on; a repeat does not count twice."""
        self.lost_units.pop(key[0], None)
        self.endpoints[key] = endpoint
        self._synthetic = None

    def lose_unit(self, dp_rank: int) -> int:
        """Mutates: this DP rank is over while the others stay; how many of its ranks were here."""
        gone = [key for key in self.endpoints if key[0] == dp_rank]
        for key in gone:
            del self.endpoints[key]
        self.lost_units[dp_rank] = None
        return len(gone)


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """The rank is registered with `instance`."""

    instance: Instance


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """No; `status` is the HTTP status and `text` says what to do."""

    status: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NeedsProbe:
    """Another life holds this name or address. Is it still there? GET `/health` at this address tells.

    It lives if the answer's `x-baton-incarnation` equals `incarnation` (None: if the header is absent).
    """

    instance: str
    incarnation: Incarnation | None
    host: str
    port: int

    @property
    def still_alive(self) -> Refused:
        """The answer to the newcomer when the old life answered."""
        life = "a life without incarnation" if self.incarnation is None else f"incarnation {self.incarnation}"
        return Refused(
            status=409,
            text=f"instance {self.instance} ({life}) still answers at {self.host}:{self.port}; stop it, or start the "
            f"new worker under another instance name and address",
        )


@dataclass(frozen=True, slots=True)
class _RoomEntry:
    dp_rank: int
    expires_at: Millis


class RegistryTable:
    """All instances and rooms of one registry. `incarnation` names this life of the registry itself."""

    def __init__(self, incarnation: Incarnation, limits: RegistryLimits | None = None) -> None:
        self.incarnation = incarnation
        self.version = 0  # grows whenever an answer about a worker may differ from the one before
        self._limits = limits or RegistryLimits()
        self._instances: dict[str, Instance] = {}
        self._by_address: dict[tuple[str, int], str] = {}
        self._ranks_total = 0
        self._next_expiry: Millis | None = None  # no lease runs out before this
        # Keyed by (instance name or None, room). Oldest first: every entry lives equally long. An OrderedDict, because
        # finding the first key of a dict whose front was deleted takes time linear in what was deleted.
        self._rooms: OrderedDict[tuple[str | None, Room], _RoomEntry] = OrderedDict()

    # -- workers come and go

    def register(self, rank: RankRegistration, now: Millis) -> Accepted | Refused | NeedsProbe:
        """A rank announces itself. Mutates the table only when the answer is Accepted."""
        self.expire(now)
        instance = self._instances.get(rank.instance)
        if instance is not None and instance.incarnation != rank.incarnation:
            return self._contest(instance, rank, now)
        if instance is None:
            return self._register_new(rank, now)
        conflict = instance.layout.conflict_with(rank.layout) or _fingerprint_conflict(instance, rank)
        if conflict is not None:
            remedy = f"start all ranks alike, or DELETE /v1/instances/{instance.name} first"
            return Refused(status=400, text=f"instance {instance.name}: {conflict}; {remedy}")
        return self._accept(instance, rank, now)

    def drop(self, instance_name: str, incarnation: Incarnation | None) -> bool:
        """Forget this life (the driver found that it is gone). False if the table holds another one by now."""
        instance = self._instances.get(instance_name)
        if instance is None or instance.incarnation != incarnation:
            return False
        self._remove(instance)
        return True

    def renew(self, instance_name: str, incarnation: Incarnation | None, now: Millis) -> Instance | Refused:
        """Start the lease anew. Refused (404) where this life is unknown: the worker registers again."""
        self.expire(now)
        instance = self._known(instance_name, incarnation)
        if isinstance(instance, Instance):
            self._start_lease(instance, instance.lease_ms, now)
        return instance

    def deregister(self, instance_name: str, incarnation: Incarnation | None, now: Millis) -> Instance | Refused:
        """The worker leaves. With `incarnation` None whatever life is there is removed."""
        self.expire(now)
        instance = self._known(instance_name, incarnation)
        if isinstance(instance, Instance):
            self._remove(instance)
        return instance

    def deregister_unit(
        self, instance_name: str, incarnation: Incarnation | None, dp_rank: int, now: Millis
    ) -> Instance | Refused:
        """One DP rank of the worker is over; the others stay, and the worker counts as complete without it."""
        self.expire(now)
        instance = self._known(instance_name, incarnation)
        if not isinstance(instance, Instance):
            return instance
        if not 0 <= dp_rank < instance.layout.dp_size:
            text = f"dp_rank must be between 0 and {instance.layout.dp_size - 1}, not {dp_rank}"
            return Refused(status=400, text=text)
        self._ranks_total -= instance.lose_unit(dp_rank)
        self.version += 1
        return instance

    def expire(self, now: Millis) -> None:
        """Forget instances whose lease ran out, and rooms whose time is over. Cheap when nothing is due."""
        while self._rooms:
            if now < self._rooms[next(iter(self._rooms))].expires_at:
                break
            self._rooms.popitem(last=False)
        if self._next_expiry is None or now < self._next_expiry:
            return
        for instance in list(self._instances.values()):
            if instance.expires_at is not None and instance.expires_at <= now:
                self._remove(instance)
        self._next_expiry = min(
            (i.expires_at for i in self._instances.values() if i.expires_at is not None), default=None
        )

    # -- who asks

    def instances(self, now: Millis) -> list[Instance]:
        """Every instance, in order of its first registration."""
        self.expire(now)
        return list(self._instances.values())

    def select(self, instance_name: str | None, now: Millis) -> Instance | Refused | None:
        """The instance of this name, or the only one where none is named; None if no worker ever registered.

        Refused: 400 where the choice is ambiguous, 404 where the name is unknown.
        """
        self.expire(now)
        if instance_name is not None:
            return self._instances.get(instance_name) or self._unknown(instance_name)
        if len(self._instances) > 1:
            names = self._names()
            return Refused(status=400, text=f"this registry knows several instances; add instance= one of: {names}")
        return next(iter(self._instances.values()), None)

    def put_room(self, room: Room, dp_rank: int, instance_name: str | None, now: Millis) -> Refused | None:
        """This room runs on this prefill DP rank; kept `room_ms` from now."""
        self.expire(now)
        if not 0 <= room <= ROOM_MAX:
            return Refused(status=400, text=f"bootstrap_room must be between 0 and 2**63-1, not {room}")
        # A router may register a room before the worker's ranks: no instance is no reason to refuse.
        instance = self._instances.get(instance_name) if instance_name is not None else self._only()
        size = None if instance is None else instance.layout.dp_size
        if dp_rank < 0 or (size is not None and dp_rank >= size):
            allowed = "at least 0" if size is None else f"between 0 and {size - 1}"
            return Refused(status=400, text=f"dp_rank must be {allowed}, not {dp_rank}")
        key = (instance_name, room)
        self._rooms.pop(key, None)  # to the end: entries are kept oldest first
        if len(self._rooms) >= self._limits.rooms_max:
            return Refused(status=503, text=f"this registry already holds {self._limits.rooms_max} rooms (rooms_max)")
        self._rooms[key] = _RoomEntry(dp_rank, now + self._limits.room_ms)
        return None

    def close_room(self, room: Room, dp_rank: int, instance_name: str | None) -> None:
        """This room does not run there any more; nothing changes where it runs on another rank by now."""
        entry = self._rooms.get((instance_name, room))
        if entry is not None and entry.dp_rank == dp_rank:
            del self._rooms[instance_name, room]

    def dp_ranks(self, rooms: Iterable[Room], instance_name: str | None, now: Millis) -> dict[Room, int] | Refused:
        """DP rank of each room that is known; others are absent."""
        instance = self.select(instance_name, now)
        if isinstance(instance, Refused) and instance.status == 400:
            return instance
        name = instance.name if isinstance(instance, Instance) else instance_name
        found: dict[Room, int] = {}
        for room in rooms:
            # Who registered without naming the instance may mean this one.
            entry = self._rooms.get((name, room)) or self._rooms.get((None, room))
            if entry is not None:
                found[room] = entry.dp_rank
        return found

    @property
    def ranks_total(self) -> int:
        """Distinct ranks registered, over all instances."""
        return self._ranks_total

    def rooms(self) -> list[tuple[str | None, Room, int, Millis]]:
        """Every room held: the instance that was named with it, the room, its DP rank, and when it is forgotten."""
        return [(name, room, entry.dp_rank, entry.expires_at) for (name, room), entry in self._rooms.items()]

    @property
    def rooms_total(self) -> int:
        """Rooms held."""
        return len(self._rooms)

    # -- inside

    def _contest(self, holder: Instance, rank: RankRegistration, now: Millis) -> Accepted | Refused | NeedsProbe:
        """Another life holds the name or the address that `rank` claims."""
        if holder.http_port is not None:
            return NeedsProbe(
                instance=holder.name, incarnation=holder.incarnation, host=holder.http_host, port=holder.http_port
            )
        # Nowhere to ask: the newcomer is known to live, the holder is not.
        self._remove(holder)
        return self.register(rank, now)

    def _register_new(self, rank: RankRegistration, now: Millis) -> Accepted | Refused | NeedsProbe:
        http_host = rank.http_host or rank.endpoint.rank_ip
        if rank.prefill_http_port is not None:
            holder_name = self._by_address.get((http_host, rank.prefill_http_port))
            if holder_name is not None:
                return self._contest(self._instances[holder_name], rank, now)
        if rank.layout.ranks_total > self._limits.ranks_max:
            wanted = rank.layout.ranks_total
            return Refused(status=400, text=f"a layout of {wanted} ranks exceeds {self._limits.ranks_max} (ranks_max)")
        instance = Instance(
            name=rank.instance,
            incarnation=rank.incarnation,
            layout=rank.layout,
            fingerprint=rank.fingerprint,
            http_host=http_host,
            http_port=rank.prefill_http_port,
            bootstrap_host=rank.bootstrap_host,
            bootstrap_port=rank.bootstrap_port,
            lease_ms=rank.lease_ms,
            expires_at=None,
            topology=topology_body(rank.layout, rank.prefill_http_port),
        )
        return self._accept(instance, rank, now)

    def _accept(self, instance: Instance, rank: RankRegistration, now: Millis) -> Accepted | Refused:
        known = instance.endpoints.get(rank.key)
        new = known is None
        if new and self._ranks_total >= self._limits.ranks_max:
            return Refused(status=503, text=f"this registry already holds {self._limits.ranks_max} ranks (ranks_max)")
        self._instances[instance.name] = instance
        if instance.http_port is not None:
            self._by_address[(instance.http_host, instance.http_port)] = instance.name
        if known != rank.endpoint:
            instance.put(rank.key, rank.endpoint)
            self.version += 1
        self._ranks_total += new
        self._start_lease(instance, rank.lease_ms, now)
        return Accepted(instance=instance)

    def _start_lease(self, instance: Instance, lease_ms: Millis | None, now: Millis) -> None:
        instance.lease_ms = lease_ms
        instance.expires_at = None if lease_ms is None else now + lease_ms
        if instance.expires_at is not None:
            due = instance.expires_at
            self._next_expiry = due if self._next_expiry is None else min(self._next_expiry, due)

    def _remove(self, instance: Instance) -> None:
        del self._instances[instance.name]
        self.version += 1
        self._ranks_total -= len(instance.endpoints)
        if instance.http_port is not None:
            del self._by_address[(instance.http_host, instance.http_port)]

    def _known(self, instance_name: str, incarnation: Incarnation | None) -> Instance | Refused:
        instance = self._instances.get(instance_name)
        if instance is None:
            return self._unknown(instance_name)
        if incarnation is not None and incarnation != instance.life:
            text = f"instance {instance_name} is incarnation {instance.life} here, not {incarnation}"
            return Refused(status=404, text=text)
        return instance

    def _only(self) -> Instance | None:
        return next(iter(self._instances.values())) if len(self._instances) == 1 else None

    def _unknown(self, instance_name: str) -> Refused:
        return Refused(status=404, text=f"instance {instance_name} is not registered here; known: {self._names()}")

    def _names(self) -> str:
        names = list(self._instances)
        return (", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")) or "none"


def _fingerprint_conflict(instance: Instance, rank: RankRegistration) -> str | None:
    if instance.fingerprint == rank.fingerprint:
        return None
    return f"fingerprint is {instance.fingerprint!r} here, {rank.fingerprint!r} sent"
