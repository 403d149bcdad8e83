"""The registry over HTTP: SGLang's routes with exactly its names, fields and codes, and ours beside them."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from fastapi import FastAPI

from baton_bootstrap.app import create_app
from baton_core.registry import NeedsProbe, RegistryTable
from baton_io.registry_routes import RegistryFront, RegistryRoutes, registry_router
from contract.registry_servers import listening_socket, registry, serving, worker_app

SGLANG_KEYS = {
    "attn_tp_size",
    "attn_cp_size",
    "dp_size",
    "pp_size",
    "page_size",
    "kv_cache_dtype",
    "follow_bootstrap_room",
    "enable_dsa_cache_layer_split",
    "decode_allocation_policy",
    "enable_kv_cache_sharding",
    "prefill_http_port",
    "target_tp_rank",
    "target_tp_ranks",
    "target_cp_ranks",
    "target_pp_ranks",
    "required_dst_info_num",
    "required_prefill_response_num",
}

TOPOLOGY = {"prefill_dp_rank": -1, "prefill_cp_rank": -1, "target_tp_rank": -1, "target_pp_rank": -1}
RANK_0 = dict.fromkeys(TOPOLOGY, 0)


def sglang_body(tp_rank: int = 0, tp_size: int = 1, **extra: object) -> dict[str, object]:
    """PUT /route as an unmodified SGLang rank sends it, plus `extra`."""
    return {
        "attn_tp_size": tp_size,
        "attn_tp_rank": tp_rank,
        "attn_cp_size": 1,
        "attn_cp_rank": 0,
        "attn_dp_size": 1,
        "attn_dp_rank": 0,
        "pp_size": 1,
        "pp_rank": 0,
        "system_dp_size": 1,
        "system_dp_rank": 0,
        "rank_ip": "127.0.0.1",
        "rank_port": 20_000 + tp_rank,
        "page_size": 16,
        "kv_cache_dtype": "auto",
        "load_balance_method": "follow_bootstrap_room",
    } | extra


class Clock:
    """Milliseconds that move only when a test says so."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now


