"""One look at one worker: what it says about itself, in our words or in SGLang's."""

import asyncio
from dataclasses import dataclass, replace
from urllib.parse import quote, urlsplit

import msgspec

from baton_core.limits import Millis
from baton_core.routing.workers import Role, Worker, WorkerState
from baton_router.config import bracketed
from baton_router.upstream import Upstream, UpstreamError, UpstreamRefused

WILDCARD_HOSTS = ("", "0.0.0.0", "::", "[::]")
TOPOLOGY = "/route?prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1"
FOLLOWING = ("follow_bootstrap_room", "auto")
"""Values of SGLang's `load_balance_method` that mean room mod dp_size, on a prefill worker."""


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
    follow_bootstrap_room: bool | None = None
    load_balance_method: str | None = None  # SGLang's name
    context_tokens: int | None = None
    model: str | None = None
    served_model_name: str | None = None  # SGLang's name


class Topology(msgspec.Struct, frozen=True):
    """What a registry says about a prefill worker as a whole."""

    follow_bootstrap_room: bool | None = None
    dp_size: int | None = None


class Readiness(msgspec.Struct, frozen=True):
    """What the body of `GET /ready` says."""

    reasons: list[str] = []
    draining: bool = False


class RankLoad(msgspec.Struct, frozen=True):
    """One rank's part of `GET /v1/loads`."""

    dp_rank: int = 0
    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_used_tokens: int = 0
    max_total_num_tokens: int = 0

    @property
    def requests(self) -> int:
        """Requests on the rank."""
        return self.num_running_reqs + self.num_waiting_reqs

    @property
    def kv_tokens_free(self) -> int | None:
        """Room for KV; None where the worker does not say."""
        return self.max_total_num_tokens - self.num_used_tokens if self.max_total_num_tokens else None


class LoadReport(msgspec.Struct, frozen=True):
    """`GET /v1/loads`."""

    loads: list[RankLoad] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class Missed:
    """A probe without an answer that could be used. `refused`: no doubt is possible, it counts at once."""

    text: str
    refused: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A worker as it describes itself, and its load where it tells."""

    worker: Worker
    loads: list[RankLoad]


class Prober:
    """Asks workers. With a `registry` both legs meet there, and a prefill worker's own bootstrap port is not needed.

    `wants_topology`: ask the registry whether a prefill worker of several ranks follows the room, if it does not say.
    """

    def __init__(
        self,
        upstream: Upstream,
        *,
        timeout_ms: Millis,
        registry: tuple[str, int] | None,
        wants_loads: bool,
        wants_topology: bool,
    ) -> None:
        self._upstream = upstream
        self._timeout_ms = timeout_ms
        self._registry = registry
        self._wants_loads = wants_loads
        self._wants_topology = wants_topology

    async def look(self, before: Worker) -> Seen | Missed:
        """The worker as it is now; `before` is what it was."""
        url = before.url
        try:
            (ready_status, ready_body), (info_status, info_body), loads = await asyncio.gather(
                self._upstream.get(f"{url}/ready", self._timeout_ms),
                self._upstream.get(f"{url}/server_info", self._timeout_ms),
                self._loads(url),
            )
            info = msgspec.json.decode(info_body, type=ServerInfo) if info_status == 200 else None
        except UpstreamError as error:
            return Missed(text=error.text, refused=isinstance(error, UpstreamRefused))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            return Missed(text=f"/server_info makes no sense ({error})", refused=True)
        if ready_status != 200:
            return Seen(worker=_unready(before, ready_status, _readiness(ready_body), info), loads=loads)
        if info is None:
            return Missed(text=f"/server_info answers {info_status}", refused=False)
        worker = await self._with_topology(_described(before.role, url, info), before, is_sized=bool(info.dp_size))
        obstacle = self._obstacle(worker, info)
        state = WorkerState.READY if obstacle is None else WorkerState.UNREADY
        return Seen(worker=replace(worker, state=state, reason=obstacle or ""), loads=loads)

    async def _loads(self, url: str) -> list[RankLoad]:
        """What the worker says about its load; nothing where it does not, which is no fault."""
        if not self._wants_loads:
            return []
        try:
            status, body = await self._upstream.get(f"{url}/v1/loads", self._timeout_ms)
            return msgspec.json.decode(body, type=LoadReport).loads if status == 200 else []
        except (UpstreamError, msgspec.MsgspecError, UnicodeDecodeError):
            return []

    async def _with_topology(self, worker: Worker, before: Worker, *, is_sized: bool) -> Worker:
        """The worker with what only its registry tells: how it places rooms, and its size where it gives none itself."""
        is_told = worker.follows_room is not None or (is_sized and worker.dp_size == 1)
        if not self._wants_topology or worker.role is not Role.PREFILL or is_told:
            return worker
        if before.follows_room is not None and before.usable and before.incarnation == worker.incarnation:
            dp_size = worker.dp_size if is_sized else before.dp_size
            return replace(worker, follows_room=before.follows_room, dp_size=dp_size)
        host, port = self._registry or (worker.bootstrap_host, worker.bootstrap_port)
        instance = f"&instance={quote(worker.instance)}" if self._registry is not None and worker.instance else ""
        if not port:
            return worker
        try:
            status, body = await self._upstream.get(f"http://{host}:{port}{TOPOLOGY}{instance}", self._timeout_ms)
            told = msgspec.json.decode(body, type=Topology) if status == 200 else Topology()
        except (UpstreamError, msgspec.MsgspecError, UnicodeDecodeError):
            return worker  # asked again with the next probe
        dp_size = worker.dp_size if is_sized else max(1, told.dp_size or 1)
        return replace(worker, follows_room=told.follow_bootstrap_room, dp_size=dp_size)

    def _obstacle(self, worker: Worker, info: ServerInfo) -> str | None:
        """Why a worker that calls itself ready is of no use here: its address may have changed hands."""
        if info.role is not None and info.role != worker.role.value:
            return f"it is a {info.role} worker, listed as {worker.role.value}"
        if worker.role is Role.PREFILL and not worker.bootstrap_port and self._registry is None:
            return "it publishes no bootstrap_port, and no registry is configured"
        return None


def _unready(before: Worker, status: int, said: Readiness, info: ServerInfo | None) -> Worker:
    draining = said.draining or (info is not None and info.state == WorkerState.DRAINING.value)
    state = WorkerState.DRAINING if draining else WorkerState.UNREADY
    described = before if info is None else _described(before.role, before.url, info)
    return replace(described, state=state, reason="; ".join(said.reasons) or f"/ready answers {status}")


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
        follows_room=_follows(info),
        context_tokens=info.context_tokens or 0,
        model=info.model or info.served_model_name or "",
    )


def _follows(info: ServerInfo) -> bool | None:
    if info.follow_bootstrap_room is not None:
        return info.follow_bootstrap_room
    return None if info.load_balance_method is None else info.load_balance_method in FOLLOWING


def _readiness(body: bytes) -> Readiness:
    try:
        return msgspec.json.decode(body, type=Readiness)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return Readiness()  # SGLang's body is empty: the status says it all
