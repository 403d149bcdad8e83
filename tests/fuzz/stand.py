"""The stack that is fired at: registry, router with its admin port, prefill and decode, as `baton up` starts them.

Its model is tiny and its context short, so that a body that is understood after all costs little; a leg without its other
leg is answered after `OTHER_LEG_MS`.
"""

import itertools
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from baton_core.kv_layout import UnitLayout
from fuzz.frame_cases import Peer
from fuzz.wire import Wrong
from integration.noise import LISTEN
from integration.pairs import LASTING
from integration.stack import REQUEST_S, Stack, eventually
from ports import free_port
from tiny_folders import VOCAB, save_folder, sure_prompts
from tiny_models import TINY, oracle

CONTEXT_TOKENS = 96
PAGE_TOKENS = 16
OTHER_LEG_MS = 2_000
LINK_SILENT_MS = 2_500
LENGTHS, COUNT = (5, 40), 8
DESCRIPTORS_MORE = 4
"""Beyond what a process held before: connections that are being closed."""
ROOMS = itertools.count(1 << 40)


@dataclass
class Stand:
    """A running stack, what it must answer, and what it held before anything was thrown at it."""

    stack: Stack
    admin_port: int
    prompts: list[tuple[list[int], list[int]]]
    pids: dict[str, int] = field(default_factory=dict)
    idle: list[dict[str, Any]] = field(default_factory=list)
    descriptors: dict[str, int] = field(default_factory=dict)

    def port(self, name: str) -> int:
        """Where a service listens for HTTP."""
        if name == "admin":
            return self.admin_port
        if name == "own registry":
            return int(self._entry("prefill")["bootstrap_port"])
        role = "bootstrap" if name == "registry" else name
        return int(self._entry(role)["url"].rpartition(":")[2])

    def pids_behind(self, port: str) -> list[int]:
        """Processes that a port's cases reach."""
        roles = {"router": None, "admin": ("router",), "registry": ("bootstrap",), "own registry": ("prefill",)}
        wanted = roles.get(port, (port,))
        return [pid for name, pid in self.pids.items() if wanted is None or name.partition(" ")[0] in wanted]

    def peer(self) -> Peer:
        """The leader of prefill, as decode would greet it."""
        info = httpx.get(f"{self._entry('prefill')['url']}/server_info", timeout=REQUEST_S).json()
        layout = UnitLayout(
            layers=TINY["num_hidden_layers"], kv_heads=4, head_dim=TINY["head_dim"], element_bytes=4, page_tokens=PAGE_TOKENS
        )  # fmt: skip
        return Peer(name=f"{info['incarnation']}/0.0", fingerprint=info["fingerprint"], layout=layout)

    async def begin(self) -> None:
        """Note how everything is while nothing is under way."""
        self.stack.refresh()
        for entry in self.stack.state:
            self.pids[entry["role"]] = entry["pid"]
            for rank in entry.get("ranks", ()):
                self.pids[f"{entry['role']} rank {rank['rank']}"] = rank["pid"]
        for _ in range(3):
            await self.gold()
        await self.stack.flush()
        self.idle = await self.stack.idle_snapshots()
        self.descriptors = self._descriptors()

    async def gold(self) -> None:
        """The next greedy answers are exactly right. Raises Wrong."""
        async with httpx.AsyncClient(timeout=REQUEST_S) as client:
            for prompt, wanted in self.prompts:
                sampling = {"temperature": 0, "max_new_tokens": COUNT, "ignore_eos": True}
                body = {"input_ids": prompt, "sampling_params": sampling}
                answer = await client.post(f"{self.stack.url}/generate", json=body)
                if answer.status_code != 200 or answer.json()["output_ids"] != wanted:
                    raise Wrong(f"the next greedy answer is {answer.status_code} {answer.text}, not {wanted}")

    async def whole(self) -> None:
        """Every process is the one it was; answers are right; pages, rows, queues, descriptors are as before."""
        for name, pid in self.pids.items():
            if not Path(f"/proc/{pid}/exe").exists():
                raise Wrong(f"{name} (process {pid}) is gone")
        async with httpx.AsyncClient(timeout=REQUEST_S) as client:
            for url in self.stack.worker_urls():
                await client.post(f"{url}/continue_generation")
        await self.gold()
        await self.stack.flush()
        await eventually(self._as_before, "all is as before", lambda: json.dumps(self._moved()), within_s=20)

    async def _as_before(self) -> bool:
        self._now = await self.stack.snapshots()
        return not self._moved()

    def _moved(self) -> list[tuple[str, float, float]]:
        found = [
            (name, idle[name], now.get(name, -1.0))
            for idle, now in zip(self.idle, self._now, strict=True)
            for name in idle
            if name.partition("{")[0] not in LASTING and idle[name] != now.get(name)
        ]
        for name, count in self._descriptors().items():
            if count > self.descriptors[name] + DESCRIPTORS_MORE:
                found.append((f"descriptors of {name}", self.descriptors[name], count))
        return found

    def _descriptors(self) -> dict[str, int]:
        """Files that each process has open, without the connections that the stack keeps among its own processes."""
        sockets = established()
        held = {name: inodes(pid) for name, pid in self.pids.items()}
        ours = {sockets[inode][0] for open_files in held.values() for inode in open_files if inode in sockets}
        return {
            name: sum(inode not in sockets or sockets[inode][1] not in ours for inode in open_files)
            for name, open_files in held.items()
        }

    def _entry(self, role: str) -> dict[str, Any]:
        return self.stack.entries(role)[0]


def inodes(pid: int) -> list[str]:
    """What a process has open: the inode of a socket, the name of anything else."""
    found = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # closed since
            found.append(os.readlink(descriptor).removeprefix("socket:[").removesuffix("]"))
    return found


def established() -> dict[str, tuple[str, str]]:
    """Every TCP connection of this machine, by inode: its own address and the other end's."""
    lines = [
        line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    return {fields[9]: (fields[1], fields[2]) for fields in lines if fields[3] != LISTEN}


@contextmanager
def standing(directory: Path, *options: str, settings: tuple[str, ...] = ()) -> Iterator[Stand]:
    """A stack, from its first breath to its last."""
    model = oracle(
        "llama", vocab_size=VOCAB, num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=CONTEXT_TOKENS
    )
    folder = save_folder(directory / "tiny", model)
    admin_port = free_port()
    of_workers = {
        "kv_tokens": 4_096,
        "page_tokens": PAGE_TOKENS,
        "other_leg_ms": OTHER_LEG_MS,
        "link_silent_ms": LINK_SILENT_MS,
    }
    common = [f"{role}.{key}={value}" for role in ("prefill", "decode") for key, value in of_workers.items()]
    common.append(f"router.admin_port={admin_port}")
    stack = Stack.up(directory, "--model", str(folder), "--dtype", "float32", *options, settings=(*common, *settings))
    try:
        yield Stand(stack, admin_port, sure_prompts(model, LENGTHS, COUNT))
    finally:
        stack.down()
