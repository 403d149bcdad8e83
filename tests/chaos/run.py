"""Chaos on real processes: random kills, stops and restarts under load, then the checks GOLD and LEAK.

    python tests/chaos/run.py --minutes 2 --seed 1
    python tests/chaos/run.py --prefill 2 --decode 2 --prefill-layout pp=2 --decode-layout tp=3 --cut-links

Every fault heals (a killed process is started again with `baton restart`, a stopped one continues, a cut link is mended),
so that in the end the stack must be whole: 30 s after the last fault every request succeeds, the greedy answer is what it
always was, every page, row and slot is free, and no process holds more descriptors, sockets, mappings, threads or memory
than before. In between every request had exactly one ending: an answer, which is the right one where it is known, an error
with a status, or an error event in its stream. Exits 1 and keeps the logs if not.
"""

import argparse
import asyncio
import collections
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parents[1]))

import held
import links

from integration.noise import listening_ports
from integration.stack import START_S, Stack, ask_all, eventually, gold, greedy

SETTINGS = ("prefill.kv_tokens=8192", "decode.kv_tokens=8192", "prefill.chunk_tokens=128")
STOP_S = (0.5, 7.0)  # shorter and longer than the five seconds after which a silent peer is lost
BUDGET_MS = 60_000  # sent with every request, so that slowness ends in an answer too
ANSWER_S = BUDGET_MS / 1_000 + 5  # a request that has no ending by then hangs


GOLD_SHARE = 0.3
WARM_S = 10.0
RECOVERED_S = 30.0  # so long after the last fault every request succeeds
AFTERWARDS_S = 10.0  # … for so long, at least


class Hang(AssertionError):
    """A request had no ending in time."""


async def one_request(client: httpx.AsyncClient, url: str, draw: random.Random) -> str:
    """A request of a random kind; how it ended. Raises AssertionError for a wrong answer."""
    if draw.random() < GOLD_SHARE:
        return await one_known_request(client, url, draw)
    sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": draw.randint(1, 60)}
    body: dict[str, Any] = {"text": "word " * draw.randint(1, 400) + str(draw.random()), "sampling_params": sampling}
    stream = draw.random() < 0.5
    try:
        async with asyncio.timeout(ANSWER_S):
            if not stream:
                return str((await client.post(f"{url}/generate", json=body)).status_code)
            return await one_stream(client, url, body | {"stream": True})
    except TimeoutError as error:
        raise Hang(f"no ending within {ANSWER_S} s: {body['sampling_params']} stream={stream}") from error
    except httpx.TransportError as error:
        return type(error).__name__


async def one_known_request(client: httpx.AsyncClient, url: str, draw: random.Random) -> str:
    """A greedy request whose answer is known: it is that one, or an error."""
    prompt = draw.choice(gold()[:8])
    try:
        async with asyncio.timeout(ANSWER_S):
            answer = await client.post(f"{url}/generate", json=greedy(prompt))
    except TimeoutError as error:
        raise Hang(f"no ending within {ANSWER_S} s: {prompt['name']}") from error
    except httpx.TransportError as error:
        return type(error).__name__
    if answer.status_code == 200:
        assert answer.json()["output_ids"] == prompt["output_ids"], f"GOLD, amid faults: {prompt['name']}"
    return str(answer.status_code)


