"""What a registry's handlers take and give, and how they read untrusted queries and bodies."""

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl

import msgspec
from starlette.types import Receive, Scope

from baton_core.errors import ClientError
from baton_core.registry import Instance
from baton_core.request import Incarnation

BODY_BYTES_MAX = 64 * 1024
"""Longest body that is read; more is a 413."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request, as far as handlers need it."""

    query: bytes = b""
    body: bytes = b""
    path: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer; `about` is the instance that the headers name."""

    status: int
    body: bytes
    json: bool = False
    about: Instance | None = None


async def read_body(scope: Scope, receive: Receive) -> bytes | None:
    """The whole body, or None where it is too long. Raises ClientError where the client left in the middle of it."""
    announced = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
    if not announced.isdigit() or len(announced) > 9 or int(announced) > BODY_BYTES_MAX:
        return None
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientError("the client left before its body was complete")
        body += message.get("body", b"")
        if len(body) > BODY_BYTES_MAX:
            return None
        if not message.get("more_body", False):
            return bytes(body)


def parse_query(raw: bytes) -> dict[bytes, bytes]:
    """The query string as pairs; of repeated keys the last counts."""
    if b"%" in raw or b"+" in raw:
        return {key.encode(): value.encode() for key, value in parse_qsl(raw.decode("latin-1"), keep_blank_values=True)}
    # Nothing is escaped in what workers send: this is three times as fast.
    parts = (part.partition(b"=") for part in raw.split(b"&"))
    return {key: value for key, _, value in parts}


def integer_of(name: bytes, raw: bytes) -> int:
    """The number in a query value. Raises ClientError naming it."""
    try:
        return int(raw)
    except ValueError as error:
        raise ClientError(f"{name.decode()} must be an integer, not {raw[:80].decode('utf-8', 'replace')!r}") from error


def dp_rank_of(call: Call) -> int | None:
    """The query parameter `dp_rank`. Raises ClientError."""
    value = parse_query(call.query).get(b"dp_rank")
    return integer_of(b"dp_rank", value) if value else None


def incarnation_of(call: Call) -> Incarnation | None:
    """The query parameter `incarnation`."""
    value = parse_query(call.query).get(b"incarnation")
    return value.decode("utf-8", "replace") if value else None


def json_of(body: bytes) -> object:
    """The body as JSON. Raises ClientError."""
    try:
        value: object = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ClientError(f"the body is not JSON: {error}") from error
    return value


def object_of(body: bytes) -> dict[str, object]:
    """The body as a JSON object. Raises ClientError."""
    value = json_of(body)
    if not isinstance(value, dict):
        raise ClientError(f"the body must be a JSON object, not {type(value).__name__}")
    return value


def integer_field(body: Mapping[str, object], name: str) -> int:
    """A required integer of a body. Raises ClientError naming it."""
    value = body.get(name)
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 20:
        return int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ClientError(
            f"{name} is missing" if name not in body else f"{name} must be an integer, not {value!r}"[:200]
        )
    return value


def rooms_field(body: Mapping[str, object]) -> list[tuple[int, int]]:
    """(room, DP rank) of one `bootstrap_room` and `dp_rank`, as SGLang sends it, or of each in `dp_ranks`.

    Raises ClientError naming what is wrong.
    """
    many = body.get("dp_ranks")
    if many is None:
        return [(integer_field(body, "bootstrap_room"), integer_field(body, "dp_rank"))]
    return _pairs("dp_ranks", many)


def over_field(body: Mapping[str, object]) -> list[tuple[int, int]]:
    """(room, DP rank) of each room in `over`, which ran there and does not any more. Raises ClientError."""
    many = body.get("over")
    return [] if many is None else _pairs("over", many)


def _pairs(name: str, many: object) -> list[tuple[int, int]]:
    if not isinstance(many, dict):
        raise ClientError(f"{name} must be an object from room to DP rank, not {type(many).__name__}")
    return [
        (integer_field({"bootstrap_room": room}, "bootstrap_room"), integer_field({"dp_rank": rank}, "dp_rank"))
        for room, rank in many.items()
    ]


def instance_field(body: Mapping[str, object]) -> str | None:
    """The optional `instance` of a body. Raises ClientError."""
    value = body.get("instance")
    if value is not None and not isinstance(value, str):
        raise ClientError(f"instance must be a text, not {type(value).__name__}")
    return value or None
