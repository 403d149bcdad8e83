"""Errors that come with status 200: the first event of a stream says that there will be no answer.

Workers that are not ours send the head of a stream before they know. While the client has seen nothing, such an error can
still be told as a status.
"""

from typing import Any

import msgspec

from baton_router.exchange import EVENT_STREAM
from baton_router.upstream import Answer

BEGINNING = b'data: {"error"'
END = b"\n\n"
ERROR_EVENT_BYTES_MAX = 64 * 1024
DEFAULT_STATUS = 500


class StreamedError(Exception):
    """The stream is an error: its status, and its words as a JSON body."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"an error in the stream, with code {status}")
        self.status = status
        self.body = body


async def first_piece(answer: Answer) -> bytes:
    """The first bytes of a body (empty: there are none). Raises StreamedError, and what `read` raises."""
    chunk = await answer.read()
    return await whole_piece(answer, chunk) if may_be_error(answer, chunk) else chunk


def may_be_error(answer: Answer, chunk: bytes) -> bool:
    """Whether a body that begins with `chunk` may say that there will be no answer: then `whole_piece` says."""
    return chunk.startswith(BEGINNING[: len(chunk)]) and bool(chunk) and _is_event_stream(answer)


async def whole_piece(answer: Answer, chunk: bytes) -> bytes:
    """What `may_be_error`, and as much more of the body as tells that it is none. Raises as `first_piece` does."""
    while END not in chunk and len(chunk) < ERROR_EVENT_BYTES_MAX and chunk.startswith(BEGINNING[: len(chunk)]):
        more = await answer.read()
        if not more:
            break
        chunk += more
    error = _error_in(chunk.partition(END)[0])
    if error is None:
        return chunk
    raise StreamedError(_status_of(error), msgspec.json.encode({"error": error}))


def _is_event_stream(answer: Answer) -> bool:
    return answer.headers.get("content-type", "").startswith(EVENT_STREAM)


def _error_in(event: bytes) -> dict[str, Any] | None:
    """The error that an event consists of; None where it is none, or comes with a record of ours, which is read later."""
    try:
        said = msgspec.json.decode(event.removeprefix(b"data: "))
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    error = said.get("error") if isinstance(said, dict) else None
    return error if isinstance(error, dict) else None


def _status_of(error: dict[str, Any]) -> int:
    code = error.get("code")
    return code if isinstance(code, int) and 400 <= code < 600 else DEFAULT_STATUS
