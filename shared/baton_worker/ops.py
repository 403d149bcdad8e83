"""What operators, routers and probes ask a worker, under SGLang's names where it has them."""

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any, TypeVar

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from baton_core.errors import BatonError, ClientError, Overloaded, Reason, Verdict
from baton_core.events import Continue, FlushCache, Pause, PauseMode
from baton_core.limits import Millis
from baton_core.request import FAKE_HOST, Bootstrap, FinishType, Sampling
from baton_worker.config import Role, follows
from baton_worker.generate import WEIGHT_VERSION
from baton_worker.http import failure, json_response, read_body
from baton_worker.intake import Prepared
from baton_worker.loads import GatewayGauges, load_of
from baton_worker.rank_process import Rank
from baton_worker.streams import RequestStream
from baton_worker.worker import Worker

PROBE_MS: Millis = 20_000
"""How long `/health_generate` waits for its token, as in SGLang."""

SNAPSHOT_MS: Millis = 2_000
SETTLE_PAUSE_S = 0.002
"""Between two looks at whether schedulers have done what they were told."""

Gauges = Mapping[str, float]
BUSY_QUEUES = ("running", "arrived", "computing", "backing_up", "restoring")
"""Where requests of decode hold KV that a pause with `retract` takes from them."""

CONTROL_BYTES_MAX = 64 * 1024

Body = TypeVar("Body")


class AbortBody(msgspec.Struct, kw_only=True):
    """Body of `/abort_request`."""

    rid: str | None = None
    abort_all: bool | None = None


class PauseBody(msgspec.Struct, kw_only=True):
    """Body of `/pause_generation`."""

    mode: PauseMode = PauseMode.ABORT


