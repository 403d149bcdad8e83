"""The link: loss, repetition, silence, new epochs and new incarnations, over a wire that the test holds in its hands."""

import random

import pytest

from baton_core.limits import Limits
from baton_core.link import ENDED_MAX, Frame, FrameKind, Link, Switchboard

LIMITS = Limits(heartbeat_ms=100, link_silent_ms=500, link_resend_ms=20, link_window=3)


def pair(now: int = 0) -> tuple[Switchboard, Switchboard]:
    """A decode worker that has dialled, and a prefill worker."""
    decode, prefill = Switchboard("D#1", LIMITS), Switchboard("P#1", LIMITS)
    decode.dial("P#1", now)
    return decode, prefill


def carry(frames: tuple[Frame, ...], to: Switchboard, back: Switchboard, now: int = 0) -> list[bytes]:
    """Deliver frames, and the answers to them; returns what `to` was told."""
    told: list[bytes] = []
    for frame in frames:
        heard = to.receive(frame, now)
        told += heard.payloads
        for answer in heard.answers:
            back.receive(answer, now)
    return told


def test_a_message_arrives_once_and_is_acknowledged() -> None:
    decode, prefill = pair()
    assert carry(decode.send("P#1", b"hello", 0), prefill, decode) == [b"hello"]
    assert decode.next_due() == 100, "nothing to repeat, only the heartbeat"
    assert carry(prefill.send("D#1", b"hi", 1), decode, prefill) == [b"hi"]
    assert decode.peers == ("P#1",)
    assert prefill.peers == ("D#1",)


def test_dialling_twice_keeps_the_conversation() -> None:
    decode, prefill = pair()
    carry(decode.send("P#1", b"a", 0), prefill, decode)
    decode.dial("P#1", 5)
    assert carry(decode.send("P#1", b"b", 5), prefill, decode) == [b"b"]


def test_a_lost_message_is_sent_again_until_it_is_acknowledged() -> None:
    decode, prefill = pair()
    decode.send("P#1", b"lost", 0)
    assert decode.tick(19) == ((), ())
    frames, lost = decode.tick(20)
    assert not lost
    assert carry(frames, prefill, decode, 20) == [b"lost"]
    assert decode.tick(40) == ((), ())


def test_a_lost_acknowledgement_costs_a_repeat_and_nothing_is_heard_twice() -> None:
    decode, prefill = pair()
    (frame,) = decode.send("P#1", b"once", 0)
    assert prefill.receive(frame, 0).payloads == (b"once",)
    again, _ = decode.tick(20)
    assert carry(again, prefill, decode, 20) == []
    assert decode.tick(40) == ((), ())


def test_messages_that_overtake_each_other_are_heard_in_order() -> None:
    decode, prefill = pair()
    first, second = decode.send("P#1", b"1", 0) + decode.send("P#1", b"2", 0)
    assert carry((second,), prefill, decode) == [], "a young conversation: its first frame is still under way"
    assert decode.peers == ("P#1",)
    assert carry((first,), prefill, decode) == [b"1"]
    frames, _ = decode.tick(25)
    assert carry(frames, prefill, decode, 25) == [b"2"]


def test_a_part_acknowledgement_keeps_the_rest() -> None:
    decode, prefill = pair()
    first, _ = decode.send("P#1", b"1", 0) + decode.send("P#1", b"2", 0)
    carry((first,), prefill, decode, 10)
    assert decode.tick(29) == ((), ()), "the clock of repeats starts again with progress"
    frames, _ = decode.tick(30)
    assert [frame.payload for frame in frames] == [b"2"]


def test_silence_ends_the_conversation_once_and_says_why() -> None:
    decode, prefill = pair()
    carry(decode.send("P#1", b"a", 0), prefill, decode)
    frames, lost = decode.tick(500)
    assert lost == (("P#1", "nothing heard for 500 ms (link_silent_ms 500)"),)
    assert [frame.kind for frame in frames] == [FrameKind.GONE]
    assert decode.tick(1_000) == ((), ())
    heard = prefill.receive(frames[0], 501)
    assert heard.lost == "nothing heard for 500 ms (link_silent_ms 500)"
    assert not prefill.knows("D#1")


def test_heartbeats_keep_an_idle_conversation() -> None:
    decode, prefill = pair()
    carry(decode.send("P#1", b"a", 0), prefill, decode)
    for now in range(100, 2_000, 100):
        frames, lost = decode.tick(now)
        assert not lost
        carry(frames, prefill, decode, now)
        frames, lost = prefill.tick(now)
        assert not lost
        carry(frames, decode, prefill, now)


def test_a_full_window_counts_as_a_lost_peer_and_is_reported_at_once() -> None:
    decode, _ = pair()
    for number in range(3):
        assert decode.send("P#1", bytes([number]), 1)
    assert decode.send("P#1", b"one too many", 2) == ()
    assert decode.send("P#1", b"and another", 2) == ()
    due = decode.next_due()
    assert due is not None and due <= 2
    frames, lost = decode.tick(2)
    assert lost == (("P#1", "3 messages are unacknowledged (link_window)"),)
    assert frames[0].kind is FrameKind.GONE


def test_a_lost_link_answers_with_its_farewell() -> None:
    link = Link("D#1", "P#1", 1, LIMITS, 0)
    for number in range(4):
        link.send(bytes([number]), 0)
    beat = Frame(kind=FrameKind.BEAT, source="P#1", target="D#1", epoch=1)
    assert [frame.kind for frame in link.receive(beat, 1).answers] == [FrameKind.GONE]
    assert link.tick(1) == ()


