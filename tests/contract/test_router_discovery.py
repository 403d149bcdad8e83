"""Where workers are learnt from, against servers that speak the real protocols: file, registry, Kubernetes, Docker."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import certifi
import pytest
from aiohttp import web

from baton_core.routing.workers import Role
from baton_router.config import RouterConfig
from baton_router.discovery.source import SourceFault
from baton_router.discovery.workers_file import parse_workers
from contract.fake_workers import LONG_MS, Client, FakeWorker, Rooms, decodes, decodes_slowly, prefills, running


@asynccontextmanager
async def workers(prefill: int, decode: int, script: Any = decodes) -> AsyncIterator[list[FakeWorker]]:
    rooms = Rooms()
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(FakeWorker("prefill", rooms, prefills)) for _ in range(prefill)] + [
            await stack.enter_async_context(FakeWorker("decode", rooms, script)) for _ in range(decode)
        ]


@asynccontextmanager
async def router(**settings: Any) -> AsyncIterator[Client]:
    async with running(RouterConfig(**({"probe_interval_ms": LONG_MS, "discovery_interval_ms": 20} | settings))) as c:
        yield c


@asynccontextmanager
async def served(app: web.Application, socket: Path | None = None) -> AsyncIterator[str]:
    """That application on the loopback, or on a socket."""
    runner = web.AppRunner(app, shutdown_timeout=0.01, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0) if socket is None else web.UnixSite(runner, str(socket))
    await site.start()
    try:
        yield "" if socket is not None else f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def are(*wanted: FakeWorker) -> Callable[[int, Any], bool]:
    """Whether the router knows exactly these workers, all of them ready."""

    def holds(_status: int, body: Any) -> bool:
        known = {(one["role"], one["url"]) for one in body["workers"] if one["state"] == "ready"}
        return known == {(one.role, one.url) for one in wanted} and len(body["workers"]) == len(wanted)

    return holds


# -- a file


async def test_workers_come_and_go_with_the_file_and_a_wrong_file_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "workers.toml"
    async with workers(1, 2) as (p, d1, d2), router(workers_file=str(path)) as client:
        assert (await client.get("/ready"))[0] == 503
        path.write_text(f'prefill = ["{p.url}"]\ndecode = ["{d1.url}"]\n')
        await client.until("/ready", are(p, d1))
        path.write_text(f'prefill = ["{p.url}"]\ndecode = ["{d2.url}/"]\n')
        await client.until("/ready", are(p, d2))
        path.write_text("nonsense")
        async with client.post() as response:
            assert response.status == 200
        path.write_text(f'prefill = ["{p.url}"]\ndecode = ["{d1.url}", "{d2.url}"]\n')
        await client.until("/ready", are(p, d1, d2))


async def test_a_worker_that_is_no_longer_named_finishes_what_it_has_and_is_forgotten_then(tmp_path: Path) -> None:
    path = tmp_path / "workers.toml"
    async with workers(1, 2, decodes_slowly) as (p, d1, d2), router(workers_file=str(path)) as client:
        path.write_text(f'prefill = ["{p.url}"]\ndecode = ["{d1.url}"]\n')
        await client.until("/ready", are(p, d1))
        async with client.post() as response:
            await response.content.readany()
            path.write_text(f'prefill = ["{p.url}"]\ndecode = ["{d2.url}"]\n')
            await client.until(
                "/ready", lambda _, body: [one["state"] for one in body["workers"]][1:] == ["draining", "ready"]
            )
            d1.release.set()
            assert b"capital" in await response.read()
        await client.until("/ready", are(p, d2))


@pytest.mark.parametrize("content", ["x", "boss = []", "decode = [1]", 'decode = ["ftp://x"]', 'decode = "http://x"'])
def test_a_file_that_makes_no_sense_is_refused(content: str) -> None:
    with pytest.raises(SourceFault):
        parse_workers(content.encode())


def test_a_file_may_name_a_worker_under_both_roles() -> None:
    both = parse_workers(b'prefill = ["http://a:1"]\ndecode = ["http://a:1"]')
    assert both == [(Role.PREFILL, "http://a:1"), (Role.DECODE, "http://a:1")]


# -- the registry


async def test_prefill_workers_come_from_the_registry_and_stay_while_it_is_down() -> None:
    async with workers(2, 1) as (p1, p2, d):
        told: list[FakeWorker] = [p1]

        async def instances(_request: web.Request) -> web.Response:
            if not told:
                return web.Response(status=500)
            addresses = [urlsplit(one.url) for one in told]
            return web.json_response(
                {
                    "instances": [
                        {"http_host": one.hostname, "http_port": one.port, "instance": "i"} for one in addresses
                    ]
                }
            )

        app = web.Application()
        app.router.add_get("/v1/instances", instances)
        async with served(app) as url, router(decode=(d.url,), registry=url, registry_discovery=True) as client:
            await client.until("/ready", are(p1, d))
            told[:] = [p2]
            await client.until("/ready", are(p2, d))
            told.clear()
            async with client.post() as response:
                assert response.status == 200
            assert (await client.get("/ready"))[0] == 200


# -- Kubernetes


class FakeCluster:
    """EndpointSlices of one namespace behind list and watch, as the API server serves them."""

    def __init__(self) -> None:
        self.slices: dict[str, dict[str, Any]] = {}
        self.version = 100
        self.watchers: list[asyncio.Queue[dict[str, Any] | None]] = []
        self.has_watcher = asyncio.Event()
        self.tokens = asyncio.Queue[str]()
        self.requests: list[tuple[dict[str, str], str]] = []
        self.is_deaf = False  # watches hear nothing more, as when a proxy dropped them
        self.is_open = asyncio.Event()  # what is asked while it is not is answered once it is again
        self.is_open.set()
        self.blocked = asyncio.Queue[None]()

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/apis/discovery.k8s.io/v1/namespaces/prod/endpointslices", self.serve)
        return app

    async def serve(self, request: web.Request) -> web.StreamResponse:
        self.requests.append((dict(request.query), request.headers.get("authorization", "")))
        self.tokens.put_nowait(request.headers.get("authorization", ""))
        if not self.is_open.is_set():
            self.blocked.put_nowait(None)
            await self.is_open.wait()
            return web.Response(status=503)
        if "watch" not in request.query:
            return web.json_response(
                {
                    "kind": "EndpointSliceList",
                    "metadata": {"resourceVersion": str(self.version)},
                    "items": list(self.slices.values()),
                }
            )
        assert int(request.query["resourceVersion"]) <= self.version
        response = web.StreamResponse(headers={"content-type": "application/json"})
        await response.prepare(request)
        events: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self.watchers.append(events)
        self.has_watcher.set()
        try:
            async with asyncio.timeout(float(request.query["timeoutSeconds"])):
                while (one := await events.get()) is not None:
                    await response.write(json.dumps(one).encode() + b"\n")
        except TimeoutError:
            pass
        self.watchers.remove(events)
        return response

    def put(self, name: str, role: str, *served_by: FakeWorker, **conditions: bool) -> None:
        self.version += 1
        kind = "MODIFIED" if name in self.slices else "ADDED"
        self.slices[name] = {
            "metadata": {"name": name, "labels": {"role": role}, "resourceVersion": str(self.version)},
            "addressType": "IPv4",
            "ports": [{"name": "metrics", "port": 1}, {"name": "http", "port": urlsplit(served_by[0].url).port}],
            "endpoints": [{"addresses": ["127.0.0.1"], "conditions": {"ready": True} | conditions}],
        }
        self._tell({"type": kind, "object": self.slices[name]})

    def delete(self, name: str) -> None:
        self.version += 1
        self._tell({"type": "DELETED", "object": self.slices.pop(name)})

    def expire(self) -> None:
        """What the API server says when the version is too old, as one more event."""
        self._tell({"type": "ERROR", "object": {"kind": "Status", "code": 410, "reason": "Expired"}})

    def block(self) -> None:
        """From now on nothing comes through, as behind a firewall that drops packets."""
        self.is_deaf = True
        self.is_open.clear()

    def unblock(self) -> None:
        self.is_deaf = False
        self.is_open.set()

    def _tell(self, one: dict[str, Any]) -> None:
        if not self.is_deaf:
            for watcher in self.watchers:
                watcher.put_nowait(one)

    async def watched(self) -> None:
        """Wait for the first watch."""
        await asyncio.wait_for(self.has_watcher.wait(), 5)


@asynccontextmanager
async def cluster(**settings: Any) -> AsyncIterator[tuple[FakeCluster, Client]]:
    fake = FakeCluster()
    options = {"kubernetes_namespace": "prod", "kubernetes_role_label": "role", "kubernetes_credentials": None}
    async with served(fake.app()) as url, router(**(options | {"kubernetes_api": url} | settings)) as client:
        await fake.watched()
        yield fake, client


async def test_endpoints_are_watched_by_role_label() -> None:
    async with workers(1, 2) as (p, d1, d2), cluster(kubernetes_selector="app=baton") as (fake, client):
        fake.put("a", "prefill", p)
        fake.put("b", "decode", d1)
        await client.until("/ready", are(p, d1))
        fake.put("b", "decode", d2)
        await client.until("/ready", are(p, d2))
        fake.put("c", "router", d1)
        fake.put("b", "decode", d2, terminating=True)
        await client.until("/ready", are(p))
        fake.delete("a")
        await client.until("/ready", are())
        assert {query["labelSelector"] for query, _ in fake.requests} == {"app=baton"}
        assert any(query.get("allowWatchBookmarks") == "true" for query, _ in fake.requests)


async def test_a_slice_whose_role_label_changes_leaves_its_old_role_at_once() -> None:
    async with workers(1, 1) as (p, d), cluster() as (fake, client):
        fake.put("a", "prefill", p)
        fake.put("b", "decode", d)
        await client.until("/ready", are(p, d))
        fake.put("a", "elsewhere", p)
        await client.until("/ready", are(d))


async def test_a_watch_whose_version_is_gone_is_followed_by_a_new_list() -> None:
    async with workers(1, 1) as (p, d), cluster() as (fake, client):
        fake.put("a", "prefill", p)
        fake.put("b", "decode", d)
        await client.until("/ready", are(p, d))
        del fake.slices["a"]  # no event tells
        fake.expire()
        await client.until("/ready", are(d))


async def test_a_watch_that_silently_went_stale_is_put_right_by_the_resync() -> None:
    async with workers(1, 1) as (p, d), cluster(kubernetes_resync_ms=1_000) as (fake, client):
        fake.put("a", "prefill", p)
        fake.put("b", "decode", d)
        await client.until("/ready", are(p, d))
        fake.is_deaf = True
        fake.delete("a")
        await client.until("/ready", are(d))


async def test_the_pods_token_is_sent_and_read_again_when_it_is_rotated(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("first\n")
    # An http API: the certificate is read, as it is where the API speaks TLS.
    (tmp_path / "ca.crt").write_bytes(Path(certifi.where()).read_bytes())
    async with workers(0, 1) as (d,), cluster(kubernetes_credentials=str(tmp_path)) as (fake, client):
        (tmp_path / "token").write_text("second\n")
        fake.put("b", "decode", d)
        fake.expire()
        await client.until("/ready", are(d))
        async with asyncio.timeout(5):
            while await fake.tokens.get() != "Bearer second":
                pass
        assert fake.requests[0][1] == "Bearer first"


async def test_an_api_that_is_away_takes_no_worker_away() -> None:
    async with workers(1, 1) as (p, d):
        fake = FakeCluster()
        options = {"kubernetes_namespace": "prod", "kubernetes_role_label": "role", "kubernetes_credentials": None}
        async with AsyncExitStack() as api:
            url = await api.enter_async_context(served(fake.app()))
            async with router(kubernetes_api=url, **options) as client:
                await fake.watched()
                fake.put("a", "prefill", p)
                fake.put("b", "decode", d)
                await client.until("/ready", are(p, d))
                for watcher in fake.watchers:
                    watcher.put_nowait(None)
                await api.aclose()
                for _ in range(5):
                    async with client.post() as response:
                        assert response.status == 200


# -- Docker


class FakeEngine:
    """The two routes of the Engine API that the docker SDK asks, at the version that the engine says it speaks."""

    def __init__(self, *listed: dict[str, Any]) -> None:
        self.listed: Any = list(listed)
        self.asked: list[dict[str, str]] = []
        self.status = 200

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/version", self.version)
        app.router.add_get("/v1.47/containers/json", self.containers)
        return app

    async def version(self, _request: web.Request) -> web.Response:
        return web.json_response({"ApiVersion": "1.47", "MinAPIVersion": "1.24", "Version": "27.0.0"})

    async def containers(self, request: web.Request) -> web.Response:
        self.asked.append(dict(request.query))
        if self.status != 200:
            return web.json_response({"message": "the engine is unwell"}, status=self.status)
        return web.json_response(self.listed)


async def test_running_containers_with_a_role_label_are_workers(tmp_path: Path) -> None:
    pytest.importorskip("docker", reason="the docker SDK is not installed (extra router)")
    socket = tmp_path / "docker.sock"
    async with workers(1, 1) as (p, d):
        engine = FakeEngine(container(p), container(d), container(d) | {"Labels": {"baton.role": "boss"}})
        async with served(engine.app(), socket), router(docker_socket=str(socket)) as client:
            await client.until("/ready", are(p, d))
            del engine.listed[0]
            await client.until("/ready", are(d))
        assert json.loads(engine.asked[0]["filters"]) == {"label": ["baton.role"], "status": ["running"]}


async def test_a_container_whose_address_is_used_again_for_another_role_changes_its_pool(tmp_path: Path) -> None:
    """I01 and I02, in compose: a container is removed, and its address serves another role."""
    pytest.importorskip("docker", reason="the docker SDK is not installed (extra router)")
    socket = tmp_path / "docker.sock"
    async with workers(2, 1) as (p, q, d):
        engine = FakeEngine(container(p), container(q), container(d))
        settings = {"docker_socket": str(socket), "probe_interval_ms": 20}
        async with served(engine.app(), socket), router(**settings) as client:
            await client.until("/ready", are(p, q, d))
            q.role = q.info["role"] = "decode"
            q.info["incarnation"] = "life-2"
            # Until the engine tells, it is in the old pool by name alone: its own word counts.
            await client.until("/ready", lambda _, body: [one["state"] for one in body["workers"]][1] == "unready")
            engine.listed[1] = container(q)
            await client.until("/ready", are(p, q, d))


async def test_an_engine_that_is_away_or_answers_nonsense_takes_no_worker_away(tmp_path: Path) -> None:
    pytest.importorskip("docker", reason="the docker SDK is not installed (extra router)")
    socket = tmp_path / "docker.sock"
    async with workers(1, 1) as (p, d), AsyncExitStack() as away:
        engine = FakeEngine(container(p), container(d))
        await away.enter_async_context(served(engine.app(), socket))
        async with router(docker_socket=str(socket)) as client:
            await client.until("/ready", are(p, d))
            for change in ({"status": 500}, {"status": 200, "listed": {"no": "list"}}, {"listed": [7]}):
                vars(engine).update(change)
                seen = len(engine.asked)
                await client.until("/ready", lambda status, _, seen=seen: len(engine.asked) > seen + 1)
                assert are(p, d)(*await client.get("/ready"))
            await away.aclose()
            async with client.post() as response:
                assert response.status == 200
            assert are(p, d)(*await client.get("/ready"))


def container(worker: FakeWorker) -> dict[str, Any]:
    """One entry of the engine's list."""
    return {
        "Id": worker.url,
        "Labels": {"baton.role": worker.role, "baton.port": str(urlsplit(worker.url).port), "baton.network": "kv"},
        "NetworkSettings": {"Networks": {"bridge": {"IPAddress": "10.1.1.1"}, "kv": {"IPAddress": "127.0.0.1"}}},
    }
