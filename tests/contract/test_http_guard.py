"""What a client may not do to any of our HTTP ports: send a head that never ends, or stop in the middle and stay."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from baton_core.limits import HEAD_BYTES_MAX
from baton_io import http_guard
from baton_io.http_guard import GuardedHttp
from contract.registry_servers import listening_socket

WAIT_S = 5.0
HEAD = b"POST / HTTP/1.1\r\nhost: a\r\n"


@pytest.fixture
async def port() -> AsyncIterator[int]:
    async def count(request: Request) -> Response:
        return PlainTextResponse(str(len(await request.body())))

    app = Starlette(routes=[Route("/", count, methods=["POST"])])
    server = uvicorn.Server(
        uvicorn.Config(app, http=GuardedHttp, lifespan="off", log_config=None, timeout_keep_alive=1)
    )
    with listening_socket() as listener:
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        yield listener.getsockname()[1]
        server.should_exit = True
        await serving


async def said(port: int, *pieces: bytes) -> bytes:
    """Everything that the server answers until it closes; it must close."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(WAIT_S):
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
            return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def test_a_request_that_ends_is_answered_in_as_many_pieces_as_it_comes(port: int) -> None:
    whole = HEAD + b"content-length: 3\r\nconnection: close\r\n\r\nabc"
    answers = {await said(port, whole), await said(port, *(whole[at : at + 1] for at in range(len(whole))))}
    assert {answer.rpartition(b"\r\n\r\n")[2] for answer in answers} == {b"3"}
    both = await said(port, HEAD + b"content-length: 1\r\n\r\na" + whole)
    assert both.count(b"HTTP/1.1 200") == 2


@pytest.mark.parametrize(
    "endless",
    [HEAD + b"x: ", HEAD, b"POST /", HEAD + b"transfer-encoding: chunked\r\n\r\n1;"],
    ids=["a header", "headers", "a target", "a chunk's extension"],
)
async def test_what_does_not_end_is_refused_before_it_is_kept(port: int, endless: bytes) -> None:
    more = b"y: z\r\n" * 2_000 if endless == HEAD else b"y" * 12_000
    answer = await said(port, endless, *(more for _ in range(HEAD_BYTES_MAX // len(more) + 20)))
    assert not answer or answer.startswith((b"HTTP/1.1 431", b"HTTP/1.1 400"))


async def test_a_head_that_stops_is_a_408_and_a_body_that_stops_is_let_go(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_guard, "HEAD_MS", 50)
    monkeypatch.setattr(http_guard, "BODY_STALL_MS", 50)
    assert (await said(port, HEAD)).startswith(b"HTTP/1.1 408")
    assert await said(port, HEAD + b"content-length: 3\r\n\r\na") == b""


async def test_who_says_nothing_at_all_is_let_go_like_one_who_has_said_everything(port: int) -> None:
    assert await said(port) == b""


async def test_a_body_longer_than_any_head_is_taken(port: int) -> None:
    body = b"a" * (4 * HEAD_BYTES_MAX)
    answer = await said(port, HEAD + b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body), body)
    assert answer.endswith(b"\r\n\r\n%d" % len(body))
