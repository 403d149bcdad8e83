"""The client's side of one request: what its head and its body say, and its answer: begun once, passed on, ended once."""

import os
import re
from collections.abc import Awaitable, Iterator, Mapping

import msgspec

from baton_core.limits import Millis
from baton_core.request import Bootstrap
from baton_core.routing.ranks import UNTOLD, Ranks
from baton_router.caller import Answering, Headers, Refused
from baton_router.failures import Failure, Rejection
from baton_router.upstream import Answer

EVENT_STREAM = "text/event-stream"
END_MARK = b"data: [DONE]\n\n"
EVENT_TAIL_BYTES_MAX = 1 << 20
PASSED_HEADERS = ("content-type", "content-length", "content-encoding", "cache-control", "retry-after")
"""What of a worker's head the client gets; the rest belongs to the hop."""
_PASSED = tuple((name, name.encode("ascii")) for name in PASSED_HEADERS)
ROUTER_FIELDS = frozenset(
    {
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "bootstrap_instance",
        "routed_dp_rank",
        "data_parallel_rank",  # SGLang's old name of routed_dp_rank
        "disagg_prefill_dp_rank",
        "baton_continuation",
    }
)
"""Fields that only the router may set: what a client says there is dropped."""

IDS_AT_ONCE = 256
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")

Fields = dict[str, msgspec.Raw]
_FIELDS = msgspec.json.Decoder(Fields)


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
    if not ROUTER_FIELDS.isdisjoint(sent):
        sent = {name: value for name, value in fields.items() if name not in ROUTER_FIELDS}
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
    return given.decode("ascii") if _REQUEST_ID.fullmatch(given) else next(_new_ids)


def _ids() -> Iterator[str]:
    """New request ids, each from 16 bytes of the system's randomness: asked for many at once, they cost no call each."""
    while True:
        drawn = os.urandom(16 * IDS_AT_ONCE).hex()
        yield from (drawn[at : at + 32] for at in range(0, len(drawn), 32))


_new_ids = _ids()


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

    def __init__(self, *, route: str, rid: str, client: Answering) -> None:
        self.route = route
        self.rid = rid
        self.status = 0  # what the client saw; 0: nothing yet
        self.stage = "reading the request body"
        self.is_event_stream = False
        self.has_all = False  # the end mark of a stream has passed: nothing may follow it
        self.failure: Failure | None = None
        self._client = client
        self._tail = EventTail()

    @property
    def began(self) -> bool:
        """Whether the client has seen a status."""
        return self.status != 0

    async def begin(self, answer: Answer) -> None:
        """Send a worker's head."""
        self.is_event_stream = answer.headers.get("content-type", "").startswith(EVENT_STREAM)
        given = answer.headers
        headers = [(name, given[word].encode("latin-1")) for word, name in _PASSED if word in given]
        await self._begin(answer.status, headers)

    def pass_on(self, chunk: bytes) -> Awaitable[None]:
        """Send bytes of a worker's body. What is returned is to be awaited at once."""
        if self.is_event_stream:
            chunk = self._tail.complete(chunk)
            self.has_all = chunk.endswith(END_MARK)
        return self._client.write(chunk)

    def end(self, last: bytes = b"") -> Awaitable[None]:
        """The worker's body ended well, with these last bytes. What is returned is to be awaited at once."""
        return self._client.end(self._tail.rest() + last)

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
            await self._client.end(failure.body)
        elif self.is_event_stream:
            await self._client.end(failure.as_event())

    async def _begin(self, status: int, headers: Headers) -> None:
        self.status = status
        headers.append((b"x-request-id", self.rid.encode("ascii")))
        await self._client.begin(status, headers)
