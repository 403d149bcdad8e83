"""What one seed's world looks like: how many workers and requests, which limits, which faults and how often."""

from dataclasses import dataclass, replace
from random import Random

from baton_core.limits import Limits
from baton_core.ranks import Parallel
from baton_core.registration import FOLLOW

PROFILES = ("free", "calm", "network", "process", "all")
"""free: nobody but the clients misbehaves. calm: links and processes are well, single attempts fail. The rest: as named."""
_WEIGHTS = (15, 22, 22, 16, 25)
LARGE_EVERY = 100
MANY_EVERY = 2
"""One of so many worlds has units of several ranks."""
SIZES = tuple(
    (Parallel(tp=tp, pp=pp, cp=cp), tp * pp * cp)
    for tp in (1, 2, 3, 4, 5, 7)
    for pp in (1, 2, 3, 4)
    for cp in (1, 2)
    if tp * pp * cp <= 8
)
"""Layouts of one unit, and how many ranks each has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Chance of each fault where it could happen, 0 to 1."""

    frame_lost: float = 0.0
    frame_repeated: float = 0.0
    frame_late: float = 0.0
    transfer_slow: float = 0.0
    transfer_error: float = 0.0
    writer_stuck: float = 0.0
    reader_stuck: float = 0.0
    row_late: float = 0.0
    row_never: float = 0.0
    row_corrupt: float = 0.0
    step_failed: float = 0.0
    copy_failed: float = 0.0  # of each page, between pool and host
    lookup_failed: float = 0.0
    lookup_slow: float = 0.0
    lookup_stale: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Manners:
    """How clients behave: the chance, per request, of each bad habit."""

    colocated: float
    fake_host: float
    leg_missing: float
    leg_repeated: float
    room_reused: float
    stubborn: float  # a failed request is tried again at once, in the same room
    prompt_differs: float
    client_abort: float
    lone_abort: float  # the same, for requests without a peer
    intake_reject: float
    stop_here: float
    careless: float  # one leg failed; the router forgets to abort the other
    routed: float  # the router names a DP rank (where there are several)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One seed's world."""

    profile: str
    parallels: dict[str, Parallel]  # by worker
    balance: str  # how prefill's app chooses among its units
    layers: int
    kv_heads: int
    requests: int
    arrivals_ms: int
    heal_ms: int
    page_tokens: int  # on prefill
    decode_page_tokens: int
    prompt_most: int
    answer_most: int
    answer_least: int = 0
    context_tokens: int
    prefill_pages: int
    decode_pages: int
    limits: Limits
    backend: str
    latency_ms: int
    step_ms: int
    turn_ms: int  # how long a loop may take to wake up: what arrives meanwhile is handled in one turn
    channel_ms: int  # how long the log and its notes may be on their way inside a unit
    other_layouts: bool
    rates: Rates
    manners: Manners
    process_faults: int
    flushes: int
    aimed_aborts: int
    prefix_cache: bool
    decode_prefix_cache: bool
    conversations: float  # chance that a prompt goes on where an earlier answer ended

    @property
    def prefills(self) -> int:
        """Prefill workers."""
        return sum(1 for name in self.parallels if name[0] == "P")

    @property
    def decodes(self) -> int:
        """Decode workers."""
        return len(self.parallels) - self.prefills

    @property
    def decode_tokens(self) -> int:
        """Tokens that a decode unit's pool holds."""
        return self.decode_pages * self.decode_page_tokens

    @property
    def unit_lag_ms(self) -> int:
        """How long a word may take inside a unit of several ranks."""
        return 8 * self.channel_ms + 20 if any(one.members > 1 for one in self.parallels.values()) else 0

    @property
    def tells_in_time(self) -> bool:
        """Links and processes are well and no tombstone is evicted: each leg hears of the other's end at once."""
        well = (
            self.profile in ("free", "calm") and self.backend == "tcp"
        )  # the fake backend needs no prefill to succeed
        return well and self.limits.tombstones_max > self.requests


