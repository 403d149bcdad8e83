"""Calls to workers, behind one small protocol; `client` speaks HTTP/1.1 behind it.

There is no total timeout: a long prompt is not an error, and the request's own deadline ends the call by cancelling it.
Cancelling a call, before or after its headers, closes its connection, which is how a worker learns that nobody waits.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

from baton_core.limits import Millis


class UpstreamError(Exception):
    """The call ended without an answer. `text` says how, for people."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


class UpstreamRefused(UpstreamError):
    """No connection could be made: nothing was sent."""


class UpstreamLost(UpstreamError):
    """The connection ended, or made no sense, after the request may have been sent."""


class Answer(Protocol):
    """The head of a worker's answer, and its body as it comes."""

    @property
    def status(self) -> int:
        """HTTP status."""
        ...

    @property
    def headers(self) -> Mapping[str, str]:
        """By lower-case name."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether all of the body has been read, as far as is known now."""
        ...

    @property
    def heard_s(self) -> float:
        """When the worker last sent something, by the event loop's clock."""
        ...

    async def read(self) -> bytes:
        """The next bytes of the body, as they come, undecoded; empty at its end. Raises UpstreamLost."""
        ...

    def cancel(self) -> None:
        """Close the connection, unless the body was read to its end. May be called twice."""
        ...

    def abandon(self, text: str) -> None:
        """The same from outside: who reads is told that the worker is lost, and why."""
        ...


class Calling(Answer, Protocol):
    """A call under way: its head is still to come while `status` is 0.

    `on_news` is called each time something of the answer came, or it is certain that no more will: who has only a look
    to take at what comes needs no task that waits for it.
    """

    on_news: Callable[[], None] | None

    def take(self) -> bytes | None:
        """What is here of the body; None: nothing yet, empty: its end. Raises UpstreamError."""
        ...

    async def closed(self) -> None:
        """After `cancel`: wait until nothing of it is left."""
        ...


class Upstream(Protocol):
    """The way to the workers."""

    def call(self, origin: str, path: str, body: bytes, lines: bytes) -> Calling:
        """Begin to POST, and return at once. Where it fails, the call says so.

        `origin`: a worker's address, with a path of its own or without; `lines`: see `head_lines`."""
        ...

    async def post(self, url: str, body: bytes, headers: Mapping[str, str]) -> Answer:
        """Send, and return with the answer's head. Raises UpstreamError."""
        ...

    async def get(self, url: str, timeout_ms: Millis) -> tuple[int, bytes]:
        """Status and whole body of a small GET. Raises UpstreamError, also when time is up."""
        ...


def head_lines(headers: Mapping[str, str]) -> bytes:
    """Headers as they stand in a request's head: both legs of an attempt send the same, made once."""
    return "".join([f"{name}: {value}\r\n" for name, value in headers.items()]).encode("utf-8")


async def read_all(answer: Answer, bytes_max: int) -> bytes:
    """The whole body. Raises UpstreamLost when it ends early or is longer than `bytes_max`."""
    parts: list[bytes] = []
    size = 0
    while part := await answer.read():
        parts.append(part)
        size += len(part)
        if size > bytes_max:
            answer.cancel()
            raise UpstreamLost(f"the answer is longer than {bytes_max} bytes")
    return b"".join(parts)


async def read_within(timeout_ms: Millis, bytes_max: int, call: Awaitable[Answer]) -> tuple[int, bytes]:
    """Status and whole body of a call, which is closed on every way out. Raises UpstreamError, also when time is up."""
    answer: Answer | None = None
    try:
        async with asyncio.timeout(timeout_ms / 1000):
            answer = await call
            return answer.status, await read_all(answer, bytes_max)
    except TimeoutError as error:
        raise UpstreamLost(f"no answer within {timeout_ms} ms") from error
    finally:
        if answer is not None:
            answer.cancel()
