"""Which workers there are and what each can take: a static list, kept true by probes.

Every worker is probed by a task of its own, so that one that never answers delays nobody. A worker turns unready at
once when it says so or when nothing listens there, after three unanswered probes otherwise: a busy worker may miss
one. It turns ready with the next good probe; a new incarnation is taken over with it.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

import msgspec
import structlog

from baton_core.limits import Millis
from baton_core.routing.workers import Role, Worker, WorkerState
from baton_router.config import bracketed
from baton_router.upstream import Upstream, UpstreamError, UpstreamRefused

MISSED_PROBES_MAX = 3
EAGER_INTERVAL_MS: Millis = 100
EAGER_PROBES = 600
"""Probes at the eager interval before a worker's first readiness: a minute, then it is probed like any other."""
WILDCARD_HOSTS = ("", "0.0.0.0", "::", "[::]")

log = structlog.get_logger()


class ServerInfo(msgspec.Struct, frozen=True):
    """What `GET /server_info` says about a worker; absent keys are a worker that is not ours."""

    role: str | None = None
    incarnation: str = ""
    instance: str = ""
    state: str | None = None  # "draining" where the worker finishes what it has
    fingerprint: str | None = None
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None
    disaggregation_bootstrap_port: int | None = None  # SGLang's name
    dp_size: int | None = None
    context_tokens: int | None = None
    model: str | None = None


class Readiness(msgspec.Struct, frozen=True):
    """What the body of `GET /ready` says."""

    reasons: list[str] = []
    draining: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Probing:
    """How workers are probed."""

    interval_ms: Millis
    timeout_ms: Millis
    registry_known: bool  # both legs meet at a registry: a prefill worker's own bootstrap port is not needed