def draw_shape(seed: int, random: Random) -> Shape:
    """The world of a seed."""
    large = seed % LARGE_EVERY == LARGE_EVERY - 1
    many = not large and seed % MANY_EVERY == 0
    profile = random.choices(PROFILES, _WEIGHTS)[0]
    page_tokens = random.choice((1, 2, 3, 4, 8, 16, 16))
    decode_page_tokens = page_tokens if random.random() < 0.7 else random.choice((1, 2, 3, 4, 8, 16))
    prompt_most = random.choice((6, 20, 60)) if min(page_tokens, decode_page_tokens) > 1 else random.choice((6, 20))
    answer_most = random.choice((2, 4, 8))
    fits = -(-(prompt_most + answer_most) // page_tokens)
    decode_fits = -(-(prompt_most + answer_most) // decode_page_tokens)
    requests = random.randint(200, 260) if large else random.choice((5, 8, 10, 14, 20, 40))
    parallels = _units_of_many(random) if many else _units_of_one(random, large)
    together = any(one.dp_attention for one in parallels.values())
    limits, manners = _limits(random, profile), _manners(random)
    talk = Random(f"conversations {seed}")
    if many:  # a unit of several ranks needs a while to agree that its writers stopped
        limits = replace(limits, revoking_ms=2_000)
    if together and random.random() < 0.5:
        # Only units that wait for each other have requests between two steps, and only lone ones own no transfer then.
        limits = replace(limits, chunk_tokens=2)
        manners = replace(manners, colocated=0.2, fake_host=0.7)
    return Shape(
        profile=profile,
        parallels=parallels,
        balance=FOLLOW if random.random() < 0.7 else "round_robin",
        layers=max(2, *(one.pp for one in parallels.values())) if many else 1,
        kv_heads=_kv_heads(random, parallels),
        requests=min(requests, random.choice((3, 5, 8))) if many else requests,
        arrivals_ms=random.choice((300, 1_500, 3_000) if profile == "process" else (50, 300, 1_500))
        * (5 if large else 1),
        heal_ms=random.choice((1_000, 3_000)) * (2 if large else 1),
        page_tokens=page_tokens,
        decode_page_tokens=decode_page_tokens,
        prompt_most=prompt_most,
        answer_most=answer_most,
        context_tokens=random.choice((prompt_most, prompt_most + 2, prompt_most + answer_most + 1, 4_096)),
        prefill_pages=fits * random.choice((1, 2, 6)) + random.randint(0, 3),
        decode_pages=decode_fits * random.choice((1, 2, 6)) + random.randint(0, 3),
        limits=limits,
        backend="fake" if random.random() < 0.05 else "tcp",
        latency_ms=random.choice((0, 2, 2, 10, 30)),
        step_ms=random.choice((1, 5, 20)),
        turn_ms=random.choice((1, 3, 3, 15)),
        channel_ms=random.choice((0, 2, 10, 40)),
        other_layouts=random.random() < 0.05,
        rates=_rates(random, profile),
        manners=manners,
        flushes=random.choice((0, 0, 1, 2)),
        aimed_aborts=random.choice((5, 8) if together else (0, 1, 2)),
        prefix_cache=random.random() < 0.85,
        decode_prefix_cache=talk.random() < 0.85,
        conversations=talk.choice((0.0, 0.4, 0.9)),
        process_faults=random.randint(4, 12) if profile in ("process", "all") else 0,
    )


def _units_of_one(random: Random, large: bool) -> dict[str, Parallel]:
    """Workers whose units have one rank; some have several units."""
    names = [f"P{number}" for number in range(4 if large else random.randint(1, 3))]
    names += [f"D{number}" for number in range(4 if large else random.randint(1, 3))]
    return {name: _units(random, Parallel(), 0.3) for name in names}


def _units(random: Random, one: Parallel, likely: float) -> Parallel:
    """One unit, or two; some of these compute together (DP attention)."""
    if random.random() >= likely:
        return one
    return replace(one, dp=2, dp_attention=one.pp == 1 and random.random() < 0.6)


def _units_of_many(random: Random) -> dict[str, Parallel]:
    """A prefill and a decode worker (now and then two) with units of one to eight ranks each."""
    names = ["P0", "D0"] if random.random() < 0.8 else random.choice((["P0", "P1", "D0"], ["P0", "D0", "D1"]))
    parallels = {}
    for name in names:
        size = random.choice((1, 2, 2, 3, 4, 5, 6, 7, 8))
        fitting = [one for one, ranks in SIZES if ranks == size and (one.cp == 1 or name[0] == "P")]
        one = random.choice(fitting)
        parallels[name] = _units(random, one, 0.3 if size < 4 else 0.0)
    return parallels


def _kv_heads(random: Random, parallels: dict[str, Parallel]) -> int:
    """Heads of the model that every unit of the world can share."""
    sizes = {one.tp for one in parallels.values()}
    fitting = [heads for heads in (1, 2, 3, 4, 6, 12) if all(not heads % tp or not tp % heads for tp in sizes)]
    return random.choice(fitting) if max(sizes) > 1 else 1


def _limits(random: Random, profile: str) -> Limits:
    free = profile == "free"
    silent = random.choice((1_000, 5_000))
    return Limits(
        request_budget_ms=600_000 if free else random.choice((400, 3_000, 20_000, 60_000)),
        lookup_ms=random.choice((300, 2_000)),
        other_leg_ms=10_000 if free else random.choice((400, 2_000, 10_000)),
        transfer_stall_ms=5_000 if free else random.choice((400, 5_000)),
        revoking_ms=random.choice((100, 2_000)),
        control_collective_ms=random.choice((300, 2_000, 10_000)),
        heartbeat_ms=silent // 5,
        link_silent_ms=silent,
        link_resend_ms=random.choice((60, 200)),
        link_window=4_096 if profile in ("free", "calm") else random.choice((8, 64, 4_096)),
        tombstone_ms=random.choice((1_000, 60_000)),
        tombstones_max=random.choice((3, 65_536)),
        orphan_hellos_max=4_096 if free else random.choice((2, 4_096)),
        waiting_max=2_048 if free else random.choice((4, 2_048, 2_048)),
        running_max=random.choice((1, 1, 3, 64)),
        metadata_rows=random.choice((1, 3, 256)),
        chunk_tokens=random.choice((2, 5, 8, 512)),
    )


def _rates(random: Random, profile: str) -> Rates:
    def some(most: float, likely: float = 0.4) -> float:
        return most * random.random() if random.random() < likely else 0.0

    if profile == "free":
        return Rates()
    network = profile in ("network", "all")
    single = profile in ("calm", "all") or random.random() < 0.3
    return Rates(
        frame_lost=some(0.4, 0.7) if network else 0.0,
        frame_repeated=some(0.3, 0.7) if network else 0.0,
        frame_late=some(0.3, 0.7) if network else 0.0,
        transfer_slow=some(0.1) if network or single else 0.0,
        transfer_error=some(0.2) if single else 0.0,
        writer_stuck=some(0.1) if network or single else 0.0,
        reader_stuck=some(0.1) if network or single else 0.0,
        row_late=some(0.4) if single else 0.0,
        row_never=some(0.1) if single else 0.0,
        row_corrupt=some(0.2) if single else 0.0,
        step_failed=some(0.05) if single else 0.0,
        lookup_failed=some(0.2) if single else 0.0,
        lookup_slow=some(0.3) if single else 0.0,
        lookup_stale=some(0.8, 0.9) if profile in ("process", "all") else 0.0,
    )


def _manners(random: Random) -> Manners:
    def habit(most: float) -> float:
        return most * random.random() if random.random() < 0.5 else 0.0

    return Manners(
        colocated=habit(0.4),
        fake_host=habit(0.5),
        leg_missing=habit(0.2),
        leg_repeated=habit(0.15),
        room_reused=habit(0.4),
        stubborn=random.choice((0.0, 0.0, 0.5)),
        prompt_differs=habit(0.1),
        client_abort=habit(0.5),
        lone_abort=random.choice((0.0, 0.4, 0.9)),
        intake_reject=habit(0.2),
        stop_here=habit(0.4),
        careless=random.choice((0.0, 0.2, 1.0)),
        routed=random.choice((0.0, 0.3, 0.6)),
    )
