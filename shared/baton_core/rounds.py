"""Rounds of DP attention: when all units take a step together.

Layers outside attention are sharded over all units' ranks, so no unit can compute alone. A unit that has something to
compute *wants* a round; the conductor (unit 0's leader) begins one for all units at once, and the next one only when every
unit has finished its part (`Part`). A unit without work idles along.
"""

from baton_core.ranks import Member


class Conductor:
    """Begins rounds. Pure: `want` and `over` answer with the number of a round that begins now, or None."""

    def __init__(self, units: int) -> None:
        self._units = units
        self._wants = False
        self._round = 0
        self._busy: set[int] = set()

    @property
    def waiting_for(self) -> tuple[int, ...]:
        """Units that have not finished the round that runs."""
        return tuple(sorted(self._busy))

    def want(self) -> int | None:
        """A unit has something to compute."""
        self._wants = True
        return self._begin()

    def over(self, unit: int, number: int) -> int | None:
        """A unit finished its part of round `number`."""
        assert number == self._round, f"unit {unit} ended round {number}, {self._round} runs"
        self._busy.discard(unit)
        return self._begin()

    def _begin(self) -> int | None:
        if self._busy or not self._wants:
            return None
        self._wants = False
        self._round += 1
        self._busy = set(range(self._units))
        return self._round


class Part:
    """One unit's part in the rounds, as its leader keeps it: whether to want one, and when its own part is over."""

    def __init__(self, members: int) -> None:
        self._members = members
        self._round: int | None = None  # the one that runs
        self._step: int | None = None  # our step in it; None: we idle along
        self._idled: set[Member] = set()
        self._wanted = False
        self._futile = False  # the last round had nothing for us: until something changes the next has not either

    def wants(self, has_work: bool) -> bool:
        """Whether to want a round now; True is said once for each."""
        if not has_work or self._wanted or self._futile or self._round is not None:
            return False
        self._wanted = True
        return True

    def changed(self) -> None:
        """An entry of the log was applied that began no round."""
        self._futile = False

    def began(self, number: int, step: int | None) -> None:
        """Round `number` began here with this step of ours, or without one."""
        assert self._round is None, f"round {number} begins while {self._round} runs"
        self._round, self._step = number, step
        self._wanted, self._futile = False, step is None
        self._idled.clear()

    def idled(self, member: Member) -> int | None:
        """A member has idled through the round that runs; its number with the last of them."""
        self._idled.add(member)
        return self._over() if len(self._idled) == self._members else None

    def computed(self, step: int) -> int | None:
        """Every member has computed this step; the number of the round that is over by it."""
        return self._over() if self._round is not None and step == self._step else None

    def _over(self) -> int | None:
        number, self._round = self._round, None
        return number
