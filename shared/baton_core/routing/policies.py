"""How one worker is chosen among equals. Chance comes in as a drawn integer; memory stays inside the policy."""

from collections.abc import Sequence
from enum import Enum
from typing import Protocol, assert_never

from baton_core.routing.workers import Worker

TURNS_MAX = 65_536
"""Workers a round robin remembers; the one not chosen for longest is forgotten and counts as new."""


class Policy(Protocol):
    """Chooses among workers that could all serve the request."""

    def choose(self, candidates: Sequence[Worker], draw: int) -> Worker:
        """One of `candidates` (at least one); `draw` is a fresh non-negative random integer of 32 bits or more."""
        ...


class PolicyName(Enum):
    """The policies an operator can name."""

    ROUND_ROBIN = "round_robin"
    RANDOM = "random"


class RandomPolicy:
    """Each candidate with the same probability."""

    def choose(self, candidates: Sequence[Worker], draw: int) -> Worker:
        """The candidate that `draw` falls on."""
        return candidates[draw % len(candidates)]


class RoundRobinPolicy:
    """The candidate that was not chosen for longest.

    A counter modulo the number of candidates may give one worker several turns in a row, or none, as soon as the
    candidates differ from request to request (fingerprints, retries, workers that come and go).
    """

    def __init__(self) -> None:
        self._turns: dict[str, int] = {}  # url → number of its last turn, in order of last turn
        self._turn = 0

    def choose(self, candidates: Sequence[Worker], draw: int) -> Worker:
        """The least recently chosen; a worker never seen comes first, ties go to the first candidate."""
        chosen = min(candidates, key=lambda worker: self._turns.get(worker.url, 0))
        self._turn += 1
        self._turns.pop(chosen.url, None)
        self._turns[chosen.url] = self._turn
        if len(self._turns) > TURNS_MAX:
            del self._turns[next(iter(self._turns))]
        return chosen


def make_policy(name: PolicyName) -> Policy:
    """A new policy of that name, with a memory of its own."""
    match name:
        case PolicyName.ROUND_ROBIN:
            return RoundRobinPolicy()
        case PolicyName.RANDOM:
            return RandomPolicy()
        case _:
            assert_never(name)
