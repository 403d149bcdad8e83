"""The process groups of one worker: who computes a tensor together, and what is said when somebody does not come.

Ranks meet at a *rendezvous*, a store that every rank can reach: `file:///path` on one host, `tcp://host:port` (served by
rank 0) across hosts. Groups connect by that store and by nothing else: there is no world that all ranks must share, so a
unit of plain DP outlives the others, and a unit of one rank needs no group at all.

    tp        the ranks that share the heads of a layer               control_tp      the same, for control
    cp        the ranks that share the tokens of a prompt             control_cp
    ffn       tp; with DP attention those of all units                control_stage   cp x tp
    stages    the ranks with the same part of every pipeline stage    control_unit    the whole unit

Control has connections of its own (gloo, host memory), because it runs on another thread than the forward.

Every wait has a limit; a rank whose wait ends badly calls the roll (`roll_call`).
"""

import socket
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from urllib.parse import urlsplit

import numpy as np
import torch
from torch import Tensor
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from baton_core.errors import EngineError
from baton_core.limits import Millis
from baton_core.ranks import Parallel, Place
from baton_engine.roll_call import GroupLost, RollCall
from baton_engine.wires import Open, Wire, device_wire, host_wires

START_MS: Millis = 300_000
"""Ranks load a model at different speeds: so long they wait for each other before the first step."""
_BLOCK_VALUES = 511
"""An agreement over no more values than that, and their number, is one message of 4 KiB to every member."""


