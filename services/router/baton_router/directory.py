"""Which workers there are and what each can take: told by discovery, kept true by probes.

Every worker is probed by a task of its own, so that one that never answers delays nobody. A worker turns unready at
once when it says so or when nothing listens there, after three unanswered probes otherwise: a busy worker may miss
one. It turns ready with the next good probe; a new incarnation is taken over with it.

A worker that answers no probe for `silence_ms` may be frozen, or cut off without a word: what of its legs has heard
nothing for as long is given up, so that it can go on elsewhere. One that still streams is only busy.

A worker that discovery no longer names gets nothing new and is forgotten when its last leg has ended.
"""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Protocol

import structlog

from baton_core.limits import Millis
from baton_core.routing.breaker import BreakerLimits
from baton_core.routing.pair import ByRank, Fleet
from baton_core.routing.workers import Role, Target, Worker, WorkerState, targets_of
from baton_router.probe import Missed, Prober, RankLoad
from baton_router.records import Records

MISSED_PROBES_MAX = 3
EAGER_INTERVAL_MS: Millis = 100
EAGER_PROBES = 600
"""Probes at the eager interval before a worker's first readiness: a minute, then it is probed like any other."""

log = structlog.get_logger()


class LiveLeg(Protocol):
    """A call to a worker that has not ended."""

    @property
    def heard_s(self) -> float:
        """When something last came from the worker, or the call began."""
        ...

    def give_up(self, text: str) -> None:
        """Its worker is lost."""
        ...


@dataclass(slots=True, kw_only=True)
class _Entry:
    """What the directory keeps of one worker."""

    view: Worker
    sources: set[str] = field(default_factory=set)  # of discovery, that name it
    is_held: bool = False  # an operator drains it
    legs: dict[LiveLeg, None] = field(default_factory=dict)  # in the order in which they began
    poke: asyncio.Event = field(default_factory=asyncio.Event)
    watcher: "asyncio.Task[None] | None" = None

    @property
    def is_leaving(self) -> bool:
        """Whether nobody names it any more."""
        return not self.sources

    @property
    def shown(self) -> Worker:
        """The view that choices are made from."""
        if self.is_leaving:
            return replace(self.view, state=WorkerState.DRAINING, reason="discovery no longer names it")
        if self.is_held and self.view.usable:
            return replace(self.view, state=WorkerState.DRAINING, reason="drained by an operator")
        return self.view


