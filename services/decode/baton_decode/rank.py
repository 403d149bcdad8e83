"""One scheduler rank of a decode worker: `python -m baton_decode.rank`, started by its app."""

import sys

import structlog

from baton_core.decode.core import DecodeCore
from baton_core.errors import EngineError
from baton_decode.side import DecodeSide
from baton_engine.rank import Materials, Parts, read_settings_line, run_rank
from baton_engine.transfer.auto import AutoReceiver
from baton_engine.transfer.fake import FakeReceiver
from baton_engine.transfer.protocol import Receiver
from baton_engine.transfer.shm_receiver import ShmReceiver
from baton_engine.transfer.tcp_receiver import TcpReceiver
from baton_io.config import from_json
from baton_io.logs import configure_logs
from baton_worker.config import RankConfig

log = structlog.get_logger(__name__)


def build(materials: Materials) -> Parts:
    """A decode core, and a receiver over this rank's pool and rows."""
    settings, engine = materials.settings, materials.engine
    core = DecodeCore(
        limits=settings.limits,
        pool_pages=engine.pool.pages,
        page_tokens=engine.pool.shape.page_tokens,
        context_tokens=engine.context_tokens,
        fingerprint=materials.fingerprint,
    )
    side = DecodeSide(_receiver(materials), engine.rows, materials.links, materials.layout, materials.incarnation)
    return Parts(core=core, side=side, control_port=0)


def _receiver(materials: Materials) -> Receiver:
    engine, settings = materials.engine, materials.settings
    if materials.backend == "fake":
        return FakeReceiver(engine.rows, materials.poker)
    if materials.backend == "shm":
        return _shm_receiver(materials)
    tcp = TcpReceiver(
        engine.pool.memory,
        engine.pool.page_bytes,
        engine.rows,
        materials.poker,
        host=settings.host,
        advertise_host=settings.advertise_host,
    )
    if materials.backend == "tcp":
        return tcp
    try:
        return AutoReceiver(_shm_receiver(materials), tcp)
    except EngineError as error:
        log.warning("transfer.without_shm", text=error.verdict.text)
        return tcp


def _shm_receiver(materials: Materials) -> ShmReceiver:
    engine, settings = materials.engine, materials.settings
    return ShmReceiver(engine.pool, engine.rows, materials.poker, directory=settings.shm_dir)


def main() -> int:
    """Run the rank; returns its exit status."""
    config = from_json(RankConfig, read_settings_line(sys.stdin))
    configure_logs("decode", rank=config.rank, log_format=config.log_format, level=config.log_level)
    return run_rank(config, build)


if __name__ == "__main__":
    sys.exit(main())
