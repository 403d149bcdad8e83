"""From what a client asked to a `Request` for the scheduler: everything that can be decided here is decided here."""

import asyncio
import hashlib
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from baton_core.errors import ClientError, Verdict, raise_for
from baton_core.limits import PRIORITY_MOST, PROMPT_LOGPROBS_MAX, Limits, Millis
from baton_core.request import FAKE_HOST, Bootstrap, Request, RequestId, Sampling
from baton_worker.config import Role
from baton_worker.placement import check_routed
from baton_worker.schemas import Leg
from baton_worker.tokenizer import Tokenizer, too_long

Number = TypeVar("Number", int, float)

RID_CHARS_MAX = 256
FOREIGN_DP_SIZE_MAX = 65_536
"""What decode lets pass as a DP rank of a prefill worker that it does not know yet."""

INLINE_CHARS = 16_384
"""A text up to this length is encoded on the event loop (about 10 ms); a longer one on a thread."""

GREEDY_BELOW = 1e-6
"""A temperature below this is 0, as in SGLang: dividing logits by it would overflow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """How the client wants its tokens, whatever the route called the fields. None means the default."""

    max_new_tokens: int | None  # None: the rest of the context
    min_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    logprobs: int | None = None  # None: none; k: of each token, and of the k likeliest
    prompt_logprobs_from: int | None = None  # None: none of the prompt's


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One prompt, as a text or as token ids, and how to answer it. `add_special`: put BOS in front where due."""

    leg: Leg
    prompt: str | list[int]
    wanted: Wanted
    stream: bool
    add_special: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A valid prompt with everything the scheduler and the detokenizer need, except the id it runs under."""

    prompt: tuple[int, ...]
    sampling: Sampling
    bootstrap: Bootstrap | None
    stop: tuple[str, ...]
    skip_special: bool
    keep_stop: bool
    routed_dp_rank: int | None = None  # the unit that must serve it
    priority: int = 0

    def request(self, rid: RequestId, budget_ms: Millis) -> Request:
        """The request as the scheduler sees it."""
        return Request(
            rid=rid,
            prompt=self.prompt,
            sampling=self.sampling,
            bootstrap=self.bootstrap,
            budget_ms=budget_ms,
            priority=self.priority,
        )


class Intake:
    """Validates, tokenizes and completes what clients ask of one worker. Every refusal is a ClientError."""

    def __init__(
        self,
        *,
        role: Role,
        tokenizer: Tokenizer,
        limits: Limits,
        dp_size: int,
        own_bootstrap: tuple[str, int],
        check_host: Callable[[str, int], Verdict | None],
    ) -> None:
        """`own_bootstrap` fills in what a leg leaves out; `check_host` judges a bootstrap address."""
        self.tokenizer = tokenizer
        self._role = role
        self._limits = limits
        self._dp_size = dp_size
        self._own_host, self._own_port = own_bootstrap
        self._check_host = check_host
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenize")

    def close(self) -> None:
        """Stop the tokenizing thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def prepare(self, ask: Ask, context_tokens: int) -> Prepared:
        """`ask`, checked and tokenized. Raises ClientError."""
        bootstrap = self.bootstrap(ask.leg)
        routed = self._checked_dp_ranks(ask.leg)
        wanted = ask.wanted
        stop = self._stop_strings(wanted.stop)
        stop_ids = self._stop_ids(wanted)
        # Checked before tokenizing, and as the client gave it: clipping must not hide a contradiction.
        self._sampling(wanted, stop_ids, wanted.max_new_tokens, bootstrap)
        prompt = await self._tokens(ask, context_tokens)
        _check_prompt_logprobs(wanted, len(prompt))
        room = context_tokens - len(prompt)
        longest = room if wanted.max_new_tokens is None else min(wanted.max_new_tokens, room)
        return Prepared(
            prompt=prompt,
            sampling=self._sampling(wanted, stop_ids, longest, bootstrap),
            bootstrap=bootstrap,
            stop=() if self._role is Role.PREFILL else stop,  # its one token is decode's to judge
            skip_special=wanted.skip_special_tokens is not False,
            keep_stop=wanted.no_stop_trim is True,
            routed_dp_rank=routed,
            priority=_priority(ask.leg),
        )

    def bootstrap(self, leg: Leg) -> Bootstrap | None:
        """The room of this leg, None where it has none (colocated). Raises ClientError."""
        if leg.bootstrap_room is None:
            if self._role is Role.PREFILL:
                raise ClientError(
                    "this is a prefill worker: the request needs a bootstrap_room (send it to a router, or to decode)"
                )
            return None
        host = leg.bootstrap_host or (self._own_host if self._role is Role.PREFILL else "")
        if not host:
            raise ClientError("bootstrap_room needs a bootstrap_host: the address of the prefill worker's registry")
        try:
            bootstrap = Bootstrap(
                host=host,
                port=self._own_port if leg.bootstrap_port is None else leg.bootstrap_port,
                room=leg.bootstrap_room,
                instance=leg.bootstrap_instance,
                prefill_dp_rank=leg.disagg_prefill_dp_rank,
            )
        except ValueError as error:
            raise ClientError(str(error)) from error
        refusal = None if host == FAKE_HOST else self._check_host(host, bootstrap.port)
        if refusal is not None:
            raise_for(refusal)
        return bootstrap

    def budget_ms(self, header: str | None) -> Millis:
        """The budget of a request, from the header `x-baton-budget-ms`."""
        if header is None:
            return self._limits.request_budget_ms
        if not (header.isascii() and header.isdecimal() and len(header) <= 18 and int(header) > 0):
            raise ClientError(f"x-baton-budget-ms must be a positive number of milliseconds, not {header[:64]!r}")
        return min(int(header), self._limits.request_budget_ms)

    def _checked_dp_ranks(self, leg: Leg) -> int | None:
        """The unit that the leg names, if any. Raises ClientError for ranks that cannot be."""
        routed = leg.data_parallel_rank if leg.routed_dp_rank is None else leg.routed_dp_rank
        if routed is not None:
            check_routed(routed, self._dp_size)
        prefill = leg.disagg_prefill_dp_rank
        most = self._dp_size if self._role is Role.PREFILL else FOREIGN_DP_SIZE_MAX
        if prefill is not None and not 0 <= prefill < most:
            text = f"disagg_prefill_dp_rank {prefill} is out of range: this worker has dp_size {most}"
            raise ClientError(text if self._role is Role.PREFILL else f"disagg_prefill_dp_rank {prefill} is no rank")
        return routed

    async def _tokens(self, ask: Ask, context_tokens: int) -> tuple[int, ...]:
        prompt = ask.prompt
        if isinstance(prompt, str):
            if len(prompt) <= INLINE_CHARS:
                ids = self.tokenizer.encode_within(prompt, context_tokens, add_special=ask.add_special)
            else:
                ids = await asyncio.get_running_loop().run_in_executor(
                    self._thread,
                    lambda: self.tokenizer.encode_within(prompt, context_tokens, add_special=ask.add_special),
                )
        else:
            ids = prompt
        if not ids:
            raise ClientError("the prompt is empty")
        if len(ids) >= context_tokens:
            raise too_long(str(len(ids)), context_tokens)
        if min(ids) < 0 or max(ids) >= self.tokenizer.vocab_size:
            raise ClientError(f"token ids must be between 0 and {self.tokenizer.vocab_size - 1}")
        return tuple(ids)

    def _sampling(
        self, wanted: Wanted, stop_ids: tuple[int, ...], longest: int | None, bootstrap: Bootstrap | None
    ) -> Sampling:
        temperature = _or(wanted.temperature, 1.0)
        top_k = _or(wanted.top_k, -1)
        least = _or(wanted.min_new_tokens, 0)
        clipped = longest != wanted.max_new_tokens and longest is not None
        try:
            return Sampling(
                temperature=0.0 if 0 <= temperature < GREEDY_BELOW else temperature,
                top_p=_or(wanted.top_p, 1.0),
                top_k=min(top_k, self.tokenizer.vocab_size),
                min_p=_or(wanted.min_p, 0.0),
                seed=_seed(wanted.seed, bootstrap),
                max_new_tokens=max(least, 0) if longest is None else longest,
                min_new_tokens=min(least, longest) if clipped and longest is not None else least,
                stop_token_ids=stop_ids,
                logprobs=wanted.logprobs,
                prompt_logprobs_from=wanted.prompt_logprobs_from,
            )
        except ValueError as error:
            raise ClientError(str(error)) from error

    def _stop_strings(self, stop: str | list[str] | None) -> tuple[str, ...]:
        stops = tuple(filter(None, (stop,) if isinstance(stop, str) else stop or ()))
        if len(stops) > self._limits.stop_strings_max:
            raise ClientError(f"stop: {len(stops)} strings, at most {self._limits.stop_strings_max} are allowed")
        longest = max(map(len, stops), default=0)
        if longest > self._limits.stop_string_chars_max:
            most = self._limits.stop_string_chars_max
            raise ClientError(f"stop: a string of {longest} characters, at most {most} are allowed")
        return stops

    def _stop_ids(self, wanted: Wanted) -> tuple[int, ...]:
        ids = wanted.stop_token_ids or []
        if len(ids) > self._limits.stop_ids_max:
            raise ClientError(f"stop_token_ids: {len(ids)} ids, at most {self._limits.stop_ids_max} are allowed")
        if ids and not (min(ids) >= 0 and max(ids) < self.tokenizer.vocab_size):
            raise ClientError(f"stop_token_ids must be between 0 and {self.tokenizer.vocab_size - 1}")
        ends = () if wanted.ignore_eos else self.tokenizer.eos_ids
        return tuple(dict.fromkeys((*ids, *ends)))


