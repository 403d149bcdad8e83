"""Units that differ: each side counts pages of its own size, tells the other its layout, and refuses what cannot be."""

from dataclasses import replace

import pytest

from baton_core.agreement import KVPoll
from baton_core.effects import Connect, Effect, Expect, Offer, Tell
from baton_core.errors import Reason
from baton_core.events import BootstrapInfos, PeerGone, RankEndpoint, Resolved
from baton_core.kv_layout import UnitLayout
from baton_core.messages import Accepted, Hello, Rejected, RoomFailed
from unit.cores import (
    ACCEPTED,
    INFOS,
    LAYOUT,
    LOST,
    ROOM,
    D,
    P,
    accepted,
    arrived,
    decode,
    ends,
    greeting,
    hello,
    polled,
    prefill,
    queued,
    request,
    row,
    tokens,
    told,
    transferring,
)

WIDE = replace(LAYOUT, page_tokens=4)
HALVES = replace(LAYOUT, tp=2)


def offers(effects: list[Effect]) -> list[Offer]:
    return [one for one in effects if isinstance(one, Offer)]


def expects(effects: list[Effect]) -> list[Expect]:
    return [one for one in effects if isinstance(one, Expect)]


def endpoints(count: int) -> BootstrapInfos:
    """A prefill unit of so many ranks, as a registry tells it."""
    found = tuple(RankEndpoint(host="10.0.0.1", port=9 + number) for number in range(count))
    return replace(INFOS, endpoints=found)


def test_each_side_tells_its_layout_and_keeps_the_others() -> None:
    sender, receiver = prefill(layout=WIDE), decode(layout=HALVES)
    (greeted,) = told(greeting(receiver))
    assert isinstance(greeted, Hello)
    sender.submit(request())
    effects = sender.say(greeted, D)
    (offer,) = offers(effects)
    assert (UnitLayout.from_text(offer.target), offer.prompt_tokens) == (HALVES, 5)
    (answer,) = told(effects)
    assert isinstance(answer, Accepted)
    assert UnitLayout.from_text(answer.layout) == WIDE
    (expect,) = expects(receiver.say(answer, P))
    assert (UnitLayout.from_text(expect.source), expect.prompt_tokens) == (WIDE, 5)
    assert sender.core.ledger.live["r"].peer_layout == HALVES.to_text()
    assert receiver.core.ledger.live["r"].peer_layout == WIDE.to_text()


@pytest.mark.parametrize(("ours", "theirs", "pages"), [(LAYOUT, WIDE, 3), (WIDE, LAYOUT, 2)])
def test_each_side_counts_pages_of_its_own_size(ours: UnitLayout, theirs: UnitLayout, pages: int) -> None:
    sender = prefill(layout=ours)
    sender.submit(request())
    (offer,) = offers(sender.say(hello(layout=theirs.to_text()), D))
    assert offer.pages_total == pages
    receiver = decode(layout=ours)
    greeting(receiver)
    (expect,) = expects(receiver.say(accepted(layout=theirs.to_text()), P))
    assert len(expect.pages) == pages
    receiver.step(polled(poll=KVPoll.Transferring, progress=pages))
    assert receiver.core.ledger.live["r"].stage_deadline_at is not None, "all pages are here: the row must follow"
    assert tokens(receiver.step(polled(row=row(42), progress=pages))) == [42]


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (replace(LAYOUT, layers=3).to_text(), ("2", "3")),
        (replace(LAYOUT, kv_heads=4).to_text(), ("2", "4")),
        (replace(LAYOUT, element_bytes=2).to_text(), ("4", "2")),
        ("{}", ("layout",)),
        ("nonsense", ()),
    ],
)
def test_layouts_that_nothing_translates_fail_that_request_on_both_legs(layout: str, words: tuple[str, ...]) -> None:
    sender = prefill()
    sender.submit(request())
    effects = sender.say(hello(layout=layout), D)
    assert ends(effects) == [("r", Reason.LAYOUT_MISMATCH)]
    (message,) = told(effects)
    assert isinstance(message, Rejected)
    assert all(word in message.text for word in words)
    receiver = decode()
    greeting(receiver)
    effects = receiver.say(accepted(layout=layout), P)
    assert ends(effects) == [("r", Reason.LAYOUT_MISMATCH)]
    (message,) = told(effects)
    assert isinstance(message, RoomFailed)
    assert all(word in message.text for word in words)
    assert (sender.live, receiver.live, receiver.free) == ([], [], 8)


def test_everything_that_differs_is_named_at_once() -> None:
    sender = prefill()
    sender.submit(request())
    (message,) = told(sender.say(hello(fingerprint='{"dtype":"bf16"}', layout=replace(LAYOUT, layers=3).to_text()), D))
    assert isinstance(message, Rejected)
    assert "bf16" in message.text and "layers" in message.text


def test_a_registry_that_knows_another_number_of_ranks_than_the_unit_says_fails_the_request() -> None:
    receiver = decode()
    receiver.submit(request())
    receiver.step(Resolved(rid="r", infos=endpoints(3)))
    effects = receiver.say(accepted(layout=HALVES.to_text()), P)
    assert ends(effects) == [("r", Reason.LAYOUT_MISMATCH)]
    (message,) = told(effects)
    assert isinstance(message, RoomFailed)
    assert "2 ranks" in message.text and "3" in message.text


def test_hello_goes_to_the_member_that_leads_the_unit() -> None:
    receiver = decode()
    receiver.submit(request())
    infos = replace(endpoints(2), dp_rank=3)
    effects = receiver.step(Resolved(rid="r", infos=infos))
    assert infos.leader == "P#1/3.0"
    assert [one.peer for one in effects if isinstance(one, Tell)] == ["P#1/3.0"]
    assert [one.infos for one in effects if isinstance(one, Connect)] == [infos]
    assert replace(infos, incarnation="P#1/3.0").leader == infos.leader


@pytest.mark.parametrize(
    ("gone", "fails"), [("{}/0.0", True), ("{}/0.3", True), ("{}/1.0", False), ("other/0.0", False)]
)
def test_a_member_that_is_gone_takes_its_unit_with_it_and_no_other(gone: str, fails: bool) -> None:
    sender, receiver = prefill(), decode()
    queued(sender)
    sender.say(hello(5, 9), D)
    transferring(receiver)
    lost = sender.step(PeerGone(peer=gone.format("D#1"), verdict=LOST))
    assert ends(lost) == ([("r", Reason.PEER_LOST)] if fails else [])
    assert list(sender.core.orphans) == ([] if fails else [5])
    lost = receiver.step(PeerGone(peer=gone.format("P#1"), verdict=LOST))
    assert ends(lost) == ([("r", Reason.PEER_LOST)] if fails else [])


def test_what_has_arrived_needs_no_member_of_prefill_any_more() -> None:
    receiver = decode()
    arrived(receiver)
    assert receiver.step(PeerGone(peer="P#1/0.1", verdict=LOST)) == []
    assert receiver.say(ACCEPTED, P) == []
    assert receiver.core.ledger.live["r"].room == ROOM
