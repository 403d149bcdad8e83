"""The two ways of a request that generates, straight from the connection or through ASGI, seen by a client of bytes.

A query changes nothing but the way, so each test is made twice.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from baton_core.limits import Limits
from baton_router import front
from baton_router.caller import AsgiCaller
from contract.fake_workers import TOKENS, World, answers, decodes_slowly, dies_after, event, is_silent, world

WAIT_S = 5.0
BODY = json.dumps({"text": "x"}).encode()
STREAM = json.dumps({"text": "x", "stream": True}).encode()
TEXT = json.dumps({"text": "".join(TOKENS)}).encode()


@pytest.fixture(params=["/generate", "/generate?through=asgi"], ids=["direct", "asgi"])
def target(request: pytest.FixtureRequest) -> str:
    """What stands in the request's first line."""
    return str(request.param)


def call(target: str, body: bytes = BODY, *headers: str, version: str = "1.1") -> bytes:
    """A whole request."""
    lines = (f"POST {target} HTTP/{version}", "host: r", f"content-length: {len(body)}", *headers)
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


class Wire:
    """A client's connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def say(self, data: bytes) -> None:
        """Send, and let it arrive."""
        self.writer.write(data)
        await self.writer.drain()

    async def head(self) -> bytes:
        """The next head."""
        async with asyncio.timeout(WAIT_S):
            return await self.reader.readuntil(b"\r\n\r\n")

    async def answer(self) -> tuple[bytes, bytes]:
        """The next answer that has a length: its head, its body."""
        head = await self.head()
        length = next(int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"content-length:"))
        async with asyncio.timeout(WAIT_S):
            return head, await self.reader.readexactly(length)

    async def rest(self) -> bytes:
        """Everything until the router closes, which it must."""
        async with asyncio.timeout(WAIT_S):
            return await self.reader.read()


@asynccontextmanager
async def wire(w: World) -> AsyncIterator[Wire]:
    """A connection to the router of that world."""
    port = int(w.client.url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield Wire(reader, writer)
    finally:
        writer.close()


async def test_only_a_query_leads_through_asgi(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    monkeypatch.setattr(AsgiCaller, "unwatch", lambda self: made.append(self))
    async with world() as w, wire(w) as line:
        await line.say(call(target))
        await line.answer()
        assert bool(made) is ("?" in target)


async def test_a_connection_serves_one_request_after_another(target: str) -> None:
    async with world() as w, wire(w) as line:
        for _ in range(3):
            await line.say(call(target))
            head, body = await line.answer()
            assert head.startswith(b"HTTP/1.1 200 OK\r\n") and body == TEXT
            assert b"\r\nx-request-id: " in head and b"\r\ndate: " in head and b"connection:" not in head


async def test_what_is_sent_early_is_answered_in_turn_on_whichever_way(target: str) -> None:
    async with world() as w, wire(w) as line:
        wrong = call(target, b"no json")
        health = b"GET /health HTTP/1.1\r\nhost: r\r\n\r\n"
        await line.say(call(target) + wrong + health + call(target))
        statuses = [(await line.answer())[0].split()[1] for _ in range(4)]
        assert statuses == [b"200", b"400", b"200", b"200"]


async def test_a_client_of_the_first_version_gets_its_answer_and_the_end(target: str) -> None:
    async with world() as w, wire(w) as line:
        await line.say(call(target, version="1.0"))
        answer = await line.rest()
        assert b"\r\nconnection: close\r\n" in answer and answer.endswith(TEXT)


async def test_who_asks_to_close_is_closed(target: str) -> None:
    async with world() as w, wire(w) as line:
        await line.say(call(target, BODY, "connection: close"))
        answer = await line.rest()
        assert b"\r\nconnection: close\r\n" in answer and answer.endswith(TEXT)


async def test_a_body_may_come_in_pieces_and_in_chunks(target: str) -> None:
    async with world() as w, wire(w) as line:
        whole = call(target)
        for at in range(0, len(whole), 7):
            await line.say(whole[at : at + 7])
        assert (await line.answer())[1] == TEXT
        await line.say(f"POST {target} HTTP/1.1\r\nhost: r\r\ntransfer-encoding: chunked\r\n\r\n".encode())
        for byte in BODY:
            await line.say(b"1\r\n%c\r\n" % byte)
        await line.say(b"0\r\n\r\n")
        assert (await line.answer())[1] == TEXT


async def test_who_waits_to_be_told_to_go_on_is_told(target: str) -> None:
    async with world() as w, wire(w) as line:
        head, _, body = call(target, BODY, "expect: 100-continue").partition(b"\r\n\r\n")
        await line.say(head + b"\r\n\r\n")
        assert await line.head() == b"HTTP/1.1 100 Continue\r\n\r\n"
        await line.say(body)
        assert (await line.answer())[1] == TEXT


async def test_a_body_that_is_too_large_is_not_waited_for(target: str) -> None:
    async with world(limits=Limits(body_bytes_max=100)) as w, wire(w) as line:
        await line.say(call(target, b" " * 101))
        assert (await line.answer())[0].split()[1] == b"413"
        async with wire(w) as other:
            await other.say(f"POST {target} HTTP/1.1\r\nhost: r\r\ncontent-length: 101\r\n\r\n".encode())
            assert (await other.answer())[0].split()[1] == b"413"
        assert not w.decode[0].received


async def test_a_client_that_leaves_within_its_body_is_heard_of_by_no_worker(target: str) -> None:
    async with world() as w:
        async with wire(w) as line:
            await line.say(call(target)[:-2])
            await w.client.until("/metrics", lambda _, text: "baton_router_inflight_requests 1.0" in text)
        await w.idle()
        assert not w.decode[0].received
        _, metrics = await w.client.get("/metrics")
        assert 'baton_router_requests_total{route="/generate",status="499"} 1.0' in metrics


async def test_a_client_that_leaves_before_its_answer_closes_both_legs(target: str) -> None:
    async with world((is_silent,), (is_silent,)) as w:
        async with wire(w) as line:
            await line.say(call(target))
            await asyncio.wait_for(w.decode[0].arrival.wait(), WAIT_S)
        await asyncio.gather(w.prefill[0].saw_its_connection_closed(), w.decode[0].saw_its_connection_closed())
        await w.idle()


async def test_a_stream_is_framed_as_it_comes_and_its_connection_goes_on(target: str) -> None:
    async with world(decode=(decodes_slowly,)) as w, wire(w) as line:
        await line.say(call(target, STREAM))
        head = await line.head()
        assert b"\r\ntransfer-encoding: chunked\r\n" in head
        for token in TOKENS[:2]:
            said = event({"text": token})
            async with asyncio.timeout(WAIT_S):
                assert await line.reader.readexactly(len(said) + 6) == b"%x\r\n%b\r\n" % (len(said), said)
            w.decode[0].release.set()
        async with asyncio.timeout(WAIT_S):
            assert await line.reader.readexactly(5) == b"0\r\n\r\n"
        await line.say(call(target))
        assert b"200 OK" in await line.head()


async def test_a_stream_whose_first_event_is_not_whole_shows_its_head_at_once(target: str) -> None:
    async with world(decode=(dies_after(b'data: {"te'),), migrations=0) as w, wire(w) as line:
        await line.say(call(target, STREAM))
        assert b"200 OK" in await line.head()


async def test_a_workers_refusal_has_its_words_and_the_connection_goes_on(target: str) -> None:
    async with world(decode=(answers(429, retry_after="7"),)) as w, wire(w) as line:
        for _ in range(2):
            await line.say(call(target))
            head, body = await line.answer()
            assert head.split()[1] == b"429" and b"\r\nretry-after: 7\r\n" in head
            assert json.loads(body)["error"]["message"] == "because 429"


async def test_a_fault_of_ours_is_a_500_and_the_end(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("a fault of ours")

    async with world() as w, wire(w) as line:
        monkeypatch.setattr("baton_router.dispatch.parse_fields", fails)
        await line.say(call(target))
        answer = await line.rest()
        assert answer.startswith(b"HTTP/1.1 500 ") and answer.endswith(b"Internal Server Error")


async def test_an_idle_connection_is_let_go_and_a_busy_one_never(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    patience_s = 0.2
    made = front.Front.connection_made

    def impatient(self: front.Front, transport: asyncio.Transport) -> None:
        self.timeout_keep_alive = patience_s  # type: ignore[assignment]
        made(self, transport)

    monkeypatch.setattr(front.Front, "connection_made", impatient)
    async with world(decode=(decodes_slowly,)) as w, wire(w) as line:
        loop = asyncio.get_running_loop()
        await line.say(call(target, STREAM))
        await line.head()
        loop.call_later(3 * patience_s, w.decode[0].release.set)
        async with asyncio.timeout(WAIT_S):
            await line.reader.readuntil(b"0\r\n\r\n")
        ended_s = loop.time()
        assert await line.rest() == b""
        assert loop.time() - ended_s > 0.9 * patience_s
