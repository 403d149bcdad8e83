"""Clients and a router: rooms are drawn, both legs are sent, and now and then somebody misbehaves.

Every leg's answer is checked token by token against the oracle; `pairs` remember enough to say, at the end, whether the
other leg was told in time and with the same reason.
"""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from baton_core.effects import Emit
from baton_core.errors import Reason, Verdict
from baton_core.events import Abort, StopHere, Submit
from baton_core.pages import pages_for
from baton_core.registration import FOLLOW
from baton_core.request import FAKE_HOST, Bootstrap, Finish, FinishType, Request, RequestId, Sampling
from simulation.invariants import Broken, check_cause
from simulation.oracle import VOCABULARY, Oracle, logprob_of
from simulation.prompts import Prompts

if TYPE_CHECKING:
    from simulation.unit import Unit
    from simulation.world import World


@dataclass(slots=True, kw_only=True)
class Leg:
    """One request at one worker."""

    request: Request
    side: str
    worker: str
    pair: "Pair"
    sent_at: int | None = None
    routed: int | None = None  # the DP rank that the router named
    unit: "Unit | None" = None
    ended_at: int | None = None
    finish: Finish | None = None
    verdict: Verdict | None = None  # why it failed; None with an answer
    tokens: int = 0
    stop_after: int = 0  # the app finds a stop string after so many tokens
    stopping: bool = False
    leave_after: int = 0  # the client leaves after so many tokens
    oracle: Oracle | None = None
    cancelled: bool = False


@dataclass(slots=True, kw_only=True)
class Pair:
    """The legs of one request."""

    legs: list[Leg] = field(default_factory=list)
    plain: bool = True  # nothing is wrong with it: with everybody well it must succeed
    own_room: bool = True  # nobody else uses its room
    told: bool = True  # both workers can speak to each other about it
    careless: bool = False
    misrouted: bool = False  # prefill runs it elsewhere than where decode looks for it

    def other(self, leg: Leg) -> Leg | None:
        """The other leg, if there are two."""
        return next((one for one in self.legs if one is not leg), None) if len(self.legs) == 2 else None


