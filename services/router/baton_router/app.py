"""The router's HTTP face: the generating routes go straight to the dispatch, everything else to FastAPI.

The front is four lines of ASGI rather than a FastAPI route, because what a framework does for a request whose body it
neither reads nor validates costs more than the choice of the pair.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from baton_core.errors import Reason, Verdict
from baton_core.limits import Millis
from baton_core.routing.pair import Policies, missing_pair
from baton_core.routing.policies import PolicyName, make_policy
from baton_core.routing.workers import Role, Worker
from baton_router.config import RouterConfig, parse_address
from baton_router.directory import Directory, Probing
from baton_router.dispatch import Dispatch, DispatchSettings
from baton_router.exchange import ClientGone, Receive, Refused, Scope, Send, read_body
from baton_router.failures import Failure, envelope, own_failure
from baton_router.metrics import RouterMetrics
from baton_router.upstream import AiohttpUpstream, Upstream, UpstreamError, read_all

GENERATING_ROUTES = ("/generate", "/v1/completions", "/v1/chat/completions")
FAN_OUT_MS: Millis = 10_000
FAN_OUT_BODY_BYTES_MAX = 64 * 1024
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]


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
    ) -> None:
        self._config = config
        self._directory = directory
        self._upstream = upstream
        self._session = session
        self._metrics = metrics
        self._watch: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def lifespan(self, _app: FastAPI) -> AsyncIterator[None]:
        """Open the way to the workers and watch them while the server runs."""
        async with self._session:
            self._watch = asyncio.create_task(self._directory.watch())
            yield
            self._watch.cancel()
            with suppress(asyncio.CancelledError):
                await self._watch

    async def health(self) -> JSONResponse:
        """Alive: workers are being watched. Says nothing about whether there are any."""
        alive = self._watch is not None and not self._watch.done()
        return JSONResponse({"status": "ok" if alive else "the watch over the workers ended"}, 200 if alive else 503)

    async def ready(self) -> Response:
        """200 only with a usable pair, or a usable decode worker where no prefill worker is configured."""
        missing = self._missing()
        body = {
            "ready": missing is None,
            "reasons": [] if missing is None else [missing],
            "progress": None,
            "workers": [_shown(worker) for worker in self._directory.all()],
        }
        if missing is None:
            return JSONResponse(body)
        return JSONResponse(body, 503, headers={"retry-after": str(self._retry_after_s())})

    async def server_info(self) -> JSONResponse:
        """What this router is and knows."""
        return JSONResponse(
            {
                "role": "router",
                "registry": self._config.registry,
                "prefill_policy": self._config.prefill_policy,
                "decode_policy": self._config.decode_policy,
                "retries": self._config.retries,
                "workers": [_shown(worker) for worker in self._directory.all()],
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
            body = await read_body(dict(request.scope["headers"]), request.receive, FAN_OUT_BODY_BYTES_MAX)
        except Refused as refused:
            return _answer(refused.failure)
        except ClientGone:
            return Response(status_code=499)
        query = f"?{request.url.query}" if request.url.query else ""
        workers = self._directory.all()
        told = await asyncio.gather(*(self._tell(worker.url + request.url.path + query, body) for worker in workers))
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
        return missing_pair(self._directory.workers(Role.PREFILL), self._directory.workers(Role.DECODE))

    def _retry_after_s(self) -> int:
        return max(1, self._config.limits.retry_after_ms // 1000)


def build(config: RouterConfig, draw: Callable[[int], int]) -> AsgiApp:
    """A whole router from its configuration; `draw(n)` gives a random integer of n bits."""
    metrics = RouterMetrics()
    upstream = AiohttpUpstream(connect_timeout_ms=config.connect_timeout_ms)
    registry = None if config.registry is None else parse_address(config.registry)
    probing = Probing(
        interval_ms=config.probe_interval_ms,
        timeout_ms=config.connect_timeout_ms,
        registry_known=registry is not None,
    )
    directory = Directory(
        prefill=config.prefill,
        decode=config.decode,
        upstream=upstream,
        probing=probing,
        on_change=metrics.count_workers,
    )
    policies = Policies(
        prefill=make_policy(PolicyName(config.prefill_policy)),
        decode=make_policy(PolicyName(config.decode_policy)),
    )
    dispatch = Dispatch(
        directory=directory,
        upstream=upstream,
        policies=policies,
        metrics=metrics,
        settings=DispatchSettings(limits=config.limits, retries=config.retries, registry=registry),
        draw=draw,
    )
    control = Control(config=config, directory=directory, upstream=upstream, session=upstream, metrics=metrics)
    return _front(dispatch, _control_app(control))


def _front(dispatch: AsgiApp, control: AsgiApp) -> AsgiApp:
    async def front(scope: Scope, receive: Receive, send: Send) -> None:
        generating = scope["type"] == "http" and scope["path"] in GENERATING_ROUTES and scope["method"] == "POST"
        await (dispatch if generating else control)(scope, receive, send)

    return front


def _control_app(control: Control) -> FastAPI:
    app = FastAPI(title="Baton router", lifespan=control.lifespan, docs_url=None, redoc_url=None)
    for path, endpoint in (
        ("/health", control.health),
        ("/ready", control.ready),
        ("/server_info", control.server_info),
        ("/get_server_info", control.server_info),
        ("/v1/models", control.models),
        ("/metrics", control.metrics),
    ):
        app.add_api_route(path, endpoint, methods=["GET"])
    for path in ("/flush_cache", "/abort_request"):
        app.add_api_route(path, control.fan_out, methods=["POST"])
    app.add_exception_handler(HTTPException, _http_error)
    return app


async def _http_error(_request: Request, error: Exception) -> Response:
    """Unknown paths and methods, in the envelope of every other error."""
    assert isinstance(error, HTTPException)
    verdict = Verdict(reason=Reason.INVALID_REQUEST, text=str(error.detail))
    body = envelope(verdict, error.status_code)
    return Response(body, error.status_code, headers=dict(error.headers or {}), media_type="application/json")


def _answer(failure: Failure) -> Response:
    headers = {} if failure.retry_after is None else {"retry-after": failure.retry_after.decode("ascii")}
    return Response(failure.body, failure.status, headers=headers, media_type=failure.content_type.decode("ascii"))


def _shown(worker: Worker) -> dict[str, Any]:
    return {
        "url": worker.url,
        "role": worker.role.value,
        "state": worker.state.value,
        "reason": worker.reason,
        "instance": worker.instance,
        "incarnation": worker.incarnation,
        "model": worker.model,
        "dp_size": worker.dp_size,
        "in_flight": worker.in_flight,
    }
