"""`baton-prefill`: a prefill worker. The app takes the requests; a process of its own, `baton_prefill.rank`, computes."""

import os
import sys
from collections.abc import Sequence

from baton_io.config import load
from baton_prefill.app import run
from baton_worker.config import PrefillConfig, Role
from baton_worker.launch import launch


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM, SIGINT or the loss of the scheduler. The exit status."""
    config = load(
        PrefillConfig,
        "prefill",
        sys.argv[1:] if argv is None else argv,
        os.environ,
        program="baton-prefill",
        description="Baton prefill worker: computes prompts and hands their KV cache over to decode workers.",
    )
    return launch(config, Role.PREFILL, "baton_prefill.rank", lambda materials: run(config, materials))


if __name__ == "__main__":
    sys.exit(main())
