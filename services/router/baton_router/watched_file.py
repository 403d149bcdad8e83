"""A file that operators may change while the router runs: read again when its time, size or inode changes."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

from baton_core.limits import Millis

FILE_BYTES_MAX = 4 << 20


async def contents(path: Path, interval_ms: Millis) -> AsyncIterator[bytes]:
    """Its bytes now and after every change, also one by renaming (as Kubernetes mounts do). Unreadable: skipped."""
    seen: tuple[int, int, int] | None = None
    while True:
        stamp = await asyncio.to_thread(_stamp, path)
        if stamp is not None and stamp != seen:
            seen = stamp
            content = await asyncio.to_thread(_read, path)
            if content is not None:
                yield content
        await asyncio.sleep(interval_ms / 1000)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _read(path: Path) -> bytes | None:
    try:
        with path.open("rb") as file:
            return file.read(FILE_BYTES_MAX)
    except OSError:
        return None
