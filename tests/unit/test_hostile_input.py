"""What fuzzing found, kept: each once ended a rank, a unit or a request of somebody else's, or was answered with 500."""

import json

import msgspec
import pytest

from baton_core.errors import TEXT_CHARS_MAX, ClientError, Reason, Verdict
from baton_core.kv_layout import UnitLayout, mismatches
from baton_core.link import NAME_CHARS_MAX, Frame, FrameKind
from baton_core.messages import ATTEMPT_MAX, INDEX_MAX, WORDS_CHARS_MAX, Accepted, Hello, PageOrder, Rejected
from baton_core.registration import parse_registration
from baton_core.request import Sampling
from baton_io.codec import FrameError
from baton_io.links import FRAMES, PAYLOADS
from baton_router.merging import asks_for_scores
from baton_worker.continuation import Part, Past, Start
from baton_worker.schemas import ChatBody, CompletionBody, GenerateBody, decode

HELLO = Hello(room=1, attempt=1, prompt_tokens=3, digest=7, fingerprint="{}", dp_rank=0, layout="{}")
ORDER = PageOrder(room=1, attempt=1, incarnation="d", pages=(1, 2), row=0, backend="tcp", address="a:1", layout="{}")


def altered(message: object, **fields: object) -> bytes:
    """`message` on the wire with fields that it could not be made with."""
    raw = PAYLOADS.encode(message)
    return raw[:1] + msgspec.msgpack.encode(msgspec.msgpack.decode(raw[1:]) | fields)


def test_a_verdict_can_be_sent_whatever_its_text_quotes() -> None:
    quoted = Verdict(reason=Reason.LAYOUT_MISMATCH, text="unexpected keyword argument '\ud800'")
    assert quoted.text == "unexpected keyword argument '\\ud800'"
    assert PAYLOADS.decode(PAYLOADS.encode(Rejected(room=1, attempt=1, reason=quoted.reason, text=quoted.text)))
    long = Verdict(reason=Reason.LAYOUT_MISMATCH, text="é" * 1_000_000)
    assert len(long.text) == TEXT_CHARS_MAX
    assert Verdict(reason=Reason.ABORTED, text="naïve 𝒳").text == "naïve 𝒳"


def test_a_fingerprint_that_goes_deep_is_a_mismatch() -> None:
    assert mismatches("{}", "[" * 100_000)
    with pytest.raises(ValueError, match="not a KV layout"):
        UnitLayout.from_text('{"\\ud800": 1}')


@pytest.mark.parametrize("attempt", [0, ATTEMPT_MAX + 1, 2**63])
def test_an_attempt_that_no_stream_or_row_has_room_for_is_no_message(attempt: int) -> None:
    for message in (HELLO, ORDER, Accepted(room=1, attempt=1, dp_rank=0, layout="")):
        with pytest.raises(FrameError, match="out of range"):
            PAYLOADS.decode(altered(message, attempt=attempt))


@pytest.mark.parametrize("fields", [{"row": INDEX_MAX + 1}, {"pages": [1, 2**63]}, {"pages": [-1]}, {"row": -1}])
def test_an_order_of_pages_or_a_row_that_cannot_be_is_no_message(fields: dict[str, object]) -> None:
    with pytest.raises(FrameError, match="out of range"):
        PAYLOADS.decode(altered(ORDER, **fields))


def test_texts_and_names_from_outside_are_bounded_before_they_are_kept() -> None:
    words = "x" * (WORDS_CHARS_MAX + 1)
    for raw in (altered(HELLO, layout=words), altered(HELLO, fingerprint=words), altered(ORDER, address=words)):
        with pytest.raises(FrameError, match="characters"):
            PAYLOADS.decode(raw)
    frame = FRAMES.encode(Frame(kind=FrameKind.BEAT, source="d", target="p", epoch=1))
    for name in ("source", "target"):
        fields = msgspec.msgpack.decode(frame[1:]) | {name: "n" * (NAME_CHARS_MAX + 1)}
        with pytest.raises(FrameError, match="name"):
            FRAMES.decode(frame[:1] + msgspec.msgpack.encode(fields))


@pytest.mark.parametrize(
    ("kind", "body", "key"),
    [
        (GenerateBody, {"text": "a"}, "session_params"),
        (CompletionBody, {"prompt": "a"}, "logit_bias"),
        (ChatBody, {"messages": []}, "unheard_of"),
    ],
)
def test_a_number_beyond_all_numbers_is_refused_where_it_was_skipped_at_first(
    kind: type[msgspec.Struct], body: dict[str, object], key: str
) -> None:
    raw = json.dumps(body | {key: "@"}).replace('"@"', "-1e999").encode()
    with pytest.raises(ClientError, match="not valid"):
        decode(raw, kind)


def test_a_router_reads_no_more_of_return_logprob_than_whether_it_is_true() -> None:
    for raw, asks in ((b"true", True), (b"1e999", False), (b'"\\ud800"', False), (b"[[", False)):
        assert asks_for_scores("/generate", {"return_logprob": msgspec.Raw(raw)}) is asks


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_continuation_whose_seed_is_none_is_refused(seed: int) -> None:
    start = Start(rid="r", created=1, seed=seed, prompt_tokens=1, prompt_digest=1)
    with pytest.raises(ClientError, match="seed"):
        Past([Part(tokens=[1], start=start)], 10).sampling(Sampling())


def test_what_a_registration_passes_on_may_not_be_nested_deeper_than_it_can_be_written() -> None:
    fields = ("attn_tp", "attn_cp", "attn_dp", "pp", "system_dp")
    body: dict[str, object] = {f"{axis}_size": 1 for axis in fields} | {f"{axis}_rank": 0 for axis in fields}
    body |= {"rank_ip": "h", "rank_port": 1, "page_size": 1, "kv_cache_dtype": "x"}
    nested: object = 1
    for _ in range(16):
        nested = [nested]
    assert parse_registration(body | {"kv_layout": nested}).layout.kv_layout == nested
    with pytest.raises(ClientError, match="nested"):
        parse_registration(body | {"kv_layout": {"a": nested}})
