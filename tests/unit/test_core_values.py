"""Values that are valid if they exist: requests, limits, messages, verdicts."""

import pytest

from baton_core.errors import (
    RETRY_AFTER,
    STATUS,
    BatonError,
    ClientError,
    EngineError,
    Overloaded,
    PeerError,
    Reason,
    Verdict,
    raise_for,
)
from baton_core.limits import Limits
from baton_core.machine import Phase
from baton_core.messages import ROW_BYTES, Hello, MetadataRow, PageOrder, Rejected, RoomFailed
from baton_core.request import FAKE_HOST, ROOM_MAX, Bootstrap, Request, Sampling, TokenLogprob, prompt_digest
from simulation.tally import TABLES


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_has_a_status_and_an_exception_of_its_kind(reason: Reason) -> None:
    verdict = Verdict(reason=reason, text="why")
    status = STATUS[reason]
    wanted: type[BatonError] = EngineError
    if status < 500:
        wanted = ClientError
    elif reason in RETRY_AFTER:
        wanted = Overloaded
    elif status in (502, 503, 504):
        wanted = PeerError
    with pytest.raises(BatonError) as caught:
        raise_for(verdict)
    assert type(caught.value) is wanted
    assert caught.value.verdict == verdict
    assert verdict.status == status


def test_only_503_carries_retry_after() -> None:
    assert {STATUS[reason] for reason in RETRY_AFTER} == {503}


def test_an_error_without_a_reason_takes_that_of_its_class() -> None:
    reasons = [error("x").verdict.reason for error in (ClientError, Overloaded, PeerError, EngineError)]
    assert reasons == [Reason.INVALID_REQUEST, Reason.WAITING_FULL, Reason.PEER_LOST, Reason.DEVICE_FAULT]


@pytest.mark.parametrize("value", [0, -1, 1.5])
def test_limits_are_positive_integers(value: int) -> None:
    with pytest.raises(ValueError, match="limit lookup_ms must be a positive integer"):
        Limits(lookup_ms=value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", 0),
        ("min_p", -0.1),
        ("seed", 2**64),
        ("max_new_tokens", -1),
        ("min_new_tokens", 129),
        ("logprobs", 129),
        ("prompt_logprobs_from", 0),
    ],
)
def test_sampling_out_of_range_names_the_field_and_the_range(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{field} must be .*"):
        Sampling(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("host", ["10.0.0.1", FAKE_HOST])
def test_room_0_belongs_to_the_fake_host_alone(host: str) -> None:
    if host == FAKE_HOST:
        assert Bootstrap(host=host, port=1, room=0).room == 0
    else:
        with pytest.raises(ValueError, match="bootstrap_room"):
            Bootstrap(host=host, port=1, room=0)


@pytest.mark.parametrize(("port", "room"), [(0, 1), (65_536, 1), (1, -1), (1, ROOM_MAX + 1)])
def test_a_bootstrap_out_of_range_cannot_be_made(port: int, room: int) -> None:
    with pytest.raises(ValueError, match="bootstrap_"):
        Bootstrap(host="10.0.0.1", port=port, room=room)


@pytest.mark.parametrize("wrong", [{"rid": ""}, {"prompt": ()}, {"budget_ms": 0}])
def test_an_empty_request_cannot_be_made(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Request(**{"rid": "r", "prompt": (1,), "sampling": Sampling(), **wrong})  # type: ignore[arg-type]


def test_a_rejected_request_needs_no_prompt() -> None:
    verdict = Verdict(reason=Reason.INVALID_REQUEST, text="no")
    assert Request(rid="r", prompt=(), sampling=Sampling(), rejected=verdict).room == 0


def test_digests_tell_prompts_apart() -> None:
    assert prompt_digest((1, 2)) == prompt_digest((1, 2))
    assert len({prompt_digest(one) for one in ((1, 2), (2, 1), (1,), (1, 2, 0))}) == 4
    assert 0 <= prompt_digest((1,)) < 2**64


@pytest.mark.parametrize(("room", "attempt"), [(-1, 1), (ROOM_MAX + 1, 1), (1, 0)])
def test_a_room_message_out_of_range_cannot_be_made(room: int, attempt: int) -> None:
    with pytest.raises(ValueError, match="out of range"):
        Hello(room=room, attempt=attempt, prompt_tokens=1, digest=1, fingerprint="", dp_rank=0, layout="")


def test_both_kinds_of_bad_news_carry_a_verdict() -> None:
    for kind in (Rejected, RoomFailed):
        message = kind(room=1, attempt=1, reason=Reason.ABORTED, text="x")
        assert message.verdict == Verdict(reason=Reason.ABORTED, text="x")


@pytest.mark.parametrize("wrong", [{"attempt": 0}, {"row": -1}, {"pages": (-1,)}])
def test_a_page_order_out_of_range_cannot_be_made(wrong: dict[str, object]) -> None:
    fields = {"room": 1, "attempt": 1, "incarnation": "D", "pages": (1,), "row": 0, "backend": "tcp", **wrong}
    with pytest.raises(ValueError, match="out of range"):
        PageOrder(**fields, address="", layout="")  # type: ignore[arg-type]


@pytest.mark.parametrize("room", [0, 1, ROOM_MAX])
def test_a_metadata_row_survives_its_bytes(room: int) -> None:
    row = MetadataRow(room=room, attempt=3, first_token=-1, cached_tokens=4, prompt_tokens=5)
    assert len(row.pack()) == ROW_BYTES
    assert MetadataRow.unpack(row.pack()) == row
    top = ((7, -1.5), (8, -2.0))
    scored = MetadataRow(room=room, attempt=3, first_token=7, logprob=TokenLogprob(token=7, logprob=-1.5, top=top))
    assert MetadataRow.unpack(scored.pack()) == scored


def test_an_empty_row_is_no_row() -> None:
    assert MetadataRow.unpack(bytes(ROW_BYTES)) is None


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.side)
def test_every_phase_of_a_table_is_reached_shown_and_named(table: object) -> None:
    from baton_core.machine import PhaseTable

    assert isinstance(table, PhaseTable)
    used = set(table.transitions)
    assert {target for _, target in table.edges()} | {Phase.INTAKE} == used
    assert set(table.polls) == used
    assert set(table.stages) == {phase for phase, targets in table.transitions.items() if targets}
