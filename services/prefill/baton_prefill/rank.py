"""One scheduler rank of a prefill worker: `python -m baton_prefill.rank`, started by its app."""

import sys

from baton_core.prefill.core import PrefillCore
from baton_engine.rank import Materials, Parts, read_settings_line, run_rank
from baton_engine.transfer.attempts import AttemptTable
from baton_engine.transfer.fake import FakeSender
from baton_engine.transfer.protocol import Sender
from baton_engine.transfer.sender import PageSender
from baton_engine.transfer.shm_way import ShmWay
from baton_engine.transfer.tcp_way import TcpWay
from baton_engine.transfer.ways import Way
from baton_io.config import from_json
from baton_io.logs import configure_logs
from baton_prefill.side import PrefillSide
from baton_worker.config import RankConfig

SHM_PROBE_MS = 2_000
"""How long `auto` waits for a decode rank's shared memory before it takes tcp."""


def build(materials: Materials) -> Parts:
    """A prefill core, and a sender over this rank's pool."""
    settings, place = materials.settings, materials.place
    core = PrefillCore(
        limits=settings.limits,
        pool_pages=materials.pages,
        context_tokens=materials.engine.context_tokens,
        fingerprint=materials.fingerprint,
        layout=materials.layout,
        vocab_size=materials.engine.config.vocab,
        prefix_cache=settings.prefix_cache,
        pp_size=materials.parallel.pp,
        dp_rank=place.dp_rank,
        dp_size=materials.parallel.dp,
        load_balance_method=settings.load_balance_method,
        force_query_dp_rank=settings.force_query_prefill_dp_rank,
    )
    control_port = materials.links.listen(settings.host)
    return Parts(core=core, side=PrefillSide(_sender(materials)), control_port=control_port)


def _sender(materials: Materials) -> Sender:
    if materials.backend == "fake":
        return FakeSender(materials.layout, materials.poker)
    ways: list[Way] = []  # the better one first
    pool, name, poker = materials.engine.pool, materials.incarnation, materials.poker
    table = AttemptTable(poker)
    timeout_ms, checksum = materials.settings.limits.transfer_stall_ms, materials.settings.kv_checksum
    if materials.backend in ("auto", "shm"):
        # Where tcp could do it too, a decode rank that does not answer is not waited for as long.
        probe_ms = min(timeout_ms, SHM_PROBE_MS) if materials.backend == "auto" else timeout_ms
        ways.append(ShmWay(pool, name, table, poker, connect_timeout_ms=probe_ms, checksum=checksum))
    if materials.backend in ("auto", "tcp"):
        staged = materials.settings.transfer_staging
        ways.append(TcpWay(pool, name, table, connect_timeout_ms=timeout_ms, staged=staged, checksum=checksum))
    return PageSender(table, materials.layout, materials.place.member, ways)


def main() -> int:
    """Run the rank; returns its exit status."""
    config = from_json(RankConfig, read_settings_line(sys.stdin))
    configure_logs("prefill", rank=config.rank, log_format=config.log_format, level=config.log_level)
    return run_rank(config, build)


if __name__ == "__main__":
    sys.exit(main())