async def one_stream(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> str:
    last = ""
    async with client.stream("POST", f"{url}/generate", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                last = line[6:]
        if answer.status_code != 200:
            return str(answer.status_code)
    if last == "[DONE]":
        return "200"
    return "error event" if "error" in json.loads(last or "{}") else "stream cut without a word"


@dataclass
class Clients:
    """What all clients have seen. `failed_s`: when the latest request was sent that did not succeed."""

    until_s: float
    endings: collections.Counter[str] = field(default_factory=collections.Counter)
    failed_s: float = 0.0


async def load(stack: Stack, clients: Clients, draw: random.Random) -> None:
    """Keep asking until it is time to end."""
    async with httpx.AsyncClient(timeout=None, headers={"x-baton-budget-ms": str(BUDGET_MS)}) as client:
        while (sent_s := time.monotonic()) < clients.until_s:
            ending = await one_request(client, stack.url, random.Random(draw.random()))
            clients.endings[ending] += 1
            if ending != "200":
                clients.failed_s = max(clients.failed_s, sent_s)
            if ending == "503":
                await asyncio.sleep(0.2)  # nobody is there to take it


def victims(stack: Stack) -> list[tuple[str, int, int]]:
    """(role, index, pid) of every process that may be hurt; the router is what we talk to."""
    found = []
    for entry in stack.state:
        if entry["role"] != "router":
            found.append((entry["role"], entry["index"], entry["pid"]))
            found += [(entry["role"], entry["index"], rank["pid"]) for rank in entry.get("ranks", [])]
    return found


def kv_and_control_ports(stack: Stack, draw: random.Random) -> tuple[str, list[int]]:
    """One worker, and the ports of its ranks: what peers reach it by, and the router does not."""
    entry = draw.choice([one for one in stack.state if one.get("ranks")])
    ports = set().union(*(listening_ports(rank["pid"]) for rank in entry["ranks"]))
    return f"{entry['role']} {entry['index']}", sorted(ports)


async def hurt(stack: Stack, draw: random.Random, say: Any, *, cut_links: bool) -> None:
    """One fault, and its healing."""
    if cut_links and draw.random() < 0.3:
        name, ports = kv_and_control_ports(stack, draw)
        seconds = draw.uniform(*STOP_S)
        say(f"cut the links of {name} (ports {ports}) for {seconds:.1f} s")
        links.cut(ports)
        await asyncio.sleep(seconds)
        links.heal()
        return
    role, index, pid = draw.choice(victims(stack))
    if draw.random() < 0.4:
        seconds = draw.uniform(*STOP_S)
        say(f"stop {role} {index} (pid {pid}) for {seconds:.1f} s")
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(seconds)
        os.kill(pid, signal.SIGCONT)
        return
    say(f"kill {role} {index} (pid {pid})")
    os.kill(pid, signal.SIGKILL)
    await asyncio.sleep(draw.uniform(0, 2))
    argv = [sys.executable, "-m", "baton_cli", "restart", "--state", str(stack.directory), role, str(index), "--kill"]
    done = await asyncio.to_thread(subprocess.run, argv, capture_output=True, text=True, timeout=START_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    stack.refresh()


async def whole(stack: Stack) -> None:
    """GOLD and LEAK."""

    async def usable() -> bool:
        async with httpx.AsyncClient() as client:
            return (await client.get(f"{stack.url}/ready")).status_code == 200

    await eventually(usable, "the router has a usable pair", within_s=60)
    prompts = gold()[:8]
    answers = await ask_all(stack.url, [greedy(prompt) for prompt in prompts], concurrency=4)
    wrong = [p["name"] for p, a in zip(prompts, answers, strict=True) if a["output_ids"] != p["output_ids"]]
    assert not wrong, f"GOLD: {wrong}"
    await stack.flush()
    await stack.idle_snapshots()
    for gauges in await every_rank(stack):
        assert gauges["pages_free"] == gauges["pages"], f"LEAK: {gauges}"
        assert gauges.get("rows_free") == gauges.get("rows"), f"LEAK: {gauges}"
        assert gauges.get("backup_pages_free") == gauges.get("backup_pages"), f"LEAK: {gauges}"
        assert not gauges.get("quarantined_pages"), f"LEAK: {gauges}"


async def warm(stack: Stack) -> dict[str, held.Held]:
    """Let everybody meet everybody, and see what each process holds then, at rest."""
    clients = Clients(until_s=time.monotonic() + WARM_S)
    await asyncio.gather(*(load(stack, clients, random.Random(number)) for number in range(16)))
    await whole(stack)
    return held.of_stack(stack.state)


async def nothing_is_held(stack: Stack, before: dict[str, held.Held]) -> None:
    """No process holds more than before; connections that nobody uses take a while to close."""
    stack.refresh()
    found: list[str] = []

    async def level() -> bool:
        found[:] = held.grown(before, held.of_stack(stack.state))
        return not found

    await eventually(level, "LEAK", lambda: "; ".join(found), within_s=30)


async def every_rank(stack: Stack) -> list[dict[str, Any]]:
    """The gauges of every rank of every worker."""
    async with httpx.AsyncClient(timeout=30) as client:
        answers = [(await client.get(f"{url}/debug/snapshot")).json() for url in stack.worker_urls()]
    return [rank["gauges"] for answer in answers for rank in answer["ranks"]]


async def chaos(options: argparse.Namespace, directory: Path) -> None:
    def say(text: str) -> None:
        print(f"{time.monotonic() - began:7.1f} s  {text}", flush=True)

    began = time.monotonic()
    draw = random.Random(options.seed)
    shape = ("--prefill", str(options.prefill), "--decode", str(options.decode), "--dtype", "float32")
    layouts = [f"prefill.{one}" for one in options.prefill_layout] + [f"decode.{one}" for one in options.decode_layout]
    if options.cut_links:
        shape += ("--transfer", "tcp")
    stack = await asyncio.to_thread(Stack.up, directory, *shape, settings=(*SETTINGS, *layouts))
    try:
        say("the stack is up")
        before = await warm(stack)
        say("everybody has met everybody")
        until_s = time.monotonic() + options.minutes * 60
        clients = Clients(until_s=until_s + 1e6)
        asking = asyncio.gather(*(load(stack, clients, random.Random(draw.random())) for _ in range(options.clients)))
        while time.monotonic() < until_s and not asking.done():
            await asyncio.sleep(draw.uniform(0.5, 4))
            await hurt(stack, draw, say, cut_links=options.cut_links)
        healed_s = time.monotonic()
        clients.until_s = healed_s + RECOVERED_S + AFTERWARDS_S
        await asking
        say(f"endings: {dict(sorted(clients.endings.items()))}")
        assert not clients.endings["stream cut without a word"]
        recovered_s = max(0.0, clients.failed_s - healed_s)
        assert recovered_s <= RECOVERED_S, f"a request sent {recovered_s:.1f} s after the last fault failed"
        say(f"the last request that failed was sent {recovered_s:.1f} s after the last fault")
        await whole(stack)
        await nothing_is_held(stack, before)
        say("whole again: GOLD and LEAK pass")
    finally:
        await asyncio.to_thread(stack.down)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--prefill", type=int, default=1)
    parser.add_argument("--decode", type=int, default=1)
    layout = "such as pp=2, or tp=3 (heads must divide: the default model has 9 query and 3 KV heads); may be repeated"
    parser.add_argument("--prefill-layout", action="append", default=[], metavar="AXIS=SIZE", help=layout)
    parser.add_argument("--decode-layout", action="append", default=[], metavar="AXIS=SIZE", help=layout)
    parser.add_argument(
        "--cut-links", action="store_true", help="drop packets, too, where this host can; over tcp then"
    )
    options = parser.parse_args()
    reason = links.why_not() if options.cut_links and links.INSIDE not in os.environ else None
    if reason is not None:
        print(f"links are not cut: {reason}")
        options.cut_links = False
    if options.cut_links:
        links.enter_namespace()
    directory = Path(tempfile.mkdtemp(prefix="baton-chaos-"))
    try:
        asyncio.run(chaos(options, directory))
    except AssertionError as error:
        print(f"FAILED: {error}\nlogs: {directory}/logs   again: --seed {options.seed} --minutes {options.minutes}")
        return 1
    print("1 passed, 0 failed")
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was started goes with whoever started it
    sys.exit(main())
