"""What a transfer backend owes the driver. Nothing here blocks: work happens on the backend's own threads, and every
change of what `poller` would say is announced by calling `poke`.

An attempt is named by (room, attempt). Its life on the decode side: `expect`, then `forget` after success, or `revoke`,
perhaps `fence`, and `forget` once its observation says `writers_stopped`. On the prefill side likewise, from `offer`.

An end belongs to one rank. Which ranks of the other unit write to it, or read from it, follows from the layouts of the
two units (`kv_layout`); they are called by their names (`ranks.member_name`).
"""

from collections.abc import Callable
from typing import Protocol

from baton_core.agreement import Poller, Staging
from baton_core.effects import Push
from baton_core.kv_layout import UnitLayout
from baton_core.messages import PageOrder
from baton_core.request import Incarnation, PageId, Room

Poke = Callable[[], None]
"""Wakes the driver; callable from any thread."""


class Attempts(Protocol):
    """What both ends of a backend can do with an attempt they know."""

    def poller(self, room: Room, attempt: int) -> Poller:
        """This rank's view of the attempt; an unknown one polls as Failed with its writers stopped."""
        ...

    def revoke(self, room: Room, attempt: int) -> None:
        """Let nobody begin to touch the attempt's pages any more; `writers_stopped` follows when nobody does."""
        ...

    def fence(self, room: Room, attempt: int) -> None:
        """Cut off whoever still touches the attempt's pages."""
        ...

    def forget(self, room: Room, attempt: int) -> None:
        """Drop everything kept about the attempt."""
        ...

    def peer_gone(self, peer: Incarnation) -> None:
        """Keep nothing about this rank of another unit: its connections are closed, attempts that need it fail."""
        ...

    def tally(self) -> tuple[dict[str, float], dict[str, list[float]]]:
        """What all transfers have come to: counters, and samples since the last call, by metric key."""
        ...

    def close(self) -> None:
        """Stop all threads and close all sockets."""
        ...


class Receiver(Attempts, Protocol):
    """The decode end. An attempt succeeds when every rank that writes here has delivered all it owes, and the row."""

    backend: str
    address: str  # goes into page orders
    staging: Staging | None  # where what arrives is scattered later

    def expect(
        self,
        room: Room,
        attempt: int,
        peer: Incarnation,
        source: UnitLayout,
        prompt_tokens: int,
        pages: tuple[PageId, ...],
        row: int,
        held_pages: int = 0,
    ) -> None:
        """From now on the ranks of `peer`'s unit that have a share may write it, and one of them, last, the row.

        The first `held_pages` of `pages` nobody may write. The row is cleared first.
        """
        ...


class Sender(Attempts, Protocol):
    """The prefill end. An attempt waits for input when all ranks that read from here have ordered."""

    def offer(self, room: Room, attempt: int, peer: Incarnation, target: UnitLayout, prompt_tokens: int) -> None:
        """From now on the ranks of `peer`'s unit that have a share here may order it."""
        ...

    def order(self, peer: Incarnation, order: PageOrder) -> None:
        """`peer` orders the pages. An order that was not offered, or that cannot be met, harms only itself."""
        ...

    def push(self, push: Push) -> None:
        """Send finished pages to all that ordered them, and with the last push the row to whom this rank owes it."""
        ...
