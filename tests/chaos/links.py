"""Cut links: what goes to and from some ports of this host is dropped without a word, as by a cable that was pulled.

Only inside a network namespace of its own (`enter_namespace` starts the program again in one), where nothing but the stack
can be hurt. Needs root, `ip`, `tc`, and a kernel with `clsact` and `flower`; `why_not` says what is missing.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable

INSIDE = "BATON_CHAOS_NAMESPACE"
_PROBE = "ip link set lo up && tc qdisc add dev lo clsact && tc filter add dev lo egress protocol ip flower"


def why_not() -> str | None:
    """Why links cannot be cut here; None if they can."""
    if os.geteuid():
        return "only root may make a network namespace"
    missing = [name for name in ("unshare", "ip", "tc") if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not installed"
    script = f"{_PROBE} ip_proto tcp dst_port 9 action drop"
    done = subprocess.run(["unshare", "-n", "sh", "-c", script], capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else f"the kernel cannot drop packets by port: {done.stderr.strip()}"


def enter_namespace() -> None:
    """Go on in a network namespace of our own; returns there."""
    if INSIDE not in os.environ:
        os.environ[INSIDE] = "1"
        os.execvp("unshare", ["unshare", "-n", sys.executable, *sys.argv])
    _run("ip link set lo up")
    _run("tc qdisc add dev lo clsact")


def cut(ports: Iterable[int]) -> None:
    """Drop what goes to these ports, and what comes from them."""
    for port in ports:
        for side in ("dst_port", "src_port"):
            _run(f"tc filter add dev lo egress protocol ip flower ip_proto tcp {side} {port} action drop")


def heal() -> None:
    """Drop nothing any more."""
    _run("tc filter del dev lo egress")


def _run(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True, text=True)
