"""The journal of a stream: what passes, what is kept, wherever the bytes are cut and wherever they end."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_router import journal
from baton_router.journal import Journal
from baton_router.upstream import UpstreamLost


def event(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def signed(events: bytes, value: object, kind: bytes = b"part") -> bytes:
    return (events[:-1] or b"\n") + b"baton-" + kind + b": " + json.dumps(value).encode() + b"\n\n"


OPENING, THE, DOG, END = event("opening"), event("the"), event("dog"), event("stop") + b"data: [DONE]\n\n"
STREAM = (
    signed(OPENING + THE, {"tokens": [1]})
    + signed(b"", {"tokens": [2]})  # half a character: nothing to show yet
    + signed(DOG, {"tokens": [3, 4]})
    + signed(END, {"tokens": [5]}, b"last")
)


def records(of: Journal) -> Any:
    return json.loads(bytes(of.continuation()))


def test_whole_writes_pass_without_their_records_and_the_records_are_kept() -> None:
    one = Journal()
    assert one.take(signed(OPENING + THE, {"tokens": [1]})) == OPENING + THE
    assert one.take(signed(b"", {"tokens": [2]})) == b""
    assert records(one) == [{"tokens": [1]}, {"tokens": [2]}]
    assert one.has_begun
    assert one.take(signed(END, {"tokens": [5]}, b"last")) == END
    assert one.is_complete


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_cuts_change_nothing(cuts: list[int]) -> None:
    one, places = Journal(), [0, *sorted(cuts), len(STREAM)]
    passed = b"".join(one.take(STREAM[start:end]) for start, end in pairwise(places))
    assert passed + one.rest() == OPENING + THE + DOG + END
    assert records(one) == [{"tokens": [1]}, {"tokens": [2]}, {"tokens": [3, 4]}, {"tokens": [5]}]


@pytest.mark.parametrize("length", range(len(STREAM)))
def test_wherever_a_stream_breaks_what_passed_is_what_the_records_say(length: int) -> None:
    one = Journal()
    passed = one.take(STREAM[:length])
    tokens = [token for record in records(one) for token in record["tokens"]]
    assert passed == {0: b"", 1: OPENING + THE, 2: OPENING + THE, 4: OPENING + THE + DOG}[len(tokens)]
    assert not one.is_complete
    assert one.has_begun == bool(passed)


def test_an_error_in_words_passes_nothing_and_ends_the_journal_of_that_worker() -> None:
    one = Journal()
    chunk = signed(THE, {"tokens": [1]}) + signed(event({"error": {"code": 500}}), 500, b"fail") + b"junk"
    assert one.take(chunk) == THE
    assert one.error == (500, b'{"error": {"code": 500}}')
    assert one.rest() == b""
    one.resume()
    assert one.error is None
    assert one.take(signed(DOG, {"tokens": [2]})) == DOG


def test_what_a_lost_worker_left_half_said_is_not_said_by_the_next() -> None:
    one = Journal()
    assert one.take(signed(THE, {"tokens": [1]}) + DOG + END[:9]) == THE
    one.resume()
    assert one.take(signed(DOG, {"tokens": [2]})) == DOG


def test_a_mark_within_a_text_is_no_record() -> None:
    one, text = Journal(), event("\nbaton-part: 7\n\n")
    assert one.take(signed(text, {"tokens": [1]})) == text


def test_events_without_a_record_pass_at_the_end_of_a_good_answer() -> None:
    one = Journal()
    assert one.take(END) == b""
    assert one.rest() == END


def test_an_event_that_never_ends_is_a_lost_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "HELD_BYTES_MAX", 100)
    one = Journal()
    one.take(b"data: " + b"x" * 90)
    with pytest.raises(UpstreamLost, match="longer than 100 bytes"):
        one.take(b"x" * 10)
