"""The real registry (its routes over its table) as a process that may be stopped, cut off, or start anew with nothing."""

from typing import TYPE_CHECKING, Any

from baton_core.registry import RegistryTable
from baton_io.registry_routes import RegistryRoutes, health_probe
from simulation.loop import Process
from simulation.wire import Ask, Exchange, Session, Wire

if TYPE_CHECKING:
    from starlette.types import ASGIApp

INSTANCES = "/v1/instances/"


class RegistryServer:
    """One life of one registry, inside `process`."""

    def __init__(self, wire: Wire, process: Process, life: str) -> None:
        self.process = process
        self.table = RegistryTable(life)
        probe = health_probe(Session(wire, process))  # type: ignore[arg-type]
        routes = RegistryRoutes.alone(self.table, clock=lambda: wire.world.now, probe=probe, token=None)
        self._endpoints: dict[tuple[str, str], ASGIApp] = {
            (method, route.path): route.app for route in routes.endpoints() for method in route.methods or ()
        }

    def accept(self, ask: Ask, exchange: Exchange) -> None:
        """See Server."""
        self.process.spawn(self._answer(ask, exchange))

    async def _answer(self, ask: Ask, exchange: Exchange) -> None:
        path, named = ask.path, {}
        if path.startswith(INSTANCES):
            name, slash, rest = path.removeprefix(INSTANCES).partition("/")
            path, named = f"{INSTANCES}{{instance}}{slash}{rest}", {"instance": name}
        endpoint = self._endpoints[ask.method, path]
        scope = {
            "type": "http",
            "query_string": ask.query.encode(),
            "headers": [(b"content-length", b"%d" % len(ask.body))],
            "path_params": named,
        }
        said: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": ask.body}

        async def send(message: Any) -> None:
            said.append(message)

        await endpoint(scope, receive, send)
        start, body = said
        headers = {name.decode(): value.decode() for name, value in start["headers"]}
        exchange.whole(start["status"], body["body"], headers)
