"""Cut links: what goes to and from some ports of this host is dropped without a word, as by a cable that was pulled.

Only inside a network namespace of its own (`enter_namespace` starts the program again in one), where nothing but the stack
can be hurt. Needs root and `ip`, and one way of dropping packets by port that the kernel has: `iptables`, `nft`, or `tc`
with `clsact` and `flower`. Each is tried in a namespace of its own; `why_not` says what is missing.

Packets are dropped where they arrive, or a sender on the same host would be told at once.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass

INSIDE = "BATON_CHAOS_NAMESPACE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to drop packets; `{port}` stands for a port in `cut`."""

    tool: str
    begin: tuple[str, ...]
    cut: tuple[str, ...]
    heal: str


WAYS = (
    Way(
        tool="iptables",
        begin=(),
        cut=("iptables -A INPUT -p tcp --dport {port} -j DROP", "iptables -A INPUT -p tcp --sport {port} -j DROP"),
        heal="iptables -F INPUT",
    ),
    Way(
        tool="nft",
        begin=("nft add table inet chaos", "nft add chain inet chaos cut { type filter hook input priority 0 ; }"),
        cut=("nft add rule inet chaos cut tcp dport {port} drop", "nft add rule inet chaos cut tcp sport {port} drop"),
        heal="nft flush chain inet chaos cut",
    ),
    Way(
        tool="tc",
        begin=("tc qdisc add dev lo clsact",),
        cut=tuple(
            f"tc filter add dev lo ingress protocol ip flower ip_proto tcp {side} {{port}} action drop"
            for side in ("dst_port", "src_port")
        ),
        heal="tc filter del dev lo ingress",
    ),
)


def why_not() -> str | None:
    """Why links cannot be cut here; None if they can."""
    if os.geteuid():
        return "only root may make a network namespace"
    missing = [name for name in ("unshare", "ip") if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not installed"
    troubles = [_trouble(way) for way in WAYS]
    return None if None in troubles else f"nothing drops packets by port: {'; '.join(filter(None, troubles))}"


def enter_namespace() -> None:
    """Go on in a network namespace of our own; returns there."""
    if INSIDE not in os.environ:
        way = next(way for way in WAYS if _trouble(way) is None)
        os.environ[INSIDE] = way.tool
        os.execvp("unshare", ["unshare", "-n", sys.executable, *sys.argv])
    _run("ip link set lo up")
    for command in _way().begin:
        _run(command)


def cut(ports: Iterable[int]) -> None:
    """Drop what goes to these ports, and what comes from them."""
    for port in ports:
        for command in _way().cut:
            _run(command.format(port=port))


def heal() -> None:
    """Drop nothing any more."""
    _run(_way().heal)


def _way() -> Way:
    return next(way for way in WAYS if way.tool == os.environ[INSIDE])


def _trouble(way: Way) -> str | None:
    """Why this way does not work here; None if it does."""
    if shutil.which(way.tool) is None:
        return f"{way.tool} is not installed"
    commands = [*way.begin, *(one.format(port=9) for one in way.cut), way.heal]
    quoted = [" ".join(f"'{word}'" for word in command.split()) for command in ("ip link set lo up", *commands)]
    done = subprocess.run(
        ["unshare", "-n", "sh", "-c", " && ".join(quoted)], capture_output=True, text=True, check=False
    )
    return None if done.returncode == 0 else f"{way.tool}: {done.stderr.strip() or done.returncode}"


def _run(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True, text=True)
