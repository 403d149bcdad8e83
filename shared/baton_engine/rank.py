"""The life of one scheduler rank process: settings in on stdin, engine up, driver turning, and out with its app.

The first line on stdin is the settings; the pipe then stays open, and its end means that the app is gone: the rank exits
at once, because nobody is left to answer.
"""

import gc
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol, TextIO

import structlog
import zmq

from baton_core.agreement import GateArgs
from baton_core.decode.core import DecodeCore
from baton_core.errors import EngineError
from baton_core.fingerprint import fingerprint
from baton_core.kv_layout import UnitLayout
from baton_core.limits import Limits
from baton_core.prefill.core import PrefillCore
from baton_core.ranks import Parallel, Place, member_name
from baton_core.request import Incarnation
from baton_core.unit_log import Report
from baton_engine.backup import HostStore
from baton_engine.compute import Compute
from baton_engine.driver import LeaderLoop, MemberLoop, Poker, Wiring, now_ms
from baton_engine.gauges import Gauges
from baton_engine.loading import Engine, load_engine
from baton_engine.meeting import Meeting
from baton_engine.performer import Reach, Side
from baton_io.ipc import TO_APP, LoadProgress, RankFailed, RankReady
from baton_io.links import Links

log = structlog.get_logger(__name__)

PROTOCOL_VERSION = 3
"""Of messages, page orders, metadata rows and the KV stream; part of the fingerprint."""

EXIT_ORPHANED = 3
EXIT_FAILED = 1
PROGRESS_PERIOD_S = 0.2
CLOSE_TIMEOUT_S = 5.0
SWITCH_INTERVAL_S = 0.001
"""How soon the loop gets the interpreter back from the compute thread (CPython's default is 5 ms)."""


