"""Which unit (attention-DP rank) of a worker takes a request: the one it names, else the balance method's choice."""

from collections.abc import Callable
from typing import assert_never

from baton_core.errors import ClientError
from baton_core.request import FAKE_HOST, Bootstrap
from baton_worker.config import BalanceMethod


class Placement:
    """Chooses units; counts on for round robin. `live_requests` tells how many requests a unit has."""

    def __init__(self, method: BalanceMethod, dp_size: int, live_requests: Callable[[int], int]) -> None:
        self._method = method
        self._dp_size = dp_size
        self._live_requests = live_requests
        self._next = 0

    def choose(self, bootstrap: Bootstrap | None, routed_dp_rank: int | None = None) -> int:
        """The DP rank for a request. A rank that the request names is honoured, never rewritten."""
        if routed_dp_rank is not None:
            check_routed(routed_dp_rank, self._dp_size)
            return routed_dp_rank
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
