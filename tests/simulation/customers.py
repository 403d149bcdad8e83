"""Clients of routers: what each asks, what it hears, and what must hold of it.

Legs at workers are checked as everywhere (`clients`); here the whole answer is: one outcome, every token right, never a
token twice, and when all is well again, success.
"""

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec

from baton_core.effects import Emit
from baton_core.errors import Verdict
from baton_core.events import Submit
from baton_core.request import Finish, FinishType, RequestId
from simulation.clients import Clients, Leg, Pair
from simulation.front import Generation
from simulation.invariants import Broken
from simulation.oracle import VOCABULARY, Oracle
from simulation.prompts import Prompts

if TYPE_CHECKING:
    from simulation.fleet import Fleet, Router
    from simulation.unit import Unit
    from simulation.worker import Worker
    from simulation.world import World

START_MS = 2_000
"""Before that workers register and routers find them."""
ANSWERED_MS = 10_000
"""A request that comes when all is well again is answered within this time."""


class Customer:
    """One request of one client."""

    def __init__(self, customers: "Customers", number: int, *, must: bool) -> None:
        world, random = customers.world, customers.fleet.random
        shape = world.shape
        self.customers, self.world, self.rid, self.must = customers, world, f"r{number}", must
        length = 3 if must else random.randint(1, shape.prompt_most)
        self.prompt = customers._prompts.draw(min(length, shape.prompt_most), customers.legs.values())
        self.is_wrong = not must and random.random() < 0.06
        if self.is_wrong:
            self.prompt = (-1, *self.prompt[1:])
        self.most = 2 if must else random.randint(max(1, shape.answer_least), shape.answer_most)
        wants_stops = not must and random.random() < 0.3
        self.stops = random.sample(range(VOCABULARY), 10) if wants_stops else []
        self.is_stream = random.random() < 0.7
        self.leave_after_ms = random.choice((5, 50, 500)) if not must and random.random() < 0.15 else None
        self.oracle = Oracle(self.prompt) if not self.is_wrong else None
        self.status = 0
        self.tokens: list[int] = []
        self.finish = ""
        self.error: Any = None
        self.is_cut_short = False  # the app found a stop string
        self.is_done = False  # it has seen the end of a stream
        self.sent_at = 0
        self.outcome = ""
        self._body = b""
        self._gone: asyncio.Future[None] | None = None

    def send(self, router: "Router") -> None:
        """Go."""
        world = self.world
        self.sent_at = world.now
        if not router.alive:
            self.end("refused")
            return
        router.serve(self)
        if self.leave_after_ms is not None:
            world.at(self.leave_after_ms, self.leave)

    async def served_by(self, router: "Router") -> None:
        """The router's work for it."""
        params = {"max_new_tokens": self.most, "min_new_tokens": min(1, self.most), "stop_token_ids": self.stops}
        fields = {"input_ids": self.prompt, "sampling_params": params, "stream": self.is_stream}
        messages = [{"type": "http.request", "body": msgspec.json.encode(fields)}]
        self._gone = asyncio.get_running_loop().create_future()

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop()
            assert self._gone is not None
            await self._gone
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if router.alive:
                self._hear(message)

        headers = [(b"x-request-id", self.rid.encode())]
        await router.dispatch({"path": "/generate", "headers": headers}, receive, send)
        self.end("cut off" if self.status else "closed")

    def leave(self) -> None:
        """The client hangs up."""
        if not self.outcome and self._gone is not None and not self._gone.done():
            self._gone.set_result(None)
            self.end("left")

    # -- what it hears

    def _hear(self, message: dict[str, Any]) -> None:
        if self.outcome == "left":
            return
        if self.outcome:
            raise Broken("one outcome", f"{self.rid}: {message} after its end ({self.outcome})")
        if message["type"] == "http.response.start":
            if self.status:
                raise Broken("one outcome", f"{self.rid}: two heads")
            self.status = message["status"]
            return
        self._body += message.get("body", b"")
        streams = self.status == 200 and self.is_stream
        while streams and b"\n\n" in self._body:
            event, _, self._body = self._body.partition(b"\n\n")
            self._take_event(event)
        if not message.get("more_body", False):
            self._complete(streams)

    def _take_event(self, event: bytes) -> None:
        if not event.startswith(b"data: ") or b"\n" in event:
            raise Broken("events", f"{self.rid}: {event!r}")
        if self.error is not None or self.is_done:
            raise Broken("one outcome", f"{self.rid}: {event!r} after the end")
        if event == b"data: [DONE]":
            self.is_done = True
            return
        value = msgspec.json.decode(event.removeprefix(b"data: "))
        if "error" in value:
            self.error = value["error"]
        else:
            self._take(value)

    def _take(self, value: dict[str, Any]) -> None:
        for token in value["tokens"]:
            assert self.oracle is not None
            wanted = self.oracle.next()
            if token != wanted:
                text = f"{self.rid} token {len(self.tokens)} at the client: {token}, oracle {wanted}"
                raise Broken("tokens", text)
            self.tokens.append(token)
        self.finish = value.get("finish", "")

    def _complete(self, streams: bool) -> None:
        if self.status == 200 and not streams:
            self._take(msgspec.json.decode(self._body))
        elif self.status != 200:
            self.error = msgspec.json.decode(self._body)["error"]
        self.end(str(self.status) if self.error is None or not streams else "error event")

    # -- how it ends

    def end(self, outcome: str) -> None:
        """Its one outcome."""
        if self.outcome:
            return
        self.outcome = outcome
        self.world.tally.outcomes[f"client {outcome}"] += 1
        self.customers.open -= 1
        said = f"{self.rid}, sent at {self.sent_at}, ended at {self.world.now} with {outcome} ({self.error})"
        if outcome == "200":
            whole = len(self.tokens) == self.most if self.finish == "length" else self.finish == "stop"
            stopped = self.finish == "stop" and (self.is_cut_short or self.tokens[-1] in self.stops)
            clipped = self.finish == "length" and len(self.tokens) < self.most and not self.customers.fits(self)
            if not ((whole and (self.finish != "stop" or stopped)) or clipped):
                raise Broken("whole answer", f"{said}: {self.tokens}, {self.finish}, of {self.most}")
            if self.is_stream and not self.is_done:
                raise Broken("whole answer", f"{said} without [DONE]")
        if self.is_wrong and outcome in ("200", "error event"):
            raise Broken("outcome", f"{said}, and it was wrong")
        if self.must:
            in_time = self.world.now - self.sent_at <= ANSWERED_MS
            if not (outcome == "200" and in_time):
                raise Broken("recovery", said)


