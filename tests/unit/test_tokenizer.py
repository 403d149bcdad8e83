"""The tokenizer of a real model, and text that grows token by token."""

import random
from pathlib import Path

import pytest

from baton_core.errors import ClientError, EngineError, Reason
from baton_io.gguf_metadata import read_metadata
from baton_worker.detokenizer import Match, StopMatcher, StreamDecoder
from baton_worker.models import resolve_model
from baton_worker.tokenizer import Tokenizer

TEXTS = (
    "Hello, world!",
    "line\n\n  indented\ttabbed   spaces   ",
    "1234567890 and 3.14",
    "naïve café — “quotes” …",
    "日本語のテキスト",
    "🎉🇩🇪👩‍👩‍👧‍👦 emoji",
    "<|im_start|>user\nhi<|im_end|>",
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_gguf(resolve_model("smollm2-135m-instruct").path)


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_survives_the_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text


def test_words_keep_their_space_digits_stand_alone_and_special_tokens_are_whole(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("The capital of France is") == [504, 3575, 282, 4649, 314]
    assert tokenizer.encode("123") == [33, 34, 35]
    assert tokenizer.encode("<|im_end|>") == [2] == list(tokenizer.eos_ids)


def test_special_tokens_are_hidden_unless_asked_for(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a<|im_end|>b")
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.decode(ids, skip_special=False) == "a<|im_end|>b"


def test_a_chat_becomes_the_prompt_the_model_was_trained_on(tokenizer: Tokenizer) -> None:
    asked = tokenizer.render_chat([{"role": "user", "content": "Hi"}])
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    assert asked == (f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    own = tokenizer.render_chat([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}])
    assert own.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n")


def test_a_stream_never_shows_half_a_character(tokenizer: Tokenizer) -> None:
    text = "🎉 é 日本 👩‍👩‍👧‍👦!"
    decoder = StreamDecoder(tokenizer)
    pieces = [decoder.feed(token) for token in tokenizer.encode(text)]
    assert "" in pieces, "some tokens end inside a character"
    assert not any("�" in piece for piece in pieces)
    assert "".join(pieces) + decoder.flush() == text


def test_a_stream_adds_up_to_the_whole_decoding_for_any_tokens(tokenizer: Tokenizer) -> None:
    draw = random.Random(7)
    for _ in range(200):
        ids = [draw.randrange(tokenizer.vocab_size) for _ in range(40)]
        decoder = StreamDecoder(tokenizer, skip_special=False)
        streamed = "".join(map(decoder.feed, ids)) + decoder.flush()
        assert streamed == tokenizer.decode(ids, skip_special=False)


def test_an_unfinished_character_comes_out_at_the_end_only(tokenizer: Tokenizer) -> None:
    decoder = StreamDecoder(tokenizer)
    half = tokenizer.encode("🎉")[:1]
    assert [decoder.feed(token) for token in half] == [""]
    assert decoder.flush() == "�"


def test_a_text_that_cannot_fit_is_refused_with_both_numbers(tokenizer: Tokenizer) -> None:
    for text in ("x" * 100_000, "word " * 50_000):
        with pytest.raises(ClientError, match=r"\d+ tokens; this worker takes at most 127") as refused:
            tokenizer.encode_within(text, 128)
        assert refused.value.verdict.reason is Reason.CONTEXT_TOO_LONG


def test_a_long_text_of_few_tokens_is_not_refused_by_its_length(tokenizer: Tokenizer) -> None:
    text = "-" * 64 * 40  # one token has up to 81 characters
    assert len(tokenizer.encode_within(text, 128)) < 128


def test_a_stop_string_is_found_across_pieces_and_cut_out() -> None:
    matcher = StopMatcher(["STOP"])
    assert [matcher.feed(piece) for piece in ("ab S", "TO", "x ST")] == [Match("ab "), Match(""), Match("STOx ")]
    assert matcher.feed("OP tail") == Match("", "STOP")


def test_what_might_be_a_stop_string_is_shown_at_the_end() -> None:
    matcher = StopMatcher(["STOP"])
    assert matcher.feed("so ST") == Match("so ")
    assert matcher.flush() == "ST"


def test_the_match_does_not_depend_on_how_the_text_is_cut() -> None:
    text, stops = "one two abcd three", ["abcd", "bc", "zzz"]
    for size in range(1, len(text)):
        matcher, shown = StopMatcher(stops), ""
        for start in range(0, len(text), size):
            match = matcher.feed(text[start : start + size])
            shown += match.text
            if match.stop is not None:
                break
        assert (shown, match.stop) == ("one two a", "bc")


def test_a_stop_string_stays_where_the_client_wants_it() -> None:
    assert StopMatcher(["."], keep_stop=True).feed("Paris. And") == Match("Paris.", ".")


def test_an_unknown_model_is_refused_with_advice(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="Known names: smollm2-135m-instruct"):
        resolve_model("no-such-model")
    with pytest.raises(EngineError, match="there is no such file"):
        resolve_model(str(tmp_path / "absent.gguf"))


@pytest.mark.parametrize("content", [b"", b"not a model", b"GGUF\x03\0\0\0", b"GGUF" + b"\xff" * 64])
def test_a_damaged_model_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    with pytest.raises(EngineError, match=r"broken\.gguf cannot be read"):
        read_metadata(path)
