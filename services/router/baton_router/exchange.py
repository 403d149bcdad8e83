"""The client's side of one request: its body read under a limit, its answer begun once, passed on, ended once."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from types import TracebackType
from typing import Any
from uuid import uuid4

import msgspec

from baton_core.limits import Millis
from baton_core.request import Bootstrap
from baton_core.routing.ranks import UNTOLD, Ranks
from baton_router.failures import Failure, Rejection, refusal, turned_away
from baton_router.upstream import Answer

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

EVENT_STREAM = "text/event-stream"
END_MARK = b"data: [DONE]\n\n"
EVENT_TAIL_BYTES_MAX = 1 << 20
PASSED_HEADERS = ("content-type", "content-length", "content-encoding", "cache-control", "retry-after")
"""What of a worker's head the client gets; the rest belongs to the hop."""
ROUTER_FIELDS = (
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "bootstrap_instance",
    "routed_dp_rank",
    "data_parallel_rank",  # SGLang's old name of routed_dp_rank
    "disagg_prefill_dp_rank",
    "baton_continuation",
)
"""Fields that only the router may set: what a client says there is dropped."""

_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")

Fields = dict[str, msgspec.Raw]
_FIELDS = msgspec.json.Decoder(Fields)


class Refused(Exception):
    """The request is wrong in itself, or may not come in now; carries what the client is told."""

    def __init__(self, rejection: Rejection, text: str, failure: Failure | None = None) -> None:
        super().__init__(text)
        self.failure = failure or refusal(rejection, text)


class ClientGone(Exception):
    """Nobody waits for an answer any more."""


async def read_body(headers: Mapping[bytes, bytes], receive: Receive, bytes_max: int, silence_ms: Millis) -> bytes:
    """The whole request body, however slowly it comes. Raises Refused above the limit, before reading it where its
    length is declared, where it is compressed, and where nothing of it comes for `silence_ms`; ClientGone."""
    declared = headers.get(b"content-length", b"0")
    if len(declared) > 18 or (declared.isdigit() and int(declared) > bytes_max):
        raise _too_large(bytes_max)
    encoding = headers.get(b"content-encoding", b"identity")
    if encoding.lower() != b"identity":
        shown = encoding[:32].decode("ascii", "replace")
        raise Refused(
            Rejection.INVALID_REQUEST, f"the request body must not be compressed (content-encoding {shown!r})"
        )
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout_at(loop.time() + silence_ms / 1000) as silence:
            return await _read_parts(receive, bytes_max, lambda: silence.reschedule(loop.time() + silence_ms / 1000))
    except TimeoutError as error:
        text = f"nothing of the request body came for {silence_ms} ms"
        raise Refused(Rejection.SILENT_CLIENT, text, turned_away(Rejection.SILENT_CLIENT, text)) from error


async def _read_parts(receive: Receive, bytes_max: int, on_part: Callable[[], None]) -> bytes:
    parts: list[bytes] = []
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        size += len(part)
        if size > bytes_max:
            raise _too_large(bytes_max)
        parts.append(part)
        more = message.get("more_body", False)
        if more:
            on_part()
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _too_large(bytes_max: int) -> Refused:
    return Refused(Rejection.BODY_TOO_LARGE, f"the request body is larger than {bytes_max} bytes")


def parse_fields(body: bytes) -> Fields:
    """The top level of a JSON object, its values left as the bytes they came in. Raises Refused."""
    try:
        return _FIELDS.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(Rejection.INVALID_REQUEST, f"the request body must be a JSON object: {error}") from error


def body_for_workers(
    fields: Fields, bootstrap: Bootstrap | None, ranks: Ranks = UNTOLD, continuation: msgspec.Raw | None = None
) -> bytes:
    """The body that a leg gets: the client's fields, the router's own in place of any a client may have sent."""
    sent: dict[str, object] = dict(fields)
    for name in ROUTER_FIELDS:
        sent.pop(name, None)
    if bootstrap is not None:
        sent["bootstrap_host"] = bootstrap.host
        sent["bootstrap_port"] = bootstrap.port
        sent["bootstrap_room"] = bootstrap.room
        if bootstrap.instance is not None:
            sent["bootstrap_instance"] = bootstrap.instance
    if ranks.routed is not None:
        sent["routed_dp_rank"] = ranks.routed
    if ranks.prefill is not None:
        sent["disagg_prefill_dp_rank"] = ranks.prefill
    if continuation is not None:
        sent["baton_continuation"] = continuation
    return msgspec.json.encode(sent)


