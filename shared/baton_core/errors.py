"""Why a request ended without its answer: one closed list of reasons, one table to HTTP, one tree of exceptions.

    BatonError
     + ClientError   (4xx: the request is wrong)        reasons INVALID_REQUEST … ABORTED
     + Overloaded    (503 + Retry-After)                WAITING_FULL, DRAINING
     + PeerError     (5xx, retryable with another pair) LOOKUP_FAILED, PEER_LOST, DEADLINE, …
     + EngineError   (500: this worker is at fault)     LAYOUT_MISMATCH, METADATA_CORRUPT, DEVICE_FAULT

Inside the core a failure is a value, `Verdict`; drivers raise and catch `BatonError`, which carries one.
"""

from dataclasses import dataclass
from enum import IntEnum


class Reason(IntEnum):
    """Closed list of reasons. Smaller wins when ranks disagree, because agreement is a minimum."""

    METADATA_CORRUPT = 1
    TRANSFER_FAILED = 2
    LAYOUT_MISMATCH = 3
    PROMPT_MISMATCH = 4
    DP_CONFLICT = 5
    INVALID_REQUEST = 6
    CONTEXT_TOO_LONG = 7
    DUPLICATE_ROOM = 8
    DUPLICATE_RID = 9
    ABORTED = 10
    CLIENT_GONE = 11
    WAITING_FULL = 12
    DRAINING = 13
    LOOKUP_FAILED = 14
    PEER_LOST = 15
    OTHER_LEG_MISSING = 16
    DEADLINE = 17
    DEVICE_FAULT = 18
    WORKER_LOST = 19
    NO_USABLE_PAIR = 20


STATUS: dict[Reason, int] = {
    Reason.METADATA_CORRUPT: 500,
    Reason.TRANSFER_FAILED: 502,
    Reason.LAYOUT_MISMATCH: 500,
    Reason.PROMPT_MISMATCH: 500,
    Reason.DP_CONFLICT: 400,
    Reason.INVALID_REQUEST: 400,
    Reason.CONTEXT_TOO_LONG: 400,
    Reason.DUPLICATE_ROOM: 409,
    Reason.DUPLICATE_RID: 409,
    Reason.ABORTED: 499,
    Reason.CLIENT_GONE: 499,
    Reason.WAITING_FULL: 503,
    Reason.DRAINING: 503,
    Reason.LOOKUP_FAILED: 503,
    Reason.PEER_LOST: 502,
    Reason.OTHER_LEG_MISSING: 504,
    Reason.DEADLINE: 504,
    Reason.DEVICE_FAULT: 500,
    Reason.WORKER_LOST: 500,
    Reason.NO_USABLE_PAIR: 503,
}
"""The one table from reason to HTTP status."""

RETRY_AFTER: frozenset[Reason] = frozenset({Reason.WAITING_FULL, Reason.DRAINING, Reason.NO_USABLE_PAIR})
"""Reasons whose answer carries `Retry-After`."""


TEXT_CHARS_MAX = 4_096
"""Longest text of a verdict: it may quote what a stranger said, and is kept for the other leg."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The end of a request that got no answer: a reason, and a text that says what happened and what to do.

    The text can be written down and sent whatever it quotes: it is cut at TEXT_CHARS_MAX, and half of a surrogate pair
    is spelt out.
    """

    reason: Reason
    text: str

    def __post_init__(self) -> None:
        text = self.text
        if len(text) > TEXT_CHARS_MAX:
            text = text[: TEXT_CHARS_MAX - 1] + "…"
        if not text.isascii():
            text = text.encode("utf-8", "backslashreplace").decode()
        if text is not self.text:
            object.__setattr__(self, "text", text)

    @property
    def status(self) -> int:
        """HTTP status of this verdict."""
        return STATUS[self.reason]


class BatonError(Exception):
    """Base of everything Baton raises on purpose; carries the verdict the client will see."""

    default_reason = Reason.DEVICE_FAULT

    def __init__(self, text: str, reason: Reason | None = None) -> None:
        super().__init__(text)
        self.verdict = Verdict(reason=reason or self.default_reason, text=text)


class ClientError(BatonError):
    """The request is wrong; sending it again changes nothing."""

    default_reason = Reason.INVALID_REQUEST


class Overloaded(BatonError):
    """Nothing is wrong with the request; there is no room for it now."""

    default_reason = Reason.WAITING_FULL


class PeerError(BatonError):
    """Another worker, or the way to it, failed; another pair may do."""

    default_reason = Reason.PEER_LOST


class EngineError(BatonError):
    """This worker is at fault."""

    default_reason = Reason.DEVICE_FAULT


_TREE: dict[Reason, type[BatonError]] = {
    reason: (
        ClientError
        if status < 500
        else Overloaded
        if reason in RETRY_AFTER
        else PeerError
        if status in (502, 503, 504)
        else EngineError
    )
    for reason, status in STATUS.items()
}


def raise_for(verdict: Verdict) -> None:
    """Raise the exception of the tree that stands for `verdict`."""
    raise _TREE[verdict.reason](verdict.text, verdict.reason)
