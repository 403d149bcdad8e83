"""Every socket that the processes of a stack listen on, by what it is for; taken from /proc, so that none is forgotten."""

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fuzz.stand import Stand
from integration.noise import listening_ports

PORTS_OF_A_STACK = {
    "router HTTP": "router",
    "router admin HTTP": "admin",
    "bootstrap HTTP": "registry",
    "prefill HTTP": "prefill",
    "prefill registry HTTP": "own registry",
    "decode HTTP": "decode",
    "prefill rank links": "links",
    "decode rank tcp door": "kv",
    "decode rank shm door": "shm",
    "prefill ipc": "ipc",
    "decode ipc": "ipc",
}
"""Each, and the lane that fires at it. Units of many ranks open more, inside a worker: their logs, rounds, nodes."""

_UNIX = {
    r".*/rank\d+\.ipc": "ipc",
    r".*/unit\d+\.log": "unit log",
    r".*/rounds": "rounds",
    r".*\.(new|kv)": "rank shm door",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """One listening socket."""

    name: str
    pid: int


def listeners(pid: int, stand: Stand) -> Iterator[Listener]:
    """What a process of the stack listens on; a socket that nobody knows is named by its address."""
    (who,) = (name for name, number in stand.pids.items() if number == pid)
    role = who.partition(" ")[0]
    known = {
        stand.port("router"): "router HTTP",
        stand.port("admin"): "router admin HTTP",
        stand.port("registry"): "bootstrap HTTP",
        stand.port("prefill"): "prefill HTTP",
        stand.port("own registry"): "prefill registry HTTP",
        stand.port("decode"): "decode HTTP",
    }
    of_rank = {"prefill": "prefill rank links", "decode": "decode rank tcp door"}
    for port in listening_ports(pid):
        unknown = of_rank[role] if "rank" in who else f"{who} port {port}"
        yield Listener(name=known.get(port, unknown), pid=pid)
    for path in unix_listeners(pid):
        kind = next((kind for form, kind in _UNIX.items() if re.fullmatch(form, str(path))), str(path))
        yield Listener(name=f"{role} {kind}", pid=pid)


def unix_listeners(pid: int) -> list[Path]:
    """Unix sockets on which a process listens."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed since
            inodes.add(os.readlink(descriptor).removeprefix("socket:[").removesuffix("]"))
    found = []
    for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        # Flags 0x10000: it accepts connections.
        if len(fields) > 7 and fields[6] in inodes and int(fields[3], 16) & 0x10000:
            found.append(Path(fields[7]))
    return found
