"""The bytes of this rank's pool as arrays, so that numpy copies them: many rows at once, without the interpreter lock.

A page's stripe (`kv_layout.Stripe`) is a two-dimensional view; what is in between is neither read nor written.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from baton_core.kv_layout import Stripe
from baton_core.request import PageId
from baton_engine.kv_pool import KVPool

BATCH_BYTES = 2 * 1024 * 1024
"""Copied in 0.1 to 1 ms; then whoever copies looks whether it should stop."""

Bytes = NDArray[np.uint8]


class PoolSource:
    """The bytes of this rank's own pool, by offset from its start."""

    def __init__(self, pool: KVPool) -> None:
        self.page_bytes = pool.page_bytes
        self._memory = pool.memory
        self._bytes = _host_bytes(pool)
        # On a device each run is staged by itself, so neighbours are not joined.
        self.span_bytes_max = 0 if self._bytes is None else BATCH_BYTES

    def view(self, offset: int, nbytes: int) -> Bytes:
        """The bytes as they are now; never across two pages of a device pool."""
        if self._bytes is not None:
            return self._bytes[offset : offset + nbytes]
        page, within = divmod(offset, self.page_bytes)
        return np.frombuffer(self._memory.source(page, within, nbytes), dtype=np.uint8)

    def rows(self, offset: int, nbytes: int, count: int, step: int) -> Bytes:
        """`count` rows of a page, `step` bytes apart: `[row, byte]`."""
        return rows_of(self.view(offset, (count - 1) * step + nbytes), 0, nbytes, count, step)


def rows_of(flat: Bytes, offset: int, nbytes: int, count: int, step: int) -> Bytes:
    """`count` rows of `nbytes`, `step` bytes apart, as a view: `[row, byte]`."""
    return np.ndarray((count, nbytes), np.uint8, flat, offset, (step, 1))


class PoolTarget:
    """Where bytes of stripes are written in this rank's own pool."""

    def __init__(self, pool: KVPool) -> None:
        self.memory = pool.memory
        self._page_bytes = pool.page_bytes
        self._bytes = _host_bytes(pool)

    def write(self, page: PageId, stripe: Stripe, rows: Bytes) -> None:
        """Fill the stripe of a page with `rows`: `[row, byte]`. On a device it counts once `landed` was called."""
        offset, nbytes, count, step = stripe.target_offset, stripe.nbytes, stripe.count, stripe.target_step
        if self._bytes is not None:
            np.copyto(rows_of(self._bytes, page * self._page_bytes + offset, nbytes, count, step), rows)
            return
        # Row by row: between them lie other ranks' bytes, which must not be written, not even unchanged.
        for row in range(count):
            self.memory.target(page, offset + row * step, nbytes)[:] = rows[row].data

    def landed(self, page: PageId) -> None:
        """What was written of the page is visible to the model."""
        self.memory.landed(page)


def _host_bytes(pool: KVPool) -> Bytes | None:
    return pool.tensor.view(torch.uint8).reshape(-1).numpy() if pool.device.type == "cpu" else None
