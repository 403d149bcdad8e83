"""What strangers send: noise for every port that a process listens on, and bodies of every odd kind."""

import json
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

CONNECT_S = 2.0
LISTEN = "0A"


def listening_ports(pid: int) -> set[int]:
    """TCP ports on which this process listens."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # closed since
            inodes.add(os.readlink(descriptor).removeprefix("socket:[").removesuffix("]"))
    ports = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTEN and fields[9] in inodes:
                ports.add(int(fields[1].rpartition(":")[2], 16))
    return ports


def make_noise(port: int, dice: Random) -> None:
    """Everything that a port scanner, a lost client and a fuzzer would say."""
    for raw in _noise(dice):
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), CONNECT_S) as stream:
            stream.sendall(raw)
            if dice.random() < 0.5:
                stream.shutdown(socket.SHUT_WR)
            stream.settimeout(0.02)
            stream.recv(4_096)


def _noise(dice: Random) -> Iterator[bytes]:
    yield b""
    yield b"\0" * 64
    yield b"\xff" * 64
    yield b"GET / HTTP/1.1\r\n"
    yield b"POST /generate HTTP/1.1\r\nContent-Length: 99999999999999\r\n\r\n{"
    yield b"POST /generate HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n"
    yield b"\xff\0\0\0\0\0\0\0\1\x7f\3\0NULL"  # half a ZeroMQ greeting
    zeromq = b"\xff" + bytes(8) + b"\x7f\3\0NULL".ljust(23, b"\0") + bytes(32)
    yield zeromq[:64]
    yield zeromq[:64] + b"\4\x19\5READY\x0bSocket-Type\0\0\0\6DEALER"
    yield zeromq[:64] + b"\2" + struct.pack(">Q", 2**62) + b"x" * 64  # a frame of a huge length
    yield b"BTKV" + struct.pack("<HH", 2, 65_535)  # our own magic, and a name that never comes
    yield b"BTKV" + struct.pack("<HH", 2, 4) + b"p1/0" + bytes(64)
    yield b"\x80\4\x95" + struct.pack("<Q", 2**40) + b"."  # a pickle
    for _ in range(12):
        yield dice.randbytes(dice.randint(1, 600))


def odd_bodies(dice: Random, good: dict[str, Any], count: int) -> Iterator[bytes]:
    """Bodies that nobody can serve: no JSON, and JSON in which one field is odd."""
    yield from (b"", b"{", b"[]", b"null", b"5", b'"text"', b"\xff\xfe", b"[" * 10_000, b'{"a":' * 10_000)
    yield b'{"text": "\\ud800", "sampling_params": {"top_p": 9}}'
    yield json.dumps(good | {"sampling_params": {"stop": ["x"] * 100_000}}).encode()
    odd: tuple[Any, ...] = (
        None,
        True,
        -1,
        2**70,
        1.5,
        float("nan"),
        float("inf"),
        "x",
        [],
        [[]],
        {},
        {"a": {}},
        [None],
    )
    for _ in range(count):
        body = json.loads(json.dumps(good))
        if dice.random() < 0.5:
            body["input_ids"] = dice.choice(([], [-1], [10**9], [1.5], ["a"], [[]], [None], {}, "", 5, [2**70], None))
        else:
            name = dice.choice(("temperature", "top_p", "top_k", "max_new_tokens", "stop", "stop_token_ids", "n"))
            wrong = {
                "temperature": (-1, "hot", [], float("nan")),
                "top_p": (-0.1, 1.1, "x", [1]),
                "top_k": (-7, "x", 1.5),
                "max_new_tokens": (-1, "many", 1.5, []),
                "stop": (5, [5], {}, [[]]),
                "stop_token_ids": ("x", [1.5], ["a"], {}),
                "n": (0, -1, "two", 1.5, 10**6),
            }[name]
            body["sampling_params"][name] = dice.choice((*wrong, *(one for one in odd if isinstance(one, dict))))
        yield json.dumps(body).encode()
