"""How one target is chosen among equals. Chance comes in as a drawn integer; memory stays inside the policy.

random, round_robin              know nothing
least_load, power_of_two         know how many requests each target has
consistent_hash, session         keep a conversation where it is; without a conversation: power_of_two
cache_aware                      goes where the prompt is soonest computed: its cached prefix spares work, others go first
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Generic, Protocol, TypeVar, assert_never

from baton_core.routing.prefixes import PrefixMemory, blocks_for
from baton_core.routing.ring import HashRing, position
from baton_core.routing.workers import Loads, Target, load_of

TURNS_MAX = 65_536
"""Targets a round robin remembers; the one not chosen for longest is forgotten and counts as new."""
STALE_TURNS_MAX = 64
"""Keys that are no candidates and yet are passed over, besides twice as many as there are candidates."""
LOOKED_AT_MAX = 256
"""Candidates whose loads are compared for one request."""
CATALOGUES_MAX = 8
"""Sets of candidates kept ready: one for each KV fingerprint in use."""
SESSIONS_MAX = 262_144
"""Conversations that `session` remembers; the one silent for longest is forgotten and chosen for anew."""
WORTHWHILE_SHARE = 0.3
"""Shares of the prompt below this are not worth being sent anywhere for: the least loaded target gets it."""
LEARNED_OVER_REQUESTS = 256
"""`cache_aware` learns over so many what a request in front of another one costs."""


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
        self._turns: OrderedDict[str, None] = OrderedDict()  # keys in order of last turn; never chosen ones first
        self._candidates = Catalogue(_by_key)
        self._seen: Sequence[Target] = ()  # the candidates whose keys are all in `_turns`

    def choose(self, candidates: Sequence[Target], ask: Ask, loads: Loads, draw: int) -> Target:
        """The least recently chosen; those never chosen come first, the last met before others, then in their order."""
        if len(candidates) == 1:
            chosen = candidates[0]
            self._turns[chosen.key] = None
        else:
            chosen = self._next(candidates)
        self._turns.move_to_end(chosen.key)
        if len(self._turns) > TURNS_MAX:
            self._turns.popitem(last=False)
            self._seen = ()
        return chosen

    def _next(self, candidates: Sequence[Target]) -> Target:
        by_key, turns = self._candidates.of(candidates), self._turns
        if candidates is not self._seen:
            for key in reversed([key for key in by_key if key not in turns]):
                turns[key] = None
                turns.move_to_end(key, last=False)
            self._seen = candidates if isinstance(candidates, tuple) else ()
        others_max = 2 * len(candidates) + STALE_TURNS_MAX
        for passed, key in enumerate(turns):
            if key in by_key:
                break
            if passed > others_max:  # mostly workers that are gone: they would be passed over each time
                self._turns = OrderedDict.fromkeys(key for key in turns if key in by_key)
                return by_key[next(iter(self._turns))]
        return by_key[key]


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
    """The candidate with the fewest requests; of very many, among a window of them that is drawn."""

    def choose(self, candidates: Sequence[Target], ask: Ask, loads: Loads, draw: int) -> Target:
        """Ties are broken by `draw`: several routers must not all take the first."""
        _, least = least_loaded(candidates, loads, draw)
        return least[draw % len(least)]


def least_loaded(candidates: Sequence[Target], loads: Loads, draw: int) -> tuple[int, list[Target]]:
    """The lowest load among those that are looked at, and who has it.

    To look at thousands of ranks for every request would cost more than the last bit of evenness is worth.
    """
    count = len(candidates)
    if count > LOOKED_AT_MAX:
        start = draw % count
        window = candidates[start : start + LOOKED_AT_MAX]
        candidates = (*window, *candidates[: LOOKED_AT_MAX - len(window)])
    lowest, least = load_of(candidates[0], loads), [candidates[0]]
    for target in candidates[1:]:
        load = loads.get(target.key)
        requests = 0 if load is None else load.requests
        if requests < lowest:
            lowest, least = requests, [target]
        elif requests == lowest:
            least.append(target)
    return lowest, least


class ConsistentHashPolicy:
    """A conversation's target follows from its name and the targets alone: several routers agree without a word.

    The worker by a hash ring, its rank by the greatest hash: what comes or goes moves only its own share.
    """

    def __init__(self) -> None:
        self._ring = HashRing()
        self._workers = Catalogue(_by_url)
        self._otherwise = PowerOfTwoPolicy()

    def choose(self, candidates: Sequence[Target], ask: Ask, loads: Loads, draw: int) -> Target:
        """When a target comes or goes, only about its own share of the conversations moves."""
        if not ask.session:
            return self._otherwise.choose(candidates, ask, loads, draw)
        workers = self._workers.of(candidates)
        ranks = workers[self._ring.owner(ask.session, workers)]
        if len(ranks) == 1:
            return ranks[0]
        return max(ranks, key=lambda target: position(f"{ask.session}#{target.key}"))


class SessionPolicy:
    """A conversation stays where its first turn found the least load; remembered by this router alone."""

    def __init__(self) -> None:
        self._homes: OrderedDict[str, str] = OrderedDict()  # conversation → key, in order of last turn
        self._candidates = Catalogue(_by_key)
        self._first = PowerOfTwoPolicy()

    def choose(self, candidates: Sequence[Target], ask: Ask, loads: Loads, draw: int) -> Target:
        """A home that is no candidate now is replaced."""
        home = self._homes.pop(ask.session, None) if ask.session else None
        chosen = None if home is None else self._candidates.of(candidates).get(home)
        if chosen is None:
            chosen = self._first.choose(candidates, ask, loads, draw)
        if ask.session:
            self._homes[ask.session] = chosen.key
            if len(self._homes) > SESSIONS_MAX:
                self._homes.popitem(last=False)
        return chosen


class CacheAwarePolicy:
    """Where the prompt is likely to be computed first: what is cached there is spared, but whoever is there goes first.

    Both are counted in blocks of prompts. A queue is its requests times what a request has had to compute of late, so a
    prefix that everybody shares ends on as many targets as it takes; many field reports are about a router that sends all
    of them to one.
    """

    def __init__(self) -> None:
        self._memory = PrefixMemory()
        self._candidates = Catalogue(_by_key)
        self._otherwise = LeastLoadPolicy()
        self._computed, self._learned = 0.0, 0  # blocks that a request is not spared, on average, and over how many

    def choose(self, candidates: Sequence[Target], ask: Ask, loads: Loads, draw: int) -> Target:
        """A prompt known nowhere, or only where the queue is longer than what is spared, goes to the least loaded."""
        depths = self._memory.depths(ask.prefix)
        chosen = self._known(candidates, ask, depths, loads)
        # Nobody can be sooner than one whose queue is no longer than what it spares: only else are all loads compared.
        if chosen is None or self._cost(chosen, depths, loads) > 0:
            idle = self._otherwise.choose(candidates, ask, loads, draw)
            if chosen is None or self._cost(chosen, depths, loads) > self._cost(idle, depths, loads):
                chosen = idle
        self._learn(len(ask.prefix) - depths.get(chosen.key, 0))
        self._memory.blocks_max = blocks_for(len(candidates))
        self._memory.remember(ask.prefix, chosen.key)
        return chosen

    def _known(self, candidates: Sequence[Target], ask: Ask, depths: Mapping[str, int], loads: Loads) -> Target | None:
        """Of those that hold a good part of the prompt, the soonest; of equals the one that holds more."""
        by_key = self._candidates.of(candidates) if depths else {}
        worthwhile = WORTHWHILE_SHARE * len(ask.prefix)
        known = [by_key[key] for key, depth in depths.items() if depth >= worthwhile and key in by_key]
        return min(known, key=lambda target: (self._cost(target, depths, loads), -depths[target.key]), default=None)

    def _cost(self, target: Target, depths: Mapping[str, int], loads: Loads) -> float:
        """Blocks of others in front of this prompt, less those of its own that are spared."""
        ahead = max(0.0, load_of(target, loads) - 0.5)  # the first of them is half done, on average
        return ahead * self._computed - depths.get(target.key, 0)

    def _learn(self, computed: int) -> None:
        self._learned = min(self._learned + 1, LEARNED_OVER_REQUESTS)
        self._computed += (computed - self._computed) / self._learned


T = TypeVar("T")


class Catalogue(Generic[T]):
    """What is looked up in candidates by name; built once for those that a fleet hands out with every request (tuples)."""

    def __init__(self, build: Callable[[Sequence[Target]], dict[str, T]]) -> None:
        self._build = build
        self._built: list[tuple[Sequence[Target], dict[str, T]]] = []  # the latest last

    def of(self, candidates: Sequence[Target]) -> dict[str, T]:
        """The names of these candidates."""
        for known, built in reversed(self._built):
            if known is candidates:
                return built
        built = self._build(candidates)
        if isinstance(candidates, tuple):
            self._built = [*self._built[1 - CATALOGUES_MAX :], (candidates, built)]
        return built


def _by_key(candidates: Sequence[Target]) -> dict[str, Target]:
    return {target.key: target for target in candidates}


def _by_url(candidates: Sequence[Target]) -> dict[str, list[Target]]:
    found: dict[str, list[Target]] = {}
    for target in candidates:
        found.setdefault(target.worker.url, []).append(target)
    return found


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