class Directory:
    """The workers this router knows, as frozen views, and the count of its own legs on each."""

    def __init__(
        self,
        *,
        prefill: tuple[str, ...],
        decode: tuple[str, ...],
        upstream: Upstream,
        probing: Probing,
        on_change: Callable[[tuple[Worker, ...]], None],
    ) -> None:
        self._upstream = upstream
        self._probing = probing
        self._on_change = on_change
        self._workers: dict[Role, dict[str, Worker]] = {
            Role.PREFILL: {url: Worker(url=url, role=Role.PREFILL) for url in map(_tidy, prefill)},
            Role.DECODE: {url: Worker(url=url, role=Role.DECODE) for url in map(_tidy, decode)},
        }
        self._in_flight = {url: 0 for known in self._workers.values() for url in known}
        self._pokes = {(role, url): asyncio.Event() for role, known in self._workers.items() for url in known}
        on_change(self.all())

    def workers(self, role: Role) -> tuple[Worker, ...]:
        """Every known worker of that role, usable or not, in the order given."""
        known = self._workers[role]
        for url, view in known.items():
            # Counts change four times a request, views are looked at once: they are brought up to date here.
            if view.in_flight != self._in_flight[url]:
                known[url] = replace(view, in_flight=self._in_flight[url])
        return tuple(known.values())

    def all(self) -> tuple[Worker, ...]:
        """Every known worker, prefill first."""
        return self.workers(Role.PREFILL) + self.workers(Role.DECODE)

    def began(self, worker: Worker) -> None:
        """One more leg of ours runs there; each call is matched by one `ended`."""
        self._in_flight[worker.url] += 1

    def ended(self, worker: Worker) -> None:
        """A leg of ours ended there, however it ended."""
        self._in_flight[worker.url] -= 1

    def refused(self, worker: Worker, text: str) -> None:
        """A request found nobody at the address of this life of the worker: it is unready until probed."""
        view = self._workers[worker.role][worker.url]
        # A late report about a former life says nothing about the one that answers probes now.
        if view.incarnation == worker.incarnation and view.usable:
            self._change(view, replace(view, state=WorkerState.UNREADY, reason=text))
        self.doubt(worker)

    def doubt(self, worker: Worker) -> None:
        """A request failed there in a way that may mean the worker is gone: probe it now."""
        self._pokes[worker.role, worker.url].set()

    async def watch(self) -> None:
        """Probe every worker, until cancelled."""
        async with asyncio.TaskGroup() as group:
            for worker in self.all():
                group.create_task(self._watch_one(worker.role, worker.url))

    async def _watch_one(self, role: Role, url: str) -> None:
        poke = self._pokes[role, url]
        probes = misses = 0
        was_ready = False
        while True:
            # Cleared first: a doubt that comes up while the probe is out deserves another one.
            poke.clear()
            seen = await self._probe(role, url)
            probes, misses = probes + 1, misses + 1 if isinstance(seen, _Missed) else 0
            # Read only now: a request may have found it gone while the probe was out.
            view = self._workers[role][url]
            if not isinstance(seen, _Missed):
                self._change(view, seen)
            elif seen.refused or misses >= MISSED_PROBES_MAX or not view.usable:
                self._change(view, replace(view, state=WorkerState.UNREADY, reason=seen.text))
            was_ready = was_ready or self._workers[role][url].usable
            # A worker in doubt is asked again soon: three silent probes take their own time, not three intervals more.
            eager = 0 < misses < MISSED_PROBES_MAX or (not was_ready and probes < EAGER_PROBES)
            await _pause(poke, EAGER_INTERVAL_MS if eager else self._probing.interval_ms)

    async def _probe(self, role: Role, url: str) -> "Worker | _Missed":
        """The worker as it describes itself now."""
        try:
            (ready_status, ready_body), (info_status, info_body) = await asyncio.gather(
                self._upstream.get(f"{url}/ready", self._probing.timeout_ms),
                self._upstream.get(f"{url}/server_info", self._probing.timeout_ms),
            )
            info = msgspec.json.decode(info_body, type=ServerInfo) if info_status == 200 else None
        except UpstreamError as error:
            return _Missed(text=error.text, refused=isinstance(error, UpstreamRefused))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            return _Missed(text=f"/server_info makes no sense ({error})", refused=True)
        said = _readiness(ready_body)
        if ready_status != 200:
            draining = said.draining or (info is not None and info.state == WorkerState.DRAINING.value)
            state = WorkerState.DRAINING if draining else WorkerState.UNREADY
            reason = "; ".join(said.reasons) or f"/ready answers {ready_status}"
            described = self._workers[role][url] if info is None else _described(role, url, info)
            return replace(described, state=state, reason=reason)
        if info is None:
            return _Missed(text=f"/server_info answers {info_status}", refused=False)
        worker = _described(role, url, info)
        obstacle = self._obstacle(worker, info)
        state = WorkerState.READY if obstacle is None else WorkerState.UNREADY
        return replace(worker, state=state, reason=obstacle or "")

    def _obstacle(self, worker: Worker, info: ServerInfo) -> str | None:
        """Why a worker that calls itself ready is of no use here: its address may have changed hands."""
        if info.role is not None and info.role != worker.role.value:
            return f"it is a {info.role} worker, listed as {worker.role.value}"
        if worker.role is Role.PREFILL and not worker.bootstrap_port and not self._probing.registry_known:
            return "it publishes no bootstrap_port, and no registry is configured"
        return None

    def _change(self, before: Worker, after: Worker) -> None:
        self._workers[after.role][after.url] = after
        if (before.state, before.reason, before.incarnation) == (after.state, after.reason, after.incarnation):
            return
        self._on_change(self.all())
        log.info(
            "router.worker_changed",
            worker=after.url,
            worker_role=after.role.value,
            state=after.state.value,
            reason=after.reason,
            incarnation=after.incarnation,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Missed:
    """A probe without an answer that could be used. `refused`: no doubt is possible, it counts at once."""

    text: str
    refused: bool


def _described(role: Role, url: str, info: ServerInfo) -> Worker:
    host = info.bootstrap_host or ""
    return Worker(
        url=url,
        role=role,
        instance=info.instance,
        incarnation=info.incarnation,
        fingerprint=info.fingerprint,
        # A worker that listens everywhere is found where the router finds it.
        bootstrap_host=bracketed(urlsplit(url).hostname or "") if host in WILDCARD_HOSTS else host,
        bootstrap_port=info.bootstrap_port or info.disaggregation_bootstrap_port or 0,
        dp_size=max(1, info.dp_size or 1),
        context_tokens=info.context_tokens or 0,
        model=info.model or "",
    )


def _readiness(body: bytes) -> Readiness:
    try:
        return msgspec.json.decode(body, type=Readiness)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return Readiness()  # SGLang's body is empty: the status says it all


async def _pause(poke: asyncio.Event, interval_ms: Millis) -> None:
    """Wait for the interval, or for a poke; a stream of pokes is answered at the eager interval, not without end."""
    try:
        async with asyncio.timeout(interval_ms / 1000):
            await poke.wait()
            await asyncio.sleep(EAGER_INTERVAL_MS / 1000)
    except TimeoutError:
        return


def _tidy(url: str) -> str:
    return url.rstrip("/")
