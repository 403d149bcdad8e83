"""The HTTP app of a worker: routes over a `Worker`, whose life is the app's lifespan."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route as HttpRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton_core.errors import Reason, Verdict
from baton_worker.api import worker_document
from baton_worker.generate import GENERATE
from baton_worker.http import INCARNATION_HEADER, failure
from baton_worker.openai import CHAT, COMPLETION
from baton_worker.ops import Ops
from baton_worker.respond import Route, respond
from baton_worker.worker import Worker


def create_app(worker: Worker) -> FastAPI:
    """The app. Starting it starts the rank; stopping it ends the rank."""

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        await worker.start()
        try:
            yield
        finally:
            await worker.close()

    async def http_error(_request: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        verdict = Verdict(reason=Reason.INVALID_REQUEST, text=str(error.detail))
        return failure(verdict, worker.limits, status=error.status_code)

    async def crash(_request: HttpRequest, error: Exception) -> Response:
        text = f"internal error: {type(error).__name__}; the worker's log has more"
        return failure(Verdict(reason=Reason.DEVICE_FAULT, text=text), worker.limits)

    # Plain routes: bodies are decoded by our own schemas, so that FastAPI's would be a second validation.
    app = FastAPI(title="Baton worker", lifespan=lifespan, openapi_url=None, docs_url=None, redoc_url=None)
    app.router.routes.extend(
        [
            HttpRoute("/generate", _endpoint(worker, GENERATE), methods=["POST", "PUT"]),
            HttpRoute("/v1/completions", _endpoint(worker, COMPLETION), methods=["POST"]),
            HttpRoute("/v1/chat/completions", _endpoint(worker, CHAT), methods=["POST"]),
            HttpRoute("/openapi.json", _described, methods=["GET"]),
            *Ops(worker).routes(),
        ]
    )
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(Exception, crash)
    app.add_middleware(IncarnationHeader, incarnation=worker.incarnation)
    return app


class IncarnationHeader:
    """Puts the worker's incarnation on every response, so that a caller notices a restart."""

    def __init__(self, app: ASGIApp, incarnation: str) -> None:
        self._app = app
        self._incarnation = incarnation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass through, adding the header."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_header(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[INCARNATION_HEADER] = self._incarnation
            await send(message)

        await self._app(scope, receive, send_with_header)


async def _described(_request: HttpRequest) -> Response:
    return Response(worker_document(), media_type="application/json")


def _endpoint(worker: Worker, route: Route[Any]) -> Callable[[HttpRequest], Awaitable[Response]]:
    async def endpoint(request: HttpRequest) -> Response:
        return await respond(worker, route, request)

    return endpoint
