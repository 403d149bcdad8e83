"""Several answers for one request: every part takes a road of its own, and the client sees one answer.

The first part that fails ends the others and is what the client is told.
"""

import asyncio
from collections.abc import Callable, Mapping

from baton_core.request import ROOM_MAX
from baton_core.routing.policies import Ask
from baton_router.caller import Headers
from baton_router.exchange import EVENT_STREAM, Exchange, Fields
from baton_router.failures import Failure, FailureKind, leg_failure
from baton_router.parts import EventJoiner, Parts, join, part_id
from baton_router.road import Road
from baton_router.trip import Trip
from baton_router.upstream import UpstreamLost

ANSWERS_BYTES_MAX = 256 << 20


class _Head:
    """The head of the joint answer, as an `Answer` without a body."""

    is_over = True
    heard_s = 0.0

    def __init__(self, content_type: str) -> None:
        self.status = 200
        self.headers: Mapping[str, str] = {"content-type": content_type}

    async def read(self) -> bytes:
        """See Answer."""
        return b""

    def cancel(self) -> None:
        """See Answer."""

    def abandon(self, text: str) -> None:
        """See Answer."""


class _Sink:
    """Where one part's answer goes, in place of a client's connection."""

    def __init__(self, number: int, client: Exchange, joiner: EventJoiner | None) -> None:
        self.body = bytearray()
        self._number = number
        self._client = client
        self._joiner = joiner

    async def begin(self, status: int, headers: Headers) -> None:
        """See Answering: the joint answer has a head of its own."""

    async def write(self, chunk: bytes) -> None:
        """See Answering."""
        if self._joiner is None:
            self.body += chunk
            if len(self.body) > ANSWERS_BYTES_MAX:
                raise UpstreamLost(f"the answer is longer than {ANSWERS_BYTES_MAX} bytes")
            return
        events = self._joiner.take(self._number, chunk)
        if events:
            if not self._client.began:
                await self._client.begin(_Head(EVENT_STREAM))
            await self._client.pass_on(events)

    async def end(self, chunk: bytes) -> None:
        """See Answering."""
        await self.write(chunk)


async def serve_parts(road: Road, trip: Trip, parts: Parts, ask: Callable[[Fields], Ask]) -> Failure | None:
    """Serve all parts. None: the client has one whole answer; else what it is to be told."""
    joiner = EventJoiner(parts) if parts.is_stream else None
    sinks = [_Sink(number, trip.exchange, joiner) for number in range(len(parts.bodies))]
    trips = _trips(road, trip, parts, sinks, ask)
    trip.exchange.stage = f"waiting for {len(trips)} answers"
    failure = await _all(road, trips, parts)
    trip.pair, trip.room = trips[0].pair, trips[0].room
    trip.attempts = max(one.attempts for one in trips)
    trip.migrations = sum(one.migrations for one in trips)
    trip.first_byte_s = min((one.first_byte_s for one in trips if one.first_byte_s is not None), default=None)
    return failure or await _finish(trip.exchange, parts, sinks, joiner)


def _trips(road: Road, trip: Trip, parts: Parts, sinks: list[_Sink], ask: Callable[[Fields], Ask]) -> list[Trip]:
    room = road.room()
    if room > ROOM_MAX - len(sinks):
        room -= len(sinks)
    return [
        Trip(
            exchange=Exchange(route=parts.route, rid=part_id(trip.exchange.rid, number), client=sink),
            loop=trip.loop,
            began_s=trip.began_s,
            deadline_s=trip.deadline_s,
            ask=ask(body),
            first_room=room + number,
            span=trip.span,
        )
        for number, (sink, body) in enumerate(zip(sinks, parts.bodies, strict=True))
    ]


async def _all(road: Road, trips: list[Trip], parts: Parts) -> Failure | None:
    """Every part's road, until all have ended well or one has not."""
    pending = {asyncio.create_task(road.serve(trip, body)) for trip, body in zip(trips, parts.bodies, strict=True)}
    try:
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            failures = [failure for task in done if (failure := task.result()) is not None]
            if failures:
                return failures[0]
        return None
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)


async def _finish(client: Exchange, parts: Parts, sinks: list[_Sink], joiner: EventJoiner | None) -> Failure | None:
    if joiner is not None:
        if not client.began:
            await client.begin(_Head(EVENT_STREAM))
        await client.pass_on(joiner.end())
    else:
        try:
            body = join(parts, [bytes(sink.body) for sink in sinks])
        except ValueError as error:
            return leg_failure(FailureKind.ANSWERED, str(error), "")
        await client.begin(_Head("application/json"))
        await client.pass_on(body)
    await client.end()
    return None
