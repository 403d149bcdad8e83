"""Load whose right answers are known, so that each of its requests is held against every token, amid whatever faults.

The answers are the stack's own, taken while nothing is wrong, and only those in which the model is sure of every token:
then no other batch, chunk or worker can round to another one (in float32). Their beginnings are held against
Transformers'.
"""

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from deploy.tools import ROOT

TOKENS = 48
MARGIN = 5e-3
CANDIDATES = 8
KNOWN_MIN = 4
ANSWER_S = 240.0
AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Known:
    """A prompt and its greedy answer."""

    prompt: tuple[int, ...]
    output_ids: tuple[int, ...]
    text: str


@dataclass(slots=True, kw_only=True)
class Asked:
    """One request as its client sees it. Times are `time.monotonic`'s."""

    rid: str
    known: Known
    is_stream: bool
    began_s: float
    came_s: list[float] = field(default_factory=list)  # when each event came
    ended_s: float | None = None
    wrong: str | None = None  # why it is not the whole right answer

    @property
    def longest_gap_s(self) -> float:
        """Between two events."""
        return max((later - earlier for earlier, later in itertools.pairwise(self.came_s)), default=0.0)

    def is_live(self, at_s: float) -> bool:
        """Whether it was streaming then."""
        return bool(self.came_s) and self.came_s[0] < at_s and (self.ended_s is None or self.ended_s > at_s)


def _body(prompt: tuple[int, ...], **more: object) -> dict[str, object]:
    sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    return {"input_ids": prompt, "sampling_params": sampling, **more}


async def learn(url: str) -> list[Known]:
    """Every prompt whose answer is sure."""
    gold: list[dict[str, Any]] = json.loads((ROOT / "tests/gold/smollm2.json").read_text())["prompts"]
    gate = asyncio.Semaphore(AT_ONCE)
    async with httpx.AsyncClient(timeout=ANSWER_S) as http:

        async def ask(prompt: dict[str, Any]) -> Known | None:
            body = _body(tuple(prompt["input_ids"]), return_logprob=True, top_logprobs_num=2)
            async with gate:
                answer = (await http.post(f"{url}/generate", json=body)).raise_for_status().json()
            first = prompt["output_ids"][: -1 if prompt["stopped_by_eos"] else None]
            assert answer["output_ids"][: len(first)] == first, prompt["name"]
            best = answer["meta_info"]["output_top_logprobs"]
            assert len(best) == TOKENS
            if any(one[0][0] - one[1][0] < MARGIN for one in best):
                return None
            return Known(tuple(prompt["input_ids"]), tuple(answer["output_ids"]), answer["text"])

        found = [one for one in await asyncio.gather(*map(ask, gold[:CANDIDATES])) if one is not None]
    assert len(found) >= KNOWN_MIN, f"the model is hardly ever sure: {len(found)} of {CANDIDATES}"
    return found


async def _follow(http: httpx.AsyncClient, url: str, asked: Asked) -> None:
    """A stream: each event goes on from the one before, and the last one has everything."""
    text, output_ids, end = "", [], ""
    body, headers = _body(asked.known.prompt, stream=True), {"x-request-id": asked.rid}
    async with http.stream("POST", f"{url}/generate", json=body, headers=headers) as answer:
        if answer.status_code != 200:
            asked.wrong = f"{answer.status_code} {(await answer.aread()).decode()}"
            return
        async for line in answer.aiter_lines():
            if not line.startswith("data: "):
                continue
            end = line[6:]
            if end == "[DONE]":
                break
            asked.came_s.append(time.monotonic())
            event = json.loads(end)
            if "error" in event:
                asked.wrong = end
                return
            if not event["text"].startswith(text):
                asked.wrong = f"{event['text']!r} does not go on from {text!r}"
                return
            text, output_ids = event["text"], event["output_ids"]
    if end != "[DONE]" or (tuple(output_ids), text) != (asked.known.output_ids, asked.known.text):
        asked.wrong = f"{len(output_ids)} tokens, then {end!r}: {text!r}"


async def _ask(http: httpx.AsyncClient, url: str, asked: Asked) -> None:
    """The same without a stream."""
    answer = await http.post(f"{url}/generate", json=_body(asked.known.prompt), headers={"x-request-id": asked.rid})
    if answer.status_code != 200 or tuple(answer.json()["output_ids"]) != asked.known.output_ids:
        asked.wrong = f"{answer.status_code} {answer.text}"


@asynccontextmanager
async def load(url: str, known: list[Known], clients: int, name: str) -> AsyncIterator[list[Asked]]:
    """Clients that keep asking, every fourth time without a stream, until the block is left; then each has its ending."""
    asked: list[Asked] = []
    is_over = False

    async def client(number: int) -> None:
        async with httpx.AsyncClient(timeout=ANSWER_S) as http:
            for turn in itertools.count(number):
                if is_over:
                    return
                one = Asked(
                    rid=f"{name}-{number}-{turn}",
                    known=known[turn % len(known)],
                    is_stream=turn % 4 != 3,
                    began_s=time.monotonic(),
                )
                asked.append(one)
                try:
                    await (_follow if one.is_stream else _ask)(http, url, one)
                except httpx.TransportError as error:
                    one.wrong = repr(error)
                one.ended_s = time.monotonic()

    async with asyncio.TaskGroup() as group:
        for number in range(clients):
            group.create_task(client(number))
        try:
            yield asked
        finally:
            is_over = True
