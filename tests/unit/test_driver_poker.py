"""The poker: a poke is never lost, never left behind, and never read twice."""

import select
import threading

from baton_engine.driver import Poker


def readable(poker: Poker) -> bool:
    return bool(select.select([poker.file_descriptor], [], [], 0)[0])


def test_a_poke_makes_the_descriptor_readable_until_it_is_drained() -> None:
    poker = Poker()
    assert not readable(poker)
    assert poker.drain() is None
    poker()
    poker()
    assert readable(poker)
    assert poker.drain() is not None
    assert not readable(poker)
    assert poker.drain() is None


def test_pokes_from_many_threads_race_with_draining_without_a_trace() -> None:
    """Once, the note was taken before the event was written: reading it raised, and the worker died."""
    poker = Poker()
    done = threading.Event()

    def poke() -> None:
        while not done.is_set():
            poker()

    threads = [threading.Thread(target=poke) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(20_000):
        poker.drain()
    done.set()
    for thread in threads:
        thread.join()
    poker.drain()
    assert not readable(poker)


def test_the_end_of_a_step_is_told_from_a_change_of_a_transfer() -> None:
    poker = Poker()
    poker.computed()
    step = poker.drain()
    poker()
    poker.computed()
    both = poker.drain()
    assert step is not None
    assert both is not None
    assert (step.changed, both.changed) == (False, True)
