"""How a leg or a request ends without its answer: one value, with the status and the body that the client will see.

A failure that a worker put into words reaches the client unchanged. One that the router noticed itself gets the same
envelope as the workers': `{"error": {"message", "type", "code", "reason"}}`.
"""

import math
from dataclasses import dataclass
from enum import Enum

import msgspec

from baton_core.errors import RETRY_AFTER, Reason, Verdict
from baton_core.limits import Millis

JSON_TYPE = b"application/json"
TOO_LARGE_STATUS = 413
CLIENT_GONE_STATUS = 499
BUSY_STATUS = 503


class FailureKind(Enum):
    """What happened to a leg, as far as a retry cares. The values are labels of the counts of retries and migrations."""

    REFUSED = "refused"  # no connection: nothing was sent
    LOST = "lost"  # the connection ended before the first byte of an answer
    BUSY = "busy"  # 503: the worker is full, draining or starting
    PEER = "peer"  # 500 or 502: the worker says that its scheduler is lost, or the worker that it was paired with
    ANSWERED = "answered"  # any other status: trying again changes nothing
    BROKE = "broke"  # the worker ended an answer that had begun, in words
    OWN = "own"  # the router's own verdict on the whole request


class Rejection(Enum):
    """What the router refuses at its door; the closed list of `baton_router_admission_rejections_total{reason}`."""

    INVALID_REQUEST = "invalid_request"
    BODY_TOO_LARGE = "body_too_large"
    NO_USABLE_PAIR = "no_usable_pair"
    UNAUTHORIZED = "unauthorized"
    QUOTA = "quota"
    QUEUE_FULL = "queue_full"
    OVERLOADED = "overloaded"
    SILENT_CLIENT = "silent_client"


FULL = frozenset({Rejection.QUEUE_FULL, Rejection.OVERLOADED})
DOOR_STATUS = {
    Rejection.UNAUTHORIZED: 401,
    Rejection.SILENT_CLIENT: 408,
    Rejection.QUOTA: 429,
} | dict.fromkeys(FULL, 503)
CAUSES = frozenset({FailureKind.REFUSED, FailureKind.LOST, FailureKind.BUSY})
"""What no failure of the other leg can explain better, short of the request being wrong."""
RETRYABLE = CAUSES | {FailureKind.PEER}
PEER_REASONS = frozenset({"worker_lost", "peer_lost", "transfer_failed"})
"""Our workers' words for it; another reason with these statuses may well be the request's own doing."""
MOVABLE = RETRYABLE | {FailureKind.BROKE}
"""After which an answer that had begun may be continued by another pair."""
MOVABLE_STATUSES = frozenset({500, 502, 503})
"""Of those that a worker gives in words: it, or what it needs, is at fault; neither the request nor its time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The end of a leg, or of a request. `url` is the worker at fault, or empty."""

    kind: FailureKind
    status: int
    body: bytes
    content_type: bytes = JSON_TYPE
    retry_after: bytes | None = None
    url: str = ""
    text: str  # for the log
    rejection: Rejection | None = None

    @property
    def is_echo(self) -> bool:
        """Whether the worker only says that somebody cancelled: true, but never the cause."""
        return self.status == CLIENT_GONE_STATUS

    @property
    def is_root_cause(self) -> bool:
        """Whether no other leg's failure could explain this one better: the request itself is wrong."""
        return 400 <= self.status < 500 and not self.is_echo

    @property
    def is_movable(self) -> bool:
        """Whether another pair may continue an answer that had begun and ended so."""
        return self.kind in RETRYABLE or (self.kind is FailureKind.BROKE and self.status in MOVABLE_STATUSES)

    def because(self, obstacle: str) -> "Failure":
        """This failure, saying also why nothing came to its help; a worker's own words stay its own."""
        if self.kind not in (FailureKind.REFUSED, FailureKind.LOST):
            return self
        return leg_failure(self.kind, f"{self.text}; {obstacle}", self.url)

    def as_event(self) -> bytes:
        """This failure as one server-sent event with valid JSON, for a stream that had begun."""
        return b"data: " + _single_line_error(self) + b"\n\n"


