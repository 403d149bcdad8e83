"""T6: the pages of 1,024 bf16 tokens of SmolLM2 between two processes, against what the machine could do at best.

    python tests/bench/bench_transfer.py [--rounds 50] [--way shm --way tcp --way staged] [--decode-page-tokens 32]

This process is decode; it starts prefill as a child. Each round measures, one after the other, the limit (one memcpy of
as many bytes in the prefill process, or a raw socket stream of as many bytes between the two) and the transfer, so that
what else runs on the machine meets both alike. Pages are scattered on both sides. Other page sizes on decode mean a run
for each head of each layer; `staged` is tcp that gathers them first.

The clock runs from just before `push` in prefill. `word` stops it when the room word is stored, and so visible (T6: nobody
has to be woken for that, and one who spins for it would slow down what it measures); `poke` when decode's driver has been
woken and sees Success, as in life. `granted` sends one page before the clock
starts, so that no handshake is counted; `whole` begins with the attempt's first push, handshake included.
"""

import argparse
import json
import random
import socket
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import structlog
import torch

from baton_core.agreement import KVPoll
from baton_core.effects import Push
from baton_core.kv_layout import UnitLayout
from baton_core.messages import MetadataRow, PageOrder
from baton_engine.kv_pool import KVPool, PoolShape, RowMemory
from baton_engine.transfer import shm_way
from baton_engine.transfer.attempts import AttemptTable
from baton_engine.transfer.pool_bytes import PoolTarget
from baton_engine.transfer.protocol import Receiver, Sender
from baton_engine.transfer.receiver import Door, PageReceiver
from baton_engine.transfer.sender import PageSender
from baton_engine.transfer.shm_copier import DecodeMemory
from baton_engine.transfer.shm_door import ShmDoor
from baton_engine.transfer.staging import StagingRing
from baton_engine.transfer.tcp_door import TcpDoor
from baton_engine.transfer.tcp_way import TcpWay
from baton_engine.transfer.ways import Way

SHAPE = PoolShape(pages=160, layers=30, kv_heads=3, page_tokens=16, head_dim=64, dtype=torch.bfloat16)
LAYOUT = UnitLayout(page_tokens=16, layers=30, kv_heads=3, head_dim=64, element_bytes=2)
PREFILL, DECODE = "p1/0.0", "d1/0.0"
BACKENDS = {"shm": "shm", "tcp": "tcp", "staged": "tcp"}
MEASURED_PAGES = 1024 // SHAPE.page_tokens
MEASURED_BYTES = MEASURED_PAGES * SHAPE.page_bytes
WARM_UP_ROUNDS = 5
WAIT_S = 20.0


class Bell:
    """A poke to wait on."""

    def __init__(self) -> None:
        self._rung = threading.Condition()

    def __call__(self) -> None:
        with self._rung:
            self._rung.notify_all()

    def wait(self) -> None:
        """Until the next poke, or for a moment."""
        with self._rung:
            self._rung.wait(0.001)

    def until(self, end: Sender | Receiver, room: int, poll: KVPoll, progress: int = 0) -> None:
        """Wait until the attempt is that far."""
        deadline = time.monotonic() + WAIT_S
        with self._rung:
            while (seen := end.poller(room, 1).poll()).poll < poll or seen.progress < progress:
                if seen.poll is KVPoll.Failed or time.monotonic() > deadline:
                    raise RuntimeError(f"transfer of room {room} does not get on: {seen}")
                self._rung.wait(1.0)


class StampedRows(RowMemory):
    """Rows that know when one was last written by this process."""

    written_ns = 0

    def write(self, row: int, raw: bytes | memoryview) -> None:
        super().write(row, raw)
        self.written_ns = time.monotonic_ns()


class StampedMemory(DecodeMemory):
    """The same for rows of another process."""

    written_ns = 0

    def write_row(self, row: int, raw: bytes) -> None:
        super().write_row(row, raw)
        StampedMemory.written_ns = time.monotonic_ns()


