"""Logprobs as OpenAI writes them, for tokens `first … end-1` of an answer.

All tokens that `usage` counts have an entry, the end-of-sequence token too. A token that is no whole character is
written as OpenAI does, `bytes:\\xe2\\x82`, so that two different ones never look alike.
"""

from typing import Any

from baton_core.request import TokenLogprob
from baton_worker.answer import Answer
from baton_worker.tokenizer import Tokenizer

UNKNOWN = -9999.0
"""Stands for a logprob that is not known: these fields must hold a number."""


def completion_logprobs(answer: Answer, tokenizer: Tokenizer, first: int, end: int) -> dict[str, Any]:
    """`choices[].logprobs` of a completion; `text_offset` counts characters from the start of the answer's text.

    `top_logprobs` holds the token itself too, as in OpenAI's: one more than asked for where it is none of the likeliest.
    """
    judged = answer.output_logprobs[first:end]
    longest = len(answer.text) if answer.ending is not None else None
    starts = answer.text_starts[first:end]
    return {
        "tokens": [token_text(tokenizer, one.token) for one in judged],
        "token_logprobs": [_number(one.logprob) for one in judged],
        "top_logprobs": [
            {token_text(tokenizer, token): logprob for token, logprob in (*one.top, (one.token, _number(one.logprob)))}
            for one in judged
        ],
        "text_offset": starts if longest is None else [min(start, longest) for start in starts],
    }


def chat_logprobs(answer: Answer, tokenizer: Tokenizer, first: int, end: int) -> dict[str, Any]:
    """`choices[].logprobs` of a chat."""
    return {"content": [_content(tokenizer, one) for one in answer.output_logprobs[first:end]], "refusal": None}


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """The text of one token alone."""
    raw = tokenizer.token_bytes(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _content(tokenizer: Tokenizer, one: TokenLogprob) -> dict[str, Any]:
    top = [_piece(tokenizer, token, logprob) for token, logprob in one.top]
    return _piece(tokenizer, one.token, _number(one.logprob)) | {"top_logprobs": top}


def _piece(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token)
    return {"token": token_text(tokenizer, token), "logprob": logprob, "bytes": list(raw)}


def _number(logprob: float | None) -> float:
    return UNKNOWN if logprob is None else logprob
