"""The units of a worker: each an attention-DP rank with its processes, led by member 0, and lost as a whole."""

import asyncio
from collections.abc import Sequence

import structlog

from baton_core.errors import EngineError, Overloaded
from baton_core.limits import Millis
from baton_core.ranks import Parallel
from baton_io.ipc import LoadProgress, Ping, RankReady, Snapshot
from baton_worker.rank_link import ToRank
from baton_worker.rank_process import Rank

log = structlog.get_logger()


class Unit:
    """One attention-DP rank. `lost` says why it is over; then it takes nothing any more."""

    def __init__(self, dp_rank: int, ranks: Sequence[Rank]) -> None:
        self.dp_rank = dp_rank
        self.ranks = tuple(ranks)  # by member
        self.lost = ""

    @property
    def leader(self) -> Rank:
        """The rank that requests go to."""
        return self.ranks[0]

    def send(self, message: ToRank) -> None:
        """To the leader. Raises Overloaded when it does not read."""
        if not self.lost:
            self.leader.send(message)

    def tell(self, message: ToRank) -> None:
        """To the leader, what cannot be refused; one that takes nothing is left to the watch over its progress."""
        tell(self.leader, message)

    def lose(self, why: str) -> None:
        """A rank is gone: so is the whole unit."""
        self.lost = why
        for rank in self.ranks:
            rank.kill()


def tell(rank: Rank, message: ToRank) -> None:
    """Send, and only log where the rank does not read."""
    try:
        rank.send(message)
    except Overloaded as error:
        log.warning("rank.not_reading", rank=rank.place.rank, message=type(message).__name__, error=str(error))


class Units:
    """All units of a worker, by DP rank."""

    def __init__(self, parallel: Parallel, ranks: Sequence[Rank]) -> None:
        assert [rank.place.rank for rank in ranks] == list(range(parallel.ranks)), "every rank once, in order"
        members = parallel.members
        self.ranks = tuple(ranks)
        self.units = tuple(Unit(dp, ranks[dp * members : (dp + 1) * members]) for dp in range(parallel.dp))

    def __getitem__(self, dp_rank: int) -> Unit:
        return self.units[dp_rank]

    @property
    def live(self) -> list[Unit]:
        """Units that are not lost."""
        return [unit for unit in self.units if not unit.lost]

    @property
    def progressing(self) -> bool:
        """Whether every rank is loaded and makes progress."""
        return all(rank.heard.progress.lively for rank in self.ranks)

    @property
    def progress_age_ms(self) -> Millis:
        """How long the slowest rank of the units that are not lost has made no progress."""
        return max((rank.heard.progress.age_ms for unit in self.live for rank in unit.ranks), default=0)

    @property
    def bad_frames(self) -> int:
        """Frames from all ranks that were no messages."""
        return sum(rank.bad_frames for rank in self.ranks)

    @property
    def ready(self) -> tuple[RankReady, ...] | None:
        """What every rank said when it was ready, by rank; None until all have."""
        said = [rank.heard.ready for rank in self.ranks]
        readies = tuple(one for one in said if one is not None)
        return readies if len(readies) == len(said) else None

    def loading(self) -> LoadProgress | None:
        """How far loading is: of the rank that is least far; None where nobody loads."""
        said = [rank.heard.loading for rank in self.ranks]
        slowest = min((one for one in said if one is not None), key=_share_loaded, default=None)
        if slowest is None or len(said) == 1:
            return slowest
        what = f"{slowest.what} (rank {slowest.rank} of {len(said)})"
        return LoadProgress(rank=slowest.rank, what=what, done=slowest.done, total=slowest.total)

    def why_unready(self) -> list[str]:
        """What is wrong with units and ranks, for people."""
        reasons = [unit.lost for unit in self.units if unit.lost]
        for rank in (rank for unit in self.live for rank in unit.ranks):
            progress = rank.heard.progress
            if rank.heard.ready is not None and not progress.lively:
                reasons.append(f"rank {rank.place.rank} has made no progress for {progress.age_ms} ms")
        return reasons

    def tell_all(self, message: ToRank) -> None:
        """To the leader of every unit."""
        for unit in self.live:
            unit.tell(message)

    async def fresh_snapshots(self, wait_ms: Millis) -> list[Snapshot]:
        """The numbers of every rank of the live units as of now, by rank. Raises TimeoutError when one says nothing."""
        asked = [rank for unit in self.live for rank in unit.ranks]
        wanted = [rank.heard.next_snapshot() for rank in asked]
        for rank in asked:
            tell(rank, Ping())
        async with asyncio.timeout(wait_ms / 1000):
            return list(await asyncio.gather(*wanted))


def merged_ready(readies: Sequence[RankReady]) -> RankReady:
    """What the whole worker has: the least of what its ranks have; raises EngineError where they are not alike."""
    first = readies[0]
    for other in readies[1:]:
        for name in ("fingerprint", "layout", "page_tokens", "kv_dtype"):
            ours, theirs = getattr(first, name), getattr(other, name)
            if ours != theirs:
                text = f"the ranks of this worker are not alike: {name} is {ours!r} on rank {first.rank}, {theirs!r} on"
                raise EngineError(f"{text} rank {other.rank}; give every node the same model and options")
    return RankReady(
        rank=first.rank,
        pid=first.pid,
        rank_host=first.rank_host,
        rank_port=first.rank_port,
        fingerprint=first.fingerprint,
        layout=first.layout,
        kv_pages=min(one.kv_pages for one in readies),
        page_tokens=first.page_tokens,
        kv_bytes=sum(one.kv_bytes for one in readies),
        context_tokens=min(one.context_tokens for one in readies),
        kv_dtype=first.kv_dtype,
        load_seconds=max(one.load_seconds for one in readies),
    )


def merged_snapshot(leaders: Sequence[Snapshot]) -> Snapshot:
    """The numbers of all units together: gauges and counters are sums."""
    if len(leaders) == 1:
        return leaders[0]
    samples: dict[str, list[float]] = {}
    for one in leaders:
        for key, values in one.samples.items():
            samples.setdefault(key, []).extend(values)
    return Snapshot(
        rank=leaders[0].rank,
        progress=min(one.progress for one in leaders),
        gauges=_summed([one.gauges for one in leaders]),
        counters=_summed([one.counters for one in leaders]),
        samples=samples,
    )


def _summed(tables: Sequence[dict[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for table in tables:
        for key, value in table.items():
            total[key] = total.get(key, 0) + value
    return total


def _share_loaded(progress: LoadProgress) -> float:
    return progress.done / progress.total if progress.total else 0.0
