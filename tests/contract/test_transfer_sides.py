"""The sides of whole units over real links: every rank of decode finds the ranks of prefill that feed it, and orders."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import zmq

from baton_core.agreement import KVPoll
from baton_core.effects import Connect, Expect, Offer, Push
from baton_core.errors import Reason
from baton_core.events import BootstrapInfos, RankEndpoint
from baton_core.kv_layout import UnitLayout
from baton_core.limits import Limits
from baton_core.messages import PageOrder
from baton_core.ranks import Parallel
from baton_decode.side import DecodeSide
from baton_io.links import Links, Lost, Said
from baton_prefill.side import PrefillSide
from contract.transfer_pairs import DECODE, PREFILL, WAIT_S, Units, row_of

LIMITS = Limits(heartbeat_ms=50, link_silent_ms=600, link_resend_ms=40)
ONE = UnitLayout(layers=3, kv_heads=2, head_dim=4, element_bytes=4, page_tokens=4)
TOKENS = 18
Side = PrefillSide | DecodeSide


def now_ms() -> int:
    return time.monotonic_ns() // 1_000_000


class Sides:
    """A side and its links for each rank of two units, turned by hand."""

    def __init__(self, directory: Path, source: UnitLayout, target: UnitLayout) -> None:
        self.units = Units("shm", directory, source, target)
        self.links: dict[str, Links] = {}
        self.prefill = [PrefillSide(sender) for sender in self.units.senders]
        ports = [self._links(f"p1/0.{member}").listen("127.0.0.1") for member in range(source.members)]
        self.endpoints = tuple(RankEndpoint(host="127.0.0.1", port=port) for port in ports)
        parallel = Parallel(tp=target.tp, pp=target.pp)
        self.decode = [
            DecodeSide(
                receiver,
                self.units.rows[member],
                self._links(f"d1/0.{member}"),
                layout=target,
                place=parallel.place(member),
                name=f"d1/0.{member}",
            )
            for member, receiver in enumerate(self.units.receivers)
        ]
        self.sides: dict[str, Side] = {f"p1/0.{member}": side for member, side in enumerate(self.prefill)}
        self.sides |= {f"d1/0.{member}": side for member, side in enumerate(self.decode)}

    def _links(self, name: str) -> Links:
        self.links[name] = Links(name, LIMITS)
        return self.links[name]

    def connect(self, endpoints: int | None = None) -> None:
        """What every replica of decode's core asks for."""
        infos = BootstrapInfos(incarnation="p1", dp_rank=0, endpoints=self.endpoints[:endpoints])
        for side in self.decode:
            side.perform(Connect(infos=infos), now_ms())

    def begin(self) -> None:
        """Offer on all ranks of prefill, expect on all of decode."""
        units = self.units
        units.begin(TOKENS, absent=tuple(range(units.source.members)))
        for end in (*units.senders, *units.receivers):
            end.forget(7, 1)
        offer = Offer(
            rid="a",
            room=7,
            attempt=1,
            peer=DECODE,
            target=units.target.to_text(),
            prompt_tokens=TOKENS,
            pages_total=len(units.source_pages),
        )
        for side in self.prefill:
            side.perform(offer, now_ms())
        expect = Expect(
            rid="a",
            room=7,
            attempt=1,
            peer=PREFILL,
            source=units.source.to_text(),
            prompt_tokens=TOKENS,
            pages=units.target_pages,
            row=2,
        )
        for decode in self.decode:
            decode.perform(expect, now_ms())

    def until(self, holds: Callable[[], bool], what: str) -> None:
        """Turn all loops until `holds`."""
        deadline = time.monotonic() + WAIT_S
        while not holds():
            assert time.monotonic() < deadline, f"not within {WAIT_S} s: {what}"
            poller = zmq.Poller()
            for links in self.links.values():
                for socket in links.sockets:
                    poller.register(socket, zmq.POLLIN)
            poller.poll(10)
            for name, links in self.links.items():
                for news in links.receive(now_ms()) + links.tick(now_ms()):
                    if isinstance(news, Said) and isinstance(news.payload, PageOrder):
                        self.sides[name].order(news.peer, news.payload)
                    elif isinstance(news, Lost):
                        self.sides[name].peer_gone(news.peer)

    def close(self) -> None:
        self.units.close()
        for links in self.links.values():
            links.close()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Sides]]:
    made: list[Sides] = []

    def make(**shapes: dict[str, int]) -> Sides:
        made.append(Sides(tmp_path, replace(ONE, **shapes["source"]), replace(ONE, **shapes["target"])))
        return made[-1]

    yield make
    for sides in made:
        sides.close()


Make = Callable[..., Sides]


def test_every_rank_orders_from_those_that_feed_it_and_everything_arrives(make: Make) -> None:
    sides = make(source={"tp": 2, "pp": 2}, target={"tp": 2, "pp": 3})
    sides.connect()
    sides.begin()
    sides.until(
        lambda: all(sides.units.sent(member).poll is KVPoll.WaitingForInput for member in range(4)), "all are ordered"
    )
    assert sides.links["d1/0.1"].peers == ("p1/0.1",), "one rank of one stage holds what this one needs"
    pages = sides.units.source_pages
    for prefill in sides.prefill:
        prefill.perform(Push(room=7, attempt=1, first=0, pages=pages, row=row_of()), now_ms())
    sides.units.arrive()


def test_only_the_leader_dials_before_there_is_anything_to_order(make: Make) -> None:
    sides = make(source={"tp": 2}, target={"tp": 2})
    sides.connect()
    assert sides.links[DECODE].peers == (PREFILL,)
    assert sides.links["d1/0.1"].peers == ()


def test_a_unit_with_fewer_endpoints_than_its_layout_needs_fails_the_attempt(make: Make) -> None:
    sides = make(source={"tp": 2}, target={})
    sides.connect(endpoints=1)
    sides.begin()
    assert sides.units.received(0).poll is KVPoll.Failed
    assert sides.units.received(0).reason is Reason.PEER_LOST


def test_a_link_that_is_lost_fails_what_that_rank_feeds_and_reads(make: Make) -> None:
    sides = make(source={"tp": 2}, target={"tp": 2})
    sides.connect()
    sides.begin()
    sides.until(lambda: sides.units.sent(1).poll is KVPoll.WaitingForInput, "all are ordered")
    sides.links.pop("p1/0.1").close()
    sides.until(lambda: sides.units.received(1).poll is KVPoll.Failed, "its reader notices")
    assert sides.units.received(0).poll is KVPoll.WaitingForInput
    sides.links.pop("d1/0.0").close()
    sides.until(lambda: sides.units.sent(0).poll is KVPoll.Failed, "so does a writer")
