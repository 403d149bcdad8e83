"""The OpenAPI document of a worker."""

from importlib.metadata import version

import msgspec

from baton_io.openapi import EVENTS, JSON, TEXT, Operation, document
from baton_worker.ops import AbortBody, PauseBody
from baton_worker.schemas import ChatBody, CompletionBody, GenerateBody

_ERRORS = {"4XX": (JSON,), "500": (JSON,), "502": (JSON,), "503": (JSON,), "504": (JSON,)}
_GENERATED = {"200": (JSON, EVENTS), **_ERRORS}
_STATE = {"200": (JSON,), "503": (JSON,)}


def _generating(path: str, body: type[msgspec.Struct], summary: str) -> Operation:
    return Operation(method="POST", path=path, summary=summary, body=body, answers=_GENERATED)


OPERATIONS = (
    _generating("/generate", GenerateBody, "Generate, as SGLang does"),
    _generating("/v1/completions", CompletionBody, "Complete a text, as OpenAI does"),
    _generating("/v1/chat/completions", ChatBody, "Answer a chat, as OpenAI does"),
    Operation(
        method="GET", path="/health", summary="Does every rank make progress?", answers={"200": (TEXT,), "503": (TEXT,)}
    ),
    Operation(method="GET", path="/ready", summary="Are requests taken?", answers=_STATE, tells_state=True),
    Operation(
        method="GET",
        path="/health_generate",
        summary="Does every unit compute a token?",
        answers={"200": (TEXT,), "503": (JSON,)},
    ),
    *(
        Operation(method="GET", path=path, summary=summary)
        for path, summary in (
            ("/model_info", "The model"),
            ("/get_model_info", "The model"),
            ("/server_info", "This worker"),
            ("/get_server_info", "This worker"),
            ("/v1/models", "The one model, as OpenAI lists them"),
            ("/v1/loads", "Load of each unit"),
        )
    ),
    *(
        Operation(
            method=method,
            path="/flush_cache",
            summary="Empty the cache",
            answers={"200": (TEXT,), "400": (TEXT,), "503": (JSON,)},
        )
        for method in ("GET", "POST")
    ),
    Operation(
        method="POST",
        path="/abort_request",
        summary="End one request, or all",
        body=AbortBody,
        body_is_required=False,
        answers={"200": (), "4XX": (JSON,)},
    ),
    Operation(
        method="POST",
        path="/pause_generation",
        summary="Compute nothing until told otherwise",
        body=PauseBody,
        body_is_required=False,
        answers={"200": (JSON,), "4XX": (JSON,), "503": (JSON,)},
    ),
    Operation(
        method="POST",
        path="/continue_generation",
        summary="Compute again",
        answers={"200": (JSON,), "409": (JSON,), "503": (JSON,)},
    ),
    Operation(method="POST", path="/drain", summary="Take no more requests"),
    Operation(method="GET", path="/metrics", summary="Prometheus' text format", answers={"200": (TEXT,)}),
    Operation(method="GET", path="/debug/snapshot", summary="The numbers as of now", answers=_STATE),
)


def worker_document() -> bytes:
    """As it is served."""
    return document("Baton worker", version("baton"), OPERATIONS)