class Prefill:
    """The child: obeys one line of JSON after the other and answers each with one."""

    def __init__(self) -> None:
        shm_way.DecodeMemory = StampedMemory  # type: ignore[attr-defined]
        self.pool, self.bell = KVPool(SHAPE), Bell()
        self.pool.tensor.fill_(1.0)
        self.ends = {name: PageSender(table, LAYOUT, 0, [self._way(name, table)]) for name, table in self._tables()}
        self.source = np.ones(MEASURED_BYTES, dtype=np.uint8)
        self.target = np.ones(MEASURED_BYTES, dtype=np.uint8)

    def _tables(self) -> list[tuple[str, AttemptTable]]:
        return [(name, AttemptTable(self.bell)) for name in BACKENDS]

    def _way(self, name: str, table: AttemptTable) -> Way:
        if name == "shm":
            return shm_way.ShmWay(self.pool, PREFILL, table, self.bell, connect_timeout_ms=5_000)
        return TcpWay(self.pool, PREFILL, table, connect_timeout_ms=5_000, staged=name == "staged")

    def run(self) -> None:
        for line in sys.stdin:
            words = json.loads(line)
            print(json.dumps(getattr(self, words.pop("do"))(**words)), flush=True)

    def memcpy(self) -> int:
        began = time.monotonic_ns()
        np.copyto(self.target, self.source)
        return time.monotonic_ns() - began

    def stream(self, port: int) -> int:
        with socket.create_connection(("127.0.0.1", port)) as stream:
            stream.recv(1)
            began = time.monotonic_ns()
            stream.sendall(self.source.data)
            stream.recv(1)
        return began

    def order(self, way: str, address: str, room: int, pages: list[int], tokens: int, layout: str) -> bool:
        count = LAYOUT.pages(tokens)
        self.sender, self.room, self.first = self.ends[way], room, count - MEASURED_PAGES
        self.sender.offer(room, 1, DECODE, UnitLayout.from_text(layout), tokens)
        order = PageOrder(
            room=room,
            attempt=1,
            incarnation=DECODE,
            pages=tuple(pages),
            row=0,
            backend=BACKENDS[way],
            address=address,
            layout=layout,
        )
        self.sender.order(DECODE, order)
        self.bell.until(self.sender, room, KVPoll.WaitingForInput)
        self.numbers = random.Random(room).sample(range(SHAPE.pages), count)
        if self.first:
            self.sender.push(Push(room=room, attempt=1, first=0, pages=tuple(self.numbers[: self.first])))
            self.bell.until(self.sender, room, KVPoll.Transferring, self.first)
        return True

    def written(self) -> int:
        return StampedMemory.written_ns

    def push(self) -> int:
        row = MetadataRow(room=self.room, attempt=1, first_token=1)
        push = Push(room=self.room, attempt=1, first=self.first, pages=tuple(self.numbers[self.first :]), row=row)
        began = time.monotonic_ns()
        self.sender.push(push)
        self.bell.until(self.sender, self.room, KVPoll.Success)
        self.sender.forget(self.room, 1)
        return began


