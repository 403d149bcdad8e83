"""The router's own HTTP client against workers that answer byte by byte what HTTP/1.1 allows, and what it does not."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import uvloop

from baton_router import client as client_module
from baton_router.client import HttpUpstream
from baton_router.upstream import UpstreamError, UpstreamLost, UpstreamRefused, head_lines, read_all
from ports import free_port


@pytest.fixture(params=[asyncio.DefaultEventLoopPolicy, uvloop.EventLoopPolicy], ids=["asyncio", "uvloop"])
def event_loop_policy(request: pytest.FixtureRequest) -> asyncio.AbstractEventLoopPolicy:
    """Both loops: transports of uvloop differ in what they allow after they were closed."""
    policy: asyncio.AbstractEventLoopPolicy = request.param()
    return policy


Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
pytestmark = pytest.mark.filterwarnings("ignore:Overriding the")
OK = b"HTTP/1.1 200 OK\r\n"
LIMIT = 1 << 24


@asynccontextmanager
async def worker(handler: Handler) -> AsyncIterator[tuple[str, HttpUpstream, list[asyncio.StreamWriter]]]:
    """A worker's address, a client, and the connections that were made to it."""
    made: list[asyncio.StreamWriter] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        made.append(writer)
        try:
            await handler(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    async with server, HttpUpstream(connect_timeout_ms=1_000) as upstream:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", upstream, made


async def read_request(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Head and body of the next request."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"content-length:"))
    return head, await reader.readexactly(length)


def says(*pieces: bytes, then_close: bool = True) -> Handler:
    """A worker that answers every request with these pieces, one packet each."""

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await read_request(reader)
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
            if then_close:
                return

    return handler


async def post(url: str, upstream: HttpUpstream, body: bytes = b"{}") -> bytes:
    answer = await upstream.post(url + "/generate", body, {"content-type": "application/json"})
    return await read_all(answer, LIMIT)


async def test_a_request_is_sent_whole_and_a_large_one_too() -> None:
    seen: list[tuple[bytes, bytes]] = []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            seen.append(await read_request(reader))
            writer.write(OK + b"content-length: 2\r\n\r\nok")

    async with worker(handler) as (url, upstream, made):
        for size in (2, 1 << 16, 8 << 20):
            assert await post(url, upstream, b"x" * size) == b"ok"
        assert [len(body) for _, body in seen] == [2, 1 << 16, 8 << 20]
        head = seen[0][0].split(b"\r\n")
        assert head[0] == b"POST /generate HTTP/1.1"
        assert b"host: " + url.removeprefix("http://").encode() in head
        assert b"content-type: application/json" in head
        assert len(made) == 1  # kept alive


@pytest.mark.parametrize(
    "pieces",
    [
        (OK + b"Content-Length: 5\r\n\r\nhello",),
        (OK + b"transfer-encoding: chunked\r\n\r\n2\r\nhe\r\n", b"3\r\nllo\r\n", b"0\r\n\r\n"),
        (OK + b"\r\nhel", b"lo"),
        (b"HTTP/1.1 100 Continue\r\n\r\n", OK + b"content-length: 5\r\n\r\nhello"),
        tuple(bytes((byte,)) for byte in OK + b"content-length: 5\r\n\r\nhello"),
    ],
    ids=["length", "chunked", "until the end", "after 100", "byte by byte"],
)
async def test_every_framing_of_a_body_is_understood(pieces: tuple[bytes, ...]) -> None:
    async with worker(says(*pieces)) as (url, upstream, _):
        assert await post(url, upstream) == b"hello"


@pytest.mark.parametrize("status", [b"204 No Content", b"304 Not Modified"])
async def test_an_answer_without_a_body_ends_with_its_head(status: bytes) -> None:
    async with worker(says(b"HTTP/1.1 " + status + b"\r\n\r\n", then_close=False)) as (url, upstream, made):
        assert await post(url, upstream) == b""
        assert await post(url, upstream) == b""
        assert len(made) == 1


async def test_a_worker_may_live_below_a_path_of_its_address() -> None:
    seen: list[bytes] = []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            seen.append((await read_request(reader))[0])
            writer.write(OK + b"content-length: 2\r\n\r\nok")

    async with worker(handler) as (url, upstream, _):
        for origin in (url, url + "/", url + "/models/a", url + "/models/a/"):
            call = upstream.call(origin, "/generate", b"{}", head_lines({"x-one": "1"}))
            await call.begin()
            assert await read_all(call, LIMIT) == b"ok"
        paths = [head.split(b" ")[1] for head in seen]
        assert paths == [b"/generate", b"/generate", b"/models/a/generate", b"/models/a/generate"]
        assert all(b"\r\nx-one: 1\r\n" in head for head in seen)


async def test_header_names_are_found_in_lower_case() -> None:
    async with worker(says(OK + b"Retry-After: 7\r\ncontent-length: 0\r\n\r\n")) as (url, upstream, _):
        answer = await upstream.post(url + "/x", b"", {})
        assert (answer.status, answer.headers["retry-after"], await answer.read()) == (200, "7", b"")


async def test_a_connection_that_its_worker_closes_is_not_used_again() -> None:
    closing = OK + b"connection: close\r\ncontent-length: 2\r\n\r\nok"
    async with worker(says(closing, then_close=False)) as (url, upstream, made):
        assert [await post(url, upstream) for _ in range(3)] == [b"ok"] * 3
        assert len(made) == 3


async def test_a_connection_that_nobody_uses_any_more_is_closed_though_its_worker_keeps_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_module, "IDLE_CONNECTION_S", 0.05)
    closed = asyncio.Event()

    async def keeps(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(OK + b"content-length: 2\r\n\r\nok")
        try:
            await reader.read()
        finally:
            closed.set()

    async with worker(keeps) as (url, upstream, _):
        assert await post(url, upstream) == b"ok"
        async with asyncio.timeout(5):
            await closed.wait()


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        ((), "before an answer"),
        ((b"SSH-2.0-OpenSSH\r\n",), "not HTTP"),
        ((OK[:9],), "before an answer"),
        ((OK + b"content-length: 10\r\n\r\nhalf",), "within the answer"),
        ((OK + b"transfer-encoding: chunked\r\n\r\n5\r\nhel",), "within the answer"),
        ((OK + b"transfer-encoding: chunked\r\n\r\nzz\r\n",), "not HTTP"),
        (
            (b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n",),
            "not HTTP|before an answer",
        ),
        ((OK + b"x: " + b"y" * 70_000 + b"\r\n\r\n",), "head is longer"),
        ((OK + b"x: ", *[b"y" * 10_000] * 30), "head is longer"),
        ((OK + b"name: value\r\n" * 10_000 + b"content-length: 2\r\n\r\nok",), "head is longer"),
        ((OK + b"transfer-encoding: chunked\r\n\r\n2\r\nhe\r\n0\r\n", *[b"x: y\r\n" * 1_000] * 30), "trailers are"),
        ((OK + b"transfer-encoding: chunked\r\n\r\n2;x=", *[b"y" * 10_000] * 30), "trailers are"),
    ],
)
async def test_an_answer_that_ends_early_or_makes_no_sense_is_a_loss_that_says_so(
    pieces: tuple[bytes, ...], words: str
) -> None:
    async with worker(says(*pieces)) as (url, upstream, _):
        with pytest.raises(UpstreamLost, match=words):
            await post(url, upstream)


async def test_where_nobody_listens_nothing_was_sent() -> None:
    async with HttpUpstream(connect_timeout_ms=500) as upstream:
        with pytest.raises(UpstreamRefused, match="no connection"):
            await upstream.post(f"http://127.0.0.1:{free_port()}/x", b"", {})


async def test_cancelling_before_the_head_or_within_the_body_closes_the_connection() -> None:
    closed = asyncio.Queue[bytes]()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        _, body = await read_request(reader)
        if body == b"stream":
            writer.write(OK + b"transfer-encoding: chunked\r\n\r\n1\r\nx\r\n")
        await reader.read()
        closed.put_nowait(body)

    async with worker(handler) as (url, upstream, _):
        call = asyncio.create_task(upstream.post(url + "/x", b"silent", {}))
        await asyncio.wait([call], timeout=0.05)
        call.cancel()
        assert await asyncio.wait_for(closed.get(), 1) == b"silent"
        answer = await upstream.post(url + "/x", b"stream", {})
        assert await answer.read() == b"x"
        answer.cancel()
        answer.cancel()
        assert await asyncio.wait_for(closed.get(), 1) == b"stream"
        with pytest.raises(UpstreamLost):
            await answer.read()


async def test_a_worker_that_answers_before_it_took_the_request_does_not_get_another_on_that_connection() -> None:
    over = asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\ncontent-length: 3\r\n\r\nbig")
        await over.wait()  # it reads nothing more: who reads on might have taken it all before its answer is understood

    async with worker(handler) as (url, upstream, made):
        for _ in range(2):
            answer = await upstream.post(url + "/x", b"x" * (32 << 20), {})
            assert (answer.status, await read_all(answer, LIMIT)) == (413, b"big")
        assert len(made) == 2
        over.set()


async def test_an_unread_body_makes_the_worker_wait_and_arrives_whole() -> None:
    size = 32 << 20
    sent = asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(OK + b"content-length: %d\r\n\r\n" % size)
        for _ in range(size >> 16):
            writer.write(b"z" * (1 << 16))
            await writer.drain()
        sent.set()

    async with worker(handler) as (url, upstream, _):
        answer = await upstream.post(url + "/x", b"", {})
        await asyncio.wait([asyncio.create_task(sent.wait())], timeout=0.2)
        assert not sent.is_set()
        assert len(await read_all(answer, size)) == size


async def test_a_get_is_bounded_in_time_and_size() -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if b"GET /big" in head:
            writer.write(OK + b"content-length: 9000000\r\n\r\n" + b"x" * 9_000_000)
        await reader.read()

    async with worker(handler) as (url, upstream, _):
        with pytest.raises(UpstreamLost, match="within 50 ms"):
            await upstream.get(url + "/slow", 50)
        with pytest.raises(UpstreamLost, match="longer than"):
            await upstream.get(url + "/big", 5_000)


async def test_what_was_held_back_can_be_read_after_the_connection_is_gone() -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(OK + b"content-length: 99999999\r\n\r\n" + b"z" * (4 << 20))
        await writer.drain()

    async with worker(handler) as (url, upstream, _):
        answer = await upstream.post(url + "/x", b"", {})
        sizes: list[int] = []

        async def drain() -> None:
            while chunk := await answer.read():
                sizes.append(len(chunk))

        with pytest.raises(UpstreamLost, match="within the answer"):
            await drain()
        assert sum(sizes) == 4 << 20


@pytest.mark.parametrize(
    "host",
    ["\x00", "a" * 64 + ".b", "a." * 200, "é\ud800", "a b", "..", "a..b", "[::1", ""],
    ids=lambda host: ascii(host)[:12],
)
async def test_an_address_that_no_resolver_takes_is_refused_like_any_other_fault_of_a_worker(host: str) -> None:
    """Once, such an address ended the watch over all workers."""
    async with HttpUpstream(connect_timeout_ms=500) as upstream:
        with pytest.raises(UpstreamError):
            await upstream.get(f"http://{host}:9/ready", 500)
