"""Calls to workers, behind one small protocol; here on aiohttp.

There is no total timeout: a long prompt is not an error, and the request's own deadline ends the call by cancelling it.
Cancelling a call, before or after its headers, closes its connection, which is how a worker learns that nobody waits.
"""

import asyncio
from collections.abc import Mapping
from io import BytesIO
from types import TracebackType
from typing import Protocol

import aiohttp

from baton_core.limits import Millis

READ_BUFFER_BYTES = 1 << 20
INLINE_BODY_BYTES = 1 << 19
"""Bodies above this are written piece by piece, so that one large prompt does not stall every stream."""
IDLE_CONNECTION_S = 4.0
"""Below the 5 s after which uvicorn closes an idle connection: a request is rarely sent into a closing one."""
PROBE_BODY_BYTES_MAX = 1 << 20


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
        """Case-insensitive."""
        ...

    async def read(self) -> bytes:
        """The next bytes of the body, as they come, undecoded; empty at its end. Raises UpstreamLost."""
        ...

    def cancel(self) -> None:
        """Close the connection, unless the body was read to its end. May be called twice."""
        ...


class Upstream(Protocol):
    """The way to the workers."""

    async def post(self, url: str, body: bytes, headers: Mapping[str, str]) -> Answer:
        """Send, and return with the answer's head. Raises UpstreamError."""
        ...

    async def get(self, url: str, timeout_ms: Millis) -> tuple[int, bytes]:
        """Status and whole body of a small GET. Raises UpstreamError, also when time is up."""
        ...


class AiohttpAnswer:
    """`Answer` on an aiohttp response."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.status = response.status
        self.headers: Mapping[str, str] = response.headers

    async def read(self) -> bytes:
        """See Answer."""
        try:
            return await self._response.content.readany()
        except (aiohttp.ClientError, OSError) as error:
            raise UpstreamLost(f"the connection broke within the answer ({_words(error)})") from error

    def cancel(self) -> None:
        """See Answer."""
        self._response.close()


class AiohttpUpstream:
    """`Upstream` on one aiohttp session; enter it inside the running event loop."""

    def __init__(self, *, connect_timeout_ms: Millis) -> None:
        self._connect_timeout_s = connect_timeout_ms / 1000
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "AiohttpUpstream":
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, limit_per_host=0, keepalive_timeout=IDLE_CONNECTION_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_timeout_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            read_bufsize=READ_BUFFER_BYTES,
            # Nothing on this path needs another encoding, and bytes are passed on as they come.
            headers={"accept-encoding": "identity", "user-agent": "baton-router"},
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._session is not None
        await self._session.close()

    async def post(self, url: str, body: bytes, headers: Mapping[str, str]) -> Answer:
        """See Upstream."""
        assert self._session is not None, "used before it was entered"
        data = body if len(body) <= INLINE_BODY_BYTES else BytesIO(body)
        try:
            response = await self._session.post(url, data=data, headers=headers, allow_redirects=False)
        except (aiohttp.ClientError, OSError) as error:
            raise _upstream_error(error) from error
        return AiohttpAnswer(response)

    async def get(self, url: str, timeout_ms: Millis) -> tuple[int, bytes]:
        """See Upstream."""
        assert self._session is not None, "used before it was entered"
        try:
            async with asyncio.timeout(timeout_ms / 1000), self._session.get(url, allow_redirects=False) as response:
                return response.status, await read_all(AiohttpAnswer(response), PROBE_BODY_BYTES_MAX)
        except TimeoutError as error:
            raise UpstreamLost(f"no answer within {timeout_ms} ms") from error
        except (aiohttp.ClientError, OSError) as error:
            raise _upstream_error(error) from error


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


def _upstream_error(error: aiohttp.ClientError | OSError) -> UpstreamError:
    # aiohttp's connect timeout is a TimeoutError, its connector errors are OSErrors: both mean that nothing was sent.
    if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
        return UpstreamRefused(f"no connection ({_words(error)})")
    return UpstreamLost(f"the connection ended before an answer ({_words(error)})")


def _words(error: BaseException) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        return error.os_error.strerror or str(error.os_error)
    return str(error) or type(error).__name__
