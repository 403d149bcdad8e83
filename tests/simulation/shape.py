"""What one seed's world looks like: how many workers and requests, which limits, which faults and how often."""

from dataclasses import dataclass
from random import Random

from baton_core.limits import Limits

PROFILES = ("free", "calm", "network", "process", "all")
"""free: nobody but the clients misbehaves. calm: links and processes are well, single attempts fail. The rest: as named."""
_WEIGHTS = (15, 22, 22, 16, 25)
LARGE_EVERY = 100


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One seed's world."""

    profile: str
    prefills: int
    decodes: int
    requests: int
    arrivals_ms: int
    heal_ms: int
    page_tokens: int
    prompt_most: int
    answer_most: int
    context_tokens: int
    prefill_pages: int
    decode_pages: int
    limits: Limits
    backend: str
    latency_ms: int
    step_ms: int
    turn_ms: int  # how long a loop may take to wake up: what arrives meanwhile is handled in one turn
    plan_late: float  # chance that a turn leaves planning to the next one
    other_layouts: bool
    other_ranks: bool
    rates: Rates
    manners: Manners
    process_faults: int
    flushes: int
    prefix_cache: bool

    @property
    def tells_in_time(self) -> bool:
        """Links and processes are well and no tombstone is evicted: each leg hears of the other's end at once."""
        return self.profile in ("free", "calm") and self.limits.tombstones_max > self.requests


def draw_shape(seed: int, random: Random) -> Shape:
    """The world of a seed."""
    large = seed % LARGE_EVERY == LARGE_EVERY - 1
    profile = random.choices(PROFILES, _WEIGHTS)[0]
    page_tokens = random.choice((1, 2, 3, 4, 8, 16, 16))
    prompt_most = random.choice((6, 20, 60)) if page_tokens > 1 else random.choice((6, 20))
    answer_most = random.choice((2, 4, 8))
    fits = -(-(prompt_most + answer_most) // page_tokens)
    requests = random.randint(200, 260) if large else random.choice((5, 8, 10, 14, 20, 40))
    return Shape(
        profile=profile,
        prefills=4 if large else random.randint(1, 3),
        decodes=4 if large else random.randint(1, 3),
        requests=requests,
        arrivals_ms=random.choice((300, 1_500, 3_000) if profile == "process" else (50, 300, 1_500))
        * (5 if large else 1),
        heal_ms=random.choice((1_000, 3_000)) * (2 if large else 1),
        page_tokens=page_tokens,
        prompt_most=prompt_most,
        answer_most=answer_most,
        context_tokens=random.choice((prompt_most, prompt_most + 2, prompt_most + answer_most + 1, 4_096)),
        prefill_pages=fits * random.choice((1, 2, 6)) + random.randint(0, 3),
        decode_pages=fits * random.choice((1, 2, 6)) + random.randint(0, 3),
        limits=_limits(random, profile),
        backend="fake" if random.random() < 0.05 else "tcp",
        latency_ms=random.choice((0, 2, 2, 10, 30)),
        step_ms=random.choice((1, 5, 20)),
        turn_ms=random.choice((1, 3, 3, 15)),
        plan_late=random.choice((0.0, 0.0, 0.85)),
        other_layouts=random.random() < 0.05,
        other_ranks=random.random() < 0.05,
        rates=_rates(random, profile),
        manners=_manners(random),
        flushes=random.choice((0, 0, 0, 2)),
        prefix_cache=random.random() < 0.85,
        process_faults=random.randint(1, 3) if profile in ("process", "all") else 0,
    )


def _limits(random: Random, profile: str) -> Limits:
    free = profile == "free"
    silent = random.choice((1_000, 5_000))
    return Limits(
        request_budget_ms=600_000 if free else random.choice((400, 3_000, 20_000, 60_000)),
        lookup_ms=random.choice((300, 2_000)),
        other_leg_ms=10_000 if free else random.choice((400, 2_000, 10_000)),
        transfer_stall_ms=5_000 if free else random.choice((400, 5_000)),
        revoking_ms=random.choice((100, 2_000)),
        heartbeat_ms=silent // 5,
        link_silent_ms=silent,
        link_resend_ms=random.choice((60, 200)),
        link_window=4_096 if profile in ("free", "calm") else random.choice((8, 64, 4_096)),
        tombstone_ms=random.choice((1_000, 60_000)),
        tombstones_max=random.choice((3, 65_536)),
        orphan_hellos_max=4_096 if free else random.choice((2, 4_096)),
        waiting_max=2_048 if free else random.choice((4, 2_048, 2_048)),
        running_max=random.choice((1, 3, 64)),
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
    )
