"""The OpenAPI document of a router. What a generating body may hold is the workers' to say: they judge it."""

from importlib.metadata import version
from typing import Literal

import msgspec

from baton_io.openapi import EVENTS, JSON, TEXT, Operation, document


class NewWorker(msgspec.Struct, kw_only=True):
    """Body of `POST /workers` on the admin port."""

    url: str
    role: Literal["prefill", "decode"]


_OBJECT = {"type": "object"}
_TO_ALL = {
    "type": "object",
    "properties": {"rid": {"type": ["string", "null"]}, "abort_all": {"type": ["boolean", "null"]}},
}
_ERRORS = {
    "4XX": (JSON,),
    "500": (JSON,),
    "502": (JSON,),
    "503": (JSON,),
    "504": (JSON,),
}
_GENERATE = {
    "type": "object",
    "properties": {
        "text": {"type": ["string", "array"]},
        "input_ids": {"type": "array"},
        "sampling_params": {"type": ["object", "array"]},
        "stream": {"type": ["boolean", "null"]},
        "return_logprob": {"type": ["boolean", "array", "null"]},
    },
}
_SAMPLED = {
    "model": {"type": ["string", "null"]},
    "max_tokens": {"type": ["integer", "null"]},
    "temperature": {"type": ["number", "null"]},
    "n": {"type": ["integer", "null"]},
    "stop": {"type": ["string", "array", "null"]},
    "stream": {"type": ["boolean", "null"]},
}
_COMPLETION = {
    "type": "object",
    "required": ["prompt"],
    "properties": {"prompt": {"type": ["string", "array"]}, **_SAMPLED},
}
_CHAT = {
    "type": "object",
    "required": ["messages"],
    "properties": {"messages": {"type": "array", "items": _OBJECT}, **_SAMPLED},
}

OPERATIONS = (
    *(
        Operation(method="POST", path=path, summary=summary, body=body, answers={"200": (JSON, EVENTS), **_ERRORS})
        for path, summary, body in (
            ("/generate", "Generate, as SGLang does", _GENERATE),
            ("/v1/completions", "Complete a text, as OpenAI does", _COMPLETION),
            ("/v1/chat/completions", "Answer a chat, as OpenAI does", _CHAT),
        )
    ),
    *(
        Operation(method="GET", path=path, summary=summary, answers={"200": (JSON,), "503": (JSON,)}, tells_state=True)
        for path, summary in (("/health", "Are the workers being watched?"), ("/ready", "Is there a usable pair?"))
    ),
    *(Operation(method="GET", path=path, summary="This router") for path in ("/server_info", "/get_server_info")),
    Operation(
        method="GET", path="/v1/models", summary="Models of a decode worker", answers={"200": (JSON,), "503": (JSON,)}
    ),
    Operation(method="GET", path="/metrics", summary="Prometheus' text format", answers={"200": (TEXT,)}),
    *(
        Operation(
            method="POST",
            path=path,
            summary=summary,
            body=_TO_ALL,
            body_is_required=False,
            answers={"200": (JSON,), "4XX": (JSON,), "5XX": (JSON,)},
            tells_state=True,
        )
        for path, summary in (
            ("/flush_cache", "Empty every worker's cache"),
            ("/abort_request", "End requests everywhere"),
        )
    ),
)


_ADMIN = {"200": (JSON,), "4XX": (JSON,)}
ADMIN_OPERATIONS = (
    Operation(method="GET", path="/", summary="A page for people", answers={"200": ("text/html",)}),
    Operation(method="GET", path="/workers", summary="Every worker"),
    Operation(
        method="POST",
        path="/workers",
        summary="One more worker",
        body=NewWorker,
        answers={"201": (JSON,), "4XX": (JSON,)},
    ),
    Operation(method="POST", path="/workers/{url}/drain", summary="New requests avoid it", answers=_ADMIN),
    Operation(method="POST", path="/workers/{url}/undrain", summary="They do not any more", answers=_ADMIN),
    Operation(method="DELETE", path="/workers/{url}", summary="It is drained and forgotten", answers=_ADMIN),
)


def router_document() -> bytes:
    """As it is served."""
    return document("Baton router", version("baton"), OPERATIONS)


def admin_document() -> bytes:
    """That of the admin port."""
    return document("Baton router, admin", version("baton"), ADMIN_OPERATIONS)
