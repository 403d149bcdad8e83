"""Who listens on a port, as far as /proc lets this user see."""

import os
from contextlib import suppress
from pathlib import Path

LISTENING = "0A"
TABLES = ("net/tcp", "net/tcp6")


def listener(port: int, proc: Path = Path("/proc")) -> str | None:
    """Name and pid of a process that listens on `port`, or None."""
    sockets = {f"socket:[{inode}]" for table in TABLES for inode in _inodes(proc / table, port)}
    if not sockets:
        return None
    for folder in proc.glob("[0-9]*"):
        # Other users' processes do not show what they have open.
        with suppress(OSError):
            if any(os.readlink(link) in sockets for link in (folder / "fd").iterdir()):
                return f"{(folder / 'comm').read_text().strip()} (pid {folder.name})"
    return None


def _inodes(table: Path, port: int) -> list[str]:
    try:
        lines = table.read_text(encoding="ascii").splitlines()[1:]
    except OSError:
        return []
    rows = [line.split() for line in lines]
    return [row[9] for row in rows if row[3] == LISTENING and int(row[1].rpartition(":")[2], 16) == port]
