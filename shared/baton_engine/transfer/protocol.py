"""What a transfer backend owes the driver. Nothing here blocks: work happens on the backend's own threads, and every
change of what `poller` would say is announced by calling `poke`.

An attempt is named by (room, attempt). Its life on the decode side: `expect`, then `forget` after success, or `revoke`,
perhaps `fence`, and `forget` once its observation says `writers_stopped`. On the prefill side likewise, from `offer`.
"""

from collections.abc import Callable
from typing import Protocol

from baton_core.agreement import Poller
from baton_core.effects import Push
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

    def close(self) -> None:
        """Stop all threads and close all sockets."""
        ...


class Receiver(Attempts, Protocol):
    """The decode end."""

    backend: str
    address: str  # goes into page orders

    def expect(self, room: Room, attempt: int, writer: Incarnation, pages: tuple[PageId, ...], row: int) -> None:
        """From now on `writer` may write these pages and, last, this row. The row is cleared first."""
        ...


class Sender(Attempts, Protocol):
    """The prefill end."""

    def offer(self, room: Room, attempt: int, peer: Incarnation, pages_total: int) -> None:
        """From now on `peer` may order the pages of this attempt."""
        ...

    def order(self, peer: Incarnation, order: PageOrder) -> None:
        """`peer` orders the pages. An order that was not offered, or that cannot be met, harms only itself."""
        ...

    def push(self, push: Push) -> None:
        """Send finished pages, and with the last push the row."""
        ...

    def peer_gone(self, peer: Incarnation) -> None:
        """Keep nothing about this peer: its connections are closed, its attempts fail."""
        ...
