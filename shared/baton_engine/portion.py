"""What one of several context-parallel ranks computes of a plan: an even, contiguous part of every slice.

A part is a slice like any other: what precedes it, in its own slice too, is found in the pool, because the keys and values
of all ranks are written before anybody attends. A slice with fewer tokens than ranks leaves some of them without a part;
the last rank always has the last token.
"""

from dataclasses import dataclass, replace

from baton_core.plan import SequenceSlice, StepPlan
from baton_core.ranks import share


@dataclass(frozen=True, slots=True, kw_only=True)
class Portion:
    """One rank's part of a plan.

    `places` say where its rows that are sampled, and then those that are scored, belong among all such rows of the plan
    (first all the sampled ones, then the scored ones, in plan order).
    """

    slices: tuple[SequenceSlice, ...]
    places: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Tokens in it."""
        return sum(len(item.tokens) for item in self.slices)


def wanted(plan: StepPlan) -> tuple[int, int]:
    """How many rows of the plan are sampled, and how many are scored."""
    return sum(item.sample for item in plan.slices), sum(len(item.score) for item in plan.slices)


def portion(plan: StepPlan, part: int, parts: int) -> Portion:
    """Part number `part` of `parts` of `plan`. Pure."""
    slices: list[SequenceSlice] = []
    sampled: list[int] = []
    scored: list[int] = []
    next_sample, next_score = 0, wanted(plan)[0]
    for item in plan.slices:
        own = share(len(item.tokens), part, parts)
        judged = range(max(item.score_from, own.start), min(item.score_from + len(item.score), own.stop))
        has_last = len(own) > 0 and own.stop == len(item.tokens)
        if own:
            slices.append(_part(item, own, judged, sample=item.sample and has_last))
        if item.sample and has_last:
            sampled.append(next_sample)
        scored += [next_score + row - item.score_from for row in judged]
        next_sample += item.sample
        next_score += len(item.score)
    return Portion(slices=tuple(slices), places=(*sampled, *scored))


def _part(item: SequenceSlice, own: range, judged: range, *, sample: bool) -> SequenceSlice:
    first = judged.start - item.score_from
    return replace(
        item,
        tokens=item.tokens[own.start : own.stop],
        start=item.start + own.start,
        sample=sample,
        score_from=judged.start - own.start if judged else 0,
        score=item.score[first : first + len(judged)] if judged else (),
    )
