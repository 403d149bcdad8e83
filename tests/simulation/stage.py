"""The collectives of one pipeline stage: each rank comes in its own time, all go on when the last has come.

What a rank sees is what it sees when it comes. All ranks must ask the same question of the same length at the same log
position; anything else would hang, or mix up, real ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, assert_never

from baton_core.agreement import (
    Observation,
    SoloGroup,
    Watch,
    poll_and_all_reduce,
    poll_and_all_reduce_attn_cp_tp_group,
)
from baton_core.unit_log import Compare, Observe, ObserveUncovered, Question, divergence
from simulation.invariants import Broken

if TYPE_CHECKING:
    from simulation.rank import Rank
    from simulation.unit import Unit


class Capture:
    """A group that notes what a rank brings to the collective."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.values: list[int] = []

    def all_reduce_min(self, values: Sequence[int]) -> list[int]:
        """As if this rank were alone."""
        self.values = list(values)
        return self.values


class Given:
    """A group whose collective is complete."""

    def __init__(self, rank: int, size: int, least: list[int]) -> None:
        self.rank, self.size = rank, size
        self._least = least

    def all_reduce_min(self, values: Sequence[int]) -> list[int]:
        """What all ranks brought, reduced."""
        return self._least


@dataclass(frozen=True, slots=True)
class Frozen:
    """What a rank saw when it came."""

    seen: Observation

    def poll(self) -> Observation:
        """That."""
        return self.seen


@dataclass(slots=True, eq=False)
class Come:
    """A rank waits in a collective."""

    rank: "Rank"
    question: Question
    pollers: list[Frozen] = field(default_factory=list)
    values: list[int] = field(default_factory=list)


class Stage:
    """The ranks of one stage."""

    def __init__(self, unit: "Unit", ranks: list["Rank"]) -> None:
        self._unit, self.ranks = unit, ranks
        self._waiting: list[Come] = []

    def meet(self, rank: "Rank", question: Question) -> None:
        """A rank asks."""
        if len(self.ranks) == 1:
            rank.answer(alone(rank, question))
            return
        come = Come(rank, question)
        match question:
            case Observe():
                come.pollers = [Frozen(seen) for seen in rank.poll(question.watches)]
                come.values = gated(rank, Capture(self._inside(rank), len(self.ranks)), question.watches, come.pollers)
            case ObserveUncovered():
                come.pollers = [Frozen(seen) for seen in rank.poll(question.watches)]
                come.values = uncovered(come.pollers, Capture(self._inside(rank), len(self.ranks)))
            case Compare():
                come.values = [question.digest]
            case _:
                assert_never(question)
        self._waiting.append(come)
        if len(self._waiting) == len(self.ranks):
            self._complete()
        elif len(self._waiting) == 1:
            timeout = self._unit.world.shape.limits.control_collective_ms
            self._unit.world.at(timeout, self._overdue, come)

    def _overdue(self, come: Come) -> None:
        if come in self._waiting and self._unit.alive:
            self._unit.lost("a rank did not come to a collective")

    def _complete(self) -> None:
        waiting, self._waiting = self._waiting, []
        first = waiting[0]
        for other in waiting[1:]:
            same = other.rank.replica.position == first.rank.replica.position and kind_of(other) == kind_of(first)
            if not same:
                asked = f"{other.rank} asks {kind_of(other)}, {first.rank} asks {kind_of(first)}"
                raise Broken("siblings", f"at log position {first.rank.replica.position}: {asked}")
        least = [min(values) for values in zip(*(come.values for come in waiting), strict=True)]
        world = self._unit.world
        for come in waiting:
            answer = self._answer(come, waiting, least)
            world.at(int(world.random.random() * 3) * come.rank.slowness, come.rank.answer, answer)

    def _answer(self, come: Come, waiting: list[Come], least: list[int]) -> object:
        match come.question:
            case Observe():
                return poll_and_all_reduce(come.pollers, Given(self._inside(come.rank), len(waiting), least))
            case ObserveUncovered():
                return uncovered(come.pollers, Given(self._inside(come.rank), len(waiting), least))
            case Compare():
                digests = {repr(one.rank): one.values[0] for one in waiting}
                if len(set(digests.values())) > 1:
                    raise divergence(come.rank.replica.position, digests)
                return None
            case _:
                assert_never(come.question)

    def _inside(self, rank: "Rank") -> int:
        return self.ranks.index(rank)


def kind_of(come: Come) -> tuple[str, int]:
    """A question, and how many values it carries."""
    return type(come.question).__name__, len(come.values)


def alone(rank: "Rank", question: Question) -> object:
    """The answer in a stage of one rank."""
    match question:
        case Observe():
            wanted = question.watches if rank.rows is not None else None
            pollers = [Frozen(seen) for seen in rank.poll(question.watches)]
            return poll_and_all_reduce(pollers, SoloGroup(), wanted, rank.rows, rank.gate_args)
        case ObserveUncovered():
            pollers = [Frozen(seen) for seen in rank.poll(question.watches)]
            return poll_and_all_reduce_attn_cp_tp_group(pollers, SoloGroup(), SoloGroup())
        case Compare():
            return None
        case _:
            assert_never(question)


def gated(rank: "Rank", group: Capture, watches: Sequence[Watch], pollers: list[Frozen]) -> list[int]:
    """What a rank brings to the fused minimum, after the metadata gate."""
    wanted = watches if rank.rows is not None else None
    poll_and_all_reduce(pollers, group, wanted, rank.rows, rank.gate_args)
    return group.values


def uncovered(pollers: list[Frozen], group: Capture | Given) -> list[int]:
    """The two reductions of what the consensus leaves out, attention CP first; here one group does for both."""
    return [int(poll) for poll in poll_and_all_reduce_attn_cp_tp_group(pollers, group, SoloGroup())]
