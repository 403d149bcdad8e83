"""Both legs of a room, sent by hand and without a router: whatever happens to one, the other hears the same, at once."""

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from integration.stack import Stack, eventually

ROOMS = iter(range(1_000, 2_000))
OTHER_LEG_MS = 1_500


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    settings = [f"{role}.kv_tokens=8192" for role in ("prefill", "decode")]
    settings += [f"{role}.other_leg_ms={OTHER_LEG_MS}" for role in ("prefill", "decode")]
    running = Stack.up(tmp_path_factory.mktemp("legs"), settings=settings)
    yield running
    running.down()


def url(stack: Stack, role: str) -> str:
    entry: str = stack.entries(role)[0]["url"]
    return entry


def body(stack: Stack, room: int, **more: Any) -> dict[str, Any]:
    """One leg; `more` overrides."""
    port = stack.entries("prefill")[0]["bootstrap_port"]
    meeting = {"bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": room}
    sampling = {"temperature": 0, "max_new_tokens": 8}
    return {"text": "The quick brown fox", "sampling_params": sampling, **meeting, **more}


async def send(client: httpx.AsyncClient, door: str, leg: dict[str, Any]) -> tuple[int, str, float]:
    """Status, error message ("" if none) and the moment of the answer."""
    answer = await client.post(f"{door}/generate", json=leg)
    message = answer.json().get("error", {}).get("message", "")
    return answer.status_code, message, time.monotonic()


async def both(
    stack: Stack, prefill: dict[str, Any], decode: dict[str, Any], *, first: str = "prefill"
) -> tuple[tuple[int, str, float], tuple[int, str, float]]:
    """Both legs, `first` a tenth of a second before the other."""
    async with httpx.AsyncClient(timeout=30) as client:
        legs = {"prefill": prefill, "decode": decode}
        second = "decode" if first == "prefill" else "prefill"
        tasks = {first: asyncio.create_task(send(client, url(stack, first), legs[first]))}
        await asyncio.sleep(0.1)
        tasks[second] = asyncio.create_task(send(client, url(stack, second), legs[second]))
        return await tasks["prefill"], await tasks["decode"]


@pytest.mark.parametrize("first", ["prefill", "decode"])
async def test_two_good_legs_meet_whichever_comes_first(stack: Stack, first: str) -> None:
    room = next(ROOMS)
    prefill, decode = await both(stack, body(stack, room), body(stack, room), first=first)
    assert (prefill[0], decode[0]) == (200, 200)


@pytest.mark.parametrize("first", ["prefill", "decode"])
@pytest.mark.parametrize("rejecting", ["prefill", "decode"])
async def test_a_rejection_at_one_door_reaches_the_other_leg_with_its_status_and_reason(
    stack: Stack, rejecting: str, first: str
) -> None:
    room = next(ROOMS)
    legs = {role: body(stack, room) for role in ("prefill", "decode")}
    legs[rejecting]["sampling_params"] = {"top_p": 7}
    began = time.monotonic()
    prefill, decode = await both(stack, legs["prefill"], legs["decode"], first=first)
    assert (prefill[0], decode[0]) == (400, 400)
    assert "top_p" in prefill[1]
    assert "top_p" in decode[1]
    assert max(prefill[2], decode[2]) - began < 1.0


async def test_different_prompts_fail_both_legs_and_name_both(stack: Stack) -> None:
    room = next(ROOMS)
    prefill, decode = await both(stack, body(stack, room), body(stack, room, text="The quick brown dog and more"))
    assert prefill[0] == decode[0] == 500
    assert "different prompts" in prefill[1]
    assert "different prompts" in decode[1]


@pytest.mark.parametrize("only", ["prefill", "decode"])
async def test_a_leg_that_stays_alone_ends_with_its_own_deadline_and_says_which_leg_is_missing(
    stack: Stack, only: str
) -> None:
    async with httpx.AsyncClient(timeout=30) as client:
        began = time.monotonic()
        status, message, at = await send(client, url(stack, only), body(stack, next(ROOMS)))
    assert status == 504
    assert "leg" in message
    assert OTHER_LEG_MS / 1_000 - 0.1 < at - began < OTHER_LEG_MS / 1_000 + 1.0


async def test_a_second_live_leg_of_a_room_is_a_409_that_harms_only_itself(stack: Stack) -> None:
    room = next(ROOMS)
    long = {"sampling_params": {"temperature": 0, "max_new_tokens": 80, "ignore_eos": True}}
    async with httpx.AsyncClient(timeout=120) as client:
        legs = [
            asyncio.create_task(send(client, url(stack, r), body(stack, room, **long))) for r in ("prefill", "decode")
        ]
        await asyncio.sleep(0.5)
        again, message, _ = await send(client, url(stack, "decode"), body(stack, room))
        assert again == 409
        assert str(room) in message
        assert [(await leg)[0] for leg in legs] == [200, 200]


async def test_a_client_that_leaves_one_leg_ends_the_other(stack: Stack) -> None:
    room = next(ROOMS)
    long = {"text": "word " * 3_000, "sampling_params": {"max_new_tokens": 1_000, "ignore_eos": True}}
    async with httpx.AsyncClient(timeout=120) as client:
        decode = asyncio.create_task(send(client, url(stack, "decode"), body(stack, room, **long)))
        prefill = asyncio.create_task(send(client, url(stack, "prefill"), body(stack, room, **long)))
        await asyncio.sleep(0.4)
        assert not prefill.done(), "prefill is still computing"
        prefill.cancel()
        status, _, _ = await asyncio.wait_for(decode, 1.5)
        assert status == 499

    async def quiet() -> bool:
        return all(gauges["live_requests"] == 0 for gauges in await stack.snapshots())

    await eventually(quiet, "both workers are free", within_s=2.0)


async def test_a_worker_that_is_told_to_drain_finishes_what_it_has_and_takes_no_more(stack: Stack) -> None:
    """Last in this file: it is about SIGTERM."""
    room = next(ROOMS)
    long = {"sampling_params": {"temperature": 0, "max_new_tokens": 60, "ignore_eos": True}}
    async with httpx.AsyncClient(timeout=120) as client:
        legs = [
            asyncio.create_task(send(client, url(stack, r), body(stack, room, **long))) for r in ("prefill", "decode")
        ]
        await asyncio.sleep(0.5)
        await client.post(f"{url(stack, 'decode')}/drain")
        refused, _, _ = await send(client, url(stack, "decode"), body(stack, next(ROOMS)))
        assert refused == 503
        assert [(await leg)[0] for leg in legs] == [200, 200]
