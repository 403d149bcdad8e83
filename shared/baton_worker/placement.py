"""Which unit (attention-DP rank) of a worker takes a request: the one it names, else the balance method's choice."""

from collections.abc import Callable
from typing import assert_never

from baton_core.errors import ClientError, Verdict
from baton_core.prefill.rules import misplaced
from baton_core.registration import FOLLOW
from baton_core.request import FAKE_HOST, Bootstrap
from baton_worker.config import BalanceMethod, Role


class Placement:
    """Chooses units; counts on for round robin. `live_requests` tells how many requests a unit has."""

    def __init__(
        self,
        method: BalanceMethod,
        dp_size: int,
        live_requests: Callable[[int], int],
        *,
        role: Role = Role.DECODE,
        forced: bool = False,
    ) -> None:
        """`forced`: this prefill worker registers the DP rank of every room."""
        self._method = method
        self._prefill = role is Role.PREFILL
        self._registers = forced or method != FOLLOW
        self._dp_size = dp_size
        self._live_requests = live_requests
        self._next = 0

    def place(self, bootstrap: Bootstrap | None, routed_dp_rank: int | None) -> tuple[int, Verdict | None]:
        """The DP rank for a request, and why it must fail there.

        On prefill a request may be sent where decode would not look for its room (S3): then the unit that decode asks
        gets it, to refuse both legs at once. Raises ClientError.
        """
        dp_rank = self.choose(bootstrap, routed_dp_rank)
        if not self._prefill or bootstrap is None:
            return dp_rank, None
        found = misplaced(bootstrap, dp_rank=dp_rank, dp_size=self._dp_size, registers=self._registers)
        if found is None or found.looked_for_on is None:
            return dp_rank, None
        return found.looked_for_on, found.verdict

    def choose(self, bootstrap: Bootstrap | None, routed_dp_rank: int | None = None) -> int:
        """The DP rank for a request. A rank that the request names is honoured, never rewritten."""
        if routed_dp_rank is not None:
            check_routed(routed_dp_rank, self._dp_size)
            return routed_dp_rank
        named = None if bootstrap is None or not self._prefill else bootstrap.prefill_dp_rank
        if named is not None and 0 <= named < self._dp_size:
            return named  # where decode will look for it
        match self._method:
            case "follow_bootstrap_room":
                if bootstrap is not None and bootstrap.host != FAKE_HOST:
                    return bootstrap.room % self._dp_size
                return self._in_turn()
            case "round_robin":
                return self._in_turn()
            case "least_load":
                turn = self._in_turn()
                in_turn = [(turn + step) % self._dp_size for step in range(self._dp_size)]
                return min(in_turn, key=self._live_requests)
            case _:
                assert_never(self._method)

    def _in_turn(self) -> int:
        chosen = self._next
        self._next = (chosen + 1) % self._dp_size
        return chosen


def check_routed(routed_dp_rank: int, dp_size: int) -> None:
    """Raise ClientError unless this worker has the DP rank that a request names."""
    if not 0 <= routed_dp_rank < dp_size:
        text = f"routed_dp_rank {routed_dp_rank} is out of range: this worker has dp_size {dp_size}"
        raise ClientError(text)
