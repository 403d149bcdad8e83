"""Prefill ranks written by hand, to say and do what a real one would not, or to stop where it would not."""

import os
import socket

from baton_engine.transfer.protocol import Receiver
from baton_engine.transfer.shm_wire import Frame, Kind, hello, order_digest, own_boot_id, receive_welcome
from baton_engine.transfer.tcp_wire import (
    ANSWER,
    FRAME,
    GREETING,
    MAGIC,
    PIECE,
    VERSION,
    AnswerKind,
    FrameKind,
    receive_exactly,
)
from contract.transfer_pairs import PREFILL, WAIT_S, row_of


class TcpWriter:
    """A prefill rank written by hand, to stop where a real one would not."""

    def __init__(self, receiver: Receiver, name: str = PREFILL) -> None:
        host, port = receiver.address.split(":")
        self.stream = socket.create_connection((host, int(port)))
        self.stream.sendall(GREETING.pack(MAGIC, VERSION, len(name)) + name.encode())

    def pages(self, room: int, pieces: list[tuple[int, int, int]], payload: bytes, attempt: int = 1) -> None:
        nbytes = sum(piece[2] for piece in pieces)
        head = FRAME.pack(FrameKind.PAGES, len(pieces), attempt, room, nbytes)
        self.stream.sendall(head + b"".join(PIECE.pack(*piece) for piece in pieces) + payload)

    def row(self, room: int, attempt: int = 1) -> None:
        raw = row_of(room, attempt).pack()
        self.stream.sendall(FRAME.pack(FrameKind.ROW, 0, attempt, room, len(raw)) + raw)

    def hears(self) -> tuple[AnswerKind, int]:
        """The answer to a frame: its kind, and how many bytes landed."""
        self.stream.settimeout(WAIT_S)
        kind, _, _, landed = ANSWER.unpack(receive_exactly(self.stream, ANSWER.size))
        return AnswerKind(kind), landed

    def is_cut(self) -> bool:
        self.stream.settimeout(WAIT_S)
        try:
            while self.stream.recv(4096):
                pass
        except ConnectionResetError:
            pass
        return True


class ShmWriter:
    """A prefill rank written by hand, to say what a real one would not."""

    def __init__(self, receiver: Receiver, name: str = PREFILL) -> None:
        self.stream = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.stream.settimeout(WAIT_S)
        self.stream.connect(receiver.address)
        self.stream.send(hello(own_boot_id(), name))
        _, *descriptors = receive_welcome(self.stream)
        for descriptor in descriptors:
            os.close(descriptor)

    def asks(
        self,
        serial: int = 1,
        room: int = 7,
        attempt: int = 1,
        pages: tuple[int, ...] = (5, 3, 9),
        row: int = 2,
        held_pages: int = 0,
    ) -> Kind:
        digest = order_digest(pages, row, held_pages)
        self.says(Frame(kind=Kind.BEGIN, serial=serial, room=room, attempt=attempt, count=digest))
        answer = self.hears()
        assert answer.serial == serial
        return answer.kind

    def says(self, frame: Frame) -> None:
        self.stream.send(frame.pack())

    def hears(self) -> Frame:
        return Frame.unpack(self.stream.recv(1024))