class Decode:
    """This process, and its child."""

    def __init__(self, page_tokens: int) -> None:
        self.layout = replace(LAYOUT, page_tokens=page_tokens)
        pages = SHAPE.pages * SHAPE.page_tokens // page_tokens
        self.shape = replace(SHAPE, page_tokens=page_tokens, pages=pages)
        self.pool, self.rows, self.bell = KVPool(self.shape), StampedRows(4), Bell()
        self.ends = {}
        for name in BACKENDS:
            table = AttemptTable(self.bell)
            self.ends[name] = PageReceiver(table, self.layout, 0, self.rows, [self._door(name, table)])
        command = [sys.executable, str(Path(__file__)), "--prefill"]
        self.child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.room = 0
        self.buffer = memoryview(bytearray(MEASURED_BYTES))

    def _door(self, name: str, table: AttemptTable) -> Door:
        if name == "shm":
            return ShmDoor(self.pool, self.rows, table)
        ring = StagingRing(PoolTarget(self.pool), table, self.bell) if name == "staged" else None
        return TcpDoor(self.pool, self.rows, table, host="127.0.0.1", advertise_host="127.0.0.1", staging=ring)

    def tell(self, do: str, **words: object) -> None:
        assert self.child.stdin is not None
        self.child.stdin.write(json.dumps({"do": do} | words) + "\n")
        self.child.stdin.flush()

    def ask(self, do: str, **words: object) -> int:
        """The child's answer."""
        self.tell(do, **words)
        return self.answer()

    def answer(self) -> int:
        assert self.child.stdout is not None
        return int(json.loads(self.child.stdout.readline()))

    def limit_ns(self, way: str) -> int:
        """A memcpy, or a raw stream."""
        if way == "shm":
            return self.ask("memcpy")
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.tell("stream", port=listener.getsockname()[1])
            stream, _ = listener.accept()
        with stream:
            stream.send(b"g")
            got = 0
            while got < MEASURED_BYTES:
                got += stream.recv_into(self.buffer[got:])
            ended = time.monotonic_ns()
            stream.send(b"e")
        return ended - self.answer()

    def transfer_ns(self, way: str, granted: bool) -> tuple[int, int]:
        """One transfer, from push to the room word, and to Success here."""
        self.room += 1
        receiver, room = self.ends[way], self.room
        tokens = (MEASURED_PAGES + granted) * LAYOUT.page_tokens
        pages = random.Random(-room).sample(range(self.shape.pages), self.layout.pages(tokens))
        receiver.expect(room, 1, PREFILL, LAYOUT, tokens, tuple(pages), 0)
        words = {"pages": pages, "tokens": tokens, "layout": self.layout.to_text()}
        self.ask("order", way=way, address=receiver.address, room=room, **words)
        self.tell("push")
        self.bell.until(receiver, room, KVPoll.Success)
        while receiver.staging is not None and not receiver.staging.settled(room, 1):
            self.bell.wait()
        ended = time.monotonic_ns()
        receiver.forget(room, 1)
        began = self.answer()
        written = self.ask("written") if way == "shm" else self.rows.written_ns
        return written - began, ended - began

    def close(self) -> None:
        for end in self.ends.values():
            end.close()
        self.child.communicate()


def measure(decode: Decode, way: str, granted: bool, rounds: int) -> None:
    """Print two lines of the table."""
    measured = []
    for _ in range(rounds + WARM_UP_ROUNDS):
        measured.append((decode.limit_ns(way), *decode.transfer_ns(way, granted)))
    limits, *transfers = zip(*measured[WARM_UP_ROUNDS:], strict=True)
    peer = "memcpy" if way == "shm" else "raw stream"
    for until, took in zip(("word", "poke"), transfers, strict=True):
        limit, transfer = statistics.median(limits), statistics.median(took)
        name = f"{way} {'granted' if granted else 'whole'}, {until}"
        figures = [f"{ns / 1e6:.2f} ms {MEASURED_BYTES / ns:4.1f} GB/s" for ns in (transfer, limit)]
        best = min(limits) / min(took)
        print(f"| {name:17} | {figures[0]:17} | {peer:10} {figures[1]:17} | {limit / transfer:.2f} | {best:.2f} |")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--way", action="append", choices=BACKENDS)
    parser.add_argument("--decode-page-tokens", type=int, default=LAYOUT.page_tokens)
    parser.add_argument("--prefill", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.prefill:
        structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))  # stdout is for answers
        Prefill().run()
        return
    decode = Decode(arguments.decode_page_tokens)
    print(f"{MEASURED_BYTES / 2**20:.1f} MiB in {MEASURED_PAGES} scattered pages, medians of {arguments.rounds} rounds")
    print("| transfer | it took | the limit | ratio | ratio of the best rounds |")
    print("|---|---|---|---|---|")
    try:
        for way in arguments.way or ("shm", "tcp"):
            for granted in (True, False):
                measure(decode, way, granted, arguments.rounds)
    finally:
        decode.close()


if __name__ == "__main__":
    main()
