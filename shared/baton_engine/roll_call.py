"""Who is missing? Once something went wrong, the ranks that are left find out, over the store at which they met.

A rank that gives up on a collective says so at the store, under its own number, and looks who else does. The others give up
too, as soon as their connections to it close; so whoever says nothing is stopped, dead, or out of reach.
"""

import queue
import threading
from collections.abc import Sequence
from datetime import timedelta

from torch._C._distributed_c10d import Store

from baton_core.errors import EngineError
from baton_core.limits import Millis

ROLL_CALL_MS: Millis = 4_000
"""So long the others may take to say that they are there."""
_GRACE_S = 2.0
_NO_STORE = "the rendezvous does not answer, so its host, rank 0, is missing"


class GroupLost(EngineError):
    """A collective failed: a rank did not come in time, or is gone. The text names the group and who is missing."""


class RollCall:
    """Finds out which ranks of a worker still answer, once something went wrong."""

    def __init__(self, store: Store, rank: int, ranks: Sequence[int]) -> None:
        self._store, self._rank, self._ranks = store, rank, tuple(ranks)

    def meet(self, where: str, limit_ms: Millis) -> None:
        """Return when every rank is at `where`. Raises GroupLost naming those that did not come."""
        missing = self._missing(where, limit_ms)
        if missing is None:
            raise GroupLost(f"rank {self._rank} is alone at {where!r}: {_NO_STORE}")
        if missing:
            raise GroupLost(f"{_ranks(missing)} did not come to {where!r} within {limit_ms} ms")

    def call(self) -> str:
        """Tell the others that this rank gives up, and say in words who of them does not answer."""
        missing = self._missing("given up", ROLL_CALL_MS)
        if missing is None:
            return _NO_STORE
        if missing:
            return f"{_ranks(missing)} did not answer the roll call"
        return "every rank answered the roll call, so one was late or its connection broke"

    def _missing(self, where: str, limit_ms: Millis) -> list[int] | None:
        """The ranks that are not at `where` in time; None when the store is out of reach."""
        # A store whose host is stopped would keep its caller for ever: so a thread asks that may be left behind.
        answers: queue.SimpleQueue[list[int] | None] = queue.SimpleQueue()
        threading.Thread(target=lambda: answers.put(self._ask(where, limit_ms)), name="roll-call", daemon=True).start()
        try:
            return answers.get(timeout=limit_ms / 1000 + _GRACE_S)
        except queue.Empty:
            return None

    def _ask(self, where: str, limit_ms: Millis) -> list[int] | None:
        keys = {rank: f"{where}/{rank}" for rank in self._ranks}
        try:
            self._store.set(keys[self._rank], "here")
            try:
                self._store.wait(list(keys.values()), timedelta(milliseconds=limit_ms))
            except RuntimeError:
                return [rank for rank, key in keys.items() if not self._store.check([key])]
        except RuntimeError:
            return None
        return []


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
