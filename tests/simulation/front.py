"""A worker's app in a fleet: HTTP in, registration (prefill) and look-ups (decode) by the real code, tokens out.

An answer is events of token ids. One that is asked to tells records, as a real decode worker does, and continues
what another worker began.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from baton_core.effects import Emit, LookUp, RegisterRank
from baton_core.errors import Overloaded, Reason, Verdict
from baton_core.events import Abort, RankEndpoint, Resolved
from baton_core.limits import RegistrarLimits
from baton_core.registration import FOLLOW, Layout
from baton_core.request import Bootstrap, FinishType, Incarnation, Request, RequestId, Room, Sampling, prompt_digest
from baton_io.peers import Peers
from baton_io.registrar import Registrar, Registration
from baton_io.registry_client import INCARNATION
from baton_worker.continuation import TOKEN_IDS_HEADER, Part, Past, Start, _signed
from baton_worker.http import encode_json, error_body
from simulation.bootstrap import RegistryServer
from simulation.loop import Process
from simulation.oracle import VOCABULARY
from simulation.wire import Ask, Exchange, Session

if TYPE_CHECKING:
    from simulation.clients import Leg
    from simulation.fleet import Fleet
    from simulation.leader import Leader
    from simulation.unit import Unit
    from simulation.worker import Worker

HTTP_PORT, BOOTSTRAP_PORT = 80, 8998
EVENTS = {"content-type": "text/event-stream"}
JSON = {"content-type": "application/json"}
DONE = b"data: [DONE]\n\n"


class _Params(msgspec.Struct):
    max_new_tokens: int
    min_new_tokens: int = 0
    stop_token_ids: list[int] = []


class _Body(msgspec.Struct):
    input_ids: list[int]
    sampling_params: _Params
    stream: bool = False
    bootstrap_host: str | None = None
    bootstrap_port: int = BOOTSTRAP_PORT
    bootstrap_room: int = 0
    bootstrap_instance: str | None = None
    routed_dp_rank: int | None = None
    disagg_prefill_dp_rank: int | None = None
    baton_continuation: list[Part] | None = None


@dataclass(slots=True, kw_only=True)
class Generation:
    """One leg at a worker, and the HTTP exchange that it is answered through."""

    exchange: Exchange
    request: Request
    is_stream: bool
    scribe: Start | None = None  # it is asked for records, the first of which says this
    given: int = 0  # tokens that another worker had told
    tokens: list[int] = field(default_factory=list)
    untold: list[int] = field(default_factory=list)  # not yet in a record
    has_begun: bool = False
    is_over: bool = False

    def push(self, emit: Emit) -> None:
        """The scheduler says something."""
        if self.is_over:
            return
        self.tokens += emit.tokens
        self.untold += emit.tokens
        finish = emit.finish
        if finish is not None and finish.type is FinishType.ABORT:
            assert finish.verdict is not None
            self.fail(finish.verdict)
        elif self.is_stream:
            self._stream(None if finish is None else finish.type.value)
        elif finish is not None:
            self.is_over = True
            told = {"tokens": self.tokens, "finish": finish.type.value}
            self.exchange.whole(200, encode_json(told), JSON)

    def fail(self, verdict: Verdict) -> None:
        """It ends with an error."""
        if self.is_over:
            return
        self.is_over = True
        body = encode_json(error_body(verdict))
        if not self.has_begun:
            self.exchange.whole(verdict.status, body, JSON)
            return
        event = b"data: " + body + b"\n\n"
        if self.scribe is not None:
            event = _signed(event, b"fail", b"%d" % verdict.status)
        self.exchange.write(event)
        self.exchange.end()

    def _stream(self, finish: str | None) -> None:
        if not self.has_begun:
            self.has_begun = True
            told = {} if self.scribe is None else {TOKEN_IDS_HEADER: str(self.given)}
            self.exchange.begin(200, EVENTS | told)
        value: dict[str, Any] = {"tokens": self.untold} | ({} if finish is None else {"finish": finish})
        events = b"data: " + encode_json(value) + b"\n\n" + (b"" if finish is None else DONE)
        if self.scribe is not None:
            first = self.scribe if not self.given and len(self.untold) == len(self.tokens) else None
            record = encode_json(Part(tokens=self.untold, start=first))
            events = _signed(events, b"part" if finish is None else b"last", record)
        self.untold = []
        self.exchange.write(events)
        if finish is not None:
            self.is_over = True
            self.exchange.end()


class App(Process):
    """The app process of one life of one worker."""

    def __init__(self, fleet: "Fleet", worker: "Worker") -> None:
        super().__init__(fleet.world, worker.name)
        self.fleet, self.worker = fleet, worker
        self.process: Process = self
        self.registrar: Registrar | None = None
        self.peers: Peers | None = None
        self.registered: dict[RequestId, Room] = {}
        wire = self.world.wire
        wire.servers[f"{self.host}:{HTTP_PORT}"] = self
        self.session: Any = Session(wire, self)
        if worker.side == "prefill":
            own = RegistryServer(wire, self, f"own-{worker.incarnation}")
            wire.servers[f"{self.host}:{BOOTSTRAP_PORT}"] = own
            self.registrar = self._registrar()
            self.spawn(self.registrar.run())
        else:
            self.peers = Peers(self.session, self.world.shape.limits)

    def _registrar(self) -> Registrar:
        worker, random = self.worker, self.world.random.random
        own = f"http://{self.host}:{BOOTSTRAP_PORT}"
        return Registrar(
            (own, *self.fleet.shared_registry()),
            self._registration(),
            self.session,
            RegistrarLimits(),
            lambda: worker.world.now,
            jitter=random,
        )

    def _registration(self) -> Registration:
        worker, parallel = self.worker, self.worker.parallel
        places = [parallel.place(rank) for rank in range(parallel.ranks)]
        return Registration(
            instance=worker.incarnation,
            incarnation=worker.incarnation,
            fingerprint="one",
            layout=Layout(
                attn_tp_size=parallel.tp,
                attn_cp_size=parallel.cp,
                dp_size=parallel.dp,
                pp_size=parallel.pp,
                page_size=self.world.shape.page_tokens,
                kv_cache_dtype="f32",
                follow_bootstrap_room=self.world.shape.balance == FOLLOW,
            ),
            ranks=tuple(
                (
                    place.dp_rank,
                    RankEndpoint(
                        host=f"{self.host}.{place.dp_rank}",
                        port=1 + place.member,
                        tp_rank=place.tp_rank,
                        cp_rank=place.cp_rank,
                        pp_rank=place.pp_rank,
                    ),
                )
                for place in places
            ),
            http_host=self.host,
            http_port=HTTP_PORT,
            bootstrap_host=self.host,
            bootstrap_port=BOOTSTRAP_PORT,
        )

    # -- HTTP

    def accept(self, ask: Ask, exchange: Exchange) -> None:
        """See Server."""
        if ask.path == "/generate":
            self._generate(ask, exchange)
        elif ask.path == "/health":
            exchange.whole(200, b"{}", {INCARNATION: self.worker.incarnation})
        elif ask.path == "/ready":
            reasons = self._unready()
            told = {"reasons": reasons, "draining": self.worker.draining}
            exchange.whole(503 if reasons else 200, encode_json(told))
        elif ask.path == "/server_info":
            exchange.whole(200, encode_json(self._info()))
        elif ask.path == "/v1/loads":
            exchange.whole(200, encode_json({"loads": [self._load(unit) for unit in self.worker.units]}))
        else:
            exchange.whole(404, b"")

    def _unready(self) -> list[str]:
        if self.worker.draining:
            return ["the worker is draining"]
        if self.registrar is not None and not self.registrar.registered():
            return ["a registry does not know it"]
        return []

    def _info(self) -> Mapping[str, object]:
        worker = self.worker
        info: dict[str, object] = {
            "role": worker.side,
            "incarnation": worker.incarnation,
            "instance": worker.incarnation,
            "fingerprint": "one",
            "dp_size": worker.parallel.dp,
            "state": "draining" if worker.draining else "serving",
        }
        if worker.side == "prefill":
            info |= {"bootstrap_host": self.host, "bootstrap_port": BOOTSTRAP_PORT}
            info["follow_bootstrap_room"] = self.world.shape.balance == FOLLOW
        return info

    def _load(self, unit: "Unit") -> Mapping[str, int]:
        ledger = unit.ranks[0].ledger
        return {
            "dp_rank": unit.dp_rank,
            "num_running_reqs": len(ledger.live),
            "num_used_tokens": (ledger.pool.total - ledger.pool.free) * unit.page_tokens,
            "max_total_num_tokens": ledger.pool.total * unit.page_tokens,
        }

    # -- legs

    def _generate(self, ask: Ask, exchange: Exchange) -> None:
        body, worker, shape = msgspec.json.decode(ask.body, type=_Body), self.worker, self.world.shape
        prompt, wanted = tuple(body.input_ids), body.sampling_params
        if min(prompt) < 0:
            exchange.whole(400, encode_json(error_body(Verdict(reason=Reason.INVALID_REQUEST, text="a token"))), JSON)
            return
        sampling = Sampling(
            max_new_tokens=wanted.max_new_tokens,
            min_new_tokens=wanted.min_new_tokens,
            stop_token_ids=tuple(wanted.stop_token_ids),
        )
        rid = ask.headers["x-request-id"]
        start = Start(rid=rid, created=0, seed=0, prompt_tokens=len(prompt), prompt_digest=prompt_digest(prompt))
        given = 0
        if body.baton_continuation is not None:
            past = Past(body.baton_continuation, VOCABULARY)
            prompt, sampling, given = past.prompt(prompt), past.sampling(sampling), len(past.tokens)
        bootstrap = None
        if body.bootstrap_host is not None:
            bootstrap = Bootstrap(
                host=body.bootstrap_host,
                port=body.bootstrap_port,
                room=body.bootstrap_room,
                instance=body.bootstrap_instance,
                prefill_dp_rank=body.disagg_prefill_dp_rank,
            )
        budget_ms = min(int(ask.headers["x-baton-budget-ms"]), shape.limits.request_budget_ms)
        request = Request(rid=rid, prompt=prompt, sampling=sampling, bootstrap=bootstrap, budget_ms=budget_ms)
        tells = body.stream and worker.side == "decode" and ask.headers.get(TOKEN_IDS_HEADER) == "1"
        generation = Generation(
            exchange=exchange,
            request=request,
            is_stream=body.stream and worker.side == "decode",
            scribe=start if tells else None,
            given=given,
        )
        leg = self.fleet.customers.arrived(worker, generation, body.routed_dp_rank)
        if leg is None:
            text = "this worker lost the unit that was to serve it, and ends"
            generation.fail(Verdict(reason=Reason.DRAINING, text=text))
        else:
            exchange.on_leave = lambda: self._left(leg)

    def _left(self, leg: "Leg") -> None:
        """Nobody waits for this answer any more."""
        if leg.ended_at is None and leg.unit is not None:
            self.world.fault("leg_cancelled", leg.unit.ranks[0], leg.request.rid)
            verdict = Verdict(reason=Reason.CLIENT_GONE, text="the client left")
            leg.unit.leader.put(Abort(rid=leg.request.rid, verdict=verdict))

    def leg_ended(self, rid: RequestId, *, went_well: bool) -> None:
        """Its room is over."""
        room = self.registered.pop(rid, None)
        if room is not None and self.registrar is not None:
            self.run(partial(self.registrar.close_room, room, went_well=went_well))

    # -- rooms and peers

    def register(self, leader: "Leader", effect: RegisterRank) -> None:
        """Prefill: a room runs on this DP rank."""
        assert self.registrar is not None
        leg = self.world.clients.legs.get((leader.unit.name, effect.rid))
        url = f"http://{effect.bootstrap.host}:{effect.bootstrap.port}"
        try:
            self.run(self.registrar.open_room, effect.room, effect.dp_rank, url)
        except Overloaded:
            return
        if leg is None or leg.ended_at is not None:
            self.run(partial(self.registrar.close_room, effect.room, went_well=False))
        else:
            self.registered[effect.rid] = effect.room

    def look_up(self, leader: "Leader", effect: LookUp) -> None:
        """Decode: find a room's prefill worker."""
        self.spawn(self._look_up(leader, effect))

    async def _look_up(self, leader: "Leader", effect: LookUp) -> None:
        assert self.peers is not None
        found = await self.peers.resolve(effect)
        if isinstance(found, Resolved):
            endpoints = tuple(
                replace(one, host="/".join(one.host.rpartition(".")[::2])) for one in found.infos.endpoints
            )
            found = replace(found, infos=replace(found.infos, endpoints=endpoints))
        else:
            self.world.clients.look_up_failed(leader.unit, effect.rid)
        leader.put(found)

    def peer_gone(self, peer: Incarnation) -> None:
        """The link to that life is lost."""
        if self.peers is not None:
            self.run(self.peers.forget, peer)
