"""The joint choice of the two workers of a request: the second is chosen among those that fit the first.

usable, not failed, KV fingerprints that match  ->  decode has room for the prompt, where that is known
prefill by its policy among those with a partner  ->  decode by its policy among the partners

Where all fingerprints match, as in nearly every fleet, a policy is given all usable targets, the same tuple each time, and
only if its choice is to be avoided, or full, those that are not: so a choice costs the same among ten and ten thousand.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton_core.routing.policies import Ask, Policy
from baton_core.routing.workers import Loads, Role, Target, Worker, compatible, has_room, targets_of

NAMED_MAX = 4
"""Workers named in a refusal; the rest is counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Who serves a request. `prefill` None: decode serves it alone (colocated)."""

    prefill: Target | None
    decode: Target


@dataclass(frozen=True, slots=True, kw_only=True)
class NoPair:
    """Nobody can serve a request now; `reason` says which role is missing and why."""

    reason: str
    missing: Role | None = None  # the role without a usable worker; None: there are, but no two fit


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ByRank:
    """Of which role the data-parallel ranks are targets of their own."""

    prefill: bool = False
    decode: bool = False


class Fleet:
    """Every known worker at one moment, and what follows from that alone: built once per change, asked per request."""

    def __init__(self, prefills: Sequence[Worker], decodes: Sequence[Worker], by_rank: ByRank | None = None) -> None:
        by_rank = by_rank or ByRank()
        self.prefills = tuple(prefills)
        self.decodes = tuple(decodes)
        able = tuple(worker for worker in decodes if worker.usable)
        self._decode_targets = _targets(able, by_rank.decode)
        self._prefill_targets = _targets([worker for worker in prefills if worker.usable], by_rank.prefill)
        self._matched = tuple(_partnered(self._prefill_targets, self._decode_targets))
        self._fitting: dict[str | None, tuple[Target, ...]] = {}
        prints = {one.worker.fingerprint for one in (*self._prefill_targets, *self._decode_targets)} - {None, ""}
        self._is_uniform = len(prints) <= 1

    def choose(
        self,
        policies: Policies,
        ask: Ask,
        loads: Loads,
        draws: Draws,
        *,
        avoid: Callable[[str], bool] | None = None,
        alone: bool = False,
    ) -> Pair | NoPair:
        """Choose among usable targets of which neither key nor url is to be avoided; only pairs whose fingerprints match.

        Mutates the policies' memory only when there is a pair. No prefill worker known at all, or `alone`, means a
        decode worker alone.
        """
        if not _any_kept(self._decode_targets, avoid):
            return NoPair(reason=_missing(Role.DECODE, self.decodes, avoid), missing=Role.DECODE)
        is_alone = alone or not self.prefills
        if not is_alone and not _any_kept(self._prefill_targets, avoid):
            return NoPair(reason=_missing(Role.PREFILL, self.prefills, avoid), missing=Role.PREFILL)
        if not is_alone and not self._is_uniform:
            return self._choose_matched(policies, ask, loads, draws, avoid)
        prefill = None
        if not is_alone:
            prefill = policies.prefill.choose(self._prefill_targets, ask, loads, draws.prefill)
            if not _is_kept(prefill, avoid):
                kept = _kept(self._prefill_targets, avoid)
                prefill = policies.prefill.choose(kept, ask, loads, draws.prefill)
        decode = policies.decode.choose(self._decode_targets, ask, loads, draws.decode)
        if not _is_kept(decode, avoid) or not has_room(decode, loads, ask.prompt_tokens):
            kept = _roomy(_kept(self._decode_targets, avoid), ask, loads)
            decode = policies.decode.choose(kept, ask, loads, draws.decode)
        return Pair(prefill=prefill, decode=decode)

    def _choose_matched(
        self, policies: Policies, ask: Ask, loads: Loads, draws: Draws, avoid: Callable[[str], bool] | None
    ) -> Pair | NoPair:
        """A pair in a fleet with several fingerprints; there is a target of each role that is not to be avoided."""
        decodes, prefills = _kept(self._decode_targets, avoid), _kept(self._prefill_targets, avoid)
        matched = self._matched if avoid is None else _partnered(prefills, decodes)
        if not matched:
            return NoPair(reason=_mismatch(prefills[0].worker, decodes[0].worker))
        roomy = _roomy(decodes, ask, loads)
        if len(roomy) < len(decodes):
            # A prefill worker all of whose partners are full would only queue for them.
            matched = _partnered(matched, roomy) or matched
        prefill = policies.prefill.choose(matched, ask, loads, draws.prefill)
        fitting = self._partners(prefill.worker, decodes)
        decode = policies.decode.choose(_roomy(fitting, ask, loads), ask, loads, draws.decode)
        return Pair(prefill=prefill, decode=decode)

    def missing_pair(self) -> str | None:
        """Why no pair is usable now, or None when one is. Chooses nothing."""
        if not self._decode_targets:
            return _missing(Role.DECODE, self.decodes, None)
        if self.prefills and not self._prefill_targets:
            return _missing(Role.PREFILL, self.prefills, None)
        if self.prefills and not self._matched:
            return _mismatch(self._prefill_targets[0].worker, self._decode_targets[0].worker)
        return None

    def _partners(self, prefill: Worker, decodes: Sequence[Target]) -> Sequence[Target]:
        if decodes is not self._decode_targets:
            return [other for other in decodes if compatible(prefill, other.worker)]
        partners = self._fitting.get(prefill.fingerprint)
        if partners is None:
            partners = tuple(other for other in decodes if compatible(prefill, other.worker))
            self._fitting[prefill.fingerprint] = partners
        return partners


def _targets(workers: Sequence[Worker], by_rank: bool) -> tuple[Target, ...]:
    return tuple(target for worker in workers for target in targets_of(worker, by_rank=by_rank))


def _is_kept(target: Target, avoid: Callable[[str], bool] | None) -> bool:
    return avoid is None or (not avoid(target.key) and not avoid(target.worker.url))


def _kept(targets: tuple[Target, ...], avoid: Callable[[str], bool] | None) -> Sequence[Target]:
    return targets if avoid is None else [target for target in targets if _is_kept(target, avoid)]


def _any_kept(targets: tuple[Target, ...], avoid: Callable[[str], bool] | None) -> bool:
    return bool(targets) if avoid is None else any(_is_kept(target, avoid) for target in targets)


def _partnered(prefills: Sequence[Target], decodes: Sequence[Target]) -> Sequence[Target]:
    """Those that some decode worker fits; one look at each worker, since this may run for every request."""
    prints = frozenset(other.worker.fingerprint for other in decodes)
    if None in prints or "" in prints:
        return prefills
    return [one for one in prefills if not one.worker.fingerprint or one.worker.fingerprint in prints]


def _roomy(decodes: Sequence[Target], ask: Ask, loads: Loads) -> Sequence[Target]:
    """Those with room for the prompt; all where none is known to have it: it then waits, as it must."""
    if not ask.prompt_tokens or len(decodes) == 1:
        return decodes
    return [target for target in decodes if has_room(target, loads, ask.prompt_tokens)] or decodes


def _missing(role: Role, workers: Sequence[Worker], avoid: Callable[[str], bool] | None) -> str:
    if not workers:
        return f"no {role.value} worker is known"
    told = [f"{worker.url}: {_obstacle(worker, avoid)}" for worker in workers[:NAMED_MAX]]
    if len(workers) > NAMED_MAX:
        told.append(f"and {len(workers) - NAMED_MAX} more")
    return f"no {role.value} worker is usable ({'; '.join(told)})"


def _obstacle(worker: Worker, avoid: Callable[[str], bool] | None) -> str:
    if worker.usable and avoid is not None:
        return "it just failed"  # as a whole, or each of its ranks: else it would have been a candidate
    return f"{worker.state.value}, {worker.reason}" if worker.reason else worker.state.value


def _mismatch(prefill: Worker, decode: Worker) -> str:
    return (
        f"no two workers have matching KV fingerprints ({prefill.url}: {prefill.fingerprint!r}; "
        f"{decode.url}: {decode.fingerprint!r})"
    )