def own_failure(verdict: Verdict, *, retry_after_ms: Millis) -> Failure:
    """The router's own verdict on a request."""
    retry_after = b"%d" % max(1, -(-retry_after_ms // 1000)) if verdict.reason in RETRY_AFTER else None
    rejection = Rejection.NO_USABLE_PAIR if verdict.reason is Reason.NO_USABLE_PAIR else None
    return _failure(FailureKind.OWN, verdict, verdict.status, retry_after=retry_after, rejection=rejection)


def refusal(rejection: Rejection, text: str) -> Failure:
    """A request that is wrong in itself, refused before any worker saw it."""
    status = TOO_LARGE_STATUS if rejection is Rejection.BODY_TOO_LARGE else 400
    return _failure(FailureKind.OWN, Verdict(reason=Reason.INVALID_REQUEST, text=text), status, rejection=rejection)


def turned_away(rejection: Rejection, text: str, *, retry_after_s: float = 0.0) -> Failure:
    """A request that may not come in now: a wrong key (401), silence (408), a quota (429), a full queue or too long a
    wait (503)."""
    reason = Reason.WAITING_FULL if rejection in FULL else Reason.INVALID_REQUEST
    retry_after = b"%d" % max(1, math.ceil(retry_after_s)) if retry_after_s > 0 else None
    verdict = Verdict(reason=reason, text=text)
    return _failure(FailureKind.OWN, verdict, DOOR_STATUS[rejection], retry_after=retry_after, rejection=rejection)


def leg_failure(kind: FailureKind, text: str, url: str) -> Failure:
    """A leg that ended without an answer of the worker's own."""
    verdict = Verdict(reason=Reason.PEER_LOST, text=text)
    return _failure(kind, verdict, verdict.status, url=url)


def envelope(verdict: Verdict, status: int) -> bytes:
    """The JSON body of an error."""
    return msgspec.json.encode(
        {
            "error": {
                "message": verdict.text,
                "type": error_type(status),
                "code": status,
                "reason": verdict.reason.name,
            }
        }
    )


def error_type(status: int) -> str:
    """The `type` of an error, in the words OpenAI's clients know."""
    if status == BUSY_STATUS:
        return "overloaded_error"
    return "invalid_request_error" if status < 500 else "server_error"


def prefer(first: Failure, second: Failure) -> Failure:
    """Which of two legs' failures is the cause: never a mere echo; a wrong request before a consequence of it; a worker
    that is gone or full before what the other says of it."""
    if first.is_echo != second.is_echo:
        return second if first.is_echo else first
    if first.is_root_cause != second.is_root_cause:
        return first if first.is_root_cause else second
    if (first.kind in CAUSES) != (second.kind in CAUSES):
        return first if first.kind in CAUSES else second
    return first


def kind_of_answer(status: int, body: bytes) -> FailureKind:
    """What a worker means that does not take the request."""
    if status == BUSY_STATUS:
        return FailureKind.BUSY
    if status not in (500, 502):
        return FailureKind.ANSWERED
    try:
        reason = msgspec.json.decode(body, type=_Envelope).error.reason
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return FailureKind.ANSWERED
    return FailureKind.PEER if reason in PEER_REASONS else FailureKind.ANSWERED


class _Error(msgspec.Struct, frozen=True):
    reason: str = ""


class _Envelope(msgspec.Struct, frozen=True):
    error: _Error


def _failure(
    kind: FailureKind,
    verdict: Verdict,
    status: int,
    *,
    retry_after: bytes | None = None,
    url: str = "",
    rejection: Rejection | None = None,
) -> Failure:
    return Failure(
        kind=kind,
        status=status,
        body=envelope(verdict, status),
        retry_after=retry_after,
        url=url,
        text=verdict.text,
        rejection=rejection,
    )


def _single_line_error(failure: Failure) -> bytes:
    """`{"error": {…}}` on one line: the worker's own words where they are such an object, else wrapped."""
    try:
        said = msgspec.json.decode(failure.body)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        said = None
    if isinstance(said, dict) and "error" in said:
        return msgspec.json.encode(said)
    message = failure.body.decode("utf-8", errors="replace") if failure.body else failure.text
    error = {"message": message, "type": error_type(failure.status), "code": failure.status}
    return msgspec.json.encode({"error": error})
