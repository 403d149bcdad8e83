"""Logs: structured events on stderr, one formatter for structlog and for the standard library's loggers.

    configure_logs("decode", rank=0, log_format="json", level="info")
    log = structlog.get_logger()
    log.info("handoff.filled", rid=rid, room=room, took_ms=12)

Every line carries a UTC timestamp, level, event, role and rank, plus what `structlog.contextvars.bound_contextvars`
(the request id) holds. Apps give uvicorn `log_config=None, access_log=False`, so that its lines come out here too.
"""

import logging
import sys
from collections.abc import MutableMapping
from typing import Any, Literal, TextIO

import structlog

LogFormat = Literal["console", "json"]

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
"""Names of levels, as the option `log_level` takes them."""

# Their INFO lines repeat, once per request or start, what our own events already say.
QUIET_LOGGERS = ("uvicorn", "uvicorn.error", "httpx", "httpcore", "asyncio", "aiohttp.access")

FIRST_FIELDS = ("timestamp", "level", "event", "role", "rank", "rid", "room")


def configure_logs(
    role: str,
    *,
    rank: int | None = None,
    log_format: LogFormat = "console",
    level: str = "info",
    stream: TextIO | None = None,
) -> None:
    """Route every log line of this process to `stream` (stderr). Call once, first thing in main.

    Raises KeyError for a level that is not in `LEVELS`.
    """
    target = sys.stderr if stream is None else stream
    identity = {"role": role} if rank is None else {"role": role, "rank": rank}

    def add_identity(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        for key, value in identity.items():
            event.setdefault(key, value)
        return event

    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        add_identity,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(target)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.ExtraAdder()], processors=_renderers(log_format, target)
        )
    )
    _take_over_stdlib(handler, LEVELS[level])


def _renderers(log_format: LogFormat, target: TextIO) -> list[structlog.typing.Processor]:
    strip = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    if log_format == "json":
        render = structlog.processors.JSONRenderer(default=str)
        return [strip, structlog.processors.format_exc_info, _order_fields, render]
    # Plain tracebacks: the pretty ones print local variables, and those hold prompts.
    console = structlog.dev.ConsoleRenderer(
        colors=target.isatty(), exception_formatter=structlog.dev.plain_traceback, pad_event_to=28, sort_keys=False
    )
    return [strip, _order_fields, _keep_on_one_line, console]


def _take_over_stdlib(handler: logging.Handler, level: int) -> None:
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level)
    logging.captureWarnings(capture=True)
    for name in QUIET_LOGGERS:
        quiet = logging.getLogger(name)
        quiet.handlers, quiet.propagate = [], True
        quiet.setLevel(max(level, logging.WARNING))
    access = logging.getLogger("uvicorn.access")
    access.handlers, access.propagate = [], False


def _order_fields(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    first = {key: event[key] for key in FIRST_FIELDS if key in event}
    return first | {key: value for key, value in event.items() if key not in first}


def _keep_on_one_line(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Quote texts with control characters: a client's request id must not forge a line of its own."""
    for key, value in event.items():
        if isinstance(value, str) and key not in ("exception", "stack") and not value.isprintable():
            event[key] = repr(value)
    return event
