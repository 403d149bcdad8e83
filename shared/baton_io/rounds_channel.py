"""How the leaders of a worker's units meet for the rounds of DP attention: one ROUTER at unit 0's leader."""

import time
from collections import deque
from typing import Protocol

import zmq

from baton_core.errors import EngineError
from baton_core.limits import Millis
from baton_core.rounds import Conductor
from baton_io.seats import Seats, open_router

NUMBER_DIGITS_MAX = 18
_WANT, _OVER, _BEGIN, _HERE, _READY = b"w", b"o", b"b", b"h", b"r"


class Rounds(Protocol):
    """One unit's view."""

    @property
    def socket(self) -> "zmq.Socket[bytes] | None":
        """Readable when there is news."""
        ...

    def gather(self, timeout_ms: Millis) -> None:
        """Wait for all units. Raises EngineError."""
        ...

    def want(self) -> None:
        """This unit has something to compute."""
        ...

    def over(self, number: int) -> None:
        """This unit finished its part of the round."""
        ...

    def begun(self) -> list[int]:
        """Rounds that began since the last call."""
        ...

    @property
    def bad_frames(self) -> int:
        """Frames of strangers, which were dropped."""
        ...

    def close(self) -> None:
        """Close the socket."""
        ...


class ConductorRounds:
    """Unit 0's leader: it conducts, and takes part itself."""

    def __init__(self, address: str, units: int) -> None:
        self._conductor = Conductor(units)
        self._begun: deque[int] = deque()
        self._seats = Seats(range(1, units))
        self.bad_frames = 0
        self._context = zmq.Context(io_threads=1)
        self.socket = open_router(self._context)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(address)

    def gather(self, timeout_ms: Millis) -> None:
        """Wait until every other unit's leader has said that it is here."""
        until_s = time.monotonic() + timeout_ms / 1000
        while missing := self._seats.missing:
            left_ms = round(1000 * (until_s - time.monotonic()))
            if left_ms <= 0 or not self.socket.poll(left_ms):
                text = ", ".join(str(unit) for unit in missing)
                raise EngineError(f"the leader of unit {text} did not come within {timeout_ms} ms")
            match self.socket.recv_multipart():
                case [name, kind, number] if (
                    kind == _HERE and _is_number(number) and self._seats.take(name, int(number))
                ):
                    pass
                case _:
                    self.bad_frames += 1
        self._tell(_READY, 0)

    def want(self) -> None:
        """This unit has something to compute."""
        self._go(self._conductor.want())

    def over(self, number: int) -> None:
        """This unit finished its part."""
        self._go(self._conductor.over(0, number))

    def begun(self) -> list[int]:
        """Take what the others said; rounds that began since."""
        while True:
            try:
                said = self._understood(self.socket.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                break
            if said is None:
                continue
            unit, kind, number = said
            if kind == _WANT:
                self._go(self._conductor.want())
            elif kind == _OVER:
                self._go(self._conductor.over(unit, number))
        begun = list(self._begun)
        self._begun.clear()
        return begun

    def close(self) -> None:
        """Close."""
        self.socket.close(linger=0)
        self._context.term()

    def _understood(self, parts: list[bytes]) -> tuple[int, bytes, int] | None:
        """Unit, kind and number of a message; None, and counted, where it is not of one of the other leaders.

        Raises EngineError where one of them cannot be understood.
        """
        unit = self._seats.of(parts[0])
        if unit is None:
            self.bad_frames += 1
            return None
        if len(parts) != 3 or not _is_number(parts[2]):
            raise EngineError(f"the leader of unit {unit} sent what cannot be read, in {len(parts)} parts")
        return unit, parts[1], int(parts[2])

    def _go(self, number: int | None) -> None:
        if number is not None:
            self._begun.append(number)
            self._tell(_BEGIN, number)

    def _tell(self, kind: bytes, number: int) -> None:
        for unit, name in self._seats.names.items():
            try:
                self.socket.send_multipart([name, kind, b"%d" % number], zmq.NOBLOCK)
            except zmq.ZMQError as error:
                raise EngineError(f"the leader of unit {unit} is gone: {error}") from error


class UnitRounds:
    """Any other unit's leader."""

    bad_frames = 0  # nobody but the conductor can say anything to it

    def __init__(self, address: str, unit: int) -> None:
        self._unit = unit
        self._context = zmq.Context(io_threads=1)
        self.socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(address)

    def gather(self, timeout_ms: Millis) -> None:
        """Say that this unit is here, and wait for the conductor."""
        self._say(_HERE, self._unit)
        if not self.socket.poll(timeout_ms):
            raise EngineError(f"unit 0's leader did not gather the units within {timeout_ms} ms")
        self.socket.recv_multipart()

    def want(self) -> None:
        """This unit has something to compute."""
        self._say(_WANT)

    def over(self, number: int) -> None:
        """This unit finished its part."""
        self._say(_OVER, number)

    def begun(self) -> list[int]:
        """Rounds that began since the last call."""
        begun: list[int] = []
        while True:
            try:
                kind, number = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return begun
            if kind == _BEGIN:
                begun.append(int(number))

    def close(self) -> None:
        """Close."""
        self.socket.close(linger=0)
        self._context.term()

    def _say(self, kind: bytes, number: int = 0) -> None:
        self.socket.send_multipart([kind, b"%d" % number], zmq.NOBLOCK)


def _is_number(text: bytes) -> bool:
    return text.isdigit() and len(text) <= NUMBER_DIGITS_MAX