class RankGroup:
    """Some ranks that compute together. Every member calls the same methods in the same order, from one thread.

    With one member nothing ever leaves the process. All methods raise GroupLost. It is a `baton_core.agreement.Group`.
    """

    def __init__(
        self,
        name: str,
        ranks: tuple[int, ...],
        rank: int,
        limit_ms: Millis,
        wire: Wire | None = None,
        roll: RollCall | None = None,
    ) -> None:
        """`ranks` are the members' numbers in the worker, `rank` this one's; `wire` and `roll` where there are more."""
        assert rank in ranks and (wire is not None) == (len(ranks) > 1)
        self.name, self.ranks, self.size = name, ranks, len(ranks)
        self.rank = ranks.index(rank)
        """This rank's place among the members."""
        self._limit_ms = limit_ms
        self._wire, self._roll = wire, roll
        self._number = 0

    def sum(self, values: Tensor) -> None:
        """Add up what all members hold, in place; every member ends with the same bits."""
        if self.size > 1:
            self._do("sum", lambda wire: wire.sum(values))

    def all_reduce_min(self, values: Sequence[int]) -> list[int]:
        """Element-wise minimum over all members, in host memory: for control.

        Every member passes as many values; where one does not, all raise GroupLost naming it.
        """
        if self.size == 1:
            return list(values)
        # How many there are is agreed first: a message longer than its room would end the process without a word.
        first = array("q", (len(values), *values[:_BLOCK_VALUES]))
        first.extend((0,) * (1 + _BLOCK_VALUES - len(first)))
        seen = self._gathered(first)
        self._check_counts(seen[:, 0].tolist())
        least: list[int] = seen[:, 1 : 1 + len(values)].min(axis=0).tolist()
        if len(values) > _BLOCK_VALUES:
            least += self._gathered(array("q", values[_BLOCK_VALUES:])).min(axis=0).tolist()
        return least

    def gather(self, own: Tensor, everybody: Tensor) -> None:
        """Copy what all members hold, equal shapes, contiguous, into `everybody` `[size, *own.shape]`."""
        if self.size == 1:
            everybody.copy_(own[None])
        else:
            self._do("gather", lambda wire: wire.gather(own, everybody))

    def gather_to_first(self, own: Tensor) -> Tensor | None:
        """What all members hold, equal shapes, as `[size, *own.shape]` on the first member; None on the others."""
        if self.size == 1:
            return own[None]
        held = own.contiguous()
        everybody = held.new_empty(self.size, *held.shape) if self.rank == 0 else None
        self._do("gather to the first", lambda wire: wire.gather_to_first(held, everybody))
        return everybody

    def send(self, values: Tensor, target: int) -> None:
        """Send to the member at place `target`, who must receive the same shape; returns before it has arrived.

        `values` must not change until `size` more were sent.
        """
        self._do("send", lambda wire: wire.send(values, target))

    def receive(self, values: Tensor, source: int) -> None:
        """Fill `values` with what the member at place `source` sends."""
        self._do("receive", lambda wire: wire.receive(values, source))

    def close(self) -> None:
        """Let go of the connections; the others' waits for this rank end at once."""
        self._wire = None

    def _gathered(self, own: "array[int]") -> "np.ndarray[tuple[int, int], np.dtype[np.int64]]":
        """What all members bring to an agreement, `[size, values]`."""
        everybody = torch.empty(self.size, len(own), dtype=torch.int64)
        self._do("minimum", lambda wire: wire.gather(torch.frombuffer(own, dtype=torch.int64), everybody))
        return everybody.numpy()

    def _check_counts(self, counts: list[int]) -> None:
        if min(counts) != max(counts):
            brought = ", ".join(f"rank {rank} {count}" for rank, count in zip(self.ranks, counts, strict=True))
            raise GroupLost(
                f"group {self.name}: members brought different numbers of values to an agreement: {brought}"
            )

    def _do(self, what: str, operation: Callable[[Wire], object]) -> None:
        assert self._wire is not None, f"group {self.name} is closed"
        self._number += 1
        began = time.monotonic()
        try:
            operation(self._wire)
        except RuntimeError as error:
            took_ms = round(1000 * (time.monotonic() - began))
            members = ", ".join(map(str, self.ranks))
            text = (
                f"group {self.name} of ranks {members}: {what}, operation {self._number}, failed on rank "
                f"{self.ranks[self.rank]} after {took_ms} ms (limit {self._limit_ms} ms)"
            )
            # Whoever waits for this rank must hear now that it gives up, or would miss the roll call: the connections close
            # with the last thing that refers to them, frames of the error included.
            self.close()
            error.__traceback__ = None
            found = "" if self._roll is None else f": {self._roll.call()}"
            raise GroupLost(f"{text}{found}. {_first_line(error)}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorGroups:
    """The groups of one rank, see above."""

    place: Place
    tp: RankGroup
    cp: RankGroup
    ffn: RankGroup
    stages: RankGroup
    control_tp: RankGroup
    control_cp: RankGroup
    control_stage: RankGroup
    control_unit: RankGroup
    roll: RollCall | None  # None: a unit of one rank
    start_ms: Millis

    def meet(self, where: str) -> None:
        """Wait until every rank that computes with this one is at `where`. Raises GroupLost naming who is missing."""
        if self.roll is not None:
            self.roll.meet(where, self.start_ms)

    def close(self) -> None:
        """Let go of all connections. Idempotent."""
        tensors, control = (self.tp, self.cp, self.ffn, self.stages), (self.control_tp, self.control_cp)
        for group in (*tensors, *control, self.control_stage, self.control_unit):
            group.close()


def join(
    parallel: Parallel,
    rank: int,
    rendezvous: str,
    device: str,
    timeout_ms: Millis,
    *,
    control_timeout_ms: Millis | None = None,
    start_ms: Millis = START_MS,
) -> TensorGroups:
    """Meet the other ranks and connect to them; to be called by every rank of the worker, once.

    `timeout_ms` limits every operation on tensors, `control_timeout_ms` (the same unless given) those of control,
    `start_ms` the wait for ranks that come late. The rendezvous must be new: what an earlier worker left there would be
    taken for an answer. Raises GroupLost naming who did not come, EngineError where the rendezvous is of no use.
    """
    place = parallel.place(rank)
    world = _world(parallel, place)
    connect = _alone(rank, timeout_ms)
    control, roll = connect, None
    if len(world) > 1:
        store, address = _rendezvous(rendezvous, rank, parallel.ranks, start_ms)
        roll = RollCall(store, rank, world)
        roll.meet("start", start_ms)
        connect = _connector(store, rank, roll, timeout_ms, host_wires(address) if device == "cpu" else device_wire)
        control = _connector(store, rank, roll, control_timeout_ms or timeout_ms, host_wires(address))
    members = _members(parallel, place)
    tp = connect("tp", members["tp"])
    shares_units = parallel.dp_attention and parallel.dp > 1
    return TensorGroups(
        place=place,
        tp=tp,
        cp=connect("cp", members["cp"]),
        ffn=connect("ffn", members["ffn"]) if shares_units else tp,
        stages=connect("stages", members["stages"]),
        control_tp=control("control_tp", members["tp"]),
        control_cp=control("control_cp", members["cp"]),
        control_stage=control("control_stage", members["stage"]),
        control_unit=control("control_unit", members["unit"]),
        roll=roll,
        start_ms=start_ms,
    )


def _world(parallel: Parallel, place: Place) -> tuple[int, ...]:
    """The ranks that this one ever computes with: its unit, or all units with DP attention."""
    if parallel.dp_attention:
        return tuple(range(parallel.ranks))
    return tuple(parallel.rank_of(place.dp_rank, member) for member in range(parallel.members))


def _members(parallel: Parallel, place: Place) -> dict[str, tuple[int, ...]]:
    """The worker's numbers of the members of each of this rank's groups."""
    unit = tuple(parallel.rank_of(place.dp_rank, member) for member in range(parallel.members))
    places = [parallel.place(rank) for rank in unit]
    everywhere = [parallel.place(rank) for rank in range(parallel.ranks)]
    stage = [one for one in places if one.pp_rank == place.pp_rank]
    return {
        "unit": unit,
        "stage": tuple(one.rank for one in stage),
        "tp": tuple(one.rank for one in stage if one.cp_rank == place.cp_rank),
        "cp": tuple(one.rank for one in stage if one.tp_rank == place.tp_rank),
        "stages": tuple(one.rank for one in places if (one.cp_rank, one.tp_rank) == (place.cp_rank, place.tp_rank)),
        "ffn": tuple(one.rank for one in everywhere if (one.pp_rank, one.cp_rank) == (place.pp_rank, place.cp_rank)),
    }


_Connect = Callable[[str, tuple[int, ...]], RankGroup]


def _alone(rank: int, limit_ms: Millis) -> _Connect:
    return lambda name, ranks: RankGroup(name, ranks, rank, limit_ms)


def _connector(store: Store, rank: int, roll: RollCall, limit_ms: Millis, opened: Open) -> _Connect:
    def connect(name: str, ranks: tuple[int, ...]) -> RankGroup:
        if len(ranks) == 1:
            return RankGroup(name, ranks, rank, limit_ms)
        # The first member's number tells apart the groups of one name.
        own = PrefixStore(f"{name}/{ranks[0]}", store)
        try:
            wire = opened(own, ranks.index(rank), len(ranks), timedelta(milliseconds=limit_ms))
        except RuntimeError as error:
            text = f"group {name} of ranks {', '.join(map(str, ranks))} cannot connect on rank {rank}"
            raise GroupLost(f"{text}: {roll.call()}. {_first_line(error)}") from error
        return RankGroup(name, ranks, rank, limit_ms, wire, roll)

    return connect


def _rendezvous(rendezvous: str, rank: int, ranks: int, limit_ms: Millis) -> tuple[Store, str]:
    """The store, and the address under which the other ranks reach this one."""
    try:
        url = urlsplit(rendezvous)
        limit = timedelta(milliseconds=limit_ms)
        if url.scheme == "file" and url.path and not url.netloc:
            store: Store = FileStore(url.path, ranks)
            store.set_timeout(limit)
            return store, "127.0.0.1"
        if url.scheme == "tcp" and url.hostname and url.port:
            served = TCPStore(url.hostname, url.port, is_master=rank == 0, timeout=limit, wait_for_workers=False)
            return served, _own_address(url.hostname, url.port)
    except (RuntimeError, OSError, ValueError) as error:
        raise EngineError(f"rank {rank} cannot use the rendezvous {rendezvous}: {_first_line(error)}") from error
    raise EngineError(f"the rendezvous {rendezvous!r} is neither file:///path nor tcp://host:port")


def _own_address(host: str, port: int) -> str:
    """The address of the interface that leads to `host`; nothing is sent."""
    family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        address: str = probe.getsockname()[0]
        return address


def _first_line(error: BaseException) -> str:
    """What the library says, without the advice that follows it."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].partition(" This is typically")[0]