class Customers(Clients):
    """All clients of a world with routers, and the legs that routers make of what they ask."""

    def __init__(self, world: "World", fleet: "Fleet", recovered_ms: int) -> None:
        self.world, self.fleet = world, fleet
        self._prompts, self.pairs, self.legs = Prompts(world), [], {}
        self._rooms: dict[int, Pair] = {}
        self._generations: dict[int, Generation] = {}  # by identity of the leg
        shape, random = world.shape, fleet.random
        self.customers = [Customer(self, number, must=False) for number in range(shape.requests)]
        for one in self.customers:
            world.at(START_MS + random.randrange(shape.arrivals_ms), self._send, one)
        for number in range(len(fleet.routers)):
            last = Customer(self, shape.requests + number, must=True)
            self.customers.append(last)
            world.at(shape.heal_ms + recovered_ms, self._send_to, last, number)
        self.open = len(self.customers)

    def _send(self, customer: Customer) -> None:
        routers = self.fleet.routers
        customer.send(self.fleet.random.choice([one for one in routers if one.alive] or routers))

    def _send_to(self, customer: Customer, number: int) -> None:
        customer.send(self.fleet.routers[number])

    def fits(self, customer: Customer) -> bool:
        """Whether its answer has room."""
        shape = self.world.shape
        return len(customer.prompt) + customer.most <= min(shape.context_tokens, shape.decode_tokens)

    # -- legs

    def arrived(self, worker: "Worker", generation: Generation, routed: int | None) -> Leg | None:
        """A leg reaches a worker. None where its unit is gone."""
        request, unit = worker.place(generation.request, routed)
        if not worker.alive or not unit.alive:
            return None
        room = request.room
        pair = self._rooms.get(room)
        if pair is None:
            pair = Pair(plain=False, careless=True)
            self.pairs.append(pair)
            if room:
                self._rooms[room] = pair
        attempts = {one.request.rid for one in pair.legs}
        if attempts and attempts != {request.rid}:
            raise Broken("rooms", f"{request.rid} has the room of {attempts}")
        leg = Leg(request=request, side=worker.side, worker=worker.name, pair=pair, routed=routed, unit=unit)
        leg.sent_at, leg.oracle = self.world.now, Oracle(request.prompt)
        pair.legs.append(leg)
        self.open += 1
        self.legs[unit.name, request.rid] = leg
        self._generations[id(leg)] = generation
        unit.leader.put(Submit(request=request))
        return leg

    def emitted(self, unit: "Unit", emit: Emit) -> None:
        """Check it as everywhere, and let the app say it."""
        super().emitted(unit, emit)
        if emit.finish is not None and emit.finish.type is FinishType.STOP and emit.finish.matched is None:
            self._of(emit.rid).is_cut_short = True
        leg = self.legs[unit.name, emit.rid]
        app = self.fleet.apps[leg.worker]
        app.run(self._generations[id(leg)].push, emit)

    def _end(self, leg: Leg, finish: Finish | None, verdict: Verdict | None) -> None:
        super()._end(leg, finish, verdict)
        app = self.fleet.apps[leg.worker]
        if app.worker is leg.unit.worker:  # type: ignore[union-attr]
            app.leg_ended(leg.request.rid, went_well=verdict is None)
            if finish is None and verdict is not None:
                app.run(self._generations[id(leg)].fail, verdict)

    def _of(self, rid: RequestId) -> Customer:
        return self.customers[int(rid.partition("~")[0][1:])]

    def leave(self, unit: "Unit", phase: str) -> None:
        """The client of a request that is in this phase now leaves."""
        name, _, idle = phase.partition(".")
        found = unit.idle if idle else unit.phases
        # What decode asked prefill for once more has no client of its own.
        rid = next((rid for rid, where in found.items() if where == name and (unit.name, rid) in self.legs), None)
        if rid is not None and not self._of(rid).must:
            self.world.fault("client_abort", unit.ranks[0], rid)
            self._of(rid).leave()

    def _retry(self, leg: Leg) -> None:
        """That is the router's business."""

    # -- the end

    def check_customers(self) -> None:
        """Each has an outcome, a good one where nothing was wrong."""
        free = self.world.shape.profile == "free"
        for one in self.customers:
            if not one.outcome:
                raise Broken("one outcome", f"{one.rid} has none")
            if free and not one.is_wrong and self._is_small(one):
                well = one.outcome in ("200", "left")
                if not well:
                    raise Broken("success", f"{one.rid} ended with {one.outcome} ({one.error}), and nothing was wrong")

    def _is_small(self, customer: Customer) -> bool:
        """Whether its prompt has room everywhere."""
        shape = self.world.shape
        pages = min(shape.prefill_pages * shape.page_tokens, shape.decode_tokens)
        return len(customer.prompt) + 1 < min(shape.context_tokens, pages)
