"""Workers of a simulated fleet: what a request costs on them, in virtual time. Mechanics only, no choice is made here.

    prefill   one prompt after the other; blocks it has computed before are free; the longest unused are forgotten
    decode    a batch whose step takes longer the more sequences are in it; pages are reserved before prefill begins

The law of pages in short: a request takes its room on decode first, prompt and longest answer, and waits there for it.
"""

import heapq
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from baton_cli.bench.route_trace import BLOCK_TOKENS, Arrival
from baton_cli.errors import UsageError
from baton_core.routing.pair import Pair

HANDOFF_S = 0.005
"""From the end of prefill to decode's first token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerShape:
    """What one worker can do: the defaults are an 8B model on a GPU of the 48 GB class. Raises UsageError."""

    prefill_tokens_per_s: float = 8_000.0
    prefill_overhead_s: float = 0.012
    cache_tokens: int = 131_072  # of prompts that a prefill worker keeps
    step_s: float = 0.022
    step_each_s: float = 0.00025
    running_max: int = 64
    kv_tokens: int = 196_608  # of a decode worker

    def __post_init__(self) -> None:
        if not self.prefill_tokens_per_s > 0:
            raise UsageError(f"--prefill-tokens-per-second must be above 0, not {self.prefill_tokens_per_s:g}")
        if not self.step_s > 0:
            raise UsageError(f"--step-ms must be above 0, not {self.step_s * 1000:g}")
        if self.cache_tokens < 0:
            raise UsageError(f"--cache-tokens must not be negative, not {self.cache_tokens}")
        if self.kv_tokens < 16_384:
            raise UsageError(f"--kv-tokens must be at least 16,384: the longest request, not {self.kv_tokens}")


class Job:
    """One request on its way. `epoch` grows with every attempt: what still happens for an older one is void."""

    __slots__ = ("arrival", "attempts", "avoid", "epoch", "first_s", "hit_blocks", "pair", "part", "router")

    def __init__(self, arrival: Arrival, *, router: int, part: int) -> None:
        self.arrival = arrival
        self.router = router
        self.part = part  # of the run, in which it came
        self.epoch = 0
        self.attempts = 0
        self.avoid: tuple[str, ...] = ()
        self.pair: Pair | None = None
        self.hit_blocks = 0
        self.first_s = -1.0  # of its first token

    @property
    def reserved_tokens(self) -> int:
        """What it takes of a decode pool."""
        return self.arrival.prompt_tokens + self.arrival.output_tokens


class Machine:
    """What the two kinds have in common. `factor`: how many times slower than it should be."""

    def __init__(self, url: str, shape: WorkerShape) -> None:
        self.url = url
        self.shape = shape
        self.alive = True
        self.factor = 1.0
        self.life = 1
        self.jobs: dict[Job, None] = {}
        self.work = 0.0  # computed: prompt tokens, or tokens of answers

    @property
    def kv_tokens_free(self) -> int | None:
        """What it tells routers; None: nothing."""
        return None

    def die(self, _now_s: float) -> list[Job]:
        """Everything on it is lost; returns whose requests those were."""
        self.alive = False
        self.life += 1
        lost = list(self.jobs)
        self.jobs.clear()
        return lost

    def revive(self, _now_s: float) -> None:
        """A new life, with nothing of the old one."""
        self.alive = True


class PrefillMachine(Machine):
    """Prompts one after the other."""

    def __init__(self, url: str, shape: WorkerShape) -> None:
        super().__init__(url, shape)
        self._free_at_s = 0.0
        # In order of last use. An OrderedDict, because a plain one steps over everything that was taken from its front.
        self._cache: OrderedDict[bytes, None] = OrderedDict()
        self._blocks_max = shape.cache_tokens // BLOCK_TOKENS

    def compute(self, job: Job, now_s: float) -> float:
        """When the prompt will be computed. What came before it is computed first, so its blocks are there by then."""
        prefix = job.arrival.prefix
        job.hit_blocks = self._hits(prefix)
        self._keep(prefix)
        tokens = BLOCK_TOKENS * (len(prefix) - job.hit_blocks)
        self.work += tokens
        took_s = self.factor * (self.shape.prefill_overhead_s + tokens / self.shape.prefill_tokens_per_s)
        self._free_at_s = max(now_s, self._free_at_s) + took_s
        return self._free_at_s

    def revive(self, now_s: float) -> None:
        """Its cache is empty."""
        super().revive(now_s)
        self._cache.clear()
        self._free_at_s = now_s

    def _hits(self, prefix: Sequence[bytes]) -> int:
        """Leading blocks that it has; never the whole prompt, whose last token must be computed."""
        hits = 0
        for block in prefix[:-1]:
            if block not in self._cache:
                break
            hits += 1
        return hits

    def _keep(self, prefix: Sequence[bytes]) -> None:
        cache = self._cache
        for block in reversed(prefix):  # the end of a prompt is forgotten before its beginning
            if block in cache:
                cache.move_to_end(block)
            else:
                cache[block] = None
        while len(cache) > self._blocks_max:
            cache.popitem(last=False)


class DecodeMachine(Machine):
    """One batch. `clock` counts steps, so that a sequence's end is a fixed number however fast the steps are."""

    def __init__(self, url: str, shape: WorkerShape) -> None:
        super().__init__(url, shape)
        self._room_tokens = shape.kv_tokens
        self._for_room: deque[tuple[Job, int]] = deque()  # with the epoch in which they came
        self._for_slot: deque[Job] = deque()
        self._running: list[tuple[float, int, Job]] = []
        self._clock = 0.0
        self._seen_s = 0.0
        self._pushed = 0
        self.version = 0  # grows whenever the next end may have moved

    @property
    def kv_tokens_free(self) -> int | None:
        """Room that is not reserved."""
        return self._room_tokens

    def reserve(self, job: Job) -> bool:
        """Take room for it, or let it wait: a later `ended` or `forget` then returns it."""
        if not self._for_room and job.reserved_tokens <= self._room_tokens:
            self._room_tokens -= job.reserved_tokens
            return True
        self._for_room.append((job, job.epoch))
        return False

    def start(self, job: Job, now_s: float) -> bool:
        """Its prompt is here: it runs (True: the batch has changed), or waits for a place in the batch."""
        self._advance(now_s)
        if len(self._running) >= self.shape.running_max:
            self._for_slot.append(job)
            return False
        self._push(job)
        return True

    def next_end_s(self, now_s: float) -> float | None:
        """When the next sequence ends, if nothing changes until then."""
        if not self._running:
            return None
        steps = self._running[0][0] - self._clock
        return now_s + max(0.0, steps) * self._step_s()

    def ended(self, now_s: float) -> list[Job]:
        """Those that end now; others take their places in the batch."""
        self._advance(now_s)
        ended = []
        while self._running and self._running[0][0] <= self._clock + 1e-6:
            job = heapq.heappop(self._running)[2]
            del self.jobs[job]
            self._room_tokens += job.reserved_tokens
            self.work += job.arrival.output_tokens
            ended.append(job)
        self._fill()
        return ended

    def forget(self, job: Job, now_s: float) -> None:
        """It was reserved here and will not come: its other leg is lost. Its room is free."""
        self._advance(now_s)
        self.jobs.pop(job, None)
        if any(waiting is job and epoch == job.epoch for waiting, epoch in self._for_room):
            self._for_room = deque(one for one in self._for_room if one[0] is not job)
            return
        self._room_tokens += job.reserved_tokens

    def admitted(self) -> list[Job]:
        """Those that waited for room and have it now, in order."""
        admitted = []
        while self._for_room and self._for_room[0][0].reserved_tokens <= self._room_tokens:
            job, _ = self._for_room.popleft()
            self._room_tokens -= job.reserved_tokens
            admitted.append(job)
        return admitted

    def slow_down(self, factor: float, now_s: float) -> None:
        """From now on each step takes `factor` times as long as it should."""
        self._advance(now_s)
        self.factor = factor
        self.version += 1

    def die(self, now_s: float) -> list[Job]:
        """Nothing is left."""
        lost = super().die(now_s)
        self._room_tokens = self.shape.kv_tokens
        self._for_room.clear()
        self._for_slot.clear()
        self._running.clear()
        self.version += 1
        return lost

    def _advance(self, now_s: float) -> None:
        if self._running:
            self._clock += (now_s - self._seen_s) / self._step_s()
        self._seen_s = now_s

    def _step_s(self) -> float:
        return self.factor * (self.shape.step_s + self.shape.step_each_s * len(self._running))

    def _push(self, job: Job) -> None:
        self._pushed += 1
        heapq.heappush(self._running, (self._clock + job.arrival.output_tokens, self._pushed, job))
        self.version += 1

    def _fill(self) -> None:
        while self._for_slot and len(self._running) < self.shape.running_max:
            self._push(self._for_slot.popleft())
        self.version += 1
