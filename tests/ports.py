"""Ports of the loopback for servers that a test starts."""

import random

from baton_cli.ports import FIRST_PORT, LAST_PORT, is_free

_given: set[int] = set()


def free_port(in_a_row: int = 1) -> int:
    """A port that nobody listens on, nor on the next `in_a_row - 1`; no two calls in a process share one.

    Below the range from which Linux gives ports to outgoing connections and to servers that ask for any: one that is
    free now stays free until the test's server takes it, however much else connects in between.
    """
    while True:
        first = random.randrange(FIRST_PORT, LAST_PORT - in_a_row)
        wanted = range(first, first + in_a_row)
        if _given.isdisjoint(wanted) and all(map(is_free, wanted)):
            _given.update(wanted)
            return first
