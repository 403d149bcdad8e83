"""`baton-router`: read the configuration, build the router, serve until told to stop."""

import gc
import os
import random
import signal
import sys

import structlog
import uvicorn

from baton_io.config import describe, load
from baton_io.logs import configure_logs
from baton_router.app import build
from baton_router.config import RouterConfig
from baton_router.keys import KeysError

IDLE_CLIENT_S = 75
"""An idle client connection is kept longer than most clients keep it, so that they, not we, close it first."""


def main() -> None:
    """SIGTERM or Ctrl-C: accept nothing more, let streams finish within `drain_ms`, then exit."""
    config = load(
        RouterConfig,
        "router",
        sys.argv[1:],
        os.environ,
        program="baton-router",
        description="One address for clients: sends each request to a prefill and a decode worker at once.",
    )
    configure_logs("router", log_format=config.log_format, level=config.log_level)
    structlog.get_logger().info("router.started", config=describe(config))
    # uvicorn drains, then raises the signal again: a router that was told to stop and did has not failed.
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(0))
    # Seeded by the system once: rooms must not repeat, and nothing secret is drawn from it.
    draw = random.Random(random.SystemRandom().getrandbits(256)).getrandbits
    try:
        app = build(config, draw)
    except KeysError as error:
        sys.exit(f"baton-router: keys_file {config.keys_file}: {error}")
    except (OSError, ValueError) as error:
        sys.exit(f"baton-router: {error}")
    # What was loaded stays. A collector that looked at it again would make every stream wait for as long.
    gc.collect()
    gc.freeze()
    uvicorn.run(
        app,
        host=config.host,
        port=config.port,
        http=app.http,
        loop="uvloop",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=IDLE_CLIENT_S,
        timeout_graceful_shutdown=max(1, config.limits.drain_ms // 1000),
    )


if __name__ == "__main__":
    main()
