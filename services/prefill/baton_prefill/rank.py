"""One scheduler rank of a prefill worker: `python -m baton_prefill.rank`, started by its app."""

import sys

from baton_core.prefill.core import PrefillCore
from baton_engine.rank import Materials, Parts, read_settings_line, run_rank
from baton_engine.transfer.auto import AutoSender
from baton_engine.transfer.fake import FakeSender
from baton_engine.transfer.protocol import Sender
from baton_engine.transfer.shm_sender import ShmSender
from baton_engine.transfer.tcp_sender import TcpSender
from baton_io.config import from_json
from baton_io.logs import configure_logs
from baton_prefill.side import PrefillSide
from baton_worker.config import RankConfig

SHM_PROBE_MS = 2_000
"""How long `auto` waits for a decode rank's shared memory before it takes tcp."""


def build(materials: Materials) -> Parts:
    """A prefill core, and a sender over this rank's pool."""
    settings, engine = materials.settings, materials.engine
    core = PrefillCore(
        limits=settings.limits,
        pool_pages=engine.pool.pages,
        page_tokens=engine.pool.shape.page_tokens,
        context_tokens=engine.context_tokens,
        fingerprint=materials.fingerprint,
    )
    control_port = materials.links.listen(settings.host)
    return Parts(core=core, side=PrefillSide(_sender(materials)), control_port=control_port)


def _sender(materials: Materials) -> Sender:
    if materials.backend == "fake":
        return FakeSender(materials.poker)
    tcp, shm = None, None
    pool, layout, name, poker = materials.engine.pool, materials.layout, materials.incarnation, materials.poker
    timeout_ms = materials.settings.limits.transfer_stall_ms
    if materials.backend in ("auto", "tcp"):
        tcp = TcpSender(pool.memory, layout, name, poker, connect_timeout_ms=timeout_ms)
    if materials.backend in ("auto", "shm"):
        # Where tcp could do it too, a decode rank that does not answer is not waited for as long.
        timeout_ms = min(timeout_ms, SHM_PROBE_MS) if tcp else timeout_ms
        shm = ShmSender(pool, layout, name, poker, connect_timeout_ms=timeout_ms)
    return AutoSender(shm=shm, tcp=tcp)


def main() -> int:
    """Run the rank; returns its exit status."""
    config = from_json(RankConfig, read_settings_line(sys.stdin))
    configure_logs("prefill", rank=config.rank, log_format=config.log_format, level=config.log_level)
    return run_rank(config, build)


if __name__ == "__main__":
    sys.exit(main())
