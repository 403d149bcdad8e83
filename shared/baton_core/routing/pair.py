"""The joint choice of the two workers of a request: the second is chosen among those that fit the first."""

from collections.abc import Sequence
from dataclasses import dataclass

from baton_core.routing.policies import Policy
from baton_core.routing.workers import Role, Worker, compatible

NAMED_MAX = 4
"""Workers named in a refusal; the rest is counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Who serves a request. `prefill` None: decode serves it alone (colocated)."""

    prefill: Worker | None
    decode: Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class NoPair:
    """Nobody can serve a request now; `reason` says which role is missing and why."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """Fresh randomness for one choice: non-negative integers of 32 bits or more."""

    prefill: int
    decode: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Policies:
    """The policy of each role."""

    prefill: Policy
    decode: Policy


def choose_pair(
    prefills: Sequence[Worker],
    decodes: Sequence[Worker],
    policies: Policies,
    draws: Draws,
    *,
    avoid: tuple[str, ...] = (),
) -> Pair | NoPair:
    """Choose among usable workers whose urls are not in `avoid`; only pairs with compatible fingerprints.

    Mutates the policies' memory only when there is a pair. No prefill worker known at all means colocated mode: a
    decode worker alone.
    """
    able_decodes = [worker for worker in decodes if worker.usable and worker.url not in avoid]
    if not able_decodes:
        return NoPair(reason=_missing(Role.DECODE, decodes, avoid))
    if not prefills:
        return Pair(prefill=None, decode=policies.decode.choose(able_decodes, draws.decode))
    able_prefills = [worker for worker in prefills if worker.usable and worker.url not in avoid]
    if not able_prefills:
        return NoPair(reason=_missing(Role.PREFILL, prefills, avoid))
    matched = [one for one in able_prefills if any(compatible(one, other) for other in able_decodes)]
    if not matched:
        return NoPair(reason=_mismatch(able_prefills[0], able_decodes[0]))
    prefill = policies.prefill.choose(matched, draws.prefill)
    fitting = [other for other in able_decodes if compatible(prefill, other)]
    return Pair(prefill=prefill, decode=policies.decode.choose(fitting, draws.decode))


def missing_pair(prefills: Sequence[Worker], decodes: Sequence[Worker]) -> str | None:
    """Why no pair is usable now, or None when one is. Chooses nothing."""
    able_decodes = [worker for worker in decodes if worker.usable]
    able_prefills = [worker for worker in prefills if worker.usable]
    if not able_decodes:
        return _missing(Role.DECODE, decodes, ())
    if prefills and not able_prefills:
        return _missing(Role.PREFILL, prefills, ())
    if prefills and not any(compatible(one, other) for one in able_prefills for other in able_decodes):
        return _mismatch(able_prefills[0], able_decodes[0])
    return None


def _missing(role: Role, workers: Sequence[Worker], avoid: tuple[str, ...]) -> str:
    if not workers:
        return f"no {role.value} worker is known"
    told = [f"{worker.url}: {_obstacle(worker, avoid)}" for worker in workers[:NAMED_MAX]]
    if len(workers) > NAMED_MAX:
        told.append(f"and {len(workers) - NAMED_MAX} more")
    return f"no {role.value} worker is usable ({'; '.join(told)})"


def _obstacle(worker: Worker, avoid: tuple[str, ...]) -> str:
    if worker.usable and worker.url in avoid:
        return "it just failed this request"
    return f"{worker.state.value}, {worker.reason}" if worker.reason else worker.state.value


def _mismatch(prefill: Worker, decode: Worker) -> str:
    return (
        f"no two workers have matching KV fingerprints ({prefill.url}: {prefill.fingerprint!r}; "
        f"{decode.url}: {decode.fingerprint!r})"
    )
