"""What the mains of both roles share: the configuration at start, the parts that need no event loop, and the run."""

import asyncio
import sys
import uuid
from collections.abc import Callable, Coroutine
from typing import Any

import structlog
import uvloop

from baton_core.errors import BatonError
from baton_io.config import describe
from baton_io.logs import configure_logs
from baton_worker.config import Role, WorkerConfig
from baton_worker.materials import Materials
from baton_worker.models import resolve_model
from baton_worker.tokenizer import Tokenizer

EXIT_FAILED = 1


def launch(
    config: WorkerConfig, role: Role, rank_module: str, run: Callable[[Materials], Coroutine[Any, Any, int]]
) -> int:
    """Set up logs, find the model, read its tokenizer, then run `run` in an event loop; the exit status."""
    configure_logs(role.value, log_format=config.log_format, level=config.log_level)
    log = structlog.get_logger()
    log.info("worker.configured", config=describe(config))
    try:
        model = resolve_model(config.model, config.served_model_name)
        materials = Materials(
            role=role,
            incarnation=uuid.uuid4().hex,
            model=model,
            tokenizer=Tokenizer.of_model(model.path),
            rank_command=(sys.executable, "-m", rank_module),
        )
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(run(materials))
    except (BatonError, OSError) as error:
        log.error("worker.failed", error=str(error))
        return EXIT_FAILED
