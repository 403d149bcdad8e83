"""What an end keeps about its attempts: who waits for what, and until when."""

import threading
import time

from baton_core.agreement import KVPoll
from baton_core.kv_layout import UnitLayout, plan
from baton_engine.transfer.attempts import WORD_GRACE_S, AttemptTable, Outgoing

LAYOUT = UnitLayout(layers=1, kv_heads=1, head_dim=4, element_bytes=2, page_tokens=4)
WAIT_S = 10.0


class Pokes:
    """Counts pokes, and waits for one more."""

    def __init__(self) -> None:
        self._rung = threading.Semaphore(0)

    def __call__(self) -> None:
        self._rung.release()

    def next(self) -> bool:
        return self._rung.acquire(timeout=WAIT_S)


def attempt(table: AttemptTable, room: int) -> Outgoing:
    one = Outgoing(room=room, attempt=1, prompt_tokens=8, pages_total=2)
    one.add_flow("d/0.0", plan(LAYOUT, 0, LAYOUT, 0), carries_row=True)
    table.open(one)
    return one


def test_a_refusal_whose_reason_never_comes_wakes_the_loop_when_its_grace_is_over() -> None:
    """Once, only a look at the attempt noticed, and in a unit of several ranks nobody looked without a poke."""
    pokes = Pokes()
    table = AttemptTable(pokes)
    first, second = attempt(table, 1), attempt(table, 2)
    began = time.monotonic()
    table.refused(first, "decode refused the pages")
    table.refused(first, "said twice")
    table.refused(second, "decode refused these, too")
    assert table.observe(1, 1).poll is not KVPoll.Failed, "the other side may still say why"
    assert pokes.next()
    while table.observe(2, 1).poll is not KVPoll.Failed:
        assert pokes.next()
    assert time.monotonic() - began >= WORD_GRACE_S
    assert table.observe(1, 1).text == "decode refused the pages"


def test_a_refusal_whose_reason_came_is_no_failure_of_the_transfer() -> None:
    pokes = Pokes()
    table = AttemptTable(pokes)
    known, unknown = attempt(table, 1), attempt(table, 2)
    table.refused(known, "decode refused the pages")
    table.refused(unknown, "decode refused the pages")
    table.forget(1, 1)  # the core heard why, and ended the request
    while table.observe(2, 1).poll is not KVPoll.Failed:
        assert pokes.next()
    assert known.reason is None
    counters, _ = table.tally()
    assert sum(count for name, count in counters.items() if name.startswith("transfer_failures_total")) == 1
