"""Load for a stack of containers: a mix of all that clients do, and names that nobody has heard before."""

import asyncio
from typing import Any

import httpx

ANSWER_S = 120.0
HOSTILE = ("a" * 300, 'x"}\n# TYPE evil counter\nevil 1', "../../etc/passwd", "{{.Values}}", "ünïcode ☃", "%00%0a")


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
