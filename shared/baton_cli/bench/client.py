"""A streaming HTTP client that notes when each token arrived.

Sockets have TCP_NODELAY set: aiohttp does so for every connection that it opens. Proxies of the environment are not used.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import aiohttp
import msgspec

from baton_cli.bench.sample import Sample
from baton_cli.errors import CliError, UsageError

CONNECT_TIMEOUT_SECONDS = 10.0
KEEPALIVE_SECONDS = 2.0
DONE = b"[DONE]"
SHORT_ANSWER = "answer of another length"
STREAM_CUT = "stream ended without [DONE]"
ERROR_EVENT = "error event"
TIMED_OUT = "timeout"


class Endpoint(Protocol):
    """Something that answers a prompt token by token."""

    async def complete(self, prompt: Sequence[int], output_tokens: int, origin_s: float) -> Sample:
        """Ask, and note the times relative to `origin_s` of `time.perf_counter`. Failures are in the sample."""
        ...


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int
    prompt_tokens_details: _Details | None = None


class _Choice(msgspec.Struct):
    text: str = ""


class _MetaInfo(msgspec.Struct):
    completion_tokens: int
    cached_tokens: int = 0


class _Event(msgspec.Struct):
    """What the events of both routes say, as far as it is looked at."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    meta_info: _MetaInfo | None = None
    error: Any = None


@dataclass(slots=True)
class _Answer:
    """An answer while it grows."""

    event_times_s: list[float]
    output_tokens: int = 0
    cached_tokens: int = 0
    counted: bool = False  # the server said how many tokens it were
    done: bool = False
    failed: bool = False

    def take(self, data: bytes, now_s: float) -> None:
        """One event's data. Raises msgspec.MsgspecError."""
        if data == DONE:
            self.done = True
            return
        event = _DECODER.decode(data)
        if event.error is not None:
            self.failed = True
        if event.meta_info is not None:
            if event.meta_info.completion_tokens > self.output_tokens:
                self.event_times_s.append(now_s)
            self.output_tokens = event.meta_info.completion_tokens
            self.cached_tokens, self.counted = event.meta_info.cached_tokens, True
        if any(choice.text for choice in event.choices):
            self.event_times_s.append(now_s)
        if event.usage is not None:
            self.output_tokens, self.counted = event.usage.completion_tokens, True
            details = event.usage.prompt_tokens_details
            self.cached_tokens = (details.cached_tokens or 0) if details is not None else 0

    def failure(self, wanted_tokens: int) -> str | None:
        """Why the answer is not what was asked for."""
        if not self.counted:
            self.output_tokens = len(self.event_times_s)  # the best guess for a server that reports no usage
        if self.failed:
            return ERROR_EVENT
        if not self.done:
            return STREAM_CUT
        return None if self.output_tokens == wanted_tokens else SHORT_ANSWER


_DECODER = msgspec.json.Decoder(_Event)


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpEndpoint:
    """A completion server at `url`. `extra` goes into every body."""

    session: aiohttp.ClientSession
    url: str
    route: str
    model: str

    async def complete(self, prompt: Sequence[int], output_tokens: int, origin_s: float) -> Sample:
        """As `Endpoint`."""
        body = _body(self.route, self.model, prompt, output_tokens)
        answer = _Answer([])
        sent_s = time.perf_counter() - origin_s
        failure = await self._stream(body, answer, origin_s)
        return Sample(
            prompt_tokens=len(prompt),
            sent_s=sent_s,
            ended_s=time.perf_counter() - origin_s,
            event_times_s=tuple(answer.event_times_s),
            failure=failure or answer.failure(output_tokens),
            output_tokens=answer.output_tokens,
            cached_tokens=answer.cached_tokens,
        )

    async def _stream(self, body: bytes, answer: _Answer, origin_s: float) -> str | None:
        headers = {"content-type": "application/json"}
        try:
            async with self.session.post(self.url + self.route, data=body, headers=headers) as response:
                if response.status != 200:
                    return f"HTTP {response.status}"
                async for data, now_s in _events(response.content.iter_any()):
                    answer.take(data, now_s - origin_s)
        except TimeoutError:
            return TIMED_OUT
        except (aiohttp.ClientError, OSError) as error:
            return f"connection: {type(error).__name__}"
        except msgspec.MsgspecError:
            return "event that is not understood"
        return None


@asynccontextmanager
async def http_session(request_timeout_seconds: float) -> AsyncIterator[aiohttp.ClientSession]:
    """A session without a limit of connections: the load alone says how many there are.

    Idle ones are not kept as long as servers keep them: one that a paused server gave up would fail the next request.
    """
    timeout = aiohttp.ClientTimeout(total=request_timeout_seconds, sock_connect=CONNECT_TIMEOUT_SECONDS)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_SECONDS)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        yield session


async def served_model(session: aiohttp.ClientSession, url: str) -> str:
    """The first model that the server lists. Raises CliError."""
    try:
        async with session.get(f"{url}/v1/models") as response:
            content = await response.json(content_type=None)
            return str(content["data"][0]["id"])
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        what = str(error) or type(error).__name__
        raise CliError(
            f"nothing answers at {url} ({what}): start a server with `baton up`, or correct --url"
        ) from error
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise CliError(f"{url}/v1/models does not list a model: name it with --model") from error


def check_url(url: str) -> str:
    """`url` without a slash at its end. Raises UsageError."""
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"--url {url}: write it with its scheme, for example http://127.0.0.1:8000")
    return url.rstrip("/")


def _body(route: str, model: str, prompt: Sequence[int], output_tokens: int) -> bytes:
    if route == "/generate":
        sampling = {"temperature": 0, "max_new_tokens": output_tokens, "ignore_eos": True, "skip_special_tokens": False}
        return msgspec.json.encode({"input_ids": prompt, "sampling_params": sampling, "stream": True})
    return msgspec.json.encode(
        {
            "model": model,
            "prompt": prompt,
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "skip_special_tokens": False,  # or such a token would be an event that nobody sees
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )


async def _events(chunks: AsyncIterator[bytes]) -> AsyncIterator[tuple[bytes, float]]:
    """The data of each server-sent event, and when its last byte arrived."""
    rest = b""
    async for chunk in chunks:
        now_s = time.perf_counter()
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip(), now_s


async def until_done(work: "asyncio.Task[None]", interrupted: Callable[[], bool], poll_seconds: float) -> bool:
    """Wait for `work`, or cancel it and return False as soon as `interrupted()`."""
    while not work.done():
        await asyncio.wait({work}, timeout=poll_seconds)
        if interrupted() and not work.done():
            work.cancel()
            await asyncio.wait({work})
            return False
    await work
    return True
