"""The router's HTTP face: the generating routes go straight to the dispatch, everything else to FastAPI.

What a framework does for a request whose body it neither reads nor validates costs more than the choice of the pair.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from baton_core.errors import Reason, Verdict
from baton_core.limits import Millis
from baton_core.routing.breaker import BreakerLimits, BreakerState, RetryBudget
from baton_core.routing.fairness import FairQueue
from baton_core.routing.pace import Pace
from baton_core.routing.pair import ByRank, Policies
from baton_core.routing.policies import PolicyName, make_policy
from baton_core.routing.ranks import DpMode
from baton_core.routing.workers import Role, in_flight_of, load_of
from baton_io.registry_token import read_token
from baton_io.tracing import Tracing, open_tracing
from baton_router.admin import admin_app, http_error, serving_admin, shown
from baton_router.api import router_document
from baton_router.caller import ClientGone, Refused, read_body
from baton_router.calls import RoadSettings
from baton_router.client import HttpUpstream
from baton_router.config import RouterConfig, parse_address
from baton_router.directory import Directory
from baton_router.discovery.configured import configured_sources
from baton_router.discovery.source import keep_following
from baton_router.dispatch import Dispatch
from baton_router.door import Door
from baton_router.facts import needs_of
from baton_router.failures import Failure, own_failure
from baton_router.front import RouterApp
from baton_router.keys import parse_keys
from baton_router.metrics import RouterMetrics, TargetFigures
from baton_router.probe import Prober
from baton_router.recent import Recent
from baton_router.road import Road
from baton_router.status_page import Status, render
from baton_router.upstream import Upstream, UpstreamError, read_all

if TYPE_CHECKING:
    from baton_router.shared_quotas import SharedQuotas

FAN_OUT_MS: Millis = 10_000
FAN_OUT_BODY_BYTES_MAX = 64 * 1024
QUERY_SAFE = "%!$&'()*+,;=:@/?-._~"
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Watch = Callable[[], Coroutine[Any, Any, None]]


class Control:
    """Everything but generating: health, readiness, descriptions, and what is told to every worker."""

    def __init__(
        self,
        *,
        config: RouterConfig,
        directory: Directory,
        upstream: Upstream,
        session: AbstractAsyncContextManager[object],
        metrics: RouterMetrics,
        watches: list[Watch],
        recent: Recent,
        door: Door,
        tracing: Tracing | None,
    ) -> None:
        self._config = config
        self._directory = directory
        self._upstream = upstream
        self._session = session
        self._metrics = metrics
        self._recent, self._door, self._tracing = recent, door, tracing
        self._watches = [directory.watch, *watches]
        self._watching: list[asyncio.Task[None]] = []

    @asynccontextmanager
    async def lifespan(self, _app: FastAPI) -> AsyncIterator[None]:
        """Open the way to the workers and watch them, and whatever else changes, while the server runs."""
        admin = admin_app(self._directory, self.status_page)
        async with self._session, serving_admin(admin, self._config.admin_host, self._config.admin_port):
            self._watching = [asyncio.create_task(watch()) for watch in self._watches]
            yield
            for task in self._watching:
                task.cancel()
            await asyncio.gather(*self._watching, return_exceptions=True)
            if self._tracing is not None:
                await asyncio.to_thread(self._tracing.close)

    async def health(self) -> JSONResponse:
        """Alive: workers are being watched. Says nothing about whether there are any."""
        ended = [task for task in self._watching if task.done() and (task.cancelled() or task.exception())]
        alive = bool(self._watching) and not ended and not self._watching[0].done()
        return JSONResponse({"status": "ok" if alive else "the watch over the workers ended"}, 200 if alive else 503)

    async def ready(self) -> Response:
        """200 only with a usable pair, or a usable decode worker where no prefill worker is configured."""
        missing = self._missing()
        body = {
            "ready": missing is None,
            "reasons": [] if missing is None else [missing],
            "progress": None,
            "workers": [shown(self._directory, worker) for worker in self._directory.all()],
        }
        if missing is None:
            return JSONResponse(body)
        return JSONResponse(body, 503, headers={"retry-after": str(self._retry_after_s())})

    def status_page(self) -> str:
        """The admin port's page for people."""
        config = self._config
        return render(
            Status(
                missing=self._missing(),
                workers=tuple(shown(self._directory, worker) for worker in self._directory.all()),
                in_flight=self._recent.under_way,
                waiting=self._door.waiting,
                waiting_max=config.queue_max,
                rates=self._recent.rates(),
                failures=tuple(reversed(self._recent.failures)),
                registry=config.registry,
                policies=(config.prefill_policy, config.decode_policy),
            )
        )

    async def server_info(self) -> JSONResponse:
        """What this router is and knows."""
        return JSONResponse(
            {
                "role": "router",
                "registry": self._config.registry,
                "prefill_policy": self._config.prefill_policy,
                "decode_policy": self._config.decode_policy,
                "retries": self._config.retries,
                "migrations": self._config.migrations,
                "dp_mode": self._config.dp_mode,
                "workers": [shown(self._directory, worker) for worker in self._directory.all()],
            }
        )

    async def models(self) -> Response:
        """The models of a usable decode worker, in its own words."""
        usable = [worker for worker in self._directory.workers(Role.DECODE) if worker.usable]
        for worker in usable:
            try:
                status, body = await self._upstream.get(f"{worker.url}/v1/models", self._config.connect_timeout_ms)
            except UpstreamError:
                self._directory.doubt(worker)
                continue
            return Response(body, status, media_type="application/json")
        verdict = Verdict(
            reason=Reason.NO_USABLE_PAIR,
            text=self._missing() or "no decode worker answered",
        )
        return _answer(own_failure(verdict, retry_after_ms=self._config.limits.retry_after_ms))

    async def metrics(self) -> Response:
        """Prometheus text."""
        return Response(self._metrics.export(), media_type=METRICS_TYPE)

    async def fan_out(self, request: Request) -> Response:
        """Tell every worker the same (`/flush_cache`, `/abort_request`); the worst status is ours."""
        try:
            headers, silence_ms = dict(request.scope["headers"]), self._config.client_silence_ms
            body = await read_body(headers, request.receive, FAN_OUT_BODY_BYTES_MAX, silence_ms)
        except Refused as refused:
            return _answer(refused.failure)
        except ClientGone:
            return Response(status_code=499)
        # Not of `request.url`, which is made of the client's host header, too.
        path, query = request.scope["path"], request.scope["query_string"].decode("latin-1")
        target = f"{path}?{quote(query, safe=QUERY_SAFE)}" if query else path
        workers = self._directory.all()
        told = await asyncio.gather(*(self._tell(worker.url + target, body) for worker in workers))
        statuses = {worker.url: status for worker, status in zip(workers, told, strict=True)}
        return JSONResponse({"workers": statuses}, max(statuses.values(), default=200))

    async def _tell(self, url: str, body: bytes) -> int:
        try:
            async with asyncio.timeout(FAN_OUT_MS / 1000):
                answer = await self._upstream.post(url, body, {"content-type": "application/json"})
                await read_all(answer, FAN_OUT_BODY_BYTES_MAX)
                return answer.status
        except (UpstreamError, TimeoutError):
            return 502

    def _missing(self) -> str | None:
        """Why nobody can be served now; with `degrade`, a decode worker alone can serve."""
        fleet = self._directory.fleet
        has_decode = any(worker.usable for worker in fleet.decodes)
        return None if self._config.degrade and has_decode else fleet.missing_pair()

    def _retry_after_s(self) -> int:
        return max(1, self._config.limits.retry_after_ms // 1000)


def build(config: RouterConfig, draw: Callable[[int], int]) -> RouterApp:
    """A whole router from its configuration; `draw(n)` gives a random integer of n bits.

    Raises KeysError or OSError when the file of keys cannot be used: a router without it would let nobody in; OSError or
    ValueError when the registry's token, or tracing, cannot be had.
    """
    metrics = RouterMetrics()
    upstream = HttpUpstream(connect_timeout_ms=config.connect_timeout_ms)
    directory = _directory(config, upstream, metrics)
    shared = _shared_quotas(config, metrics)
    door = Door(
        queue=FairQueue(running_max=config.concurrent_max, waiting_max=config.queue_max),
        keys=None if config.keys_file is None else Path(config.keys_file),
        queue_ms=config.queue_ms,
        retry_after_ms=config.limits.retry_after_ms,
        on_queue=metrics.queued.set,
        shared=shared,
    )
    if config.keys_file is not None:
        door.take_keys(parse_keys(Path(config.keys_file).read_bytes()))
    names = PolicyName(config.prefill_policy), PolicyName(config.decode_policy)
    recent = Recent()
    metrics.under_way_from(lambda: recent.under_way)
    tracing = open_tracing("baton-router", f"{draw(64):016x}", config.otlp_endpoint, config.trace_ratio)
    pace = Pace(longest_ms=config.first_token_ms)
    metrics.waits_from(lambda: pace.waiting, lambda: pace.expected_ms(1000 * asyncio.get_running_loop().time()) / 1000)
    dispatch = Dispatch(
        road=_road(config, directory, upstream, metrics, pace, draw),
        door=door,
        pace=pace,
        metrics=metrics,
        recent=recent,
        tracing=tracing,
        limits=config.limits,
        silence_ms=config.client_silence_ms,
        needs=needs_of(*names, tokens=config.poll_loads or config.local_prompt_tokens > 0 or config.first_token_ms > 0),
    )
    control = Control(
        config=config,
        directory=directory,
        upstream=upstream,
        session=upstream,
        metrics=metrics,
        watches=[door.watch, *_followed(config, directory, upstream), *([shared.run] if shared else [])],
        recent=recent,
        door=door,
        tracing=tracing,
    )
    return RouterApp(dispatch, _control_app(control))


def _directory(config: RouterConfig, upstream: Upstream, metrics: RouterMetrics) -> Directory:
    prober = Prober(
        upstream,
        timeout_ms=config.connect_timeout_ms,
        registry=None if config.registry is None else parse_address(config.registry),
        wants_loads=config.poll_loads,
        wants_topology=config.dp_mode == "auto",
    )
    by_rank = config.dp_mode != "off"
    directory = Directory(
        prober=prober,
        interval_ms=config.probe_interval_ms,
        silence_ms=config.worker_silence_ms,
        breaker_limits=BreakerLimits(failures_max=config.breaker_failures_max, open_ms=config.breaker_open_ms),
        by_rank=ByRank(prefill=by_rank, decode=by_rank),
        on_change=metrics.count_workers,
    )
    named = [(Role.PREFILL, url) for url in config.prefill] + [(Role.DECODE, url) for url in config.decode]
    directory.name("configuration", named)
    metrics.open_breakers_from(lambda: len(directory.records.blocked()))
    metrics.targets_from(partial(target_figures, directory))
    return directory


def target_figures(directory: Directory) -> Iterator[TargetFigures]:
    """What a scrape shows of each target."""
    records = directory.records
    for worker in directory.all():
        for target in directory.targets(worker):
            record = records.of(target.key)
            yield TargetFigures(
                role=worker.role.value,
                worker=worker.url,
                dp_rank="" if target.dp_rank is None else str(target.dp_rank),
                in_flight=in_flight_of(target, records.loads),
                load=load_of(target, records.loads),
                is_open=records.state(target.key) is BreakerState.OPEN,
                served=record.served,
                failed=record.failed,
            )


def _road(
    config: RouterConfig,
    directory: Directory,
    upstream: Upstream,
    metrics: RouterMetrics,
    pace: Pace,
    draw: Callable[[int], int],
) -> Road:
    settings = RoadSettings(
        limits=config.limits,
        retries=config.retries,
        migrations=config.migrations,
        registry=None if config.registry is None else parse_address(config.registry),
        dp_mode=DpMode(config.dp_mode),
        is_degrading=config.degrade,
        local_prompt_tokens=config.local_prompt_tokens,
        worker_key=config.worker_key,
        registry_token=read_token(config.registry_token_file),
    )
    policies = Policies(
        prefill=make_policy(PolicyName(config.prefill_policy)),
        decode=make_policy(PolicyName(config.decode_policy)),
    )
    budget = RetryBudget(per_request=config.retries_per_request, burst=config.retries_burst)
    return Road(
        directory=directory,
        upstream=upstream,
        policies=policies,
        metrics=metrics,
        settings=settings,
        budget=budget,
        pace=pace,
        draw=draw,
    )


def _followed(config: RouterConfig, directory: Directory, upstream: Upstream) -> list[Watch]:
    """What follows each configured source of workers."""
    interval_ms = config.discovery_interval_ms
    return [
        partial(keep_following, source, directory.name, interval_ms) for source in configured_sources(config, upstream)
    ]


def _shared_quotas(config: RouterConfig, metrics: RouterMetrics) -> "SharedQuotas | None":
    """The way to the quotas that routers share, where there is one. Raises ValueError."""
    if config.redis is None:
        return None
    try:
        from baton_router.shared_quotas import SharedQuotas
    except ImportError as error:
        raise ValueError(f"redis needs the extra redis (pip install 'baton[redis]'): {error}") from error
    return SharedQuotas(
        config.redis,
        read_token(config.redis_password_file),
        lease_ms=config.limits.request_budget_ms,
        on_away=metrics.counted_alone,
    )


def _control_app(control: Control) -> FastAPI:
    app = FastAPI(title="Baton router", lifespan=control.lifespan, openapi_url=None, docs_url=None, redoc_url=None)
    for path, endpoint in (
        ("/health", control.health),
        ("/ready", control.ready),
        ("/server_info", control.server_info),
        ("/get_server_info", control.server_info),
        ("/v1/models", control.models),
        ("/metrics", control.metrics),
        ("/openapi.json", _described),
    ):
        app.add_api_route(path, endpoint, methods=["GET"])
    for path in ("/flush_cache", "/abort_request"):
        app.add_api_route(path, control.fan_out, methods=["POST"])
    app.add_exception_handler(HTTPException, http_error)
    return app


async def _described() -> Response:
    return Response(router_document(), media_type="application/json")


def _answer(failure: Failure) -> Response:
    headers = {} if failure.retry_after is None else {"retry-after": failure.retry_after.decode("ascii")}
    return Response(failure.body, failure.status, headers=headers, media_type=failure.content_type.decode("ascii"))
