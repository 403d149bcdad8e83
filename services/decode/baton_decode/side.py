"""What a decode rank does with the effects that only decode knows: it dials, expects, and orders pages."""

from typing import assert_never

from baton_core.agreement import MetadataRows, Staging
from baton_core.effects import Connect, Expect, Offer, Push
from baton_core.kv_layout import Layout
from baton_core.limits import Millis
from baton_core.messages import PageOrder
from baton_core.request import Incarnation
from baton_engine.transfer.protocol import Receiver
from baton_io.links import Links


class DecodeSide:
    """Drives a `Receiver` and the links to prefill ranks."""

    staging: Staging | None = None

    def __init__(
        self, receiver: Receiver, rows: MetadataRows, links: Links, layout: Layout, incarnation: Incarnation
    ) -> None:
        self.attempts = receiver
        self.rows: MetadataRows = rows
        self._links = links
        self._layout_text = layout.to_text()
        self._incarnation = incarnation

    def perform(self, effect: Expect | Offer | Push | Connect, now: Millis) -> None:
        """Dial or expect. The other two are prefill's; a decode core never asks for them."""
        match effect:
            case Connect():
                self._links.dial(effect.infos.incarnation, effect.infos.endpoints[0], now)
            case Expect():
                self._expect(effect, now)
            case Offer() | Push():
                raise AssertionError(f"decode was asked to {effect}")
            case _:
                assert_never(effect)

    def order(self, peer: Incarnation, order: PageOrder) -> None:
        """Nobody orders pages from decode; a stray order is ignored."""

    def peer_gone(self, peer: Incarnation) -> None:
        """The core fails its rooms; their streams end by revoking and, if need be, fencing."""

    def _expect(self, effect: Expect, now: Millis) -> None:
        # Ready to receive before anybody can send.
        self.attempts.expect(effect.room, effect.attempt, effect.peer, effect.pages, effect.row)
        order = PageOrder(
            room=effect.room,
            attempt=effect.attempt,
            incarnation=self._incarnation,
            pages=effect.pages,
            row=effect.row,
            backend=self.attempts.backend,
            address=self.attempts.address,
            layout=self._layout_text,
        )
        self._links.send(effect.peer, order, now)
