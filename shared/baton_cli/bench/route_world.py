"""A simulated fleet under one policy: events in virtual time, in the order of (time, number).

The run has four parts, and each request counts for the part in which it came:

    warm-up 20 % | calm 30 % | deaths 25 %: some workers die and come back empty | slow 25 %: some take several times as long
"""

import heapq
import random
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from baton_cli.bench.route_router import SimulatedRouter
from baton_cli.bench.route_trace import BLOCK_TOKENS, Arrival, Trace, TraceShape
from baton_cli.bench.route_workers import HANDOFF_S, DecodeMachine, Job, Machine, PrefillMachine, WorkerShape
from baton_cli.errors import UsageError
from baton_core.routing.pair import NoPair
from baton_core.routing.policies import PolicyName
from baton_core.routing.workers import Role, Target

PROBE_S = 1.0
TELL_EVERY = 1_000
WORKERS_MAX = 100_000


class Part(IntEnum):
    """Of a run."""

    WARM_UP = 0
    CALM = 1
    DEATHS = 2
    SLOW = 3


BEGINS = {Part.WARM_UP: 0.0, Part.CALM: 0.2, Part.DEATHS: 0.5, Part.SLOW: 0.75}
"""As shares of the run."""
OUTAGE_SHARE = 0.1
"""Of the run, that a dead worker takes to come back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetShape:
    """The fleet and what it goes through. `load`: share of prefill's rate when nothing is cached. Raises UsageError."""

    prefills: int = 500
    decodes: int = 500
    routers: int = 1
    load: float = 0.8
    death_share: float = 0.02
    slow_share: float = 0.05
    slow_factor: float = 4.0
    seed: int = 0
    worker: WorkerShape = field(default_factory=WorkerShape)
    trace: TraceShape = field(default_factory=TraceShape)

    def __post_init__(self) -> None:
        if min(self.prefills, self.decodes) < 1 or self.prefills + self.decodes > WORKERS_MAX:
            raise UsageError(f"at least one worker of each role, and at most {WORKERS_MAX:,} in all")
        if not 1 <= self.routers <= 100:
            raise UsageError(f"--routers must be 1 to 100, not {self.routers}")
        if not 0 < self.load <= 10:
            raise UsageError(f"--load must be above 0 and at most 10, not {self.load:g}")
        for name, share in (("death", self.death_share), ("slow", self.slow_share)):
            if not 0 <= share < 1:
                raise UsageError(f"--{name}-share must be at least 0 and below 1, not {share:g}")
        if not self.slow_factor >= 1:
            raise UsageError(f"--slow-factor must be at least 1, not {self.slow_factor:g}")

    @property
    def rate_per_s(self) -> float:
        """Requests a second."""
        tokens = self.trace.prompt_tokens_mean
        each_s = self.worker.prefill_overhead_s + tokens / self.worker.prefill_tokens_per_s
        return self.load * self.prefills / each_s


@dataclass(slots=True)
class Counts:
    """What became of the requests of one part."""

    ttft_s: "array[float]" = field(default_factory=lambda: array("d"))
    tpot_s: "array[float]" = field(default_factory=lambda: array("d"))
    prompt_tokens: int = 0
    hit_tokens: int = 0
    known_tokens: int = 0
    retried: int = 0
    failed: int = 0  # nobody could serve it, or not within the retries
    broken: int = 0  # its stream had begun when decode died


@dataclass(slots=True)
class Balance:
    """How even the calm part was, of one role: work done by each worker, and at each probe the fullest over the mean."""

    work: list[float]
    peaks: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Outcome:
    """Everything that a run measured. `chosen_s`: what each choice of a pair took of a real core."""

    parts: dict[Part, Counts]
    balance: dict[Role, Balance]
    chosen_s: "array[float]"
    virtual_s: float
    in_flight_left: int  # legs that were never ended: always 0


