"""Load for a stack of containers: streams that are to end well whatever happens, and a mix of all that clients do."""

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import httpx

TOKENS = 48
ANSWER_S = 120.0
HOSTILE = ("a" * 300, 'x"}\n# TYPE evil counter\nevil 1', "../../etc/passwd", "{{.Values}}", "ünïcode ☃", "%00%0a")


@dataclass(slots=True)
class Streams:
    """Keeps some streams open; each is to have `TOKENS` tokens."""

    url: str
    ended: int = 0
    failures: list[str] = field(default_factory=list)

    async def keep(self, number: int, stop: asyncio.Event) -> None:
        """One stream after the other until told to stop; what has begun is read to its end."""
        async with httpx.AsyncClient(timeout=ANSWER_S) as client:
            turn = 0
            while not stop.is_set():
                turn += 1
                failure = await self._one(client, f"Stream {number}, turn {turn}. Count from one upwards: 1, 2, 3,")
                if failure:
                    self.failures.append(failure)
                self.ended += 1

    async def _one(self, client: httpx.AsyncClient, text: str) -> str:
        """Why it did not end well; empty if it did."""
        sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
        body = {"text": text, "stream": True, "sampling_params": sampling}
        events: list[str] = []
        try:
            async with client.stream("POST", f"{self.url}/generate", json=body) as answer:
                async for line in answer.aiter_lines():
                    events += [line.removeprefix("data: ")] if line else []
        except httpx.HTTPError as error:
            return f"{type(error).__name__}: {error}, after {events[-1:]}"
        if answer.status_code != 200 or len(events) < 2 or events[-1] != "[DONE]":
            return f"{answer.status_code}: {events[-2:]}"
        meta = json.loads(events[-2]).get("meta_info", {})
        well = meta.get("completion_tokens") == TOKENS and meta["finish_reason"]["type"] == "length"
        return "" if well else f"ended early: {events[-2]}"


async def mixed(url: str, rounds: int) -> list[int]:
    """All that clients do, wrong things too; the statuses of those requests that were right."""
    statuses: list[int] = []
    async with httpx.AsyncClient(timeout=ANSWER_S) as client:
        for turn in range(rounds):
            chat = {"model": "m", "max_tokens": 12, "messages": [{"role": "user", "content": f"Say hello, {turn}."}]}
            plain = {"prompt": "word " * (40 + 60 * (turn % 4)), "max_tokens": 8}
            right: list[tuple[str, dict[str, Any]]] = [
                ("/v1/chat/completions", chat),
                ("/v1/chat/completions", chat | {"stream": True}),
                ("/v1/completions", plain),
                ("/v1/completions", plain | {"stream": True}),
                ("/generate", {"text": "Hi", "stream": True, "sampling_params": {"max_new_tokens": 12}}),
            ]
            answers = await asyncio.gather(*(client.post(url + path, json=body) for path, body in right))
            statuses += [answer.status_code for answer in answers]
            await client.post(f"{url}/generate", json={"text": 5})
            await _leave(client, url)
    return statuses


async def hostile(url: str, requests: int) -> None:
    """Names of models, ids, keys, paths, methods and headers that nobody has heard before."""
    async with httpx.AsyncClient(timeout=ANSWER_S) as client:
        for number in range(requests):
            word = f"{HOSTILE[number % len(HOSTILE)]}-{number}"
            ascii_word = word.encode("ascii", "backslashreplace").decode().replace("\n", "\\n")
            headers = {
                "x-request-id": ascii_word[:100],
                "authorization": f"Bearer {ascii_word}",
                "x-baton-priority": ascii_word[:20] if number % 3 == 0 else "1",
            }
            chat = {"model": word, "user": word, "max_tokens": 0, "messages": [{"role": word, "content": word}]}
            asked = {"text": [word], "rid": word, "sampling_params": {"max_new_tokens": -1, word[:30]: word}}
            await client.post(f"{url}/v1/chat/completions", json=chat, headers=headers)
            await client.post(f"{url}/generate", json=asked, headers=headers)
            await client.get(f"{url}/{number}/nowhere", params={"q": word}, headers=headers)
            await client.request(f"ODD{number}", f"{url}/generate", headers=headers)


async def _leave(client: httpx.AsyncClient, url: str) -> None:
    """A client that is gone after its first bytes."""
    body = {"text": "A long story:", "stream": True, "sampling_params": {"max_new_tokens": 200, "ignore_eos": True}}
    async with client.stream("POST", f"{url}/generate", json=body) as answer:
        async for _ in answer.aiter_bytes():
            return
