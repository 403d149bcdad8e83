"""How cases reach a socket: HTTP over connections that are kept, and streams that break off, each with a deadline."""

import asyncio
import contextlib
from dataclasses import dataclass, field
from types import TracebackType

from fuzz.http_cases import HttpCase

ANSWER_S = 30.0
BROKEN_S = 0.05
"""How long the answer to a request that is no request is waited for."""
DRIPS = 40


class Wrong(AssertionError):
    """A port did what it must not."""


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer."""

    status: int
    headers: dict[bytes, bytes]
    body: bytes = field(repr=False)


class Caller:
    """One connection to an HTTP port, opened again whenever the other end closes it."""

    def __init__(self, host: str, port: int) -> None:
        self._address = host, port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def __aenter__(self) -> "Caller":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close()

    async def whole(self, case: HttpCase) -> Reply:
        """Send a request that is one, and take its answer; once more where the connection had ended meanwhile."""
        try:
            async with asyncio.timeout(ANSWER_S):
                for kept in (self._streams is not None, False):
                    try:
                        return await self._ask(case.raw)
                    except (OSError, asyncio.IncompleteReadError):
                        await self._close()
                        if not kept:
                            raise
        except TimeoutError as error:
            await self._close()
            raise Wrong(f"no answer within {ANSWER_S} s to {case}") from error
        except (OSError, asyncio.IncompleteReadError) as error:
            raise Wrong(f"no answer ({error!r}) to {case}") from error
        raise AssertionError("unreachable")

    async def broken(self, case: HttpCase) -> Reply | None:
        """Send what is no request on a connection of its own; the answer, if there is one soon."""
        reader, writer = await asyncio.open_connection(*self._address)
        try:
            async with asyncio.timeout(5.0):
                await _send(writer, case)
            if case.ends == "close":
                return None
            async with asyncio.timeout(BROKEN_S):
                return await read_reply(reader)
        except (OSError, TimeoutError, asyncio.IncompleteReadError, ValueError):
            return None
        finally:
            await _gone(writer)

    async def _ask(self, raw: bytes) -> Reply:
        if self._streams is None:
            self._streams = await asyncio.open_connection(*self._address, limit=1 << 20)
        reader, writer = self._streams
        with contextlib.suppress(ConnectionError):  # it may be refused before all of it is sent: the answer is there
            writer.write(raw)
            await writer.drain()
        reply = await read_reply(reader)
        if reply.headers.get(b"connection", b"").lower() == b"close":
            await self._close()
        return reply

    async def _close(self) -> None:
        if self._streams is not None:
            await _gone(self._streams[1])
        self._streams = None


async def _send(writer: asyncio.StreamWriter, case: HttpCase) -> None:
    if case.ends == "drip":
        step = max(1, len(case.raw) // DRIPS)
        for first in range(0, len(case.raw), step):
            writer.write(case.raw[first : first + step])
            await writer.drain()
            await asyncio.sleep(0)
    else:
        writer.write(case.raw)
        await writer.drain()
    if case.ends == "half":
        writer.write_eof()


async def _gone(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


async def read_reply(reader: asyncio.StreamReader) -> Reply:
    """One answer, whatever its framing. Raises ValueError where it is not HTTP, IncompleteReadError where it is cut."""
    head = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
    if not head[0].startswith(b"HTTP/1.1 "):
        raise ValueError(f"not HTTP: {head[0][:80]!r}")
    status = int(head[0][9:12])
    if status == 100:
        return await read_reply(reader)
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(b":") for line in head[1:] if line)}
    if headers.get(b"transfer-encoding") == b"chunked":
        return Reply(status, headers, await _chunks(reader))
    if b"content-length" in headers:
        return Reply(status, headers, await reader.readexactly(int(headers[b"content-length"])))
    return Reply(status, headers, b"")


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    body = bytearray()
    while size := int(await reader.readuntil(b"\r\n"), 16):
        body += (await reader.readexactly(size + 2))[:-2]
    await reader.readuntil(b"\r\n")
    return bytes(body)