class Clients:
    """Everybody who sends requests."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self._prompts = Prompts(world)
        self.pairs: list[Pair] = []
        self.legs: dict[tuple[str, RequestId], Leg] = {}
        self._rooms: dict[int, Pair] = {}  # the newest pair of each room, newest last
        self.open = world.shape.requests  # legs without an answer, and requests still to come
        for number in range(world.shape.requests):
            world.at(world.random.randrange(world.shape.arrivals_ms), self._plan_request, number)

    # -- what is asked

    def _plan_request(self, number: int) -> None:
        world, shape = self.world, self.world.shape
        random, manners = world.random, world.shape.manners
        self.open -= 1
        length = random.randint(1, shape.prompt_most)
        if random.random() < 0.03:
            length = shape.context_tokens + 1 if shape.context_tokens < 200 else shape.decode_tokens
        prompt = self._prompts.draw(length, self.legs.values())
        length = len(prompt)
        most = random.randint(shape.answer_least, shape.answer_most)
        stops = tuple(random.sample(range(VOCABULARY), 15)) if random.random() < 0.3 else ()
        sampling = Sampling(
            max_new_tokens=most,
            min_new_tokens=min(1, most),
            stop_token_ids=stops,
            logprobs=1 if random.random() < 0.2 else None,
        )
        if sampling.logprobs is not None and random.random() < 0.5:
            sampling = replace(sampling, prompt_logprobs_from=random.randrange(length))
        pair = Pair(careless=random.random() < manners.careless)
        self.pairs.append(pair)
        rid = f"r{number}"
        prefill, decode = f"P{random.randrange(shape.prefills)}", f"D{random.randrange(shape.decodes)}"
        if random.random() < manners.colocated:
            self._leg(pair, Request(rid=rid, prompt=prompt, sampling=sampling), "decode", decode, 0)
        elif random.random() < manners.fake_host:
            bootstrap = Bootstrap(host=FAKE_HOST, port=1, room=0)
            request = Request(rid=rid, prompt=prompt, sampling=sampling, bootstrap=bootstrap)
            self._leg(
                pair, request, *random.choice((("decode", decode), ("prefill", prefill), ("prefill", prefill))), 0
            )
        else:
            self._plan_pair(pair, rid, prompt, sampling, (prefill, decode))

    def _plan_pair(
        self,
        pair: Pair,
        rid: str,
        prompt: tuple[int, ...],
        sampling: Sampling,
        workers: tuple[str, str],
    ) -> None:
        world, random, manners = self.world, self.world.random, self.world.shape.manners
        room = random.randrange(1, 1 << 40)
        if random.random() < manners.room_reused:
            earlier = self._used_room(pair)
            if earlier is not None:
                room = earlier.legs[0].request.room
                if len(earlier.legs) == 2 and random.random() < 0.6:
                    workers = earlier.legs[0].worker, earlier.legs[1].worker
        self._rooms.pop(room, None)
        self._rooms[room] = pair
        bootstrap, routed = self._route(pair, workers[0], room)
        legs = [("prefill", workers[0]), ("decode", workers[1])]
        if random.random() < manners.leg_missing:
            del legs[random.randrange(2)]
            pair.plain = pair.told = False
            world.fault("leg_missing", None)
        late = random.choice((0, 5, 5, 50, 500)) if world.shape.profile != "free" else 50
        for side, worker in legs:
            asked = prompt
            if side == "decode" and random.random() < manners.prompt_differs:
                asked = (*prompt[:-1], (prompt[-1] + 1) % VOCABULARY)
                pair.plain = False
                world.fault("prompt_differs", None)
            rejected = None
            if random.random() < manners.intake_reject:
                rejected = Verdict(reason=Reason.INVALID_REQUEST, text="temperature must be at least 0")
                pair.plain = False
                world.fault("intake_reject", None)
            request = Request(rid=rid, prompt=asked, sampling=sampling, bootstrap=bootstrap, rejected=rejected)
            self._leg(pair, request, side, worker, int(random.random() * late), routed)
        if random.random() < manners.leg_repeated:
            self._repeat(pair, rid)

    def _route(self, pair: Pair, prefill: str, room: int) -> tuple[Bootstrap, int | None]:
        """Where prefill's leg goes: most routers leave that to the room, some name a DP rank, few do so on one side only."""
        world, size = self.world, self.world.shape.parallels[prefill].dp
        named = routed = None
        if size > 1 and world.random.random() < world.shape.manners.routed:
            routed = world.random.randrange(size)
            named = world.random.choice((None, routed, routed, world.random.randrange(size)))
            if named is None and world.shape.balance == FOLLOW and routed != room % size:
                pair.plain, pair.misrouted = False, True
                world.fault("route_conflict", None)
            elif named is not None and named != routed:
                pair.plain, pair.misrouted = False, True
                world.fault("rank_differs", None)
        return Bootstrap(host=prefill, port=1, room=room, prefill_dp_rank=named), routed

    def _used_room(self, pair: Pair) -> Pair | None:
        """Whose room to use again: both sides finished it, well or a while ago; now and then it is still in use."""
        world, random = self.world, self.world.random
        if not self._rooms:
            return None
        earlier = self._rooms[random.choice(list(self._rooms)[-6:])]
        legs = earlier.legs
        over = len(legs) == 2 and all(leg.unit is not None and leg.ended_at is not None for leg in legs)
        well = over and all(leg.verdict is None for leg in legs)
        gap = 300 + 6 * world.shape.latency_ms + world.shape.unit_lag_ms
        long_ago = over and all(world.now - (leg.ended_at or 0) > gap for leg in legs)
        if not earlier.own_room or not (well or long_ago):
            if random.random() < 0.5:
                return None
            earlier.plain = earlier.own_room = pair.plain = pair.own_room = False
        if world.shape.balance != FOLLOW and not (well and long_ago):
            # The registry keeps a failed room a while, for a late leg: it knows on which DP rank the last life ran.
            pair.plain = pair.own_room = False
        world.fault("room_reused", None)
        return earlier

    def _repeat(self, pair: Pair, rid: str) -> None:
        """Somebody sends one leg a second time, under the same room."""
        world = self.world
        side, first = world.random.choice([(leg.side, leg) for leg in pair.legs])
        pair.plain = pair.own_room = False
        world.fault("leg_repeated", None)
        again = first.request
        request = Request(rid=f"{rid}b", prompt=again.prompt, sampling=again.sampling, bootstrap=again.bootstrap)
        twin = Pair(plain=False, own_room=False, told=False)
        self.pairs.append(twin)
        worker = first.worker if side == "prefill" else f"D{world.random.randrange(world.shape.decodes)}"
        self._leg(twin, request, side, worker, world.random.randrange(100), first.routed)

    def _leg(self, pair: Pair, request: Request, side: str, worker: str, at: int, routed: int | None = None) -> None:
        world, random, manners = self.world, self.world.random, self.world.shape.manners
        leg = Leg(request=request, side=side, worker=worker, pair=pair, routed=routed if side == "prefill" else None)
        shape = world.shape
        pages = shape.prefill_pages if side == "prefill" else shape.decode_pages
        page_tokens = shape.page_tokens if side == "prefill" else shape.decode_page_tokens
        tokens = len(request.prompt)
        if tokens >= shape.context_tokens or pages_for(tokens + 1, page_tokens) > pages:
            pair.plain = False
        if shape.other_layouts:
            pair.plain = False
        pair.legs.append(leg)
        self.open += 1
        world.at(at, self._send, leg)
        if side == "decode" and random.random() < manners.stop_here:
            leg.stop_after = random.randint(1, 4)
        lone = request.room == 0
        habit = manners.lone_abort if lone else manners.client_abort
        if random.random() < habit:
            pair.plain = False
            if side == "decode" and random.random() < 0.5:
                leg.leave_after = random.choice((1, 1, 2, 3))
            else:
                soon = random.choice((5, 30, 60, 100, 300) if lone else (5, 30, 30, 300, 1_000))
                world.at(at + random.randrange(soon), self._give_up, pair)

    def _send(self, leg: Leg) -> None:
        worker = self.world.workers[leg.worker]
        leg.sent_at = self.world.now
        if leg.cancelled:
            self._end(leg, None, Verdict(reason=Reason.CLIENT_GONE, text="never sent"))
            return
        request, unit = worker.place(leg.request, leg.routed)
        if not worker.alive or not unit.alive:
            self._end(leg, None, Verdict(reason=Reason.WORKER_LOST, text="connection refused"))
            return
        leg.unit = unit
        leg.oracle = Oracle(leg.request.prompt)
        self.legs[unit.name, leg.request.rid] = leg
        unit.leader.put(Submit(request=request))

    def _give_up(self, pair: Pair) -> None:
        """The client leaves: the router cancels both legs."""
        verdict = Verdict(reason=Reason.CLIENT_GONE, text="the client left")
        for leg in pair.legs:
            if leg.ended_at is None:
                self.world.fault("client_abort", None if leg.unit is None else leg.unit.ranks[0], leg.request.rid)
                self.world.at(int(self.world.random.random() * 4), self._abort, leg, verdict)

    def leave(self, unit: "Unit", phase: str) -> None:
        """The client of a request that is in this phase now leaves."""
        name, _, idle = phase.partition(".")
        found = unit.idle if idle else unit.phases
        rid = next((rid for rid, where in found.items() if where == name), None)
        leg = None if rid is None else self.legs.get((unit.name, rid))
        if leg is not None and leg.ended_at is None:
            leg.pair.plain = False
            unit.leader.note(Abort(rid=leg.request.rid, verdict=Verdict(reason=Reason.CLIENT_GONE, text="it left")))
            self._give_up(leg.pair)

    def _abort(self, leg: Leg, verdict: Verdict) -> None:
        if leg.sent_at is None:
            leg.cancelled = self.world.random.random() < 0.7
        if leg.ended_at is None and leg.unit is not None:
            leg.unit.leader.put(Abort(rid=leg.request.rid, verdict=verdict))

    # -- what is answered

    def emitted(self, unit: "Unit", emit: Emit) -> None:
        """A worker says something about one of its requests: check it, and react."""
        leg = self.legs.get((unit.name, emit.rid))
        assert leg is not None and leg.oracle is not None
        if leg.ended_at is not None:
            raise Broken("one outcome", f"{unit} {emit.rid}: {emit} after the end")
        for token in emit.tokens:
            wanted = leg.oracle.next()
            if token != wanted:
                raise Broken("tokens", f"{unit} {emit.rid} token {leg.tokens}: {token}, oracle {wanted}")
            leg.tokens += 1
        self._check_logprobs(unit, leg, emit)
        if emit.finish is not None:
            self._check_finish(unit, leg, emit)
            self._end(leg, emit.finish, emit.finish.verdict)
        elif leg.leave_after and leg.tokens >= leg.leave_after:
            leg.leave_after = 0
            self._give_up(leg.pair)
        elif leg.stop_after and leg.tokens >= leg.stop_after and not leg.stopping:
            leg.stopping = True
            unit.leader.put(StopHere(rid=emit.rid))

    def _check_logprobs(self, unit: "Unit", leg: Leg, emit: Emit) -> None:
        """Logprobs come with their tokens, across the handoff too; those of the prompt once, from where it was computed."""
        sampling, prompt = leg.request.sampling, leg.request.prompt
        wanted = tuple(logprob_of(token) for token in emit.tokens) if sampling.logprobs is not None else ()
        if self.world.shape.backend == "tcp":
            if emit.logprobs != wanted:
                raise Broken("logprobs", f"{unit} {emit.rid}: {emit.logprobs}, wanted {wanted}")
        start = sampling.prompt_logprobs_from
        computed_here = leg.side == "prefill" or leg.request.room == 0
        if emit.tokens and leg.tokens == len(emit.tokens) and start is not None and computed_here:
            found = [one.token for one in emit.prompt_logprobs]
            if found != list(prompt[start:]):
                raise Broken("logprobs", f"{unit} {emit.rid} prompt from {start}: {found}")

    def _check_finish(self, unit: "Unit", leg: Leg, emit: Emit) -> None:
        finish, sampling, shape = emit.finish, leg.request.sampling, self.world.shape
        assert finish is not None
        if finish.type is FinishType.ABORT:
            if finish.verdict is None:
                raise Broken("outcome", f"{unit} {emit.rid} failed without a verdict")
            if finish.verdict is not None:
                check_cause(self.world, finish.verdict.reason, finish.verdict.text)
        elif finish.type is FinishType.STOP and finish.matched is None:
            if not leg.stopping:
                raise Broken("outcome", f"{unit} {emit.rid} stopped and nobody asked")
        elif finish.type is FinishType.STOP:
            ended = emit.tokens[-1:] == (finish.matched,) and finish.matched in sampling.stop_token_ids
            if not ended:
                raise Broken("outcome", f"{unit} {emit.rid} stopped at {finish.matched}")
        else:
            most = min(shape.context_tokens, shape.decode_tokens) - len(leg.request.prompt)
            wanted = 1 if leg.side == "prefill" else min(sampling.max_new_tokens, most)
            if leg.tokens != wanted:
                raise Broken("outcome", f"{unit} {emit.rid}: {leg.tokens} tokens, wanted {wanted}")

    def look_up_failed(self, unit: "Unit", rid: RequestId) -> None:
        """The way to prefill is not known: the other leg of this request cannot be told."""
        self.legs[unit.name, rid].pair.told = False

    def unit_died(self, unit: "Unit") -> None:
        """A unit is gone: its app, or the broken connection, ends what it held."""
        verdict = Verdict(reason=Reason.WORKER_LOST, text=f"{unit} died")
        for leg in list(self.legs.values()):
            if leg.unit is unit and leg.ended_at is None:
                self._end(leg, None, verdict)

    def _end(self, leg: Leg, finish: Finish | None, verdict: Verdict | None) -> None:
        world = self.world
        leg.ended_at, leg.finish, leg.verdict = world.now, finish, verdict
        self.open -= 1
        outcome = finish.type.value if verdict is None and finish is not None else verdict.reason.name.lower()  # type: ignore[union-attr]
        world.tally.outcomes[f"{leg.side} {outcome}"] += 1
        if leg.side == "prefill" and verdict is None and leg.request.room:
            world.registry.close(leg.worker, leg.request.room)
        other = leg.pair.other(leg)
        if verdict is not None and other is not None and other.ended_at is None and not leg.pair.careless:
            world.at(int(world.random.random() * 20), self._abort, other, verdict)
        if verdict is not None and leg.request.room and (other is None or other.ended_at is not None):
            self._retry(leg)

    def _retry(self, leg: Leg) -> None:
        """Both legs ended and there is no answer: a stubborn client tries again at once, in the same room."""
        world, random = self.world, self.world.random
        if world.healed or leg.request.rid.count("+") > 2 or random.random() >= world.shape.manners.stubborn:
            return
        world.fault("room_reused", None)
        again = Pair(plain=False, own_room=False, told=False)
        leg.pair.own_room = leg.pair.plain = False
        self.pairs.append(again)
        delay = random.choice((0, 20, 200))
        for one in leg.pair.legs:
            request = replace(one.request, rid=f"{one.request.rid}+", rejected=None)
            self._leg(again, request, one.side, one.worker, int(random.random() * delay), one.routed)

    # -- what must hold at the end

    def check_end(self) -> None:
        """Everybody has an answer; with everybody well, a good one; and nobody waited for a dead leg."""
        for pair in self.pairs:
            for leg in pair.legs:
                if leg.ended_at is None:
                    raise Broken("one outcome", f"{leg.worker} {leg.request.rid} has none")
                if pair.plain and self.world.shape.profile == "free" and leg.verdict is not None:
                    text = f"{leg.worker} {leg.request.rid} ended with {leg.verdict}, and nothing was wrong"
                    raise Broken("success", text)
            if pair.own_room and pair.told and len(pair.legs) == 2 and self.world.shape.tells_in_time:
                for leg in pair.legs:
                    self._check_told(leg, pair.legs[1 - pair.legs.index(leg)])
                    waited = leg.verdict is not None and leg.verdict.reason is Reason.OTHER_LEG_MISSING
                    if pair.misrouted and waited:
                        raise Broken("route", f"{leg.worker} {leg.request.rid} waited for a leg that ran elsewhere")

    def _check_told(self, leg: Leg, other: Leg) -> None:
        """`leg` failed: `other` ended soon after, for the same reason unless it had one of its own by then."""
        if leg.verdict is None or leg.unit is None or other.unit is None or leg.verdict.reason in _SILENT:
            return
        assert leg.ended_at is not None and other.ended_at is not None and other.sent_at is not None
        soon = max(leg.ended_at, other.sent_at) + self.world.told_within_ms()
        name = f"{leg.worker} {leg.request.rid} failed at {leg.ended_at} with {leg.verdict.reason.name}"
        theirs = None if other.verdict is None else other.verdict.reason
        text = f"{name}; {other.worker} ended at {other.ended_at} with {theirs}"
        if not (other.ended_at <= soon or (other.verdict is None and other.side == "prefill")):
            raise Broken("told in time", text)
        if theirs is not None and other.ended_at > leg.ended_at and theirs != leg.verdict.reason:
            if other.ended_at > soon:
                raise Broken("same reason", text)


_SILENT = (Reason.LOOKUP_FAILED, Reason.DEADLINE)
"""Reasons that prefill may not hear of: its registry does not answer, or the whole budget is spent."""