async def nobody_answers(question: NeedsProbe) -> bool:
    return False


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["behind the app", "in front of the app"])
async def http(request: pytest.FixtureRequest, clock: Clock) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an empty registry, mounted both ways."""
    routes = RegistryRoutes.alone(RegistryTable("life-1"), clock=clock, probe=nobody_answers, token=None)
    app = FastAPI()
    app.include_router(registry_router(routes))
    target = app if request.param == "behind the app" else RegistryFront(routes, app)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(target), base_url="http://registry") as client:
        yield client


# -- SGLang's contract


async def test_health_is_ok_and_names_the_registry(http: httpx.AsyncClient) -> None:
    answer = await http.get("/health")
    assert (answer.status_code, answer.text) == (200, "OK")
    assert answer.headers["x-baton-registry-incarnation"] == "life-1"


async def test_a_plain_sglang_worker_registers_and_is_found(http: httpx.AsyncClient) -> None:
    answer = await http.put("/route", json=sglang_body(prefill_http_port=30_000))
    assert (answer.status_code, answer.text) == (200, "OK")
    topology = await http.get("/route", params=TOPOLOGY)
    assert topology.status_code == 200 and set(topology.json()) == SGLANG_KEYS
    assert topology.json()["prefill_http_port"] == 30_000 and topology.json()["target_tp_ranks"] is None
    assert topology.headers["x-baton-instance"] == "default"
    rank = await http.get("/route", params=RANK_0)
    assert rank.json() == {"rank_ip": "127.0.0.1", "rank_port": 20_000}


async def test_layout_keys_appear_only_if_they_are_set(http: httpx.AsyncClient) -> None:
    await http.put("/route", json=sglang_body(kv_layout="NHD", dsv41_spec_layout={"a": 1}))
    topology = (await http.get("/route", params=TOPOLOGY)).json()
    assert set(topology) == SGLANG_KEYS | {"kv_layout", "dsv41_spec_layout"} and topology["kv_layout"] == "NHD"


async def test_an_incomplete_registration_is_503_and_counts_distinct_ranks(http: httpx.AsyncClient) -> None:
    for _ in range(3):
        await http.put("/route", json=sglang_body(0, tp_size=2))
    for query in (TOPOLOGY, RANK_0):
        answer = await http.get("/route", params=query)
        text = "Prefill server not fully registered yet (1 workers registered)."
        assert (answer.status_code, answer.text) == (503, text)


@pytest.mark.parametrize("missing", sorted(TOPOLOGY))
async def test_a_missing_or_empty_parameter_is_400(http: httpx.AsyncClient, missing: str) -> None:
    without = {key: value for key, value in TOPOLOGY.items() if key != missing}
    for query in (without, without | {missing: ""}):
        answer = await http.get("/route", params=query)
        assert (answer.status_code, answer.text) == (400, "Missing inputs for bootstrap server.")


async def test_a_rank_that_does_not_exist_is_404(http: httpx.AsyncClient) -> None:
    await http.put("/route", json=sglang_body())
    answer = await http.get("/route", params=RANK_0 | {"target_tp_rank": 9})
    assert answer.status_code == 404
    assert answer.text == "Bootstrap info not found for dp_rank=0 cp_rank=0 tp_rank=9 pp_rank=0"


async def test_a_number_that_is_none_is_400_naming_it(http: httpx.AsyncClient) -> None:
    answer = await http.get("/route", params=RANK_0 | {"target_tp_rank": "x"})
    assert answer.status_code == 400 and "target_tp_rank must be an integer" in answer.text


async def test_other_methods_on_route_are_405(http: httpx.AsyncClient) -> None:
    assert (await http.post("/route", json={})).status_code == 405


async def test_rooms_are_registered_and_queried(http: httpx.AsyncClient) -> None:
    room = 2**63 - 1
    answer = await http.post("/register_dp_rank", json={"bootstrap_room": room, "dp_rank": 3})
    assert (answer.status_code, answer.text) == (200, "OK")
    found = await http.post("/query_dp_ranks", json={"bootstrap_rooms": [room, 5]})
    assert (found.status_code, found.json()) == (200, {str(room): 3})


@pytest.mark.parametrize(
    ("method", "path", "body", "named"),
    [
        ("PUT", "/route", b"{", "not JSON"),
        ("PUT", "/route", b"[1]", "JSON object"),
        ("PUT", "/route", b"[" * 60_000, "not JSON"),
        ("PUT", "/route", b"{}", "system_dp_size is missing"),
        ("POST", "/register_dp_rank", b'{"dp_rank":1}', "bootstrap_room is missing"),
        ("POST", "/register_dp_rank", b'{"dp_ranks":[1]}', "dp_ranks must be an object from room to DP rank"),
        ("POST", "/register_dp_rank", b'{"dp_ranks":{"x":1}}', "bootstrap_room must be an integer"),
        ("POST", "/register_dp_rank", b'{"bootstrap_room":1.5,"dp_rank":1}', "bootstrap_room must be an integer"),
        ("POST", "/register_dp_rank", b'{"bootstrap_room":-1,"dp_rank":1}', "bootstrap_room must be between"),
        ("POST", "/register_dp_rank", b'{"bootstrap_room":1,"dp_rank":true}', "dp_rank must be an integer"),
        ("POST", "/query_dp_ranks", b'{"bootstrap_rooms":5}', "bootstrap_rooms must be a list"),
        ("POST", "/query_dp_ranks", b'{"bootstrap_rooms":[null]}', "bootstrap_rooms must be an integer"),
        ("POST", "/query_dp_ranks", b'{"bootstrap_rooms":[],"instance":7}', "instance must be a text"),
    ],
)
async def test_a_bad_body_is_400_naming_the_field(
    http: httpx.AsyncClient, method: str, path: str, body: bytes, named: str
) -> None:
    answer = await http.request(method, path, content=body)
    assert answer.status_code == 400 and named in answer.text


async def test_a_body_beyond_64_kib_is_413(http: httpx.AsyncClient) -> None:
    async def in_pieces() -> AsyncIterator[bytes]:
        for _ in range(65):
            yield b" " * 1_024

    assert (await http.put("/route", content=b" " * 65_537)).status_code == 413
    assert (await http.put("/route", content=in_pieces())).status_code == 413


async def test_a_conflicting_layout_is_400_naming_both_values(http: httpx.AsyncClient) -> None:
    await http.put("/route", json=sglang_body(0, tp_size=2))
    answer = await http.put("/route", json=sglang_body(1, tp_size=2, page_size=64))
    assert answer.status_code == 400 and "page_size is 16 here, 64 sent" in answer.text


# -- several instances


async def test_several_instances_are_told_apart_by_name(http: httpx.AsyncClient) -> None:
    for name, port in (("p0", 1), ("p1", 2)):
        extra = {"instance": name, "incarnation": f"{name}-life", "rank_port": port, "prefill_http_port": port}
        assert (await http.put("/route", json=sglang_body(**extra))).status_code == 200
    answer = await http.get("/route", params=RANK_0)
    assert answer.status_code == 400 and "p0, p1" in answer.text
    answer = await http.get("/route", params=RANK_0 | {"instance": "p1"})
    assert answer.json()["rank_port"] == 2
    assert (answer.headers["x-baton-instance"], answer.headers["x-baton-incarnation"]) == ("p1", "p1-life")
    absent = await http.get("/route", params=RANK_0 | {"instance": "p 9"})
    assert absent.status_code == 503 and "p 9 is not registered here" in absent.text


async def test_room_queries_name_the_instance_where_there_are_several(http: httpx.AsyncClient) -> None:
    for name, port in (("p0", 1), ("p1", 2)):
        await http.put("/route", json=sglang_body(instance=name, prefill_http_port=port))
    await http.post("/register_dp_rank", json={"bootstrap_room": 7, "dp_rank": 0, "instance": "p0"})
    assert (await http.post("/query_dp_ranks", json={"bootstrap_rooms": [7], "instance": "p0"})).json() == {"7": 0}
    assert (await http.post("/query_dp_ranks", json={"bootstrap_rooms": [7], "instance": "p1"})).json() == {}
    assert (await http.post("/query_dp_ranks", json={"bootstrap_rooms": [7]})).status_code == 400


# -- leases, listing, leaving


async def test_a_lease_runs_out_unless_renewed_and_an_unknown_life_is_404(
    http: httpx.AsyncClient, clock: Clock
) -> None:
    await http.put("/route", json=sglang_body(instance="p0", incarnation="a", lease_ms=1_000))
    clock.now = 900
    renewed = await http.put("/v1/instances/p0/lease", params={"incarnation": "a"})
    assert (renewed.status_code, renewed.headers["x-baton-registry-incarnation"]) == (200, "life-1")
    clock.now = 1_800
    assert (await http.get("/route", params=RANK_0)).status_code == 200
    assert (await http.put("/v1/instances/p0/lease", params={"incarnation": "b"})).status_code == 404
    clock.now = 1_900
    assert (await http.get("/route", params=RANK_0)).status_code == 503
    assert (await http.put("/v1/instances/p0/lease", params={"incarnation": "a"})).status_code == 404


async def test_instances_are_listed_with_everything_a_router_needs(http: httpx.AsyncClient, clock: Clock) -> None:
    extra = {"instance": "p0", "incarnation": "a", "lease_ms": 5_000, "fingerprint": "fp", "http_host": "10.0.0.5"}
    ports = {"prefill_http_port": 30_000, "bootstrap_host": "10.0.0.5", "bootstrap_port": 8998}
    await http.put("/route", json=sglang_body(0, tp_size=2, **extra, **ports))
    clock.now = 1_000
    listing = (await http.get("/v1/instances")).json()
    (entry,) = listing["instances"]
    assert listing["registry_incarnation"] == "life-1" and set(entry.pop("layout")) == SGLANG_KEYS
    assert entry == {
        "instance": "p0",
        "incarnation": "a",
        "fingerprint": "fp",
        "ranks_registered": 1,
        "ranks_total": 2,
        "ready": False,
        "lease_left_ms": 4_000,
        "http_host": "10.0.0.5",
        "http_port": 30_000,
        "bootstrap_host": "10.0.0.5",
        "bootstrap_port": 8998,
    }
    assert (await http.get("/v1/instances", params={"instance": "p9"})).json()["instances"] == []


async def test_a_worker_leaves_and_look_ups_know_at_once(http: httpx.AsyncClient) -> None:
    await http.put("/route", json=sglang_body(instance="p0", incarnation="a"))
    assert (await http.get("/route", params=RANK_0)).status_code == 200
    assert (await http.delete("/v1/instances/p0", params={"incarnation": "b"})).status_code == 404
    assert (await http.delete("/v1/instances/p0", params={"incarnation": "a"})).status_code == 200
    assert (await http.get("/route", params=RANK_0)).status_code == 503


async def test_one_unit_leaves_and_the_worker_counts_as_complete_without_it(http: httpx.AsyncClient) -> None:
    for dp, tp in ((0, 0), (0, 1), (1, 0), (1, 1)):
        extra = {"attn_dp_size": 2, "attn_dp_rank": dp, "rank_port": 20_000 + 2 * dp + tp}
        await http.put("/route", json=sglang_body(tp, tp_size=2, instance="p0", incarnation="a", **extra))
    left = await http.delete("/v1/instances/p0", params={"incarnation": "a", "dp_rank": 1})
    assert left.status_code == 200
    assert (await http.get("/route", params=TOPOLOGY)).json()["dp_size"] == 2
    assert (await http.get("/route", params=RANK_0)).status_code == 200
    gone = await http.get("/route", params=RANK_0 | {"prefill_dp_rank": 1})
    assert gone.status_code == 404 and "dp_rank=1" in gone.text
    (entry,) = (await http.get("/v1/instances")).json()["instances"]
    assert (entry["ranks_registered"], entry["ranks_total"], entry["ready"]) == (2, 4, True)
    for wrong, status in (({"incarnation": "b", "dp_rank": 0}, 404), ({"dp_rank": 2}, 400), ({"dp_rank": "x"}, 400)):
        assert (await http.delete("/v1/instances/p0", params=wrong)).status_code == status
    again = {"attn_dp_size": 2, "attn_dp_rank": 1, "rank_port": 30_000}
    await http.put("/route", json=sglang_body(0, tp_size=2, instance="p0", incarnation="a", **again))
    (entry,) = (await http.get("/v1/instances")).json()["instances"]
    assert (entry["ranks_registered"], entry["ready"]) == (3, False), "a rank that comes back is waited for in full"


async def test_many_rooms_are_told_at_once_and_a_wrong_one_harms_no_other(http: httpx.AsyncClient) -> None:
    await http.put("/route", json=sglang_body(attn_dp_size=2, instance="p0"))
    rooms = {"5": 0, "6": 1, str(2**63 - 1): 1, "7": 2}
    answer = await http.post("/register_dp_rank", json={"instance": "p0", "dp_ranks": rooms})
    assert (answer.status_code, answer.text) == (400, "dp_rank must be between 0 and 1, not 2")
    found = await http.post("/query_dp_ranks", json={"bootstrap_rooms": [5, 6, 7, 2**63 - 1], "instance": "p0"})
    assert found.json() == {"5": 0, "6": 1, str(2**63 - 1): 1}


async def test_ranks_of_many_units_count_once_each_in_any_order_and_never_too_early(http: httpx.AsyncClient) -> None:
    layout = {"attn_dp_size": 2, "pp_size": 2, "attn_cp_size": 2}
    keys = [(dp, pp, cp, tp) for dp in (0, 1) for pp in (0, 1) for cp in (0, 1) for tp in (0, 1)]
    bodies = [
        sglang_body(tp, tp_size=2, **layout, attn_dp_rank=dp, pp_rank=pp, attn_cp_rank=cp, rank_port=1_000 + number)
        for number, (dp, pp, cp, tp) in enumerate(keys)
    ]
    for body in [*reversed(bodies[1:]), *bodies[1:]]:
        assert (await http.put("/route", json=body)).status_code == 200
    waiting = await http.get("/route", params=TOPOLOGY)
    assert (waiting.status_code, waiting.text[:60]) == (
        503,
        "Prefill server not fully registered yet (15 workers register",
    )
    await http.put("/route", json=bodies[0])
    last = {"prefill_dp_rank": 1, "prefill_cp_rank": 1, "target_tp_rank": 0, "target_pp_rank": 1}
    assert (await http.get("/route", params=last)).json()["rank_port"] == 1_014
    wrong = sglang_body(0, tp_size=2, **layout | {"pp_size": 1})
    refused = await http.put("/route", json=wrong)
    assert refused.status_code == 400 and "pp_size is 2 here, 1 sent" in refused.text


async def test_a_changed_rank_address_is_seen_by_the_next_look_up(http: httpx.AsyncClient) -> None:
    await http.put("/route", json=sglang_body())
    assert (await http.get("/route", params=RANK_0)).json()["rank_port"] == 20_000
    await http.put("/route", json=sglang_body(rank_port=777))
    assert (await http.get("/route", params=RANK_0)).json()["rank_port"] == 777


# -- over real sockets


async def test_a_restarted_worker_supersedes_the_dead_one_at_its_address() -> None:
    async with registry() as port, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        async with serving(worker_app("old")) as http_port:
            body = sglang_body(instance="p0", incarnation="old", prefill_http_port=http_port)
            assert (await client.put("/route", json=body)).status_code == 200
        newcomer = body | {"incarnation": "new", "rank_port": 555}
        assert (await client.put("/route", json=newcomer)).status_code == 200
        async with serving(worker_app("new"), http_port):
            answer = await client.get("/route", params=RANK_0)
        assert (answer.json()["rank_port"], answer.headers["x-baton-incarnation"]) == (555, "new")


async def test_a_worker_that_still_answers_is_not_superseded() -> None:
    async with (
        registry() as port,
        serving(worker_app("old")) as http_port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client,
    ):
        body = sglang_body(instance="p0", incarnation="old", prefill_http_port=http_port)
        await client.put("/route", json=body)
        answer = await client.put("/route", json=body | {"incarnation": "new", "prefill_http_port": http_port + 1})
        assert answer.status_code == 409 and "p0 (incarnation old) still answers" in answer.text
        assert (await client.get("/route", params=RANK_0)).headers["x-baton-incarnation"] == "old"


async def test_another_life_answering_at_the_old_address_does_not_protect_the_old_one() -> None:
    async with (
        registry() as port,
        serving(worker_app("new")) as http_port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client,
    ):
        body = sglang_body(instance="p0", incarnation="old", prefill_http_port=http_port)
        await client.put("/route", json=body)
        assert (await client.put("/route", json=body | {"incarnation": "new"})).status_code == 200


async def test_writes_need_the_token_and_reads_do_not() -> None:
    async with registry(token="s3cret") as port, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        assert (await client.put("/route", json=sglang_body())).status_code == 401
        wrong = {"authorization": "Bearer nope"}
        assert (await client.delete("/v1/instances/default", headers=wrong)).status_code == 401
        right = {"authorization": "Bearer s3cret"}
        assert (await client.put("/route", json=sglang_body(), headers=right)).status_code == 200
        assert (await client.get("/route", params=RANK_0)).status_code == 200


async def test_the_service_reports_readiness_and_bounded_metrics(clock: Clock) -> None:
    routes = RegistryRoutes.alone(RegistryTable("life-1"), clock=clock, probe=nobody_answers, token=None)
    transport = httpx.ASGITransport(create_app(routes, clock))
    async with httpx.AsyncClient(transport=transport, base_url="http://registry") as client:
        await client.put("/route", json=sglang_body())
        await client.get("/route", params=RANK_0)
        await client.put("/v1/instances/nobody/lease")
        ready = (await client.get("/ready")).json()
        text = (await client.get("/metrics")).text
    assert ready == {
        "ready": True,
        "takes_writes": True,
        "registry_incarnation": "life-1",
        "instances": 1,
        "instances_ready": 1,
    }
    lines = text.splitlines()
    assert "baton_bootstrap_ranks 1.0" in lines and "baton_bootstrap_instances_ready 1.0" in lines
    assert 'baton_bootstrap_requests_total{route="GET /route",status="200"} 1.0' in lines
    route = "PUT /v1/instances/{instance}/lease"
    assert f'baton_bootstrap_requests_total{{route="{route}",status="404"}} 1.0' in lines


# -- the process


@asynccontextmanager
async def bootstrap_process(port: int) -> AsyncIterator[asyncio.subprocess.Process]:
    """`baton-bootstrap` as a process of its own; killed at the end if it still runs."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "baton_bootstrap", "--port", str(port))
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_the_process_serves_until_sigterm_and_then_exits_with_0() -> None:
    bound = listening_socket()
    port = bound.getsockname()[1]
    bound.close()
    transport = httpx.AsyncHTTPTransport(retries=0)
    async with bootstrap_process(port) as process, httpx.AsyncClient(transport=transport) as client:
        async with asyncio.timeout(15):
            while True:
                try:
                    ready = await client.get(f"http://127.0.0.1:{port}/ready")
                    break
                except httpx.ConnectError:
                    await asyncio.sleep(0.05)
        assert ready.status_code == 200
        process.terminate()
        async with asyncio.timeout(10):
            assert await process.wait() == 0


async def test_a_port_that_is_taken_ends_the_process_with_an_error() -> None:
    bound = listening_socket()
    bound.listen()
    async with bootstrap_process(bound.getsockname()[1]) as process, asyncio.timeout(15):
        assert await process.wait() != 0
    bound.close()