class Directory:
    """The workers this router knows, as frozen views, and the count of its own legs on each target."""

    def __init__(
        self,
        *,
        prober: Prober,
        interval_ms: Millis,
        silence_ms: Millis,
        breaker_limits: BreakerLimits,
        by_rank: ByRank,
        on_change: Callable[[tuple[Worker, ...]], None],
    ) -> None:
        self._prober = prober
        self._interval_ms = interval_ms
        self._silence_ms = silence_ms
        self._by_rank = by_rank
        self._on_change = on_change
        self._entries: dict[tuple[Role, str], _Entry] = {}
        self._group: asyncio.TaskGroup | None = None
        self.records = Records(breaker_limits)
        self.fleet = Fleet((), ())
        self._changed()

    # -- what a choice needs

    def workers(self, role: Role) -> tuple[Worker, ...]:
        """Every known worker of that role, usable or not, in the order given."""
        return self.fleet.prefills if role is Role.PREFILL else self.fleet.decodes

    def all(self) -> tuple[Worker, ...]:
        """Every known worker, prefill first."""
        return self.fleet.prefills + self.fleet.decodes

    def targets(self, worker: Worker) -> tuple[Target, ...]:
        """What of a worker is chosen: itself, or each of its ranks."""
        return targets_of(
            worker, by_rank=self._by_rank.prefill if worker.role is Role.PREFILL else self._by_rank.decode
        )

    def in_flight(self, worker: Worker) -> int:
        """Legs of this router there."""
        entry = self._entries.get((worker.role, worker.url))
        return 0 if entry is None else len(entry.legs)

    # -- what legs report

    def began(self, target: Target, leg: LiveLeg) -> None:
        """One more leg of ours runs there; each call is matched by one `ended`."""
        self.records.began(target.key)
        entry = self._entries.get((target.worker.role, target.worker.url))
        if entry is not None:
            entry.legs[leg] = None

    def ended(self, target: Target, leg: LiveLeg) -> None:
        """A leg of ours ended there, however it ended."""
        load = self.records.loads[target.key]
        load.in_flight -= 1
        entry = self._entries.get((target.worker.role, target.worker.url))
        if entry is not None:
            entry.legs.pop(leg, None)
            if entry.is_leaving and not entry.legs:
                self._drop(target.worker.role, target.worker.url)
        if entry is None and not load.in_flight:
            del self.records.loads[target.key]

    def served(self, target: Target) -> None:
        """A leg did well there."""
        if (target.worker.role, target.worker.url) in self._entries:
            self.records.served(target.key)

    def failed(self, target: Target) -> None:
        """A leg failed there by its own fault."""
        worker = target.worker
        if (worker.role, worker.url) in self._entries and self.records.failed(target.key):
            log.warning("router.breaker_opened", target=target.key, worker_role=worker.role.value)

    def refused(self, worker: Worker, text: str) -> None:
        """A request found nobody at the address of this life of the worker: it is unready until probed."""
        entry = self._entries.get((worker.role, worker.url))
        # A late report about a former life says nothing about the one that answers probes now.
        if entry is not None and entry.view.incarnation == worker.incarnation and entry.view.usable:
            self._take(entry, replace(entry.view, state=WorkerState.UNREADY, reason=text))
        self.doubt(worker)

    def doubt(self, worker: Worker) -> None:
        """A request failed there in a way that may mean the worker is gone: probe it now."""
        entry = self._entries.get((worker.role, worker.url))
        if entry is not None:
            entry.poke.set()

    # -- what discovery and operators say

    def name(self, source: str, named: Iterable[tuple[Role, str]]) -> None:
        """All that `source` knows now; what it named before and does not now leaves, unless another names it."""
        wanted = dict.fromkeys((role, url.rstrip("/")) for role, url in named)
        before = {key for key, entry in self._entries.items() if source in entry.sources}
        if before == wanted.keys():
            return
        for (role, url), entry in tuple(self._entries.items()):
            if (role, url) not in wanted and source in entry.sources:
                entry.sources.discard(source)
                log.info("router.worker_unnamed", worker=url, worker_role=role.value, source=source)
                if entry.is_leaving and not entry.legs:
                    self._drop(role, url)
        for role, url in wanted:
            self._add(source, role, url)
        self._changed()

    def add(self, source: str, role: Role, url: str) -> None:
        """One more worker."""
        self._add(source, role, url.rstrip("/"))
        self._changed()

    def remove(self, url: str) -> bool:
        """Whoever named it: it leaves. False: nobody did."""
        found = [key for key in self._entries if key[1] == url.rstrip("/")]
        for role, known in found:
            entry = self._entries[role, known]
            entry.sources.clear()
            if not entry.legs:
                self._drop(role, known)
        self._changed()
        return bool(found)

    def hold(self, url: str, *, is_held: bool) -> bool:
        """Drain a worker, or take that back. False: nobody named it."""
        found = [entry for (_, known), entry in self._entries.items() if known == url.rstrip("/")]
        for entry in found:
            entry.is_held = is_held
        self._changed()
        return bool(found)

    def _add(self, source: str, role: Role, url: str) -> None:
        entry = self._entries.get((role, url))
        if entry is None:
            entry = _Entry(view=Worker(url=url, role=role))
            self._entries[role, url] = entry
            self._start_watching(role, url, entry)
        entry.sources.add(source)

    def _drop(self, role: Role, url: str) -> None:
        entry = self._entries.pop((role, url))
        self.records.forget(url)
        if entry.watcher is not None:
            entry.watcher.cancel()
        self._changed()

    # -- probes

    async def watch(self) -> None:
        """Probe every worker, until cancelled."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            for (role, url), entry in self._entries.items():
                self._start_watching(role, url, entry)
            await asyncio.Event().wait()  # workers that come later are watched too

    def _start_watching(self, role: Role, url: str, entry: _Entry) -> None:
        if self._group is not None and entry.watcher is None:
            entry.watcher = self._group.create_task(self._watch_one(entry))

    async def _watch_one(self, entry: _Entry) -> None:
        probes = misses = 0
        was_ready = False
        loop = asyncio.get_running_loop()
        answered_s = loop.time()
        while True:
            # Cleared first: a doubt that comes up while the probe is out deserves another one.
            entry.poke.clear()
            seen = await self._prober.look(entry.view)
            probes, misses = probes + 1, misses + 1 if isinstance(seen, Missed) else 0
            # The view is read only now: a request may have found the worker gone while the probe was out.
            if not isinstance(seen, Missed):
                answered_s = loop.time()
                self._take(entry, seen.worker)
                self._note(seen.worker, seen.loads)
            elif seen.refused or misses >= MISSED_PROBES_MAX or not entry.view.usable:
                self._take(entry, replace(entry.view, state=WorkerState.UNREADY, reason=seen.text))
            if isinstance(seen, Missed):
                self._give_up_silent(entry, answered_s, loop.time() - self._silence_ms / 1000)
            was_ready = was_ready or entry.view.usable
            # A worker in doubt is asked again soon: three silent probes take their own time, not three intervals more.
            eager = 0 < misses < MISSED_PROBES_MAX or (not was_ready and probes < EAGER_PROBES)
            await _pause(entry.poke, EAGER_INTERVAL_MS if eager else self._interval_ms)

    def _give_up_silent(self, entry: _Entry, answered_s: float, since_s: float) -> None:
        """No probe was answered since `answered_s`: legs that heard nothing since `since_s` have lost their worker."""
        if answered_s > since_s:
            return
        silent = [leg for leg in entry.legs if leg.heard_s < since_s]
        if not silent:
            return
        log.warning("router.worker_silent", worker=entry.view.url, worker_role=entry.view.role.value, legs=len(silent))
        for leg in silent:
            leg.give_up(f"it has sent nothing and answered no probe for {self._silence_ms} ms")

    def _note(self, worker: Worker, ranks: list[RankLoad]) -> None:
        """Take what the worker says about its load, for itself and for each of its ranks."""
        if not ranks:
            return
        free = [rank.kv_tokens_free for rank in ranks]
        known = [tokens for tokens in free if tokens is not None]
        whole = self.records.load(worker.url)
        whole.report(requests=sum(rank.requests for rank in ranks), kv_tokens_free=max(known) if known else None)
        if worker.dp_size > 1:
            for rank, tokens in zip(ranks, free, strict=True):
                load = self.records.load(f"{worker.url}@{rank.dp_rank}")
                load.report(requests=rank.requests, kv_tokens_free=tokens)

    def _take(self, entry: _Entry, after: Worker) -> None:
        before, entry.view = entry.view, after
        if before == after:
            return
        if before.incarnation != after.incarnation:
            self.records.forgive(after.url)
        self._changed()
        if (before.state, before.reason, before.incarnation) == (after.state, after.reason, after.incarnation):
            return
        log.info(
            "router.worker_changed",
            worker=after.url,
            worker_role=after.role.value,
            state=after.state.value,
            reason=after.reason,
            incarnation=after.incarnation,
        )

    def _changed(self) -> None:
        shown: dict[Role, list[Worker]] = {Role.PREFILL: [], Role.DECODE: []}
        for (role, _), entry in self._entries.items():
            shown[role].append(entry.shown)
        self.fleet = Fleet(shown[Role.PREFILL], shown[Role.DECODE], self._by_rank)
        self._on_change(self.all())


async def _pause(poke: asyncio.Event, interval_ms: Millis) -> None:
    """Wait for the interval, or for a poke; a stream of pokes is answered at the eager interval, not without end."""
    try:
        async with asyncio.timeout(interval_ms / 1000):
            await poke.wait()
            await asyncio.sleep(EAGER_INTERVAL_MS / 1000)
    except TimeoutError:
        return
