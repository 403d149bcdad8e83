"""One router of a simulated fleet: the real policies, pair choice, breakers and retry budget, told what a router is told.

It mirrors `baton_router.directory` and `road`, which need sockets: load is its own legs, corrected by what workers say at
each probe; a refused connection makes a worker unready until it is probed; failures count on its breaker.
"""

import random
import time
from array import array
from collections.abc import Mapping, Sequence

from baton_cli.bench.route_workers import Job, Machine
from baton_core.routing.breaker import (
    RETRIES,
    RETRIES_BURST,
    RETRIES_PER_REQUEST,
    Breaker,
    BreakerLimits,
    BreakerState,
    RetryBudget,
)
from baton_core.routing.pair import Draws, Fleet, NoPair, Pair, Policies
from baton_core.routing.policies import Ask, PolicyName, make_policy
from baton_core.routing.workers import Load, Role, Target, Worker, WorkerState

DRAW_BITS = 62


class SimulatedRouter:
    """Chooses pairs, and keeps the books that choices are made from."""

    def __init__(
        self,
        names: tuple[PolicyName, PolicyName],
        machines: Mapping[Role, Sequence[Machine]],
        *,
        seed: str,
        chosen_s: "array[float]",
    ) -> None:
        """Every choice appends the time that it took to `chosen_s`."""
        self._random = random.Random(seed)
        self._chosen_s = chosen_s
        self._policies = Policies(prefill=make_policy(names[0]), decode=make_policy(names[1]))
        self._machines = [(role, machine) for role, several in machines.items() for machine in several]
        self._roles = {machine.url: role for role, machine in self._machines}
        self._lives = {machine.url: machine.life for _, machine in self._machines}
        self._usable = dict.fromkeys(self._roles, True)
        self._breakers: dict[str, Breaker] = {}
        self._budget = RetryBudget(per_request=RETRIES_PER_REQUEST, burst=RETRIES_BURST)
        self.loads: dict[str, Load] = {url: Load() for url in self._roles}
        self._fleet = self._built()

    # -- the road of a request

    def choose(self, job: Job, now_s: float) -> Pair | NoPair:
        """A pair for the first attempt, or for another one that avoids who failed before."""
        if not job.attempts:
            self._budget.earn()
        arrival = job.arrival
        ask = Ask(session=arrival.session, prefix=arrival.prefix, prompt_tokens=arrival.prompt_tokens)
        draws = Draws(prefill=self._random.getrandbits(DRAW_BITS), decode=self._random.getrandbits(DRAW_BITS))
        blocked, avoid = self._blocked(now_s), job.avoid
        avoided = (lambda url: url in blocked or url in avoid) if blocked or avoid else None
        began_s = time.thread_time()  # not the wall's: what other programs take of the core is no policy's fault
        pair = self._fleet.choose(self._policies, ask, self.loads, draws, avoid=avoided)
        self._chosen_s.append(time.thread_time() - began_s)
        return pair

    def may_retry(self, job: Job) -> bool:
        """Whether one more attempt is within both bounds."""
        return job.attempts <= RETRIES and self._budget.spend()

    def began(self, target: Target, now_s: float) -> None:
        """A leg of ours goes there."""
        self.loads[target.key].in_flight += 1
        breaker = self._breakers.get(target.worker.url)
        if breaker is not None:
            breaker.sent(_ms(now_s))

    def ended(self, target: Target) -> None:
        """A leg of ours is over, one way or another."""
        self.loads[target.key].in_flight -= 1

    def served(self, target: Target) -> None:
        """It was over in a good way."""
        self._breakers.pop(target.worker.url, None)

    def failed(self, url: str, now_s: float) -> None:
        """A leg was refused or lost: it counts on the breaker, and the worker is unready until a probe finds it back.

        A router probes a worker that lost a leg at once, which takes no time here.
        """
        breaker = self._breakers.setdefault(url, Breaker(BreakerLimits()))
        breaker.failed(_ms(now_s))
        if self._usable[url]:
            self._usable[url] = False
            self._fleet = self._built()

    # -- probes

    def probe(self) -> None:
        """Every worker says how much it has, or that it is not there."""
        changed = False
        for _, machine in self._machines:
            url = machine.url
            if machine.alive:
                self.loads[url].report(requests=len(machine.jobs), kv_tokens_free=machine.kv_tokens_free)
            if machine.life != self._lives[url]:
                self._lives[url] = machine.life
                self._breakers.pop(url, None)
            if machine.alive is not self._usable[url]:
                self._usable[url] = machine.alive
                changed = True
        if changed:
            self._fleet = self._built()

    def _blocked(self, now_s: float) -> Sequence[str]:
        if not self._breakers:
            return ()
        now = _ms(now_s)
        return [
            url
            for url, one in self._breakers.items()
            if one.state(now) is not BreakerState.CLOSED and not one.admits(now)
        ]

    def _built(self) -> Fleet:
        workers: dict[Role, list[Worker]] = {Role.PREFILL: [], Role.DECODE: []}
        for url, role in self._roles.items():
            state = WorkerState.READY if self._usable[url] else WorkerState.UNREADY
            reason = "" if self._usable[url] else "refused"
            workers[role].append(Worker(url=url, role=role, fingerprint="same", state=state, reason=reason))
        return Fleet(workers[Role.PREFILL], workers[Role.DECODE])


def _ms(now_s: float) -> int:
    return int(now_s * 1000)