class World:
    """One run."""

    def __init__(self, shape: FleetShape, names: tuple[PolicyName, PolicyName], requests: int) -> None:
        self._shape = shape
        self._requests = requests
        self._rate_per_s = shape.rate_per_s
        self._length_s = requests / self._rate_per_s
        self._prefills = [PrefillMachine(_url(Role.PREFILL, n), shape.worker) for n in range(shape.prefills)]
        self._decodes = [DecodeMachine(_url(Role.DECODE, n), shape.worker) for n in range(shape.decodes)]
        self._by_role: dict[Role, Sequence[Machine]] = {Role.PREFILL: self._prefills, Role.DECODE: self._decodes}
        self._prefill_at = {machine.url: machine for machine in self._prefills}
        self._decode_at = {machine.url: machine for machine in self._decodes}
        self._chosen_s = array("d")
        self._routers = [
            SimulatedRouter(names, self._by_role, seed=f"router {n} {shape.seed}", chosen_s=self._chosen_s)
            for n in range(shape.routers)
        ]
        self._events: list[tuple[float, int, Callable[[Any, int, float], None], Any, int]] = []
        self._numbers = 0
        self._part = Part.WARM_UP
        self._parts = {part: Counts() for part in Part}
        self._balance = {role: Balance(work=[]) for role in Role}
        self._live = 0
        self._now_s = 0.0
        self._more_to_come = True

    def run(self, tell: Callable[[], None]) -> Outcome:
        """Serve all requests; `tell` is called after every thousandth, and may raise to end the run."""
        self._plan()
        spread = random.Random(f"spread {self._shape.seed}")
        trace = Trace(self._shape.trace, rate_per_s=self._rate_per_s, seed=self._shape.seed)
        for number, arrival in enumerate(_first(trace, self._requests), 1):
            self._until(arrival.at_s)
            router = 0 if len(self._routers) == 1 else spread.randrange(len(self._routers))
            self._live += 1
            self._try(Job(arrival, router=router, part=self._part), arrival.at_s)
            if number % TELL_EVERY == 0:
                tell()
        self._more_to_come = False
        self._until(float("inf"))
        left = sum(abs(load.in_flight) for router in self._routers for load in router.loads.values())
        return Outcome(
            parts=self._parts,
            balance=self._balance,
            chosen_s=self._chosen_s,
            virtual_s=self._now_s,
            in_flight_left=left + self._live,
        )

    # -- time

    def _until(self, at_s: float) -> None:
        events = self._events
        while events and events[0][0] <= at_s:
            self._now_s, _, handle, subject, epoch = heapq.heappop(events)
            handle(subject, epoch, self._now_s)

    def _at(self, at_s: float, handle: Callable[[Any, int, float], None], subject: Any, epoch: int) -> None:
        self._numbers += 1
        heapq.heappush(self._events, (at_s, self._numbers, handle, subject, epoch))

    def _plan(self) -> None:
        """Everything that does not depend on requests: parts, probes, faults."""
        chance = random.Random(f"faults {self._shape.seed}")
        for part, share in BEGINS.items():
            self._at(share * self._length_s, self._begin, part, 0)
        for number, router in enumerate(self._routers):
            self._at(PROBE_S * (1 + number / len(self._routers)), self._probe, router, 0)
        dies_s, outage_s = BEGINS[Part.DEATHS] * self._length_s, OUTAGE_SHARE * self._length_s
        for machines in self._by_role.values():
            for machine in chance.sample(machines, round(self._shape.death_share * len(machines))):
                self._at(dies_s, self._die, machine, 0)
                self._at(dies_s + outage_s, self._revive, machine, 0)
            for machine in chance.sample(machines, round(self._shape.slow_share * len(machines))):
                self._at(BEGINS[Part.SLOW] * self._length_s, self._slow_down, machine, 0)

    def _begin(self, part: Part, _epoch: int, _now_s: float) -> None:
        self._part = part
        if part in (Part.CALM, Part.DEATHS):
            for role, machines in self._by_role.items():
                before = self._balance[role].work or [0.0] * len(machines)
                self._balance[role].work = [machine.work - work for machine, work in zip(machines, before, strict=True)]

    def _probe(self, router: SimulatedRouter, _epoch: int, now_s: float) -> None:
        router.probe()
        if self._part is Part.CALM:
            for role, machines in self._by_role.items():
                counts = [len(machine.jobs) for machine in machines]
                if any(counts):
                    self._balance[role].peaks.append(max(counts) * len(counts) / sum(counts))
        if self._live or self._more_to_come:
            self._at(now_s + PROBE_S, self._probe, router, 0)

    # -- the way of a request

    def _try(self, job: Job, now_s: float) -> None:
        router = self._routers[job.router]
        pair = router.choose(job, now_s)
        if isinstance(pair, NoPair) or pair.prefill is None:
            self._fail(job)
            return
        job.pair = pair
        job.attempts += 1
        job.epoch += 1
        router.began(pair.prefill, now_s)
        router.began(pair.decode, now_s)
        prefill, decode = self._prefill_at[pair.prefill.worker.url], self._decode_at[pair.decode.worker.url]
        for machine in (prefill, decode):
            if not machine.alive:
                router.ended(pair.prefill)
                router.ended(pair.decode)
                self._again(job, machine.url, now_s)
                return
        prefill.jobs[job] = None
        decode.jobs[job] = None
        if decode.reserve(job):
            self._compute(job, now_s)

    def _compute(self, job: Job, now_s: float) -> None:
        prefill = self._prefill_at[_prefill_of(job).worker.url]
        self._at(prefill.compute(job, now_s), self._computed, job, job.epoch)

    def _computed(self, job: Job, epoch: int, now_s: float) -> None:
        if epoch != job.epoch:
            return
        assert job.pair is not None
        target, router = _prefill_of(job), self._routers[job.router]
        del self._prefill_at[target.worker.url].jobs[job]
        router.ended(target)
        router.served(target)
        job.first_s = now_s + HANDOFF_S
        decode = self._decode_at[job.pair.decode.worker.url]
        if decode.start(job, now_s):
            self._expect_end(decode, now_s)

    def _expect_end(self, decode: DecodeMachine, now_s: float) -> None:
        end_s = decode.next_end_s(now_s)
        if end_s is not None:
            self._at(end_s, self._decoded, decode, decode.version)

    def _decoded(self, decode: DecodeMachine, version: int, now_s: float) -> None:
        if version != decode.version:
            return
        for job in decode.ended(now_s):
            self._finish(job, now_s)
        self._admit(decode, now_s)
        self._expect_end(decode, now_s)

    def _admit(self, decode: DecodeMachine, now_s: float) -> None:
        for job in decode.admitted():
            self._compute(job, now_s)

    def _finish(self, job: Job, now_s: float) -> None:
        assert job.pair is not None
        router, arrival, counts = self._routers[job.router], job.arrival, self._parts[Part(job.part)]
        router.ended(job.pair.decode)
        router.served(job.pair.decode)
        self._live -= 1
        counts.ttft_s.append(job.first_s - arrival.at_s)
        counts.tpot_s.append((now_s - job.first_s) / arrival.output_tokens)
        counts.prompt_tokens += arrival.prompt_tokens
        counts.hit_tokens += job.hit_blocks * BLOCK_TOKENS
        counts.known_tokens += min(arrival.known_blocks, len(arrival.prefix) - 1) * BLOCK_TOKENS

    # -- faults

    def _die(self, machine: Machine, _epoch: int, now_s: float) -> None:
        for job in machine.die(now_s):
            assert job.pair is not None
            router, prefill, decode = self._routers[job.router], _prefill_of(job), job.pair.decode
            prefill_machine, decode_machine = self._prefill_at[prefill.worker.url], self._decode_at[decode.worker.url]
            had_begun = job.first_s >= 0
            job.epoch += 1
            if not had_begun:
                prefill_machine.jobs.pop(job, None)
                router.ended(prefill)
            router.ended(decode)
            if machine is not decode_machine:
                job.epoch -= 1  # as it is known there
                decode_machine.forget(job, now_s)
                job.epoch += 1
                self._admit(decode_machine, now_s)
            if had_begun:
                self._parts[Part(job.part)].broken += 1
                self._live -= 1
                router.failed(machine.url, now_s)
            else:
                self._again(job, machine.url, now_s)

    def _revive(self, machine: Machine, _epoch: int, now_s: float) -> None:
        machine.revive(now_s)

    def _slow_down(self, machine: Machine, _epoch: int, now_s: float) -> None:
        if isinstance(machine, DecodeMachine):
            machine.slow_down(self._shape.slow_factor, now_s)
            self._expect_end(machine, now_s)
        else:
            machine.factor = self._shape.slow_factor

    def _again(self, job: Job, url: str, now_s: float) -> None:
        router = self._routers[job.router]
        router.failed(url, now_s)
        if not router.may_retry(job):
            self._fail(job)
            return
        self._parts[Part(job.part)].retried += 1
        job.avoid = (*job.avoid, url)
        self._try(job, now_s)

    def _fail(self, job: Job) -> None:
        self._parts[Part(job.part)].failed += 1
        self._live -= 1


def _first(trace: Trace, count: int) -> Iterator[Arrival]:
    for _, arrival in zip(range(count), trace, strict=False):
        yield arrival


def _prefill_of(job: Job) -> Target:
    assert job.pair is not None and job.pair.prefill is not None
    return job.pair.prefill


def _url(role: Role, number: int) -> str:
    """As long as real ones: policies spend time on these texts."""
    return f"http://10.{1 if role is Role.PREFILL else 2}.{number // 250}.{number % 250}:8000"