class RankSettings(Protocol):
    """What a rank must be told; `baton_worker.config.RankConfig` is one."""

    @property
    def rank(self) -> int: ...  # in the worker
    @property
    def parallel(self) -> Parallel: ...
    @property
    def incarnation(self) -> str: ...  # of the worker
    @property
    def ipc_address(self) -> str: ...
    @property
    def rendezvous(self) -> str: ...
    @property
    def log_address(self) -> str: ...
    @property
    def run_dir(self) -> str: ...
    @property
    def control(self) -> str: ...
    @property
    def load_balance_method(self) -> str: ...
    @property
    def force_query_prefill_dp_rank(self) -> bool: ...
    @property
    def model_path(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def transfer(self) -> str: ...
    @property
    def transfer_staging(self) -> bool: ...
    @property
    def kv_checksum(self) -> bool: ...
    @property
    def shm_dir(self) -> str: ...
    @property
    def host(self) -> str: ...
    @property
    def advertise_host(self) -> str: ...
    @property
    def page_tokens(self) -> int: ...
    @property
    def kv_tokens(self) -> int: ...
    @property
    def prefix_cache(self) -> bool: ...
    @property
    def threads(self) -> int: ...
    @property
    def cores(self) -> tuple[int, ...]: ...
    @property
    def traces(self) -> bool: ...
    @property
    def limits(self) -> Limits: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What one side contributes to a rank."""

    core: PrefillCore | DecodeCore
    side: Side
    control_port: int  # where the rank listens for control links, or 0
    backup: HostStore | None = None  # decode: where the KV cache of retracted requests waits


@dataclass(frozen=True, slots=True, kw_only=True)
class Materials:
    """What a side is built from."""

    settings: RankSettings
    engine: Engine
    links: Links
    poker: Poker
    parallel: Parallel
    place: Place
    layout: UnitLayout  # of the whole unit
    pages: int  # of the smallest pool of the unit
    fingerprint: str
    incarnation: Incarnation  # this rank's own name
    backend: str


Build = Callable[[Materials], Parts]


def read_settings_line(stdin: TextIO) -> str:
    """The settings, as JSON; from now on the end of stdin ends this process."""
    line = stdin.readline()
    threading.Thread(target=_exit_with_app, args=(stdin,), name="app-watch", daemon=True).start()
    return line


def run_rank(settings: RankSettings, build: Build) -> int:
    """Load, serve until the app says stop, and clean up. Returns the exit status; the app is told why on failure."""
    _settle(settings)
    context = zmq.Context(io_threads=1)
    app: zmq.Socket[bytes] = context.socket(zmq.PAIR)
    app.setsockopt(zmq.LINGER, 1_000)
    app.connect(settings.ipc_address)
    try:
        _serve(settings, build, app)
    except EngineError as error:
        log.error("rank.failed", error=error.verdict.text)
        app.send(TO_APP.encode(RankFailed(rank=settings.rank, text=error.verdict.text)))
        return EXIT_FAILED
    except Exception as error:
        # Whatever it is, this unit cannot go on: say so, and let the app end it as a whole.
        log.exception("rank.failed")
        app.send(TO_APP.encode(RankFailed(rank=settings.rank, text=f"{type(error).__name__}: {error}")))
        return EXIT_FAILED
    finally:
        app.close()
        context.term()
    return 0


def _serve(settings: RankSettings, build: Build, app: "zmq.Socket[bytes]") -> None:
    began = time.monotonic()
    with ExitStack() as owned:  # closed in reverse: transfers before the memory they move, groups last
        materials, meeting = _materials(settings, owned, _Progress(settings.rank, app))
        compute = Compute(materials.engine.runner, materials.poker.computed, now_ms)
        owned.callback(compute.close, CLOSE_TIMEOUT_S)
        parts = build(materials)
        owned.callback(parts.side.attempts.close)
        if parts.backup is not None:
            owned.callback(parts.backup.close, CLOSE_TIMEOUT_S)
        loop = _loop(materials, parts, meeting, compute, app)
        load_seconds = time.monotonic() - began
        app.send(TO_APP.encode(_ready(materials, parts, load_seconds)))
        log.info("rank.ready", pages=materials.pages, load_seconds=round(load_seconds, 2))
        loop.run()
        meeting.farewell()  # not where the loop raised: then the app hears what happened before anybody else leaves


def _materials(settings: RankSettings, owned: ExitStack, progress: "_Progress") -> tuple[Materials, Meeting]:
    """Meet the siblings and load; whatever must be closed is `owned`. Raises EngineError."""
    backend = _backend(settings.transfer)
    meeting = Meeting(settings)
    owned.callback(meeting.close)
    engine = load_engine(
        model_path=settings.model_path,
        dtype=settings.dtype,
        device=settings.device,
        kv_tokens=settings.kv_tokens,
        page_tokens=settings.page_tokens,
        metadata_rows=settings.limits.metadata_rows,
        threads=settings.threads or max(1, len(settings.cores)),
        progress=progress,
        parallel=settings.parallel,
        rank=settings.rank,
        groups=meeting.tensors,
    )
    owned.callback(engine.close)
    # What was loaded stays: the collector need not look at it again and again.
    gc.collect()
    gc.freeze()
    name = member_name(settings.incarnation, meeting.place.dp_rank, meeting.place.member)
    links = Links(name, settings.limits)
    owned.callback(links.close)
    # Which way pages travel is agreed order by order; a worker that moves nothing fits only one that moves nothing.
    text = fingerprint({**engine.fingerprint_fields, "protocol": PROTOCOL_VERSION, "moves_kv": backend != "fake"})
    meeting.gather()
    materials = Materials(
        settings=settings,
        engine=engine,
        links=links,
        poker=Poker(),
        parallel=settings.parallel,
        place=meeting.place,
        layout=engine.layout,
        pages=meeting.least(engine.pool.pages),
        fingerprint=text,
        incarnation=name,
        backend=backend,
    )
    return materials, meeting


def _loop(
    materials: Materials, parts: Parts, meeting: Meeting, compute: Compute, app: "zmq.Socket[bytes]"
) -> LeaderLoop | MemberLoop:
    settings, place = materials.settings, materials.place
    gauges = Gauges(settings.rank, parts.side.attempts.tally, traces=settings.traces)
    wiring = Wiring(
        core=parts.core,
        poker=materials.poker,
        limits=settings.limits,
        gauges=gauges,
        parallel=settings.parallel,
        place=place,
    )

    def report(seen: Report) -> None:
        if isinstance(loop, LeaderLoop):
            loop.take_report(seen)
        else:
            meeting.note(seen)

    reach = Reach(
        side=parts.side,
        links=materials.links,
        app=app,
        compute=compute,
        groups=meeting.groups,
        gate=GateArgs(backend=materials.backend),
        leads=place.leads,
        report=report,
        backup=parts.backup,
    )
    loop: LeaderLoop | MemberLoop
    if place.leads:
        loop = LeaderLoop(wiring, reach, meeting.leader, meeting.rounds)
    else:
        assert meeting.member is not None
        loop = MemberLoop(wiring, reach, meeting.member)
    return loop


def _settle(settings: RankSettings) -> None:
    if settings.cores:
        os.sched_setaffinity(0, settings.cores)
    sys.setswitchinterval(SWITCH_INTERVAL_S)


def _backend(transfer: str) -> str:
    if transfer in ("auto", "shm", "tcp", "fake"):
        return transfer
    raise EngineError(f"transfer backend {transfer!r} is not available here: use --transfer auto, shm or tcp")


def _ready(materials: Materials, parts: Parts, load_seconds: float) -> RankReady:
    settings, engine = materials.settings, materials.engine
    return RankReady(
        rank=settings.rank,
        pid=os.getpid(),
        rank_host=settings.advertise_host,
        rank_port=parts.control_port,
        fingerprint=materials.fingerprint,
        layout=materials.layout.to_text(),
        kv_pages=materials.pages,
        page_tokens=engine.pool.shape.page_tokens,
        kv_bytes=engine.pool.pages * engine.pool.page_bytes,
        context_tokens=engine.context_tokens,
        kv_dtype=settings.dtype,
        load_seconds=load_seconds,
    )


class _Progress:
    """Tells the app how far loading is, a few times a second."""

    def __init__(self, rank: int, app: "zmq.Socket[bytes]") -> None:
        self._rank = rank
        self._app = app
        self._said_at = 0.0

    def __call__(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._said_at >= PROGRESS_PERIOD_S or done == total:
            self._said_at = now
            self._app.send(TO_APP.encode(LoadProgress(rank=self._rank, what=what, done=done, total=total)))


def _exit_with_app(stdin: TextIO) -> None:
    # Nothing more is ever written; the read returns when the app's end of the pipe closes, however it died.
    stdin.read()
    os._exit(EXIT_ORPHANED)
