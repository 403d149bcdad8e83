"""What a pair is asked: the room, the ranks, the bodies and heads of both legs; and the room's rank at the registry."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from baton_core.limits import Limits, Millis
from baton_core.request import Bootstrap
from baton_core.routing.pair import Pair
from baton_core.routing.ranks import DpMode, ranks_told
from baton_core.routing.rooms import ROOM_BITS, draw_room
from baton_core.routing.workers import Target
from baton_io.tracing import Span
from baton_router.exchange import Fields, body_for_workers
from baton_router.failures import Failure, FailureKind, leg_failure
from baton_router.journal import TOKEN_IDS_HEADER
from baton_router.legs import Call
from baton_router.merging import asks_for_scores
from baton_router.trip import Trip
from baton_router.upstream import Upstream, UpstreamError, head_lines, read_all

REGISTER_MS: Millis = 2_000
REGISTER_ANSWER_BYTES_MAX = 64 * 1024
JSON_HEADERS = {"content-type": "application/json"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RoadSettings:
    """The parts of the configuration that the road depends on."""

    limits: Limits
    retries: int
    registry: tuple[str, int] | None  # where both legs meet; None: at the prefill worker itself
    migrations: int = 0  # further pairs for a stream that had begun
    dp_mode: DpMode = DpMode.OFF
    is_degrading: bool = False  # without a usable prefill worker decode serves alone
    local_prompt_tokens: int = 0  # prompts estimated below this stay on decode
    worker_key: str | None = None
    registry_token: str | None = None


class Calls:
    """Prepares the calls of each attempt; `draw(n)` gives a random integer of n bits."""

    def __init__(self, *, settings: RoadSettings, upstream: Upstream, draw: Callable[[int], int]) -> None:
        self._settings = settings
        self._upstream = upstream
        self._draw = draw

    def room(self) -> int:
        """A fresh room."""
        return draw_room(self._draw(ROOM_BITS))

    def prepare(self, trip: Trip, fields: Fields, pair: Pair, span: Span | None = None) -> Call:
        """What that pair is asked. Mutates the trip: one more attempt, its pair and its room. `span`: of the attempt."""
        exchange, settings = trip.exchange, self._settings
        trip.attempts += 1
        trip.pair = pair
        bootstrap = self._bootstrap(trip, pair)
        trip.room = 0 if bootstrap is None else bootstrap.room
        decode_url = pair.decode.worker.url
        who = decode_url if pair.prefill is None else f"{decode_url} (prefill {pair.prefill.worker.url})"
        exchange.stage = f"waiting for the first bytes of {who}"
        prefill_ranks, decode_ranks = ranks_told(settings.dp_mode, pair)
        continuation = None
        if trip.journal is not None and trip.journal.has_begun:
            continuation = trip.journal.continuation()
            fields = {name: value for name, value in fields.items() if name != "rid"}  # the head's counts attempts
        streams = _streams(fields)
        decode_body = body_for_workers(fields, bootstrap, decode_ranks, continuation)
        same = prefill_ranks == decode_ranks
        return Call(
            path=exchange.route,
            prefill_body=decode_body if same else body_for_workers(fields, bootstrap, prefill_ranks, continuation),
            decode_body=decode_body,
            lines=head_lines(self._headers(trip, streams) | ({} if span is None else span.headers)),
            wants_scores=continuation is None and trip.scores is None and asks_for_scores(exchange.route, fields),
            continues=continuation is not None,
            streams=streams,
        )

    def registers(self, pair: Pair) -> bool:
        """Whether a pair's legs may go only when its room's rank is published."""
        return (
            self._settings.dp_mode is DpMode.REGISTER and pair.prefill is not None and pair.prefill.dp_rank is not None
        )

    async def register(self, room: int, pair: Pair) -> Failure | None:
        """Publish the rank of a room where decode will look it up."""
        assert pair.prefill is not None
        worker = pair.prefill.worker
        host, port = self._settings.registry or (worker.bootstrap_host, worker.bootstrap_port)
        told: dict[str, object] = {"bootstrap_room": room, "dp_rank": pair.prefill.dp_rank}
        if self._settings.registry is not None and worker.instance:
            told["instance"] = worker.instance
        url = f"http://{host}:{port}/register_dp_rank"
        token = self._settings.registry_token
        headers = JSON_HEADERS if token is None else JSON_HEADERS | {"authorization": f"Bearer {token}"}
        try:
            async with asyncio.timeout(REGISTER_MS / 1000):
                answer = await self._upstream.post(url, msgspec.json.encode(told), headers)
                await read_all(answer, REGISTER_ANSWER_BYTES_MAX)
        except UpstreamError as error:
            return leg_failure(FailureKind.LOST, f"registering the rank at {url}: {error.text}", worker.url)
        except TimeoutError:
            text = f"registering the rank at {url}: no answer within {REGISTER_MS} ms"
            return leg_failure(FailureKind.LOST, text, worker.url)
        if answer.status != 200:
            text = f"registering the rank at {url}: it answered {answer.status}"
            return leg_failure(FailureKind.ANSWERED, text, worker.url)
        return None

    def _headers(self, trip: Trip, streams: bool) -> dict[str, str]:
        settings, rid = self._settings, trip.exchange.rid
        left_ms: Millis = max(1, int((trip.deadline_s - trip.loop.time()) * 1000))
        headers = {
            "content-type": "application/json",
            # A worker may still be burying the leg this one replaces, and would refuse the same id as a duplicate.
            "x-request-id": rid if trip.attempts == 1 else f"{rid}~{trip.attempts}",
            "x-baton-budget-ms": str(left_ms),
        }
        if settings.worker_key is not None:
            headers["authorization"] = f"Bearer {settings.worker_key}"
        if settings.migrations and streams:
            headers[TOKEN_IDS_HEADER] = "1"
        return headers

    def _bootstrap(self, trip: Trip, pair: Pair) -> Bootstrap | None:
        if pair.prefill is None:
            return None
        prefill = pair.prefill.worker
        room = self._room_for(pair.prefill, trip.first_room if trip.attempts == 1 else 0)
        if self._settings.registry is None:
            return Bootstrap(host=prefill.bootstrap_host, port=prefill.bootstrap_port, room=room)
        host, port = self._settings.registry
        return Bootstrap(host=host, port=port, room=room, instance=prefill.instance or None)

    def _room_for(self, prefill: Target, wanted: int) -> int:
        """A room that leads to the rank of that target; `wanted` where any does."""
        if prefill.dp_rank is None:
            return wanted or self.room()
        return draw_room(self._draw(ROOM_BITS), dp_size=prefill.worker.dp_size, dp_rank=prefill.dp_rank)


def _streams(fields: Fields) -> bool:
    """Whether the client asks for a stream."""
    return bytes(fields.get("stream", b"")) == b"true"
