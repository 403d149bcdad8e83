"""The door: who is turned away before it owns anything, and by which of two paths (S5)."""

import pytest

from baton_core.admission import capacity_verdict, is_unadmitted_reject
from baton_core.decode.core import DecodeCore
from baton_core.decode.phases import DECODE
from baton_core.errors import Reason
from baton_core.machine import Handoff, Phase, move
from baton_core.request import Request
from unit.cores import GONE, decode, kinds, request


def handoff(**fields: object) -> Handoff:
    made = {"request": request(), "serial": 1, "table": DECODE, "arrived_at": 0, "deadline_at": 1, **fields}
    return Handoff(**made)  # type: ignore[arg-type]


def test_a_rejected_request_that_owns_nothing_is_turned_away() -> None:
    assert is_unadmitted_reject(handoff(to_finish=GONE))
    assert not is_unadmitted_reject(handoff()), "nobody rejected it"


@pytest.mark.parametrize(
    ("owned", "name"), [({"pages": (1,)}, "pages"), ({"row": 0}, "row"), ({"opened": True}, "transfer")]
)
def test_whoever_owns_something_takes_the_later_path(owned: dict[str, object], name: str) -> None:
    one = handoff(to_finish=GONE, **owned)
    assert not is_unadmitted_reject(one)
    assert one.owned() == (name,)


def test_a_retracted_request_owns_nothing_and_is_not_turned_away() -> None:
    assert not is_unadmitted_reject(handoff(to_finish=GONE, is_retracted=True))


@pytest.mark.parametrize("flag", ["is_retracted", "is_rebootstrap"])
def test_the_decode_door_lets_re_entering_requests_pass(flag: str) -> None:
    core = decode().core
    assert isinstance(core, DecodeCore)
    one = core.ledger.intake(request(rejected=GONE), 0)
    assert one is not None
    assert core.prealloc.add(one, 0, **{flag: True})
    assert one.phase is Phase.RESOLVING


def test_a_handoff_that_owns_something_cannot_be_retired_at_the_door() -> None:
    ledger = decode().core.ledger
    one = ledger.intake(request(), 0)
    assert one is not None
    one.row = 3
    with pytest.raises(AssertionError, match="owns"):
        ledger.retire_unadmitted_request(one, GONE)


def test_a_retired_request_is_answered_with_its_own_verdict_and_counted() -> None:
    ledger = decode().core.ledger
    one = ledger.intake(request(rejected=GONE), 0)
    assert one is not None
    ledger.retire_unadmitted_request(one)
    assert kinds(ledger.take_effects()) == ["Emit"]
    assert ledger.rejections == {Reason.CLIENT_GONE: 1}
    assert not ledger.live


@pytest.mark.parametrize(
    ("tokens", "fits", "words"),
    [(7, True, ()), (15, False, ("15 tokens", "at most 14")), (8, False, ("5 KV pages", "has 4", "--kv-tokens"))],
)
def test_capacity_is_judged_by_context_and_pool(tokens: int, fits: bool, words: tuple[str, ...]) -> None:
    one: Request = request(prompt=tuple(range(tokens)))
    verdict = capacity_verdict(one, context_tokens=15, pool_pages=4, page_tokens=2)
    assert (verdict is None) == fits
    if verdict is not None:
        assert verdict.reason is Reason.CONTEXT_TOO_LONG
        assert all(word in verdict.text for word in words)


def test_an_illegal_move_asserts() -> None:
    with pytest.raises(AssertionError, match="is not legal"):
        move(handoff(), Phase.RUNNING, [])


def test_two_attempts_of_one_name_cannot_be_open_at_once() -> None:
    ledger = decode().core.ledger
    ledger.transfer_begins(handoff())
    with pytest.raises(AssertionError, match="is open for r"):
        ledger.transfer_begins(handoff())
