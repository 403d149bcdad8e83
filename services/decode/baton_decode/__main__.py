"""`baton-decode`: a decode worker. The app takes the requests; a process of its own, `baton_decode.rank`, decodes."""

import os
import sys
from collections.abc import Sequence

from baton_decode.app import run
from baton_io.config import load
from baton_worker.config import DecodeConfig, Role
from baton_worker.launch import launch


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM, SIGINT or the loss of the scheduler. The exit status."""
    config = load(
        DecodeConfig,
        "decode",
        sys.argv[1:] if argv is None else argv,
        os.environ,
        program="baton-decode",
        description="Baton decode worker: takes over computed prompts from prefill workers and streams the answers.",
    )
    return launch(config, Role.DECODE, "baton_decode.rank", lambda materials: run(config, materials))


if __name__ == "__main__":
    sys.exit(main())
