"""What the commands do with all processes together: ask them who they are, stop them in order, try them out."""

import http.client
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from baton_cli.errors import CliError, Interrupted
from baton_cli.layout import WORKERS
from baton_cli.processes import POLL_SECONDS, Running, get_json, post_json, stop
from baton_cli.state import Entry, Rank, entry_of

QUESTION = "What is the capital of France? Answer briefly."
ANSWER_TOKENS_MAX = 24
COMPLETION_TIMEOUT_SECONDS = 120.0
INFO_TIMEOUT_SECONDS = 5.0
LEAST_GRACE_SECONDS = 1.0

# The door closes first, then those behind it finish what they have; they need the registry to the end.
STOP_ORDER = (("router",), WORKERS, ("bootstrap",))


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A completion that went through the router, and how long it took."""

    text: str
    seconds: float


def live_entry(process: Running) -> Entry:
    """The entry of a ready process, with what its `/server_info` says: incarnation, and ranks of a worker."""
    entry = entry_of(process)
    try:
        code, info = get_json(f"{process.spec.url}/server_info", timeout_seconds=INFO_TIMEOUT_SECONDS)
    except (OSError, http.client.HTTPException):
        return entry
    if code != 200 or not isinstance(info, dict):
        return entry  # the route is a worker's; others may go without
    incarnation = info.get("incarnation")
    return Entry(
        spec=entry.spec,
        pid=entry.pid,
        started_ticks=entry.started_ticks,
        incarnation=incarnation if isinstance(incarnation, str | int) else None,
        ranks=_ranks(info.get("ranks"), process.spec.log),
    )


def _ranks(said: Any, log: str) -> tuple[Rank, ...]:
    if not isinstance(said, list):
        return ()
    return tuple(Rank(rank=int(item["rank"]), pid=int(item["pid"]), log=log) for item in said)


def stop_in_order(processes: Sequence[Running], *, grace_seconds: float, hurry: Callable[[], bool]) -> list[Running]:
    """Stop all within one grace period, router first, registry last; returns those that had to be killed."""
    deadline = time.monotonic() + grace_seconds
    killed: list[Running] = []
    for roles in STOP_ORDER:
        group = [process for process in processes if process.spec.role in roles]
        left_seconds = max(LEAST_GRACE_SECONDS, deadline - time.monotonic())
        killed += stop(group, grace_seconds=left_seconds, hurry=hurry)
    return killed


def first_completion(router_url: str, model: str, interrupted: Callable[[], bool]) -> Answer:
    """Ask the router a real question. Raises CliError where no answer comes, Interrupted when `interrupted()`."""
    body = chat_body(model) | {"max_tokens": ANSWER_TOKENS_MAX, "temperature": 0}
    url = f"{router_url}/v1/chat/completions"
    began = time.monotonic()
    pool = ThreadPoolExecutor(max_workers=1)
    reply = pool.submit(post_json, url, body, timeout_seconds=COMPLETION_TIMEOUT_SECONDS)
    pool.shutdown(wait=False)
    while not reply.done():
        if interrupted():
            raise Interrupted
        time.sleep(POLL_SECONDS / 10)
    seconds = time.monotonic() - began
    try:
        code, content = reply.result()
    except (OSError, http.client.HTTPException) as error:
        raise CliError(f"POST {url} failed: {error or type(error).__name__}") from error
    try:
        return Answer(text=str(content["choices"][0]["message"]["content"]).strip(), seconds=seconds)
    except (TypeError, KeyError, IndexError) as error:
        raise CliError(f"POST {url} answered {code}: {json.dumps(content)}") from error


def chat_body(model: str) -> dict[str, Any]:
    """The question as a chat, without options."""
    return {"model": model, "messages": [{"role": "user", "content": QUESTION}]}
