"""What users of other systems reported, tried on one prefill and one decode worker: see docs/reliability.md."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from integration.noise import listening_ports, make_noise, odd_bodies
from integration.pairs import COUNT, LENGTHS, PAGE_TOKENS, POOL_TOKENS, ROOMS, Exam, Pair, served
from integration.stack import REQUEST_S, eventually
from integration.workers import Worker
from tiny_folders import VOCAB, save_folder, sure_prompts
from tiny_models import oracle


@pytest.fixture(scope="module")
def exam(tmp_path_factory: pytest.TempPathFactory) -> Exam:
    model = oracle(
        "llama", vocab_size=VOCAB, num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=POOL_TOKENS
    )
    folder = save_folder(tmp_path_factory.mktemp("models") / "tiny", model)
    return Exam(folder, sure_prompts(model, LENGTHS, COUNT))


@pytest.fixture(scope="module")
def running(exam: Exam, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    runner = asyncio.Runner()
    context = served(exam, tmp_path_factory.mktemp("pair"))
    yield runner.run(context.__aenter__())
    runner.run(context.__aexit__(None, None, None))
    runner.close()


async def _leave(client: httpx.AsyncClient, pair: Pair, patience_s: float, tokens: int, count: int) -> bool:
    """Both legs of a request whose client leaves after `patience_s`; whether it was answered before."""
    try:
        async with asyncio.timeout(patience_s):
            answers = await pair.both(client, tokens, count)
    except TimeoutError:
        return False
    assert {answer.status_code for answer in answers} == {200}, [answer.text for answer in answers]
    return True


async def test_fifty_refusals_by_decode_leave_nothing_at_prefill(running: Pair) -> None:
    """B07."""
    async with httpx.AsyncClient(timeout=REQUEST_S) as client:
        for _ in range(50):
            leg = running.leg(next(ROOMS))
            refused = leg | {"sampling_params": {"top_p": 7}}
            first, second = await asyncio.gather(
                client.post(f"{running.prefill.url}/generate", json=leg),
                client.post(f"{running.decode.url}/generate", json=refused),
            )
            assert (first.status_code, second.status_code) == (400, 400), f"{first.text} {second.text}"
            assert "top_p" in first.text
    await running.whole(within_s=5.0)


async def test_aborts_of_everybody_in_a_storm_leave_one_answer_each(running: Pair) -> None:
    """B01, B05: aborts of everybody every 50 ms, while handoffs finish and legs that stay alone run out of time."""
    dice = Random(5)
    async with httpx.AsyncClient(timeout=30, limits=httpx.Limits(max_connections=None)) as client:

        async def ask(number: int) -> list[httpx.Response]:
            await asyncio.sleep(dice.random() * 3)
            if number % 6:
                return await running.both(client, dice.randint(1, 1_500), dice.randint(1, 200))
            leg = running.leg(next(ROOMS))
            return [await client.post(f"{running.decode.url}/generate", json=leg)]

        asked = [asyncio.create_task(ask(number)) for number in range(120)]
        while not all(task.done() for task in asked):
            for worker in running.workers:
                await client.post(f"{worker.url}/abort_request", json={"abort_all": True})
            await asyncio.sleep(0.05)
        answers = [answer for task in asked for answer in await task]
    assert [answer.text for answer in answers if answer.status_code not in (200, 504)] == []
    aborted = [answer for answer in answers if answer.status_code == 200 and _reason(answer) == "abort"]
    assert len(aborted) > len(answers) / 3
    await running.whole()


def _reason(answer: httpx.Response) -> str:
    return str(answer.json()["meta_info"]["finish_reason"]["type"])


async def test_clients_that_leave_around_the_end_of_prefill_leave_nothing(running: Pair) -> None:
    """B08, B10: each leaves a little later than the one before, from before the first chunk to after the handoff."""
    answered = 0
    async with httpx.AsyncClient(timeout=REQUEST_S) as client:
        began = time.monotonic()
        assert await _leave(client, running, 30.0, 300, 1)
        whole_s = time.monotonic() - began
        for step in range(60):
            answered += await _leave(client, running, whole_s * step / 40, 300, 1)
    assert 0 < answered < 60
    await running.whole()


async def test_a_long_prompt_whose_client_left_stops_at_the_next_chunk(exam: Exam, tmp_path: Path) -> None:
    """B02."""
    tokens, chunk = 6_000, 8
    async with served(exam, tmp_path, {"chunk_tokens": chunk}) as pair, httpx.AsyncClient(timeout=REQUEST_S) as client:
        before = pair.steps()
        task = asyncio.create_task(_leave(client, pair, 30.0, tokens, 4))
        await eventually(lambda: _computing(pair), "the prompt is being computed")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        began = time.monotonic()
        assert await _leave(client, pair, 5.0, 20, 1)
        assert time.monotonic() - began < 1.0
        assert pair.steps() - before < tokens / chunk / 2
        await pair.whole()


async def _computing(pair: Pair) -> bool:
    return bool(pair.prefill.snapshots()[0]["queue_requests{queue=forwarding}"] > 0)


async def test_an_abort_takes_the_whole_id_and_nothing_that_begins_like_it(running: Pair) -> None:
    """H49."""
    async with httpx.AsyncClient(timeout=REQUEST_S) as client:
        leg = running.leg(next(ROOMS), 20, 400)
        leg.pop("bootstrap_host"), leg.pop("bootstrap_port"), leg.pop("bootstrap_room")
        url = f"{running.decode.url}/generate"
        tasks = {rid: asyncio.create_task(client.post(url, json=leg | {"rid": rid})) for rid in ("req-1", "req-10")}
        await eventually(lambda: _live(running.decode, 2), "both run")
        await client.post(f"{running.decode.url}/abort_request", json={"rid": "req-1"})
        assert _reason(await tasks["req-1"]) == "abort"
        other = await tasks["req-10"]
        assert _reason(other) == "length", other.text
        assert other.json()["meta_info"]["completion_tokens"] == 400
    await running.whole()


async def _live(worker: Worker, count: int) -> bool:
    return bool(sum(unit["live_requests"] for unit in worker.snapshots()) == count)


async def test_orphan_rooms_are_gone_when_their_time_is_over(running: Pair) -> None:
    """L02."""
    async with httpx.AsyncClient(timeout=REQUEST_S, limits=httpx.Limits(max_connections=None)) as client:

        async def orphan() -> None:
            try:
                async with asyncio.timeout(0.3):
                    await client.post(f"{running.decode.url}/generate", json=running.leg(next(ROOMS)))
            except TimeoutError:
                pass

        for _ in range(6):
            await asyncio.gather(*(orphan() for _ in range(50)))
    await running.whole()


@pytest.mark.parametrize("room", [0, -1, 2**63, 2**64, 1.5, "7", [1, 2], True, {}], ids=repr)
async def test_what_is_no_room_is_a_400_at_both_doors(running: Pair, room: Any) -> None:
    """L01."""
    async with httpx.AsyncClient(timeout=REQUEST_S) as client:
        for worker in running.workers:
            answer = await client.post(f"{worker.url}/generate", json=running.leg(1) | {"bootstrap_room": room})
            assert answer.status_code == 400, answer.text
            assert "bootstrap_room" in answer.json()["error"]["message"]


async def test_noise_on_every_port_harms_nobody(running: Pair) -> None:
    """L04."""
    ports = {
        port for one in running.workers for pid in (one.process.pid, *one.rank_pids()) for port in listening_ports(pid)
    }
    assert {running.prefill.port, running.prefill.bootstrap_port, running.decode.port} < ports
    await asyncio.gather(*(asyncio.to_thread(make_noise, port, Random(port)) for port in ports))
    await running.whole()


async def test_odd_bodies_are_answered_with_4xx_at_every_door(running: Pair) -> None:
    """L07."""
    async with httpx.AsyncClient(timeout=30) as client:
        for number, raw in enumerate(odd_bodies(Random(7), running.leg(next(ROOMS)), count=150)):
            for worker in running.workers:
                answer = await client.post(f"{worker.url}/generate", content=raw)
                assert 400 <= answer.status_code < 500, f"{number}: {raw[:200]!r} {answer.text}"
            if number % 50 == 0:
                await running.gold()
    await running.whole()


async def test_a_decode_leg_that_comes_after_prefill_gave_up_hears_its_verdict_at_once(running: Pair) -> None:
    """A14: decode stands still while prefill waits for its leg."""
    room = next(ROOMS)
    pids = (running.decode.process.pid, *running.decode.rank_pids())
    async with httpx.AsyncClient(timeout=30) as client:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        late = asyncio.create_task(client.post(f"{running.decode.url}/generate", json=running.leg(room)))
        first = await client.post(f"{running.prefill.url}/generate", json=running.leg(room))
        assert first.status_code == 504, first.text
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        began = time.monotonic()
        second = await late
        assert time.monotonic() - began < 1.0
        assert second.status_code == 504, second.text
        assert second.json()["error"]["message"]
    await running.whole()


@pytest.mark.parametrize("stop_s", [3.0, 7.0])
async def test_a_decode_rank_that_stands_still_costs_what_waited_for_it_and_nothing_afterwards(
    running: Pair, stop_s: float
) -> None:
    """A05, C02: for less and for more than the five seconds of silence after which a peer is lost."""
    (pid,) = running.decode.rank_pids()
    async with httpx.AsyncClient(timeout=30) as client:
        under_way = [asyncio.create_task(running.both(client, 3_000, 4)) for _ in range(4)]
        await asyncio.sleep(0.3)
        os.kill(pid, signal.SIGSTOP)
        churn = asyncio.create_task(running.both(client, 1_000, 4))
        await asyncio.sleep(stop_s)
        os.kill(pid, signal.SIGCONT)
        for answers in [*(await asyncio.gather(*under_way)), await churn]:
            statuses = {answer.status_code for answer in answers}
            assert statuses <= {200, 502, 504}, [answer.text for answer in answers]
            assert 200 not in statuses or len(statuses) == 1 or answers[0].status_code == 200
    for _ in range(7):  # three answers each
        await running.gold()
    await running.whole()


async def test_rounds_that_everybody_leaves_give_a_small_pool_back_at_once(exam: Exam, tmp_path: Path) -> None:
    """B11: prompts for which the pool has room for a few, four rounds of forty, all left at once."""
    small = {"kv_tokens": 2_048}
    async with served(exam, tmp_path, small, small) as pair, httpx.AsyncClient(timeout=30) as client:
        for _ in range(4):
            asked = [_leave(client, pair, 0.5, 500, 20) for _ in range(40)]
            await asyncio.gather(*asked)
        began = time.monotonic()
        await pair.gold()
        assert time.monotonic() - began < 5.0
        await pair.whole()


@pytest.mark.parametrize("smaller", ["prefill", "decode"])
async def test_a_prompt_over_the_smaller_limit_is_a_400_on_both_legs_and_one_below_is_served(
    exam: Exam, tmp_path: Path, smaller: str
) -> None:
    """C04."""
    limit = 512
    few = {"kv_tokens": limit}
    flags = (few, None) if smaller == "prefill" else (None, few)
    async with served(exam, tmp_path, *flags) as pair, httpx.AsyncClient(timeout=30) as client:
        for tokens in (limit - PAGE_TOKENS, limit - 1, limit, limit + 1, limit + PAGE_TOKENS, 2 * limit):
            for stream in (False, True):
                first, second = await pair.both(client, tokens, 1, stream=stream)
                assert first.status_code == second.status_code, f"{tokens}: {first.text} {second.text}"
                assert first.status_code == (200 if tokens < limit else 400), f"{tokens}: {first.text}"
                if first.status_code == 400:
                    assert str(limit - 1) in first.text, first.text
                    assert str(limit - 1) in second.text, second.text
        await pair.whole()


async def test_every_unit_of_decode_is_empty_after_odd_requests(exam: Exam, tmp_path: Path) -> None:
    """B17: an odd number of requests of one token on two units, some of them left."""
    async with served(exam, tmp_path, None, {"dp": 2}) as pair, httpx.AsyncClient(timeout=30) as client:
        asked = [_leave(client, pair, 0.02 if number % 3 == 0 else 20.0, 30, 1) for number in range(21)]
        await asyncio.gather(*asked)
        await pair.whole()


@pytest.mark.parametrize("transfer", ["shm", "tcp"])
async def test_with_checksums_answers_are_the_same(exam: Exam, tmp_path: Path, transfer: str) -> None:
    """C: `--kv-checksum` on two prefill ranks and one decode rank."""
    flags: dict[str, object] = {"kv_checksum": True, "transfer": transfer}
    async with served(exam, tmp_path, flags | {"tp": 2}, flags) as pair:
        await pair.whole()


async def test_a_decode_worker_that_checks_refuses_what_has_no_checksum(exam: Exam, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"KV checksum differs in room .* sent none"):
        async with served(exam, tmp_path, None, {"kv_checksum": True}):
            pass
