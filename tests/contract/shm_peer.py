"""One end of an shm transfer as a process of its own, to be stopped and killed: `shm_peer.py writer|reader JSON`.

Writer: connects to `address`, pushes all pages of one attempt, and stops itself (SIGSTOP) on its copying thread right
before copy number `stop_at`. Reader: expects one attempt, prints its address, and stays until its stdin ends.
Says one word a line on stdout.
"""

import json
import os
import select
import signal
import socket
import sys
from pathlib import Path

import torch

from baton_core.agreement import KVPoll
from baton_core.effects import Push
from baton_core.kv_layout import plan
from baton_engine.kv_pool import KVPool, PoolShape, RowMemory
from baton_engine.transfer.attempts import AttemptTable, Outgoing
from baton_engine.transfer.pool_bytes import Bytes, PoolSource
from baton_engine.transfer.shm_copier import Copier, DecodeMemory
from baton_engine.transfer.shm_wire import hello, own_boot_id, receive_welcome
from baton_engine.transfer.ways import Job, Target
from contract.transfer_pairs import DECODE, PREFILL, Bell, layout_of, make_receiver, row_of

LARGE = PoolShape(pages=8, layers=8, kv_heads=8, page_tokens=16, head_dim=128, dtype=torch.float32)  # 1 MiB a page
ORDER = (1, 0, 3, 2, 5, 4, 7, 6)  # so that no two pages are neighbours on both sides: a copy a page, two a batch


class StoppingSource(PoolSource):
    """A pool whose reader freezes in the middle."""

    def __init__(self, pool: KVPool, stop_at: int) -> None:
        super().__init__(pool)
        self._left = stop_at

    def view(self, offset: int, nbytes: int) -> Bytes:
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        self._left -= 1
        return super().view(offset, nbytes)


def write(address: str, stop_at: int) -> None:
    pool = KVPool(LARGE)
    pool.tensor.fill_(7.0)
    table, layout = AttemptTable(Bell()), layout_of(LARGE)
    tokens = len(ORDER) * LARGE.page_tokens
    one = Outgoing(room=7, attempt=1, prompt_tokens=tokens, pages_total=len(ORDER), status=KVPoll.WaitingForInput)
    one.add_flow(DECODE, plan(layout, 0, layout, 0), carries_row=True)
    table.open(one)
    stream = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stream.connect(address)
    stream.send(hello(own_boot_id(), PREFILL))
    memory = DecodeMemory(*receive_welcome(stream))
    copier = Copier(stream, memory, StoppingSource(pool, stop_at), table, "writer", lambda: False)
    push = Push(room=7, attempt=1, first=0, pages=tuple(range(len(ORDER))), row=row_of())
    copier.take(Job(one.flows[DECODE], Target(address=address, pages=ORDER, row=2, page_bytes=LARGE.page_bytes), push))
    print("asked", flush=True)
    while select.select([stream, sys.stdin], [], [])[0] == [stream]:
        copier.hear()
        copier.work()
        print(one.status.name, flush=True)


def read(directory: str) -> None:
    pool, rows = KVPool(LARGE), RowMemory(4)
    layout, bell = layout_of(LARGE), Bell()
    receiver = make_receiver("shm", pool, rows, bell, Path(directory), layout)
    receiver.expect(7, 1, PREFILL, layout, len(ORDER) * LARGE.page_tokens, ORDER, 2)
    print(receiver.address, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    {"writer": write, "reader": read}[sys.argv[1]](**json.loads(sys.argv[2]))