def request_id(headers: Mapping[bytes, bytes]) -> str:
    """The client's `x-request-id`, or a new one where there is none that can be passed on and logged."""
    given = headers.get(b"x-request-id", b"")
    return given.decode("ascii") if _REQUEST_ID.fullmatch(given) else uuid4().hex


def budget_ms(headers: Mapping[bytes, bytes], limit_ms: Millis) -> Millis:
    """What the whole request may take: the smaller of ours and the client's `x-baton-budget-ms`. Raises Refused."""
    given = headers.get(b"x-baton-budget-ms")
    if given is None:
        return limit_ms
    if not given.isdigit() or len(given) > 18 or int(given) == 0:
        raise Refused(Rejection.INVALID_REQUEST, "x-baton-budget-ms must be a positive whole number of milliseconds")
    return min(limit_ms, int(given))


class EventTail:
    """Holds back an event that is not complete yet, so that an answer can always end with one that is valid.

    Costs no time: a client cannot use half an event. Whole events pass as the very bytes they came in.
    """

    def __init__(self) -> None:
        self._tail = b""

    def complete(self, chunk: bytes) -> bytes:
        """What may be passed on now."""
        if not self._tail and chunk.endswith(b"\n\n"):
            return chunk
        held = self._tail + chunk
        end = max(held.rfind(mark) + len(mark) if mark in held else 0 for mark in (b"\n\n", b"\r\n\r\n"))
        if len(held) - end > EVENT_TAIL_BYTES_MAX:
            end = len(held)  # no event of ours is that long: not our business, pass it on
        self._tail = held[end:]
        return held[:end]

    def rest(self) -> bytes:
        """What is still held, at the end of a good answer."""
        return self._tail


class Exchange:
    """One request of a client, and its answer."""

    def __init__(self, *, route: str, rid: str, send: Send) -> None:
        self.route = route
        self.rid = rid
        self.status = 0  # what the client saw; 0: nothing yet
        self.stage = "reading the request body"
        self.is_event_stream = False
        self.has_all = False  # the end mark of a stream has passed: nothing may follow it
        self.failure: Failure | None = None
        self._send = send
        self._tail = EventTail()

    @property
    def began(self) -> bool:
        """Whether the client has seen a status."""
        return self.status != 0

    async def begin(self, answer: Answer) -> None:
        """Send a worker's head."""
        self.is_event_stream = answer.headers.get("content-type", "").startswith(EVENT_STREAM)
        headers = [
            (name.encode("ascii"), value.encode("latin-1"))
            for name in PASSED_HEADERS
            if (value := answer.headers.get(name)) is not None
        ]
        await self._begin(answer.status, headers)

    async def pass_on(self, chunk: bytes) -> None:
        """Send bytes of a worker's body."""
        if self.is_event_stream:
            chunk = self._tail.complete(chunk)
            self.has_all = chunk.endswith(END_MARK)
        if chunk:
            await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def end(self, last: bytes = b"") -> None:
        """The worker's body ended well, with these last bytes."""
        await self._send({"type": "http.response.body", "body": self._tail.rest() + last})

    async def fail(self, failure: Failure) -> None:
        """End with a failure: as an answer of its own, or as one event of a stream that had begun.

        Another kind of answer that had begun is left unfinished, so that the server closes the connection: the
        client must not take it for whole.
        """
        self.failure = failure
        if not self.began:
            headers = [(b"content-type", failure.content_type), (b"content-length", b"%d" % len(failure.body))]
            if failure.retry_after is not None:
                headers.append((b"retry-after", failure.retry_after))
            await self._begin(failure.status, headers)
            await self._send({"type": "http.response.body", "body": failure.body})
        elif self.is_event_stream:
            await self._send({"type": "http.response.body", "body": failure.as_event()})

    async def _begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.status = status
        headers.append((b"x-request-id", self.rid.encode("ascii")))
        await self._send({"type": "http.response.start", "status": status, "headers": headers})


class ClientWatch:
    """Ends the enclosed block with ClientGone when the client goes away. To be entered once its body was read."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._gone = False

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._guarded = task
        self._watcher = asyncio.create_task(self._watch())

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watcher.cancel()
        if self._gone and isinstance(error, asyncio.CancelledError):
            self._guarded.uncancel()
            raise ClientGone from error

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        self._guarded.cancel()
