"""One priority for the router's queue and for both workers, at most the key's, whichever way it is asked for."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from baton_core.limits import PRIORITY_MOST
from contract.fake_workers import World, decodes, decodes_slowly, prefills, tells, world
from contract.test_router_batches import completes, generates

KEYS = """
[keys.search]
key = "sk-search"
priority_max = 10
[keys.plain]
key = "sk-plain"
[keys.batch]
key = "sk-batch"
priority_max = -5
"""
ROUTES: dict[str, dict[str, Any]] = {
    "/generate": {"text": "x"},
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
}
UNSAID = "nothing"


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    path.write_text(KEYS)
    return path


async def sent(w: World, path: str, body: dict[str, Any], **headers: str) -> list[object]:
    """The priorities that prefill and decode are told for that request."""
    seen = len(w.decode[0].received)
    async with w.client.post(path, json=body, headers=headers) as response:
        assert response.status == 200, await response.text()
    return [worker.received[seen].body.get("priority", UNSAID) for worker in (w.prefill[0], w.decode[0])]


@pytest.mark.parametrize("path", ROUTES)
async def test_both_legs_are_told_the_priority_that_the_header_or_the_body_asks_for(path: str) -> None:
    async with world() as w:
        body = ROUTES[path]
        assert await sent(w, path, body) == [UNSAID, UNSAID]
        assert await sent(w, path, body, **{"x-baton-priority": "7"}) == [7, 7]
        assert await sent(w, path, body | {"priority": -3}) == [-3, -3]
        assert await sent(w, path, body | {"priority": PRIORITY_MOST}) == [PRIORITY_MOST] * 2
        # Where both are given the header counts: a gateway sets it, and does not touch bodies.
        assert await sent(w, path, body | {"priority": 50}, **{"x-baton-priority": "7"}) == [7, 7]
        assert await sent(w, path, body | {"priority": 50}, **{"x-baton-priority": "0"}) == [0, 0]
        assert await sent(w, path, body | {"priority": None}, **{"x-baton-priority": "-7"}) == [-7, -7]
        assert await sent(w, path, body | {"priority": None}) == [None, None]


@pytest.mark.parametrize(
    ("key", "header", "body", "told"),
    [
        ("sk-search", None, 50, 10),
        ("sk-search", "50", None, 10),
        ("sk-search", "50", 99, 10),
        ("sk-search", "3", 99, 3),
        ("sk-search", None, -50, -50),
        ("sk-plain", None, 50, 0),
        ("sk-plain", "50", None, UNSAID),
        ("sk-plain", "-1", None, -1),
        ("sk-batch", None, None, -5),
        ("sk-batch", None, 0, -5),
        ("sk-batch", "-4", None, -5),
        ("sk-batch", "-6", None, -6),
    ],
)
async def test_no_priority_is_greater_than_that_of_the_key(
    keys_file: Path, key: str, header: str | None, body: int | None, told: object
) -> None:
    async with world(keys_file=str(keys_file)) as w:
        asked = {"text": "x"} if body is None else {"text": "x", "priority": body}
        headers = {"authorization": f"Bearer {key}"} | ({} if header is None else {"x-baton-priority": header})
        assert await sent(w, "/generate", asked, **headers) == [told, told]


@pytest.mark.parametrize("body", [b"1.5", b'"5"', b"true", b"[1]", b"1000001", b"-1000001", b"1" * 400, b"[" * 5000])
async def test_a_priority_in_the_body_that_makes_no_sense_is_refused_and_no_worker_hears_of_it(body: bytes) -> None:
    async with world() as w:
        data = b'{"text": "x", "priority": ' + body + b"}"
        for headers in ({}, {"x-baton-priority": "1"}):
            async with w.client.post(data=data, headers=headers) as response:
                assert response.status == 400, await response.text()
        assert not w.decode[0].received
        assert not w.prefill[0].received


@pytest.mark.parametrize("header", ["high", "", "-", "--1", "1.0", "1000001", "-1000001", "0" * 30])
async def test_a_priority_in_the_head_that_makes_no_sense_is_refused_whatever_the_body_says(header: str) -> None:
    async with world() as w:
        body = {"text": "x", "priority": 1}
        async with w.client.post(json=body, headers={"x-baton-priority": header}) as response:
            assert response.status == 400
            assert "x-baton-priority" in (await response.json())["error"]["message"]
        assert not w.decode[0].received


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": ["a", "b"], "n": 2}),
        ("/generate", {"text": ["a", "b"], "sampling_params": {"n": 2}}),
    ],
)
async def test_every_part_of_a_batch_and_every_sample_has_the_priority_in_force(
    keys_file: Path, path: str, body: dict[str, Any]
) -> None:
    decode = completes if path == "/v1/completions" else generates
    async with world(decode=(decode,), keys_file=str(keys_file)) as w:
        headers = {"authorization": "Bearer sk-search"}
        async with w.client.post(path, json=body | {"priority": 999}, headers=headers) as response:
            assert response.status == 200
        for worker in (w.prefill[0], w.decode[0]):
            assert [received.body["priority"] for received in worker.received] == [10] * 4


async def test_a_stream_that_goes_on_elsewhere_keeps_its_priority() -> None:
    async with world(prefill=(prefills,), decode=(tells(dies_at=2), tells(dies_at=2)), migrations=1) as w:
        async with w.client.post(headers={"x-baton-priority": "4"}) as response:
            assert response.status == 200
            await response.read()
        bodies = [received.body for worker in w.decode for received in worker.received]
        assert sorted("baton_continuation" in body for body in bodies) == [False, True]
        assert [body["priority"] for body in bodies] == [4, 4]


async def test_the_bodys_priority_counts_in_the_routers_queue_and_the_keys_bounds_it(keys_file: Path) -> None:
    async def status(key: str, priority: int) -> int:
        headers = {"authorization": f"Bearer {key}"}
        async with w.client.post(json={"text": "x", "priority": priority}, headers=headers) as response:
            await response.read()
            return int(response.status)

    settings: dict[str, Any] = {"concurrent_max": 1, "queue_max": 1, "keys_file": str(keys_file)}
    async with world(decode=(decodes_slowly,), **settings) as w:
        async with w.client.post(headers={"authorization": "Bearer sk-search"}) as running:
            await running.content.readany()
            ordinary = asyncio.create_task(status("sk-search", 1))
            await w.client.until("/metrics", lambda _, text: "baton_router_queue_requests 1.0" in text)
            assert await status("sk-plain", PRIORITY_MOST) == 503  # counts as 0
            urgent = asyncio.create_task(status("sk-search", 5))
            assert await ordinary == 503
            w.decode[0].script = decodes
            w.decode[0].release.set()
            await running.read()
        assert await urgent == 200