def test_nothing_is_sent_without_a_conversation() -> None:
    prefill = Switchboard("P#1", LIMITS)
    assert prefill.send("D#1", b"a", 0) == ()
    assert prefill.hang_up("D#1") == ()
    assert prefill.next_due() is None


def test_hanging_up_tells_the_other_side() -> None:
    decode, prefill = pair()
    carry(decode.send("P#1", b"a", 0), prefill, decode)
    (gone,) = decode.hang_up("P#1")
    assert prefill.receive(gone, 1).lost == "closed"


def test_a_newer_epoch_replaces_the_older_which_counts_as_lost() -> None:
    decode, prefill = pair()
    old = decode.send("P#1", b"old", 0)
    carry(old, prefill, decode)
    decode.hang_up("P#1")
    decode.dial("P#1", 10)
    (frame,) = decode.send("P#1", b"new", 10)
    heard = prefill.receive(frame, 10)
    assert (heard.lost, heard.payloads) == ("the peer opened a new conversation", (b"new",))
    echo = prefill.receive(old[0], 11)
    assert (echo.payloads, echo.answers) == ((), ()), "an echo of the past"


def test_who_speaks_in_an_epoch_that_is_over_is_told_so() -> None:
    decode, prefill = pair()
    carry(decode.send("P#1", b"a", 0), prefill, decode)
    prefill.hang_up("D#1")  # and the farewell is lost
    frames, _ = decode.tick(100)
    heard = prefill.receive(frames[0], 100)
    assert [frame.text for frame in heard.answers] == ["this conversation is over"]
    assert decode.receive(heard.answers[0], 101).lost == "this conversation is over"


def test_a_late_repeat_of_the_first_frame_does_not_revive_a_conversation_that_ended() -> None:
    decode, prefill = pair()
    (first,) = decode.send("P#1", b"a", 0)
    carry((first, *decode.send("P#1", b"b", 0)), prefill, decode)
    prefill.tick(500)
    assert prefill.peers == (), "prefill lost decode to silence, and its farewell is lost"
    heard = prefill.receive(first, 501)
    assert (heard.payloads, prefill.peers) == ((), ())
    assert decode.receive(heard.answers[0], 502).lost == "this conversation is over"
    decode.dial("P#1", 503)
    assert carry(decode.send("P#1", b"anew", 503), prefill, decode, 503) == [b"anew"]


def test_conversations_that_ended_are_remembered_within_bounds() -> None:
    prefill = Switchboard("P#1", LIMITS)
    for number in range(ENDED_MAX + 5):
        decode = Switchboard(f"D#{number}", LIMITS)
        decode.dial("P#1", 0)
        carry(decode.send("P#1", b"a", 0), prefill, decode)
        prefill.hang_up(f"D#{number}")
    assert len(prefill._ended) == ENDED_MAX


def test_a_message_to_an_earlier_incarnation_is_refused_in_its_name() -> None:
    decode, _ = pair()
    restarted = Switchboard("P#2", LIMITS)
    (frame,) = decode.send("P#1", b"hello", 0)
    heard = restarted.receive(frame, 0)
    assert heard.payloads == ()
    lost = decode.receive(heard.answers[0], 1).lost
    assert lost == "incarnation P#1 does not live here any more"
    assert not decode.knows("P#1")


def test_farewells_are_not_answered() -> None:
    _, prefill = pair()
    for target in ("P#1", "P#0"):
        gone = Frame(kind=FrameKind.GONE, source="D#1", target=target, epoch=1)
        assert prefill.receive(gone, 0).answers == ()


def test_frames_with_impossible_numbers_cannot_be_made() -> None:
    for epoch, seq, ack in ((0, 0, 0), (1, -1, 0), (1, 0, -1)):
        with pytest.raises(ValueError, match="out of range"):
            Frame(kind=FrameKind.BEAT, source="a", target="b", epoch=epoch, seq=seq, ack=ack)


@pytest.mark.parametrize("seed", range(20))
def test_over_a_bad_wire_everything_arrives_once_and_in_order(seed: int) -> None:
    chance = random.Random(seed)
    limits = Limits(link_window=1_000, link_silent_ms=60_000)
    decode, prefill = Switchboard("D#1", limits), Switchboard("P#1", limits)
    decode.dial("P#1", 0)
    wire: list[tuple[int, Frame]] = []
    told: dict[str, list[bytes]] = {"D#1": [], "P#1": []}
    answered: list[bytes] = []

    def put(frames: tuple[Frame, ...], now: int) -> None:
        for frame in frames:
            for _ in range(chance.choice((0, 1, 1, 2))):
                wire.append((now + chance.randrange(60), frame))

    for now in range(0, 30_000, 10):
        if now < 400:
            put(decode.send("P#1", b"%d" % now, now), now)
            if prefill.knows("D#1"):
                answered.append(b"%d" % now)
                put(prefill.send("D#1", answered[-1], now), now)
        for frame in [frame for due, frame in wire if due <= now]:
            board = decode if frame.target == "D#1" else prefill
            heard = board.receive(frame, now)
            told[board.own] += heard.payloads
            assert heard.lost is None
            put(heard.answers, now)
        wire = [(due, frame) for due, frame in wire if due > now]
        for board in (decode, prefill):
            frames, lost = board.tick(now)
            assert not lost
            put(frames, now)
    assert told["P#1"] == [b"%d" % now for now in range(0, 400, 10)]
    assert told["D#1"] == answered
