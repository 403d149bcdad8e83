"""What an answer knows about its tokens: their logprobs, where their text starts, and which are settled."""

from itertools import pairwise

import pytest

from baton_core.effects import Emit
from baton_core.request import Finish, FinishType, TokenLogprob
from baton_worker.answer import Answer
from baton_worker.models import resolve_model
from baton_worker.streams import Delivery, RequestStream
from baton_worker.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_gguf(resolve_model("smollm2-135m-instruct").path)


def answer(tokenizer: Tokenizer, *, stop: tuple[str, ...] = (), judged: bool = True) -> Answer:
    return Answer(
        rid="r", prompt=(1,), tokenizer=tokenizer, stop=stop, skip_special=True, keep_stop=False, judged=judged
    )


def judged(token: int) -> TokenLogprob:
    return TokenLogprob(token=token, logprob=-1.0)


def delivery(*tokens: int, finish: Finish | None = None) -> Delivery:
    return Delivery(tokens, finish, 0, tuple(map(judged, tokens)))


async def test_a_token_that_came_without_a_logprob_shifts_no_other() -> None:
    stream = RequestStream("r", "r")
    stream.push(Emit(rid="r", tokens=(5,)))
    stream.push(Emit(rid="r", tokens=(6,), logprobs=(judged(6),), prompt_logprobs=(judged(1),)))
    taken = await stream.take()
    assert taken.logprobs == (TokenLogprob(token=5, logprob=None), judged(6))
    assert taken.prompt_logprobs == (judged(1),)
    stream.push(Emit(rid="r", tokens=(7,), logprobs=(judged(7),)))
    assert (await stream.take()).logprobs == (judged(7),)


def test_every_token_has_one_entry_also_where_none_came(tokenizer: Tokenizer) -> None:
    grown = answer(tokenizer)
    grown.feed(delivery(50))
    grown.feed(Delivery((51,), None, 0))
    assert [one.logprob for one in grown.output_logprobs] == [-1.0, None]
    silent = answer(tokenizer, judged=False)
    silent.feed(Delivery((51,), None, 0))
    assert silent.output_logprobs == []


def test_a_token_is_settled_once_its_text_is_shown(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one two 🎉!")
    grown = answer(tokenizer, stop=(" two x",))
    settled = []
    for token in ids:
        grown.feed(delivery(token))
        settled.append(grown.settled_tokens)
    held = len(tokenizer.encode("one"))
    assert settled[held] == held, "' two' may be the beginning of the stop string"
    assert settled[-1] == len(ids)
    assert all(later >= earlier for earlier, later in pairwise(settled))
    pieces = [grown.text[start:] for start in grown.text_starts]
    assert pieces[0] == grown.text and pieces[held].startswith(" two")


def test_at_the_end_all_tokens_are_settled_though_a_stop_string_hid_some(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one two three")
    grown = answer(tokenizer, stop=("two three",))
    for token in ids[:-1]:
        grown.feed(delivery(token))
    grown.feed(delivery(ids[-1], finish=Finish(type=FinishType.LENGTH)))
    assert grown.text == "one "
    assert grown.settled_tokens == len(grown.output_logprobs) == len(ids)
