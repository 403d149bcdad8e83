"""The wire between workers: frames that may be lost, repeated, late or cut off, and byte streams that may stall or break.

Addresses are names of workers' units ("P0/1"); whoever leads there now gets what arrives. Byte streams join two ranks.
Partitions are one-way cuts between workers.
"""

from collections import deque
from typing import TYPE_CHECKING

from baton_core.link import Frame
from simulation.leader import Leader, Reset
from simulation.rank import Rank

if TYPE_CHECKING:
    from simulation.unit import Unit
    from simulation.world import World

RETRY_MS = 40


class Network:
    """All wires of a world."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self._cuts: dict[tuple[str, str], int] = {}
        self._last: dict[tuple[str, str], int] = {}  # when the newest frame of a way arrives
        self.streams: list[Stream] = []

    def cut(self, source: str, target: str) -> None:
        """Nothing from `source` reaches `target` until it is healed as often as it was cut."""
        self._cuts[source, target] = self._cuts.get((source, target), 0) + 1

    def heal(self, source: str, target: str) -> None:
        """Undo one cut."""
        self._cuts[source, target] -= 1

    def is_cut(self, source: str, target: str) -> bool:
        """Whether nothing passes this way."""
        return self._cuts.get((source, target), 0) > 0

    def latency(self) -> int:
        """Milliseconds that something takes on its way."""
        return int(self.world.random.random() * (self.world.shape.latency_ms + 1))

    def send(self, sender: Leader, address: str, frame: Frame) -> None:
        """Put a frame on the wire; only late and repeated ones overtake each other."""
        world, rates = self.world, self.world.rates
        random = world.random.random
        if rates.frame_lost and random() < rates.frame_lost:
            world.fault("frame_lost", sender.rank, frame.payload)
            return
        way = sender.address, address
        arrives = max(world.now + self.latency(), self._last.get(way, 0))
        self._last[way] = arrives
        delay = arrives - world.now
        if rates.frame_late and random() < rates.frame_late:
            world.fault("frame_late", sender.rank, frame.payload)
            delay += int(random() * 400)
        world.at(delay, self._arrive, sender, address, frame)
        if rates.frame_repeated and random() < rates.frame_repeated:
            world.fault("frame_repeated", sender.rank, frame.payload)
            world.at(delay + int(random() * 300), self._arrive, sender, address, frame)

    def _arrive(self, sender: Leader, address: str, frame: Frame) -> None:
        name = address.partition("/")[0]
        if self.is_cut(sender.unit.worker.name, name):
            return
        target = self.world.leader_at(address)
        if target.alive:
            target.put((sender.address, frame))
        elif sender.alive and not self.is_cut(name, sender.unit.worker.name):
            self.world.at(self.latency(), sender.put, Reset(frame.target))

    def reset(self, dead: "Unit") -> None:
        """A unit is gone: its connections break, where that can be seen."""
        for stream in list(self.streams):
            if dead in (stream.prefill.unit, stream.decode.unit):
                stream.close()
        for other in self.world.living():
            knows = other.leader.switchboard.knows(dead.leader.name)
            if knows and not self.is_cut(dead.worker.name, other.worker.name):
                self.world.at(self.latency(), other.leader.put, Reset(dead.leader.name))

    def stream(self, prefill: Rank, decode: Rank) -> "Stream":
        """The open byte stream between two ranks."""
        for stream in self.streams:
            if stream.prefill is prefill and stream.decode is decode:
                return stream
        stream = Stream(self, prefill, decode)
        self.streams.append(stream)
        return stream


class Stream:
    """A TCP-like connection of one prefill and one decode rank: ordered both ways, stalls in a partition."""

    def __init__(self, network: Network, prefill: Rank, decode: Rank) -> None:
        self._network = network
        self.prefill, self.decode = prefill, decode
        self.open = True
        self.busy = False  # the receiving thread on decode is in the middle of a write
        self._queues: dict[bool, deque[tuple[object, ...]]] = {True: deque(), False: deque()}
        self._pumping = {True: False, False: False}

    def post(self, to_decode: bool, *message: object) -> None:
        """Send something; it arrives after everything sent before."""
        if not self.open:
            return
        self._queues[to_decode].append(message)
        self.pump(to_decode)

    def pump(self, to_decode: bool) -> None:
        """See to it that what is queued arrives."""
        if self._queues[to_decode] and not self._pumping[to_decode]:
            self._pumping[to_decode] = True
            self._network.world.at(self._network.latency(), self._deliver, to_decode)

    def _deliver(self, to_decode: bool) -> None:
        if not self.open:
            return
        source, target = (self.prefill, self.decode) if to_decode else (self.decode, self.prefill)
        if not target.alive:
            return  # bytes to nowhere: the reset follows, or the silence is noticed
        if to_decode and self.busy:
            self._pumping[True] = False  # the page that is being written pumps on when it has landed
            return
        if target.paused or self._network.is_cut(source.worker.name, target.worker.name):
            self._network.world.at(RETRY_MS, self._deliver, to_decode)
            return
        self._pumping[to_decode] = False
        message = self._queues[to_decode].popleft()
        target.transfer.heard(self, message)
        self.pump(to_decode)

    def close(self) -> None:
        """Break the stream; each end that can see it learns so, and what was under way is lost."""
        if not self.open:
            return
        self.open = False
        network = self._network
        network.streams.remove(self)
        for end in (self.prefill, self.decode):
            if end.alive:
                network.world.at(network.latency(), self._notice, end)

    def _notice(self, end: Rank) -> None:
        other = self.decode if end is self.prefill else self.prefill
        if not end.alive:
            return
        if end.paused or self._network.is_cut(other.worker.name, end.worker.name):
            self._network.world.at(RETRY_MS, self._notice, end)
            return
        end.transfer.closed(self)