def check_top_logprobs(name: str, value: int, most: int) -> int:
    """How many of the likeliest tokens the client wants to see, if that many can be had. Raises ClientError."""
    if not 0 <= value <= most:
        raise ClientError(f"{name} must be between 0 and {most}, not {value}")
    return value


def check_rid(rid: RequestId) -> RequestId:
    """`rid` if it can serve as an id. Raises ClientError."""
    if not 0 < len(rid) <= RID_CHARS_MAX:
        raise ClientError(f"rid must have between 1 and {RID_CHARS_MAX} characters, not {len(rid)}")
    return rid


def _priority(leg: Leg) -> int:
    """The request's priority. Raises ClientError where it is beyond all sense."""
    priority = leg.priority or 0
    if abs(priority) > PRIORITY_MOST:
        raise ClientError(f"priority must be between -{PRIORITY_MOST} and {PRIORITY_MOST}, not {priority}")
    return priority


def _check_prompt_logprobs(wanted: Wanted, prompt_tokens: int) -> None:
    start = wanted.prompt_logprobs_from
    if start is None:
        return
    if start > prompt_tokens:
        raise ClientError(f"the prompt has {prompt_tokens} tokens; its logprobs cannot start at {start}")
    numbers = (prompt_tokens - start) * (1 + (wanted.logprobs or 0))
    if numbers > PROMPT_LOGPROBS_MAX:
        text = (
            f"{numbers} logprobs of the prompt, at most {PROMPT_LOGPROBS_MAX} are given; ask for fewer of the likeliest"
        )
        raise ClientError(f"{text} tokens, or start later")


def _seed(asked: int | None, bootstrap: Bootstrap | None) -> int:
    """64 bits. Both legs of a room must draw the same noise, and the room is what both know."""
    if asked is not None:
        return asked % 2**64
    if bootstrap is None:
        return secrets.randbits(64)
    room = bootstrap.room.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(room, digest_size=8, person=b"baton-seed").digest(), "little")


def _or(value: Number | None, default: Number) -> Number:
    return default if value is None else value
