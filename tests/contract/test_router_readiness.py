"""What users of other systems reported of discovery and readiness (theme I of docs/reliability.md), tried at the router."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from baton_io.config import describe, load
from baton_router import directory
from baton_router.config import RouterConfig
from contract.fake_workers import (
    FakeWorker,
    World,
    decodes,
    decodes_slowly,
    prefills,
    prefills_and_holds_its_body,
    world,
)
from contract.test_router_discovery import are, cluster, router, workers


def states(body: Any) -> list[str]:
    return [one["state"] for one in body["workers"]]


async def test_what_changed_while_the_api_server_was_blocked_is_right_soon_after() -> None:
    """I01. Scale: a resync each second instead of each 30 s; blocked for one of them instead of two minutes."""
    async with workers(1, 3) as (p, d1, d2, d3), cluster(kubernetes_resync_ms=1_000) as (fake, client):
        fake.put("p", "prefill", p)
        fake.put("d1", "decode", d1)
        fake.put("d2", "decode", d2)
        await client.until("/ready", are(p, d1, d2))
        fake.block()
        fake.delete("d1")
        fake.put("d3", "decode", d3)
        await asyncio.wait_for(fake.blocked.get(), 5)  # the router asks, and nobody answers
        assert are(p, d1, d2)(*await client.get("/ready")), "an API that says nothing takes nobody away"
        fake.unblock()
        await client.until("/ready", are(p, d2, d3))


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"role": "decode"}, "it is a decode worker"), ({"fingerprint": "another model"}, "no two workers")],
    ids=["role", "model"],
)
async def test_an_address_that_was_given_to_another_worker_is_not_used(change: dict[str, str], reason: str) -> None:
    """I01: a container is gone and its address belongs to somebody else."""
    async with world((prefills,), (decodes,), probe_interval_ms=20) as w:
        w.prefill[0].info |= change | {"incarnation": "life-2", "instance": "another"}
        await w.client.until("/ready", lambda status, body: status == 503 and reason in body["reasons"][0])
        async with w.client.post() as response:
            assert response.status == 503
        assert w.prefill[0].received == w.decode[0].received == []


async def test_a_flipped_label_takes_a_worker_out_of_its_pool_at_once_and_lets_it_finish() -> None:
    """I02: prefill becomes decode, in Kubernetes and then in what the worker says of itself."""
    async with workers(2, 1, decodes_slowly) as (p1, p2, d), cluster(probe_interval_ms=20) as (fake, client):
        p1.script = prefills_and_holds_its_body
        fake.put("a", "prefill", p1)
        fake.put("d", "decode", d)
        await client.until("/ready", are(p1, d))
        async with client.post() as response:
            await response.content.readany()
            fake.put("b", "prefill", p2)
            fake.put("a", "decode", p1)

            def is_leaving(_status: int, body: Any) -> bool:
                found = {(one["role"], one["url"]): one for one in body["workers"]}
                old, new = found.get(("prefill", p1.url)), found.get(("decode", p1.url))
                return (
                    old is not None
                    and (old["state"], old["in_flight"]) == ("draining", 1)
                    and new is not None
                    and "it is a prefill worker" in new["reason"]
                    and found["prefill", p2.url]["state"] == "ready"
                )

            await client.until("/server_info", is_leaving)
            p1.release.set()
            d.release.set()
            assert b"capital" in await response.read()
        p1.info |= {"role": "decode", "incarnation": "life-2"}
        p1.role, p1.script, d.script = "decode", decodes, decodes
        await client.until("/ready", are(p2, p1, d))
        for _ in range(4):
            async with client.post() as response:
                assert response.status == 200
                await response.read()
        assert len(p2.received) == 4


@pytest.mark.parametrize(
    ("prefill", "decode", "usable"),
    [((), (), False), ((prefills,), (), False), ((), (decodes,), True), ((prefills,), (decodes,), True)],
    ids=["router alone", "prefill alone", "decode alone, without any prefill: colocated", "both"],
)
async def test_readiness_is_a_usable_pair_and_liveness_is_not(prefill: Any, decode: Any, usable: bool) -> None:
    """I04."""
    async with world(prefill, decode, wait_ready=False, probe_interval_ms=20) as w:
        await w.client.until("/ready", lambda status, _: status == (200 if usable else 503))
        assert (await w.client.get("/health"))[0] == 200
        async with w.client.post() as response:
            assert response.status == (200 if usable else 503)
            assert ("retry-after" in response.headers) is not usable


async def test_readiness_ends_with_the_last_decode_worker_and_a_prefill_worker_that_is_down_is_not_colocation() -> None:
    """I04: R + D with a prefill worker that is configured and not there; then the last D stops."""
    async with world((prefills,), (decodes,), probe_interval_ms=20) as w:
        await w.prefill[0].stop()
        await w.client.until("/ready", lambda status, _: status == 503)
        assert (await w.client.get("/health"))[0] == 200
    async with world((prefills,), (decodes,), probe_interval_ms=20) as w:
        await w.decode[0].stop()
        await w.client.until("/ready", lambda status, _: status == 503)
        async with w.client.post() as response:
            assert (response.status, response.headers["retry-after"]) == (503, "1")
        assert (await w.client.get("/health"))[0] == 200


async def test_a_worker_that_is_ready_very_late_or_never_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """I05. Scale: ready after 40 probes of 20 ms, the eager ones long over, instead of 20 min."""
    monkeypatch.setattr(directory, "EAGER_PROBES", 5)

    def not_yet(found: list[FakeWorker]) -> None:
        for worker in found[2:]:
            worker.ready_answer = (503, {"ready": False, "reasons": ["loading the model"]})

    async def serves(w: World) -> None:
        async with w.client.post() as response:
            assert response.status == 200
            await response.read()

    settings: dict[str, Any] = {"probe_interval_ms": 20, "decode_policy": "round_robin"}
    async with world((prefills,), (decodes,) * 3, prepare=not_yet, wait_ready=False, **settings) as w:
        await w.client.until("/ready", lambda status, body: status == 200 and states(body)[2:] == ["unready"] * 2)
        await serves(w)
        await w.client.until("/ready", lambda status, _: status == 200 and w.decode[1].probed >= 40)
        await serves(w)
        w.decode[1].ready_answer = (200, {"ready": True})
        await w.client.until("/ready", lambda _, body: states(body) == ["ready", "ready", "ready", "unready"])
        for _ in range(4):
            await serves(w)
        assert len(w.decode[1].received) == 2 and w.decode[2].received == []


async def test_a_router_starts_without_any_of_its_workers(tmp_path: Path) -> None:
    """I05: all are down at first, static or discovered."""
    async with workers(1, 1) as (p, d):
        path = tmp_path / "workers.toml"
        async with router(workers_file=str(path), prefill=("http://127.0.0.1:1",)) as client:
            assert (await client.get("/health"))[0] == 200
            assert (await client.get("/ready"))[0] == 503
            path.write_text(f'prefill = ["{p.url}"]\ndecode = ["{d.url}"]\n')
            await client.until("/ready", lambda status, body: status == 200 and "unready" in states(body))


# -- the effective configuration

SETTINGS = {
    "prefill_policy": "cache_aware",
    "decode_policy": "least_load",
    "dp_mode": "inject",
    "kubernetes_selector": "app=a,tier in (b)",
    "kubernetes_role_label": "role",
    "retries": "4",
}


def loaded(*argv: str, environ: dict[str, str] | None = None) -> RouterConfig:
    return load(RouterConfig, "router", list(argv), environ or {}, program="baton-router", description="")


def test_flags_variables_and_the_file_make_the_same_router(tmp_path: Path) -> None:
    """I11: the effective configuration is one object, whoever gave its values, and is logged at start."""
    flags = [part for name, value in SETTINGS.items() for part in ("--" + name.replace("_", "-"), value)]
    environ = {f"BATON_ROUTER_{name.upper()}": value for name, value in SETTINGS.items()}
    path = tmp_path / "baton.toml"
    lines = [f"{name} = {value}" if value.isdigit() else f'{name} = "{value}"' for name, value in SETTINGS.items()]
    path.write_text("[router]\n" + "\n".join(lines))
    one = loaded(*flags)
    assert one == loaded(environ=environ) == loaded("--config", str(path))
    shown = describe(one)
    assert [name for name, value in SETTINGS.items() if f"{name}={value}" not in shown] == []


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (("--registry-discovery",), "registry_discovery needs a registry"),
        (("--dp-mode", "both"), "dp_mode"),
        (("--prefill-policy", "fastest"), "prefill_policy"),
        (("--prefill", "10.0.0.1:8100"), "prefill must list URLs"),
        (("--decode", "http://10.0.0.1:8200/v1"), "decode must list URLs"),
        (("--registry", "nowhere"), "registry must be host:port"),
        (("--no-such-mode",), "--no-such-mode"),
    ],
)
def test_contradictions_are_refused_by_name(
    argv: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """I11."""
    with pytest.raises(SystemExit) as ended:
        loaded(*argv)
    assert ended.value.code == 2
    assert told in capsys.readouterr().err