class Ops:
    """Handlers over one worker."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._started_at = time.time()
        self._dp_size = worker.parallel.dp
        self._gateway_gauges = GatewayGauges(worker)
        self._words = 0  # pauses and their ends so far: the last one holds

    def routes(self) -> list[Route]:
        """Every route of this file."""
        table = (
            (("/health",), self.health, ["GET"]),
            (("/ready",), self.ready, ["GET"]),
            (("/health_generate",), self.health_generate, ["GET"]),
            (("/model_info", "/get_model_info"), self.model_info, ["GET"]),
            (("/server_info", "/get_server_info"), self.server_info, ["GET"]),
            (("/v1/models",), self.models, ["GET"]),
            (("/v1/loads",), self.loads, ["GET"]),
            (("/flush_cache",), self.flush_cache, ["GET", "POST"]),
            (("/abort_request",), self.abort_request, ["POST"]),
            (("/pause_generation",), self.pause_generation, ["POST"]),
            (("/continue_generation",), self.continue_generation, ["POST"]),
            (("/drain",), self.drain, ["POST"]),
            (("/metrics",), self.metrics, ["GET"]),
            (("/debug/snapshot",), self.debug_snapshot, ["GET"]),
        )
        return [Route(path, handler, methods=methods) for paths, handler, methods in table for path in paths]

    async def health(self, _request: HttpRequest) -> Response:
        """200 while every rank is loaded and makes progress."""
        well = self._worker.units.progressing
        return PlainTextResponse("OK" if well else "a scheduler makes no progress", 200 if well else 503)

    async def ready(self, _request: HttpRequest) -> Response:
        """200 when requests are taken; otherwise the reasons, and how far loading is."""
        reasons = self._worker.unready()
        loading = self._worker.units.loading()
        progress = None if loading is None else {"what": loading.what, "done": loading.done, "total": loading.total}
        body = {"ready": not reasons, "reasons": reasons, "progress": progress}
        return json_response(body, 503 if reasons else 200)

    async def health_generate(self, _request: HttpRequest) -> Response:
        """200 when every unit computes a token for a request without a peer."""
        worker = self._worker
        try:
            probes = [
                worker.submit(_probe_of(dp), f"health-{uuid.uuid4().hex}", PROBE_MS) for dp in range(self._dp_size)
            ]
        except BatonError as error:
            return failure(error.verdict, worker.limits)
        try:
            async with asyncio.timeout(PROBE_MS / 1000):
                verdicts = await asyncio.gather(*(_ending_of(probe) for probe in probes))
        except TimeoutError:
            return failure(Overloaded(f"no token within {PROBE_MS} ms").verdict, worker.limits)
        for verdict in verdicts:
            if verdict is not None:
                return failure(verdict, worker.limits, status=503)
        return PlainTextResponse("OK")

    async def model_info(self, _request: HttpRequest) -> Response:
        """SGLang's description of the model."""
        worker = self._worker
        return json_response(
            {
                "model_path": str(worker.model.path),
                "tokenizer_path": str(worker.model.path),
                "served_model_name": worker.model.name,
                "is_generation": True,
                "preferred_sampling_params": None,
                "weight_version": WEIGHT_VERSION,
                "load_format": worker.model.path.suffix.removeprefix("."),
                "reasoning_parser": None,
                "tool_call_parser": None,
                "disaggregation_mode": worker.role.value,
                "has_image_understanding": False,
                "has_audio_understanding": False,
            }
        )

    async def server_info(self, _request: HttpRequest) -> Response:
        """Who this worker is: role, incarnation, layout, addresses."""
        worker, ready = self._worker, self._worker.rank_ready
        bootstrap_host, bootstrap_port = worker.own_bootstrap
        is_prefill = worker.role is Role.PREFILL
        info: dict[str, Any] = {
            "role": worker.role.value,
            "disaggregation_mode": worker.role.value,
            "incarnation": worker.incarnation,
            "instance": worker.incarnation,
            "state": worker.state.value,
            "version": version("baton"),
            "model": worker.model.name,
            "model_path": str(worker.model.path),
            "served_model_name": worker.model.name,
            "dtype": worker.config.dtype,
            "device": worker.config.device,
            "transfer": worker.config.transfer,
            "dp_size": worker.parallel.dp,
            "tp_size": worker.parallel.tp,
            "pp_size": worker.parallel.pp,
            "attn_cp_size": worker.parallel.cp,
            "enable_dp_attention": worker.parallel.dp_attention,
            "nnodes": worker.config.nnodes,
            "load_balance_method": worker.config.load_balance_method,
            "follow_bootstrap_room": is_prefill
            and follows(worker.config.load_balance_method, forced=worker.config.force_query_prefill_dp_rank),
            "registries": list(worker.config.registry),
            "bootstrap_host": bootstrap_host if is_prefill else None,
            "bootstrap_port": bootstrap_port if is_prefill else None,
            "disaggregation_bootstrap_port": bootstrap_port,
            "page_tokens": worker.config.page_tokens,
            "page_size": worker.config.page_tokens,
            "kv_tokens": worker.config.kv_tokens,
            "startup_time": self._started_at,
            "ranks": [_rank_view(rank) for rank in worker.units.ranks],
        }
        if ready is not None:
            info |= {
                "fingerprint": ready.fingerprint,
                "layout": ready.layout,
                "kv_pages": ready.kv_pages,
                "kv_bytes": ready.kv_bytes,
                "kv_dtype": ready.kv_dtype,
                "context_tokens": ready.context_tokens,
                "max_total_num_tokens": ready.kv_pages * ready.page_tokens,
                "load_seconds": ready.load_seconds,
                "internal_states": [{"dp_rank": dp_rank} for dp_rank in range(self._dp_size)],
            }
        return json_response(info)

    async def models(self, _request: HttpRequest) -> Response:
        """OpenAI's list of the one model."""
        worker = self._worker
        longest = None if worker.rank_ready is None else worker.rank_ready.context_tokens
        model = {
            "id": worker.model.name,
            "object": "model",
            "created": int(self._started_at),
            "owned_by": "baton",
            "root": worker.model.name,
            "parent": None,
            "max_model_len": longest,
        }
        return json_response({"object": "list", "data": [model]})

    async def loads(self, _request: HttpRequest) -> Response:
        """SGLang's load report, one entry a unit, as of their last snapshots."""
        now = time.time()
        loads = [load_of(self._worker, dp_rank, now) for dp_rank in range(self._dp_size)]
        return json_response({"timestamp": now, "version": version("baton"), "loads": loads})

    async def flush_cache(self, _request: HttpRequest) -> Response:
        """Return every cached page to the pool; 400 while requests are live, whose pages would stay."""
        live = len(self._worker.streams)
        if live:
            return PlainTextResponse(f"Cache not flushed: {live} requests are live.\n", 400)
        self._worker.units.tell_all(FlushCache())
        late = await self._settled(lambda gauges: not gauges.get("pages_cached") or bool(self._worker.streams))
        return late or PlainTextResponse("Cache flushed.\n")

    async def abort_request(self, request: HttpRequest) -> Response:
        """End one live request by its id, or all. An id that is not live is ignored."""
        worker, body = self._worker, await self._control_body(request, AbortBody)
        if isinstance(body, Response):
            return body
        verdict = Verdict(reason=Reason.ABORTED, text="aborted by request")
        stream = worker.streams.find(body.rid) if body.rid else None
        if body.abort_all:
            worker.abort_all(verdict)
        elif stream is not None:
            worker.abort(stream, verdict)
        return Response(status_code=200)

    async def pause_generation(self, request: HttpRequest) -> Response:
        """Compute nothing until `/continue_generation`; what runs is aborted, kept in place, or retracted."""
        worker, body = self._worker, await self._control_body(request, PauseBody)
        if isinstance(body, Response):
            return body
        word = self._say(Pause(mode=body.mode))
        busy = BUSY_QUEUES if body.mode is PauseMode.RETRACT and worker.role is Role.DECODE else ()

        def rests(gauges: Gauges) -> bool:
            held = sum(gauges.get(f"queue_requests{{queue={queue}}}", 0) for queue in busy)
            return gauges.get("paused", 1) == 1 and not gauges.get("running_steps") and not held

        late = await self._settled(rests, word)
        return late or json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def _control_body(self, request: HttpRequest, kind: type[Body]) -> Body | Response:
        """The body of a control request, or the answer to one that has none that will do."""
        try:
            raw = await read_body(request, CONTROL_BYTES_MAX)
            return msgspec.json.decode(raw or b"{}", type=kind)
        except ClientDisconnect:
            return Response(status_code=499)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            return failure(ClientError(f"the body is not valid: {error}").verdict, self._worker.limits)
        except ClientError as error:
            return failure(error.verdict, self._worker.limits)

    async def continue_generation(self, _request: HttpRequest) -> Response:
        """Compute again."""
        word = self._say(Continue())
        late = await self._settled(lambda gauges: gauges.get("paused", 0) == 0, word)
        return late or json_response({"message": "Generation continued successfully.", "status": "ok"})

    def _say(self, what: Pause | Continue) -> int:
        """Tell all units; the number of this word."""
        self._worker.units.tell_all(what)
        self._words += 1
        return self._words

    async def _settled(self, holds: Callable[[Gauges], bool], word: int = 0) -> Response | None:
        """Wait until it is so on every rank, for the longest step at most; the answer to say that it is not.

        What word number `word` asks for may never be so once a later word was said: that is a 409, at once.
        """
        worker, longest_ms = self._worker, self._worker.limits.step_ms
        try:
            async with asyncio.timeout(longest_ms / 1000):
                while not all(holds(one.gauges) for one in await worker.fresh_snapshots(longest_ms)):
                    if word and word != self._words:
                        text = "a later pause or continuation was asked for meanwhile, and holds"
                        verdict = Verdict(reason=Reason.INVALID_REQUEST, text=text)
                        return failure(verdict, worker.limits, status=409)
                    await asyncio.sleep(SETTLE_PAUSE_S)
        except TimeoutError:
            late = Overloaded(f"the schedulers were told, but have not done so within {longest_ms} ms")
            return failure(late.verdict, worker.limits)
        return None

    async def drain(self, _request: HttpRequest) -> Response:
        """Refuse new requests from now on, without ending the process."""
        self._worker.begin_drain()
        return json_response({"draining": True, "live_requests": len(self._worker.streams)})

    async def metrics(self, _request: HttpRequest) -> Response:
        """Prometheus' text format: our own names, then those that a Kubernetes gateway asks for."""
        worker = self._worker
        worker.metrics.gauge("app_live_requests", len(worker.streams))
        worker.metrics.gauge("rank_progress_age_seconds", worker.units.progress_age_ms / 1000)
        worker.metrics.gauge("ready", 0 if worker.unready() else 1)
        worker.metrics.set_count("bad_frames_total", worker.bad_frames)
        text = worker.metrics.render() + self._gateway_gauges.render()
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    async def debug_snapshot(self, _request: HttpRequest) -> Response:
        """The numbers as of now of all units together, of each unit, and of every rank; and the app's live requests.

        At rest, everything must be free, on every rank.
        """
        worker = self._worker
        try:
            ranks = await worker.fresh_snapshots(SNAPSHOT_MS)
        except TimeoutError:
            late = Overloaded(f"a scheduler did not answer within {SNAPSHOT_MS} ms")
            return failure(late.verdict, worker.limits)
        body = {
            "live_requests": len(worker.streams),
            "snapshot": worker.whole(ranks),
            "snapshots": worker.of_leaders(ranks),
            "ranks": ranks,
        }
        return json_response(body)


def _probe_of(dp_rank: int) -> Prepared:
    """A request for one token of one unit, without a peer."""
    return Prepared(
        prompt=(0,),
        sampling=Sampling(temperature=0.0, max_new_tokens=1),
        bootstrap=Bootstrap(host=FAKE_HOST, port=1, room=0, prefill_dp_rank=dp_rank),
        stop=(),
        skip_special=True,
        keep_stop=False,
        routed_dp_rank=dp_rank,
    )


async def _ending_of(stream: RequestStream) -> Verdict | None:
    """Why the request failed; None if it did not."""
    while (delivery := await stream.take()).finish is None:
        pass
    return delivery.finish.verdict if delivery.finish.type is FinishType.ABORT else None


def _rank_view(rank: Rank) -> dict[str, object]:
    place = rank.place
    return {
        "rank": place.rank,
        "pid": rank.pid,
        "dp_rank": place.dp_rank,
        "pp_rank": place.pp_rank,
        "cp_rank": place.cp_rank,
        "tp_rank": place.tp_rank,
    }
