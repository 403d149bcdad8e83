"""How one target is chosen among equals. Chance comes in as a drawn integer; memory stays inside the policy.

random, round_robin              know nothing
least_load, power_of_two         know how many requests each target has
consistent_hash, session         keep a conversation where it is; without a conversation: power_of_two
cache_aware                      goes where the longest prefix of the prompt went before, unless that is overloaded
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, assert_never

from baton_core.routing.prefixes import PrefixMemory
from baton_core.routing.ring import HashRing
from baton_core.routing.workers import Loads, Target, load_of

TURNS_MAX = 65_536
"""Targets a round robin remembers; the one not chosen for longest is forgotten and counts as new."""
SESSIONS_MAX = 262_144
"""Conversations that `session` remembers; the one silent for longest is forgotten and chosen for anew."""
OVERLOAD_REQUESTS = 16
OVERLOAD_RATIO = 1.5
"""A cached prefix is not worth a queue: a target is passed over when it has both this many requests and this many
times as many as the least loaded one. Many field reports are about a router without such a guard."""
WORTHWHILE_SHARE = 0.3
"""Shares of the prompt below this are not worth being sent anywhere for: the least loaded target gets it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What a policy may know about a request."""

    session: str = ""  # the conversation it belongs to; empty: none that is known
    prefix: tuple[bytes, ...] = ()  # `prefixes.prefix_blocks` of its prompt
    prompt_tokens: int = 0  # an estimate; 0: unknown


class Policy(Protocol):
    """Chooses among targets that could all serve the request."""

    def choose(self, candidates: Sequence[Target], ask: Ask, loads: Loads, draw: int) -> Target:
        """One of `candidates` (at least one); `draw` is a fresh non-negative random integer of 32 bits or more."""
        ...


class PolicyName(Enum):
    """The policies an operator can name."""

    ROUND_ROBIN = "round_robin"
    RANDOM = "random"
    POWER_OF_TWO = "power_of_two"
    LEAST_LOAD = "least_load"
    CACHE_AWARE = "cache_aware"
    CONSISTENT_HASH = "consistent_hash"
    SESSION = "session"


class RandomPolicy:
    """Each candidate with the same probability."""

    def choose(self, candidates: Sequence[Target], ask: Ask, loads: Loads, draw: int) -> Target:
        """The candidate that `draw` falls on."""
        return candidates[draw % len(candidates)]


class RoundRobinPolicy:
    """The candidate that was not chosen for longest.

    A counter modulo the number of candidates may give one target several turns in a row, or none, as soon as the
    candidates differ from request to request (fingerprints, retries, workers that come and go).
    """

    def __init__(self) -> None:
        self._turns: dict[str, int] = {}  # key → number of its last turn, in order of last turn
        self._turn = 0

    def choose(self, candidates: Sequence[Target], ask: Ask, loads: Loads, draw: int) -> Target:
        """The least recently chosen; a target never seen comes first, ties go to the first candidate."""
        turns = self._turns
        chosen = candidates[0]
        if len(candidates) > 1:
            chosen = min(candidates, key=lambda target: turns.get(target.key, 0))
        self._turn += 1
        turns.pop(chosen.key, None)
        turns[chosen.key] = self._turn
        if len(turns) > TURNS_MAX:
            del turns[next(iter(turns))]
        return chosen


class PowerOfTwoPolicy:
    """The less loaded of two that are drawn: nearly as even as the least loaded, and no herd runs to one target."""

    def choose(self, candidates: Sequence[Target], ask: Ask, loads: Loads, draw: int) -> Target:
        """A tie goes to the first drawn."""
        count = len(candidates)
        first = candidates[draw % count]
        if count == 1:
            return first
        second = candidates[(draw % count + 1 + draw // count % (count - 1)) % count]
        return second if load_of(second, loads) < load_of(first, loads) else first


class LeastLoadPolicy:
    """The candidate with the fewest requests."""

    def choose(self, candidates: Sequence[Target], ask: Ask, loads: Loads, draw: int) -> Target:
        """Ties are broken by `draw`: several routers must not all take the first."""
        lowest = min(load_of(target, loads) for target in candidates)
        least = [target for target in candidates if load_of(target, loads) == lowest]
        return least[draw % len(least)]


class ConsistentHashPolicy:
    """A conversation's target follows from its name and the targets alone: several routers agree without a word."""

    def __init__(self) -> None:
        self._ring = HashRing()
        self._otherwise = PowerOfTwoPolicy()

    def choose(self, candidates: Sequence[Target], ask: Ask, loads: Loads, draw: int) -> Target:
        """When a target comes or goes, only about its own share of the conversations moves."""
        if not ask.session:
            return self._otherwise.choose(candidates, ask, loads, draw)
        by_key = {target.key: target for target in candidates}
        return by_key[self._ring.owner(ask.session, by_key)]


class SessionPolicy:
    """A conversation stays where its first turn found the least load; remembered by this router alone."""

    def __init__(self) -> None:
        self._homes: dict[str, str] = {}  # conversation → key, in order of last turn
        self._first = PowerOfTwoPolicy()

    def choose(self, candidates: Sequence[Target], ask: Ask, loads: Loads, draw: int) -> Target:
        """A home that is no candidate now is replaced."""
        home = self._homes.pop(ask.session, None) if ask.session else None
        chosen = next((target for target in candidates if target.key == home), None) if home is not None else None
        if chosen is None:
            chosen = self._first.choose(candidates, ask, loads, draw)
        if ask.session:
            self._homes[ask.session] = chosen.key
            if len(self._homes) > SESSIONS_MAX:
                del self._homes[next(iter(self._homes))]
        return chosen


class CacheAwarePolicy:
    """Where the longest part of the prompt was computed before, as far as this router sent it."""

    def __init__(self) -> None:
        self._memory = PrefixMemory()
        self._otherwise = LeastLoadPolicy()

    def choose(self, candidates: Sequence[Target], ask: Ask, loads: Loads, draw: int) -> Target:
        """A prompt that is known nowhere, or only where too much waits, goes to the least loaded."""
        chosen = self._known(candidates, ask, loads) or self._otherwise.choose(candidates, ask, loads, draw)
        self._memory.remember(ask.prefix, chosen.key)
        return chosen

    def _known(self, candidates: Sequence[Target], ask: Ask, loads: Loads) -> Target | None:
        depths = self._memory.depths(ask.prefix)
        known = [target for target in candidates if target.key in depths]
        if not known:
            return None
        best = max(known, key=lambda target: (depths[target.key], -load_of(target, loads)))
        if depths[best.key] < WORTHWHILE_SHARE * len(ask.prefix):
            return None
        load = load_of(best, loads)
        if load < OVERLOAD_REQUESTS:
            return best
        lowest = min(load_of(target, loads) for target in candidates)
        return None if load > OVERLOAD_RATIO * lowest else best


def make_policy(name: PolicyName) -> Policy:
    """A new policy of that name, with a memory of its own."""
    match name:
        case PolicyName.ROUND_ROBIN:
            return RoundRobinPolicy()
        case PolicyName.RANDOM:
            return RandomPolicy()
        case PolicyName.POWER_OF_TWO:
            return PowerOfTwoPolicy()
        case PolicyName.LEAST_LOAD:
            return LeastLoadPolicy()
        case PolicyName.CACHE_AWARE:
            return CacheAwarePolicy()
        case PolicyName.CONSISTENT_HASH:
            return ConsistentHashPolicy()
        case PolicyName.SESSION:
            return SessionPolicy()
        case _:
            assert_never(name)
