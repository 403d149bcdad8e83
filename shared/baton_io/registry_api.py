"""The OpenAPI document of a registry: the service's, and that of a prefill worker's own."""

from importlib.metadata import version

from baton_io.openapi import JSON, TEXT, Operation, document

_WRITTEN = {"200": (TEXT,), "400": (TEXT,), "401": (TEXT,), "413": (TEXT,), "503": (TEXT,)}
_RANK = {"type": ["integer", "string"]}
_RANK_FIELDS = [
    f"{axis}_{what}" for axis in ("attn_tp", "attn_cp", "attn_dp", "pp", "system_dp") for what in ("size", "rank")
]
_REGISTRATION = {
    "type": "object",
    "required": [*_RANK_FIELDS, "rank_ip", "rank_port", "page_size", "kv_cache_dtype"],
    "properties": {
        **dict.fromkeys(_RANK_FIELDS, _RANK),
        "rank_ip": {"type": "string"},
        "rank_port": _RANK,
        "page_size": {"type": ["integer", "string", "null"]},
        "kv_cache_dtype": {"type": ["string", "null"]},
        "load_balance_method": {"type": ["string", "null"]},
        "instance": {"type": ["string", "null"]},
        "incarnation": {"type": ["string", "null"]},
        "lease_ms": {"type": ["integer", "null"]},
    },
}
_ROOM = {
    "type": "object",
    "properties": {
        "bootstrap_room": _RANK,
        "dp_rank": _RANK,
        "dp_ranks": {"type": "object", "additionalProperties": _RANK},
        "instance": {"type": ["string", "null"]},
    },
}
_ROOMS = {
    "type": "object",
    "required": ["bootstrap_rooms"],
    "properties": {"bootstrap_rooms": {"type": "array", "items": _RANK}, "instance": {"type": ["string", "null"]}},
}
_ROUTE_QUERY = ("prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank", "instance")

OPERATIONS = (
    Operation(method="GET", path="/health", summary="Somebody listens", answers={"200": (TEXT,)}),
    Operation(
        method="GET",
        path="/route",
        summary="The layout of a prefill worker, or where one rank listens",
        query=_ROUTE_QUERY,
        answers={"200": (JSON,), "400": (TEXT,), "404": (TEXT,), "503": (TEXT,)},
    ),
    Operation(
        method="PUT",
        path="/route",
        summary="A rank registers",
        body=_REGISTRATION,
        answers={**_WRITTEN, "409": (TEXT,)},
    ),
    Operation(
        method="POST", path="/register_dp_rank", summary="On which DP rank rooms run", body=_ROOM, answers=_WRITTEN
    ),
    Operation(
        method="POST",
        path="/query_dp_ranks",
        summary="DP ranks of rooms",
        body=_ROOMS,
        answers={"200": (JSON,), "400": (TEXT,), "413": (TEXT,)},
    ),
    Operation(method="GET", path="/v1/instances", summary="Who is registered", query=("instance",)),
    Operation(
        method="PUT",
        path="/v1/instances/{instance}/lease",
        summary="A worker still lives",
        query=("incarnation",),
        answers={**_WRITTEN, "404": (TEXT, JSON)},
    ),
    Operation(
        method="DELETE",
        path="/v1/instances/{instance}",
        summary="A worker, or one DP rank of it, leaves",
        query=("incarnation", "dp_rank"),
        answers={**_WRITTEN, "404": (TEXT, JSON)},
    ),
)


def registry_document() -> bytes:
    """As it is served."""
    return document("Baton bootstrap registry", version("baton"), OPERATIONS)
