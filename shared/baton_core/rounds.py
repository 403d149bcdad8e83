"""Rounds of DP attention: when all units take a step together.

Layers outside attention are sharded over all units' ranks, so no unit can compute alone. A unit that has something to
compute *wants* a round; the conductor (unit 0's leader) begins one for all units at once, and the next one only when every
unit has finished its part. A unit without work idles along.
"""


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
