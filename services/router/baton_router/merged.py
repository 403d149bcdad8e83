"""Decode's answer with prefill's logprobs of the prompt in it, as one more `Answer` to be passed on."""

from collections.abc import Mapping

from baton_router.exchange import EVENT_STREAM, PASSED_HEADERS, EventTail
from baton_router.journal import TOKEN_IDS_HEADER
from baton_router.legs import FirstBytes
from baton_router.merging import Scores, merge, merge_events
from baton_router.upstream import Answer, read_all

MERGED_BYTES_MAX = 256 << 20
"""A whole answer is held in memory to be merged; a stream only event by event."""


async def merged(first: FirstBytes, scores: Scores) -> FirstBytes:
    """The merged answer, begun. Raises UpstreamLost."""
    if first.answer.headers.get("content-type", "").startswith(EVENT_STREAM):
        stream = _MergedStream(first, scores)
        return FirstBytes(answer=stream, chunk=await stream.read())
    body = merge(first.chunk + await read_all(first.answer, MERGED_BYTES_MAX), scores)
    return FirstBytes(answer=_MergedWhole(first.answer, len(body)), chunk=body)


class _MergedWhole:
    """A body that was read and merged as a whole: nothing comes after its first bytes."""

    is_over = True

    def __init__(self, answer: Answer, length: int) -> None:
        self._answer = answer
        self.status = answer.status
        self.headers: Mapping[str, str] = _headers(answer) | {"content-length": str(length)}

    async def read(self) -> bytes:
        """See Answer."""
        return b""

    @property
    def heard_s(self) -> float:
        """See Answer."""
        return self._answer.heard_s

    def cancel(self) -> None:
        """See Answer."""
        self._answer.cancel()

    def abandon(self, text: str) -> None:
        """See Answer."""
        self._answer.abandon(text)


class _MergedStream:
    """Events, merged one by one as they become whole."""

    def __init__(self, first: FirstBytes, scores: Scores) -> None:
        self._answer = first.answer
        self._scores = scores
        self._tail = EventTail()
        self._next = first.chunk
        self.is_over = False
        self.status = first.answer.status
        self.headers: Mapping[str, str] = _headers(first.answer)

    async def read(self) -> bytes:
        """See Answer."""
        while not self.is_over:
            chunk = self._next or await self._answer.read()
            self._next = b""
            self.is_over = not chunk
            whole = self._tail.complete(chunk) if chunk else self._tail.rest()
            if whole:
                return merge_events(whole, self._scores)
        return b""

    @property
    def heard_s(self) -> float:
        """See Answer."""
        return self._answer.heard_s

    def cancel(self) -> None:
        """See Answer."""
        self._answer.cancel()

    def abandon(self, text: str) -> None:
        """See Answer."""
        self._answer.abandon(text)


def _headers(answer: Answer) -> dict[str, str]:
    """What is passed on of the head, or still needed; the length is not that of the merged body."""
    names = (name for name in (*PASSED_HEADERS, TOKEN_IDS_HEADER) if name != "content-length")
    return {name: value for name in names if (value := answer.headers.get(name)) is not None}
