"""The operators' routes, on a port of their own: what the router knows of its workers, drain, undrain, add, remove.

    GET    /                                     a page for people: workers, queues, rates, the last failures
    GET    /workers                              every worker, its state, its breaker, its load
    POST   /workers          {"url", "role"}     one more worker
    POST   /workers/{url}/drain | /undrain       new requests avoid it; what runs there goes on
    DELETE /workers/{url}                        it is drained and forgotten, whoever named it

A url in a path is percent-encoded (http%3A%2F%2F10.0.0.1%3A8100) or stands as it is.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

import msgspec
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse
from starlette.exceptions import HTTPException

from baton_core.errors import Reason, Verdict
from baton_core.limits import Millis
from baton_core.routing.workers import Role, Worker, in_flight_of
from baton_io.http_guard import GuardedHttp
from baton_router.api import NewWorker, admin_document
from baton_router.caller import ClientGone, Refused, read_body
from baton_router.config import check_url
from baton_router.directory import Directory
from baton_router.failures import CLIENT_GONE_STATUS, envelope

SOURCE = "operators"
PAGE_HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
}
"""The page runs and loads nothing, whatever a worker may have put into its words."""


BODY_BYTES_MAX = 64 * 1024
BODY_SILENCE_MS: Millis = 10_000


# FastAPI's own reading knows no limit, and puts what is wrong into an answer that cannot always be written.
_NEW_WORKER = msgspec.json.Decoder(NewWorker)


def shown(directory: Directory, worker: Worker) -> dict[str, Any]:
    """One worker, for people; its ranks too, where they are targets of their own."""
    targets, records = directory.targets(worker), directory.records
    ranks = [
        {
            "dp_rank": target.dp_rank,
            "breaker": records.state(target.key).value,
            "in_flight": in_flight_of(target, records.loads),
        }
        for target in targets
        if target.dp_rank is not None
    ]
    return {
        "url": worker.url,
        "role": worker.role.value,
        "state": worker.state.value,
        "reason": worker.reason,
        "breaker": records.worst(targets).value,
        "instance": worker.instance,
        "incarnation": worker.incarnation,
        "model": worker.model,
        "dp_size": worker.dp_size,
        "in_flight": directory.in_flight(worker),
    } | ({"ranks": ranks} if ranks else {})


async def http_error(_request: Request, error: Exception) -> Response:
    """Unknown paths and methods, in the envelope of every other error."""
    assert isinstance(error, HTTPException)
    verdict = Verdict(reason=Reason.INVALID_REQUEST, text=str(error.detail))
    body = envelope(verdict, error.status_code)
    return Response(body, error.status_code, headers=dict(error.headers or {}), media_type="application/json")


class Admin:
    """The handlers."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory

    async def workers(self) -> JSONResponse:
        """GET /workers."""
        directory = self._directory
        return JSONResponse({"workers": [shown(directory, worker) for worker in directory.all()]})

    async def add(self, request: Request) -> Response:
        """POST /workers."""
        try:
            body = await read_body(dict(request.scope["headers"]), request.receive, BODY_BYTES_MAX, BODY_SILENCE_MS)
            new = _NEW_WORKER.decode(body)
            check_url("url", new.url)
        except Refused as refused:
            return _error(refused.failure.status, str(refused))
        except ClientGone:
            return Response(status_code=CLIENT_GONE_STATUS)
        except msgspec.ValidationError as error:
            return _error(422, str(error))
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # no JSON, or no address
            return _error(400, str(error))
        self._directory.add(SOURCE, Role(new.role), new.url)
        return JSONResponse({"url": new.url, "role": new.role}, 201)

    async def remove(self, url: str) -> Response:
        """DELETE /workers/{url}."""
        return _done(url, self._directory.remove(url), "removed")

    async def drain(self, url: str) -> Response:
        """POST /workers/{url}/drain."""
        return _done(url, self._directory.hold(url, is_held=True), "draining")

    async def undrain(self, url: str) -> Response:
        """POST /workers/{url}/undrain."""
        return _done(url, self._directory.hold(url, is_held=False), "undrained")


def admin_app(directory: Directory, status_page: Callable[[], str]) -> FastAPI:
    """The application of the admin port; `status_page` makes the page for people."""
    admin = Admin(directory)

    async def page() -> Response:
        return HTMLResponse(status_page(), headers=PAGE_HEADERS)

    async def described() -> Response:
        return Response(admin_document(), media_type="application/json")

    app = FastAPI(title="Baton router, admin", openapi_url=None, docs_url=None, redoc_url=None)
    app.add_exception_handler(HTTPException, http_error)
    app.add_api_route("/", page, methods=["GET"])
    app.add_api_route("/openapi.json", described, methods=["GET"])
    app.add_api_route("/workers", admin.workers, methods=["GET"])
    app.add_api_route("/workers", admin.add, methods=["POST"])
    app.add_api_route("/workers/{url:path}/drain", admin.drain, methods=["POST"])
    app.add_api_route("/workers/{url:path}/undrain", admin.undrain, methods=["POST"])
    app.add_api_route("/workers/{url:path}", admin.remove, methods=["DELETE"])
    return app


class _Guest(uvicorn.Server):
    """A second server in a process whose signals belong to the first."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """None are captured."""
        yield


@asynccontextmanager
async def serving_admin(app: FastAPI, host: str, port: int | None) -> AsyncIterator[None]:
    """Serve the admin app while the block runs; without a port, nothing."""
    if port is None:
        yield
        return
    config = uvicorn.Config(
        app, host=host, port=port, http=GuardedHttp, access_log=False, log_config=None, timeout_graceful_shutdown=1
    )
    server = _Guest(config)
    task = asyncio.create_task(server.serve())
    try:
        yield
    finally:
        server.should_exit = True
        with suppress(asyncio.CancelledError):
            await task


def _done(url: str, is_known: bool, word: str) -> Response:
    return JSONResponse({"url": url, "state": word}) if is_known else _error(404, f"no worker {url} is known")


def _error(status: int, text: str) -> Response:
    verdict = Verdict(reason=Reason.INVALID_REQUEST, text=text)
    return Response(envelope(verdict, status), status, media_type="application/json")
