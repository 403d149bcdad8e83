"""HTTP odds and ends that every route shares: reading a bounded body, the one error envelope, common headers."""

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from baton_core.errors import RETRY_AFTER, ClientError, Verdict
from baton_core.limits import Limits

INCARNATION_HEADER = "x-baton-incarnation"
REQUEST_ID_HEADER = "x-request-id"
BUDGET_HEADER = "x-baton-budget-ms"
FIRST_TOKEN_HEADER = "x-baton-first-token-us"
"""Of a stream: from the request's arrival at this worker to the first token that it sends."""

_encoder = msgspec.json.Encoder()


class BodyTooLong(ClientError):
    """A body longer than `limits.body_bytes_max`; the only refusal whose status is not its reason's."""

    status = 413


def encode_json(value: object) -> bytes:
    """`value` as compact JSON."""
    return _encoder.encode(value)


def json_response(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON answer."""
    return Response(encode_json(value), status_code=status, headers=headers, media_type="application/json")


def error_body(verdict: Verdict, status: int | None = None) -> dict[str, object]:
    """The one shape of errors, which OpenAI's clients parse: `{"error": {message, type, param, code, reason}}`."""
    code = verdict.status if status is None else status
    kind = "invalid_request_error" if code < 500 else "overloaded_error" if code == 503 else "server_error"
    reason = verdict.reason.name.lower()
    return {"error": {"message": verdict.text, "type": kind, "param": None, "code": code, "reason": reason}}


def failure(verdict: Verdict, limits: Limits, *, rid: str | None = None, status: int | None = None) -> Response:
    """The answer of a request that failed before anything was sent."""
    headers = request_id_header(rid)
    if verdict.reason in RETRY_AFTER:
        headers["retry-after"] = str(-(-limits.retry_after_ms // 1000))
    return json_response(error_body(verdict, status), verdict.status if status is None else status, headers)


def request_id_header(rid: str | None) -> dict[str, str]:
    """`x-request-id`, where the id can stand in a header."""
    return {REQUEST_ID_HEADER: rid} if rid and rid.isascii() and rid.isprintable() else {}


async def read_body(request: HttpRequest, bytes_max: int) -> bytes:
    """The whole body. Raises BodyTooLong as soon as it is known to be too long, ClientDisconnect if the client left."""
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > bytes_max:
        raise BodyTooLong(f"the body has {announced} bytes; at most {bytes_max} are allowed")
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > bytes_max:
            raise BodyTooLong(f"the body has more than {bytes_max} bytes")
        parts.append(part)
    return b"".join(parts)
