"""One scheduler rank of a decode worker: `python -m baton_decode.rank`, started by its app."""

import sys

from baton_core.decode.core import DecodeCore
from baton_decode.side import DecodeSide
from baton_engine.rank import Materials, Parts, read_settings_line, run_rank
from baton_engine.transfer.fake import FakeReceiver
from baton_engine.transfer.protocol import Receiver
from baton_engine.transfer.tcp_receiver import TcpReceiver
from baton_io.config import from_json
from baton_io.logs import configure_logs
from baton_worker.config import RankConfig


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
    return TcpReceiver(
        engine.pool.memory,
        engine.pool.page_bytes,
        engine.rows,
        materials.poker,
        host=settings.host,
        advertise_host=settings.advertise_host,
    )


def main() -> int:
    """Run the rank; returns its exit status."""
    config = from_json(RankConfig, read_settings_line(sys.stdin))
    configure_logs("decode", rank=config.rank, log_format=config.log_format, level=config.log_level)
    return run_rank(config, build)


if __name__ == "__main__":
    sys.exit(main())
