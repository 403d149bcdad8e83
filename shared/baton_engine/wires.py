"""How the members of a process group move tensors: over gloo between host memories, over NCCL between CUDA devices.

Gloo's own collectives are a chain of hops through a thread of theirs; where cores are scarce every hop waits for one. So
`HostWire` only sends and receives, from the caller's thread: every member to every other, all at once. Whoever adds up adds
in the order of the members, so that all end with the same bits.
"""

from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from baton_core.errors import EngineError
from baton_core.ranks import share

_WHOLE_BYTES = 2**17
"""Up to this size a sum sends everything to everybody, in one step; above it each member adds up a part, in two."""
_TAG = 0


class Wire(Protocol):
    """The connections of one member. All methods raise RuntimeError when another member fails or is late."""

    def sum(self, values: Tensor) -> None:
        """Add up in place, contiguous."""
        ...

    def gather(self, own: Tensor, everybody: Tensor) -> None:
        """Copy `own` of every member into `everybody` `[size, *own.shape]`, both contiguous."""
        ...

    def gather_to_first(self, own: Tensor, everybody: Tensor | None) -> None:
        """The same, on the first member, the only one that has an `everybody`."""
        ...

    def send(self, values: Tensor, target: int) -> None:
        """Begin to send; `values` must not change until `size` more were sent."""
        ...

    def receive(self, values: Tensor, source: int) -> None:
        """Fill `values`."""
        ...


Open = Callable[[Store, int, int, timedelta], Wire]
"""Connects, over a store: member `index` of `size`, with a limit for every operation."""


class _Work(Protocol):
    def wait(self, timeout: timedelta = ...) -> bool: ...


class _Backend(Protocol):
    """What a gloo or NCCL process group can do; torch's own stubs leave it out."""

    def allreduce(self, tensors: list[Tensor]) -> _Work: ...
    def _allgather_base(self, output: Tensor, input: Tensor) -> _Work: ...
    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], root: dist.GatherOptions) -> _Work: ...
    def send(self, tensors: list[Tensor], target: int, tag: int) -> _Work: ...
    def recv(self, tensors: list[Tensor], source: int, tag: int) -> _Work: ...


class HostWire:
    """Between host memories."""

    def __init__(self, backend: _Backend, index: int, size: int, limit: timedelta) -> None:
        self._backend, self._index, self._size, self._limit = backend, index, size, limit
        self._others = [other for other in range(size) if other != index]
        self._sent: deque[tuple[_Work, Tensor]] = deque()

    def sum(self, values: Tensor) -> None:
        """See `Wire`. The sum is rounded once, whatever the dtype."""
        if self._size == 2 or values.nbytes <= _WHOLE_BYTES:
            everybody = values.new_empty(self._size, *values.shape)
            self.gather(values, everybody)
            _add_up(everybody, values)
            return
        flat = values.view(-1)
        parts = [flat[own.start : own.stop] for own in (share(len(flat), one, self._size) for one in range(self._size))]
        mine = parts[self._index]
        arrived = mine.new_empty(self._size, len(mine))
        arrived[self._index] = mine
        self._exchange({other: parts[other] for other in self._others}, dict(enumerate(arrived)))
        _add_up(arrived, mine)
        self._exchange(dict.fromkeys(self._others, mine), dict(enumerate(parts)))

    def gather(self, own: Tensor, everybody: Tensor) -> None:
        """See `Wire`."""
        everybody[self._index] = own
        self._exchange(dict.fromkeys(self._others, own), dict(enumerate(everybody)))

    def gather_to_first(self, own: Tensor, everybody: Tensor | None) -> None:
        """See `Wire`."""
        if everybody is None:
            self._wait(self._backend.send([own], 0, _TAG))
            return
        everybody[0] = own
        for work in [self._backend.recv([everybody[other]], other, _TAG) for other in self._others]:
            self._wait(work)

    def send(self, values: Tensor, target: int) -> None:
        """See `Wire`."""
        self._sent.append((self._backend.send([values], target, _TAG), values))
        if len(self._sent) > self._size:
            self._wait(self._sent.popleft()[0])

    def receive(self, values: Tensor, source: int) -> None:
        """See `Wire`."""
        self._wait(self._backend.recv([values], source, _TAG))

    def _exchange(self, leaving: dict[int, Tensor], arriving: dict[int, Tensor]) -> None:
        # Receives first: what is expected at its target leaves at once.
        arrivals = [self._backend.recv([arriving[other]], other, _TAG) for other in self._others]
        departures = [self._backend.send([leaving[other]], other, _TAG) for other in self._others]
        for work in (*arrivals, *departures):
            self._wait(work)

    def _wait(self, work: _Work) -> None:
        work.wait(self._limit)


def _add_up(everybody: Tensor, total: Tensor) -> None:
    """Put the sum of `everybody` `[size, …]`, rounded once, into `total`."""
    if len(everybody) == 2:
        torch.add(everybody[0], everybody[1], out=total)  # up to twenty times as fast as a sum over a dimension
    else:
        torch.sum(everybody, 0, out=total)


class DeviceWire:
    """Between CUDA devices. Nothing here waits on the host: NCCL's own watch ends the process of a rank that is stuck."""

    def __init__(self, backend: _Backend, size: int) -> None:
        self._backend, self._size = backend, size
        self._to_first = dist.GatherOptions()
        self._to_first.rootRank = 0
        self._sent: deque[tuple[_Work, Tensor]] = deque()

    def sum(self, values: Tensor) -> None:
        """See `Wire`."""
        self._backend.allreduce([values]).wait()

    def gather(self, own: Tensor, everybody: Tensor) -> None:
        """See `Wire`."""
        self._backend._allgather_base(everybody.view(-1), own.view(-1)).wait()

    def gather_to_first(self, own: Tensor, everybody: Tensor | None) -> None:
        """See `Wire`."""
        outputs = [] if everybody is None else [list(everybody.unbind())]
        self._backend.gather(outputs, [own], self._to_first).wait()

    def send(self, values: Tensor, target: int) -> None:
        """See `Wire`."""
        self._sent.append((self._backend.send([values], target, _TAG), values))
        if len(self._sent) > self._size:
            self._sent.popleft()[0].wait()

    def receive(self, values: Tensor, source: int) -> None:
        """See `Wire`."""
        self._backend.recv([values], source, _TAG).wait()


def host_wires(address: str) -> Open:
    """Wires on the interface that has `address`, all served by one thread."""
    device = dist.ProcessGroupGloo.create_device(hostname=address)

    def opened(store: Store, index: int, size: int, limit: timedelta) -> Wire:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices, options._threads, options._timeout = [device], 1, limit
        backend = cast(_Backend, dist.ProcessGroupGloo(store, index, size, options))
        return HostWire(backend, index, size, limit)

    return opened


def device_wire(store: Store, index: int, size: int, limit: timedelta) -> Wire:
    """A wire of the current CUDA device. Raises EngineError where torch has no NCCL."""
    if not dist.is_nccl_available():
        raise EngineError("ranks on CUDA need a torch that has NCCL")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    return DeviceWire(cast(_Backend, dist.ProcessGroupNCCL(store, index, size, options)), size)
