"""OpenAPI documents of our HTTP ports: a table of operations in, a document out. Served at `/openapi.json`.

Bodies are described by what really decodes them, so that the description cannot fall behind.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

Schema = Mapping[str, Any]

JSON = "application/json"
TEXT = "text/plain"
EVENTS = "text/event-stream"
ANYTHING: Schema = {}
ERROR: Schema = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "code", "reason"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "code": {"type": "integer"},
                "reason": {"type": "string"},
            },
        }
    },
}
"""The one envelope of errors."""

_PLACES = "#/components/schemas/{name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """What one method of one path takes and gives. `answers`: by status (or 4XX), the media types it may come in."""

    method: str
    path: str
    summary: str
    body: type[msgspec.Struct] | Schema | None = None
    body_is_required: bool = True
    query: Sequence[str] = ()
    answers: Mapping[str, Sequence[str]] = field(default_factory=lambda: {"200": (JSON,)})
    tells_state: bool = False  # a 503 is no error, but the same description as a 200


def document(title: str, version: str, operations: Sequence[Operation]) -> bytes:
    """The document as JSON."""
    structs = [one.body for one in operations if isinstance(one.body, type)]
    refs, components = msgspec.json.schema_components(structs, ref_template=_PLACES)
    by_struct = dict(zip(structs, refs, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for one in operations:
        body = by_struct[one.body] if isinstance(one.body, type) else one.body
        paths.setdefault(one.path, {})[one.method.lower()] = _described(one, body)
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": title, "version": version},
            "paths": paths,
            "components": {"schemas": {**components, "Error": ERROR}},
        }
    )


def _described(one: Operation, body: Schema | None) -> dict[str, Any]:
    described: dict[str, Any] = {
        "summary": one.summary,
        "parameters": [
            *(
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
                for name in _in_path(one.path)
            ),
            *({"name": name, "in": "query", "required": False, "schema": {"type": "string"}} for name in one.query),
        ],
        "responses": {status: _answer(one, status, kinds) for status, kinds in one.answers.items()},
    }
    if body is not None:
        described["requestBody"] = {"required": one.body_is_required, "content": {JSON: {"schema": body}}}
    return described


def _answer(one: Operation, status: str, kinds: Sequence[str]) -> dict[str, Any]:
    is_error = status[0] in "45" and not one.tells_state
    schema: Schema = {"$ref": _PLACES.format(name="Error")} if is_error else ANYTHING
    content = {kind: {"schema": schema if kind == JSON else {"type": "string"}} for kind in kinds}
    return {"description": "", **({"content": content} if content else {})}


def _in_path(path: str) -> list[str]:
    return [part[1:-1].partition(":")[0] for part in path.split("/") if part.startswith("{")]
