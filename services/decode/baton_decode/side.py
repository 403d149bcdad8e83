"""What a decode rank does with the effects that only decode knows: it dials, expects, and orders pages.

The rank that leads its unit speaks with prefill's leader; every rank orders its pages from the prefill ranks that hold
a share of them, each on a link of its own.
"""

from collections import OrderedDict
from typing import assert_never

import structlog

from baton_core.agreement import MetadataRows, Staging
from baton_core.effects import Connect, Expect, Offer, Push
from baton_core.events import BootstrapInfos, RankEndpoint
from baton_core.kv_layout import UnitLayout, writers
from baton_core.limits import Millis
from baton_core.messages import PageOrder
from baton_core.ranks import Place, member_of, unit_of
from baton_core.request import Incarnation
from baton_engine.transfer.attempts import sibling
from baton_engine.transfer.protocol import Receiver
from baton_io.links import Links

log = structlog.get_logger(__name__)

UNITS_MAX = 4_096


class DecodeSide:
    """Drives a `Receiver` and the links to prefill ranks, for the rank called `name`, at `place` in a unit of `layout`."""

    def __init__(
        self,
        receiver: Receiver,
        rows: MetadataRows,
        links: Links,
        *,
        layout: UnitLayout,
        place: Place,
        name: Incarnation,
    ) -> None:
        self.attempts = receiver
        self.rows: MetadataRows = rows
        self.staging: Staging | None = receiver.staging
        self._links = links
        self._layout, self._layout_text = layout, layout.to_text()
        self._place, self._name = place, name
        self._endpoints: OrderedDict[Incarnation, tuple[RankEndpoint, ...]] = OrderedDict()  # by prefill unit

    def perform(self, effect: Expect | Offer | Push | Connect, now: Millis) -> None:
        """Dial or expect. The other two are prefill's; a decode core never asks for them."""
        match effect:
            case Connect():
                self._connect(effect.infos, now)
            case Expect():
                self._expect(effect, now)
            case Offer() | Push():
                raise AssertionError(f"decode was asked to {effect}")
            case _:
                assert_never(effect)

    def order(self, peer: Incarnation, order: PageOrder) -> None:
        """Nobody orders pages from decode; a stray order is ignored."""

    def peer_gone(self, peer: Incarnation) -> None:
        """Keep nothing about a prefill rank that is gone; what it feeds fails here, and so in the whole unit."""
        if member_of(peer) == 0:
            self._endpoints.pop(unit_of(peer), None)
        self.attempts.peer_gone(peer)

    def _connect(self, infos: BootstrapInfos, now: Millis) -> None:
        unit = unit_of(infos.leader)
        self._endpoints[unit] = infos.endpoints
        self._endpoints.move_to_end(unit)
        if len(self._endpoints) > UNITS_MAX:
            self._endpoints.popitem(last=False)
        if self._place.leads:
            self._links.dial(infos.leader, infos.endpoints[0], now)

    def _expect(self, effect: Expect, now: Millis) -> None:
        source = UnitLayout.from_text(effect.source)
        # Ready to receive before anybody can send.
        self.attempts.expect(
            effect.room,
            effect.attempt,
            effect.peer,
            source,
            effect.prompt_tokens,
            effect.pages,
            effect.row,
            effect.held_pages,
        )
        order = PageOrder(
            room=effect.room,
            attempt=effect.attempt,
            incarnation=self._name,
            pages=effect.pages,
            row=effect.row,
            backend=self.attempts.backend,
            address=self.attempts.address,
            layout=self._layout_text,
            held_pages=effect.held_pages,
        )
        endpoints = self._endpoints.get(unit_of(effect.peer), ())
        for writer in writers(source, self._layout, self._place.member):
            name = sibling(effect.peer, writer)
            if writer < len(endpoints):
                self._links.dial(name, endpoints[writer], now)
                self._links.send(name, order, now)
            else:
                log.error("transfer.no_endpoint", room=effect.room, peer=name, known=len(endpoints))
                self.attempts.peer_gone(name)
