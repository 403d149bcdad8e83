"""The registry as a service of its own: its routes, readiness and metrics."""

from collections.abc import Callable, Iterator

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp

from baton_core.limits import Millis
from baton_io.registry_routes import RegistryFront, RegistryRoutes, registry_router


def create_app(
    routes: RegistryRoutes, clock: Callable[[], Millis], has_loaded: Callable[[], bool] = lambda: True
) -> ASGIApp:
    """The whole service as one ASGI application. `has_loaded`: whether what replicas share has ever been read."""
    metrics = CollectorRegistry()
    metrics.register(RegistryCollector(routes, clock))
    app = FastAPI(title="Baton bootstrap registry", docs_url=None, redoc_url=None, openapi_url=None)
    app.include_router(registry_router(routes))

    @app.get("/ready")
    async def ready() -> JSONResponse:
        """200 as soon as the service answers and, with replicas, knows what they know: an empty one is ready, too."""
        instances = routes.table.instances(clock())
        body = {
            "ready": has_loaded(),
            "takes_writes": routes.store.is_up,
            "registry_incarnation": routes.table.incarnation,
            "instances": len(instances),
            "instances_ready": sum(instance.ready for instance in instances),
        }
        return JSONResponse(body, 200 if has_loaded() else 503)

    @app.get("/metrics")
    async def show_metrics() -> Response:
        """Prometheus text format."""
        return Response(generate_latest(metrics), media_type=CONTENT_TYPE_LATEST)

    return RegistryFront(routes, app)


class RegistryCollector(Collector):
    """Reads the table when it is scraped. Labels are bounded: the routes of a registry, and their statuses."""

    def __init__(self, routes: RegistryRoutes, clock: Callable[[], Millis]) -> None:
        self._routes = routes
        self._clock = clock

    def collect(self) -> Iterator[Metric]:
        """Every metric of the service."""
        table = self._routes.table
        instances = table.instances(self._clock())
        ready = sum(instance.ready for instance in instances)
        yield GaugeMetricFamily("baton_bootstrap_ranks", "Distinct prefill ranks registered", table.ranks_total)
        yield GaugeMetricFamily("baton_bootstrap_instances", "Prefill workers registered", len(instances))
        yield GaugeMetricFamily("baton_bootstrap_instances_ready", "Prefill workers with all ranks registered", ready)
        yield GaugeMetricFamily("baton_bootstrap_rooms", "Rooms whose DP rank is registered", table.rooms_total)
        yield GaugeMetricFamily("baton_bootstrap_takes_writes", "1: the store answers", self._routes.store.is_up)
        requests = CounterMetricFamily("baton_bootstrap_requests", "Answers given", labels=("route", "status"))
        for (route, status), count in sorted(self._routes.counts.items()):
            requests.add_metric((route, str(status)), count)
        yield requests
