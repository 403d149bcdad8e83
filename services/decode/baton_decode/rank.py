"""One scheduler rank of a decode worker: `python -m baton_decode.rank`, started by its app."""

import sys

import structlog

from baton_core.decode.core import DecodeCore
from baton_core.errors import EngineError
from baton_decode.side import DecodeSide
from baton_engine.backup import HostStore
from baton_engine.rank import Materials, Parts, read_settings_line, run_rank
from baton_engine.transfer.attempts import AttemptTable
from baton_engine.transfer.fake import FakeReceiver
from baton_engine.transfer.pool_bytes import PoolTarget
from baton_engine.transfer.protocol import Receiver
from baton_engine.transfer.receiver import Door, PageReceiver
from baton_engine.transfer.shm_door import ShmDoor
from baton_engine.transfer.staging import StagingRing
from baton_engine.transfer.tcp_door import TcpDoor
from baton_io.config import from_json
from baton_io.logs import configure_logs
from baton_worker.config import RankConfig

log = structlog.get_logger(__name__)


def build(materials: Materials) -> Parts:
    """A decode core, a receiver over this rank's pool and rows, and room on the host for what is retracted."""
    core = DecodeCore(
        limits=materials.settings.limits,
        pool_pages=materials.pages,
        context_tokens=materials.engine.context_tokens,
        fingerprint=materials.fingerprint,
        layout=materials.layout,
        pp_size=materials.parallel.pp,
        vocab_size=materials.engine.config.vocab,
    )
    side = DecodeSide(
        _receiver(materials),
        materials.engine.rows,
        materials.links,
        layout=materials.layout,
        place=materials.place,
        name=materials.incarnation,
    )
    backup = HostStore(materials.engine.pool, materials.settings.limits.backup_pages, materials.poker)
    return Parts(core=core, side=side, control_port=0, backup=backup)


def _receiver(materials: Materials) -> Receiver:
    engine, settings = materials.engine, materials.settings
    if materials.backend == "fake":
        return FakeReceiver(engine.rows, materials.poker)
    doors: list[Door] = []
    table = AttemptTable(materials.poker)
    if materials.backend in ("auto", "shm"):
        try:
            doors.append(ShmDoor(engine.pool, engine.rows, table, directory=settings.shm_dir))
        except EngineError as error:
            if materials.backend == "shm":
                raise
            log.warning("transfer.without_shm", text=error.verdict.text)
    if materials.backend in ("auto", "tcp"):
        doors.append(
            TcpDoor(
                engine.pool,
                engine.rows,
                table,
                host=settings.host,
                advertise_host=settings.advertise_host,
                staging=StagingRing(PoolTarget(engine.pool), table, materials.poker)
                if settings.transfer_staging
                else None,
            )
        )
    return PageReceiver(
        table, materials.layout, materials.place.member, engine.rows, doors, checksum=settings.kv_checksum
    )


def main() -> int:
    """Run the rank; returns its exit status."""
    config = from_json(RankConfig, read_settings_line(sys.stdin))
    configure_logs("decode", rank=config.rank, log_format=config.log_format, level=config.log_level)
    return run_rank(config, build)


if __name__ == "__main__":
    sys.exit(main())
