"""What is served: a request as the scheduler sees it, validated, tokenized and complete.

A request that exists is valid in itself; whether it fits *this* worker (context, pool) is decided at the door
(`admission`).
"""

import hashlib
from array import array
from dataclasses import dataclass, replace
from enum import Enum

from baton_core.errors import Verdict
from baton_core.limits import Millis

RequestId = str
Room = int
PageId = int
Incarnation = str
"""One life of one worker: a restart is a new incarnation, even at the same address."""

ROOM_MAX = 2**63 - 1
FAKE_HOST = "2.2.2.2"
"""Bootstrap host of a request that has no peer (health probes); with it alone room 0 is legal."""


TOP_LOGPROBS_MAX = 128
"""Alternatives that a metadata row has room for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """The natural logarithm of a token's probability before temperature, and the likeliest tokens beside it.

    `logprob` is None for the first token of a prompt, which nothing precedes. `top` holds (token, logprob), likeliest first.
    """

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are drawn. Noise is a counter-based function of (seed, sample_index, output position)."""

    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = -1  # -1: all
    min_p: float = 0.0
    seed: int = 0  # 64 bits; both legs carry the same one, so that it survives the handoff
    sample_index: int = 0
    output_offset: int = 0  # tokens drawn before, elsewhere, and now in the prompt: the first output has this position
    max_new_tokens: int = 128
    min_new_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()  # end-of-sequence ids included, unless the client ignores them
    logprobs: int | None = None  # None: none; k: of each drawn token, and of the k likeliest beside it
    prompt_logprobs_from: int | None = None  # likewise of the prompt's tokens, from this position on (prefill)

    def __post_init__(self) -> None:
        _require(self.temperature >= 0, "temperature", self.temperature, "at least 0")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        _require(self.top_k == -1 or self.top_k >= 1, "top_k", self.top_k, "-1 or at least 1")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "between 0 and 1")
        _require(0 <= self.seed < 2**64, "seed", self.seed, "a 64-bit unsigned integer")
        _require(self.output_offset >= 0, "output_offset", self.output_offset, "at least 0")
        _require(self.max_new_tokens >= 0, "max_new_tokens", self.max_new_tokens, "at least 0")
        _require(
            0 <= self.min_new_tokens <= self.max_new_tokens,
            "min_new_tokens",
            self.min_new_tokens,
            f"between 0 and max_new_tokens ({self.max_new_tokens})",
        )
        _require(
            self.logprobs is None or 0 <= self.logprobs <= TOP_LOGPROBS_MAX,
            "logprobs",
            self.logprobs,
            f"between 0 and {TOP_LOGPROBS_MAX}",
        )
        start = self.prompt_logprobs_from
        _require(start is None or start >= 0, "prompt_logprobs_from", start, "at least 0")
        _require(start is None or self.logprobs is not None, "prompt_logprobs_from", start, "given with logprobs only")

    def after(self, drawn: int) -> "Sampling":
        """How the rest is drawn where the first `drawn` tokens, fewer than `max_new_tokens`, are now in the prompt.

        The rest comes out as if nothing had been: noise, limits and stops go by the position in the whole answer.
        """
        return replace(
            self,
            output_offset=self.output_offset + drawn,
            max_new_tokens=self.max_new_tokens - drawn,
            min_new_tokens=max(0, self.min_new_tokens - drawn),
            prompt_logprobs_from=None,  # they are told
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Bootstrap:
    """Where the two legs of a room meet: the registry that knows the prefill worker, and the room."""

    host: str
    port: int
    room: Room
    instance: str | None = None  # which prefill worker, where the registry knows several
    prefill_dp_rank: int | None = None  # `disagg_prefill_dp_rank`

    def __post_init__(self) -> None:
        _require(0 < self.port < 65_536, "bootstrap_port", self.port, "a port number")
        lowest = 0 if self.host == FAKE_HOST else 1
        _require(lowest <= self.room <= ROOM_MAX, "bootstrap_room", self.room, f"between {lowest} and 2**63-1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt and how to answer it.

    `bootstrap` None means colocated: the worker that gets it computes and decodes alone. `rejected` is a verdict reached
    at intake: the request is carried to the door only to be retired there and to tell the other leg.
    """

    rid: RequestId
    prompt: tuple[int, ...]
    sampling: Sampling
    bootstrap: Bootstrap | None = None
    budget_ms: Millis = 600_000
    priority: int = 0  # greater is served first, and may take the pages of a lesser one (decode)
    rejected: Verdict | None = None

    def __post_init__(self) -> None:
        _require(bool(self.rid), "rid", self.rid, "not empty")
        _require(self.budget_ms > 0, "budget_ms", self.budget_ms, "positive")
        if self.rejected is None:
            _require(len(self.prompt) > 0, "prompt", self.prompt, "at least one token")

    @property
    def room(self) -> Room:
        """The room, or 0 where there is none."""
        return 0 if self.bootstrap is None else self.bootstrap.room


class FinishType(Enum):
    """How an answer ended. The values are the wire names of SGLang's `finish_reason.type`."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """The end of a request: `matched` with STOP (the token id), `verdict` with ABORT."""

    type: FinishType
    matched: int | None = None
    verdict: Verdict | None = None


def prompt_digest(prompt: tuple[int, ...]) -> int:
    """64-bit digest of the token ids, by which the two legs of a room prove that they tokenized alike."""
    raw = array("I", prompt).tobytes()
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little")


def _require(holds: bool, name: str, value: object, wanted: str) -> None:
    if not holds:
        raise ValueError(f"{name} must be {wanted}, not {value!r}")
