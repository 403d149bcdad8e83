"""The KV pool of one rank, and the rows that travel beside it.

One tensor `[page][layer][k|v][kv_head][token][dim]`: a page with all its layers is one contiguous run of bytes, a head
slice of it a few large ones, a pipeline stage's layers one sub-run. So a handoff is a few large copies. On CPU the pool
is a sealed memfd, which a peer on the same host maps and a socket reads and writes without a copy; on CUDA it is a device
tensor, staged through pinned host memory. Transfers see neither: they see `PageMemory`.
"""

import threading
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from baton_core.messages import ROOM_WORD, ROW_BYTES, MetadataRow
from baton_core.request import PageId
from baton_engine.sealed_memory import SealedMemory, available_bytes, require_memory

_REMEDY = "lower --kv-tokens, or free memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolShape:
    """Everything that fixes a pool's size and meaning."""

    pages: int
    layers: int
    kv_heads: int
    page_tokens: int
    head_dim: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        for name in ("pages", "layers", "kv_heads", "page_tokens", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"pool {name} must be at least 1, not {getattr(self, name)}")

    @property
    def dimensions(self) -> tuple[int, int, int, int, int, int]:
        """`[page, layer, k|v, kv_head, token, dim]`."""
        return (self.pages, self.layers, 2, self.kv_heads, self.page_tokens, self.head_dim)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, all layers, keys and values."""
        return self.layers * 2 * self.kv_heads * self.page_tokens * self.head_dim * self.dtype.itemsize

    @property
    def pool_bytes(self) -> int:
        """Bytes of the whole pool."""
        return self.pages * self.page_bytes


class PageMemory(Protocol):
    """How a transfer reads and writes pages, wherever they live. Offsets and sizes are bytes within one page."""

    def source(self, page: PageId, offset: int, nbytes: int) -> memoryview:
        """Bytes of a page to send, as they are now."""
        ...

    def target(self, page: PageId, offset: int, nbytes: int) -> memoryview:
        """A writable place for bytes of a page; they count once `landed` was called for the page."""
        ...

    def landed(self, page: PageId) -> None:
        """Every byte of the page that this thread wrote through `target` is now visible to the model."""
        ...

    def dropped(self, page: PageId) -> None:
        """This thread gives up what it began to write of the page."""
        ...


class HostPages:
    """`PageMemory` over memory that the CPU addresses: views are the pool itself, so nothing is ever copied."""

    def __init__(self, view: memoryview, page_bytes: int) -> None:
        self._view = view
        self._page_bytes = page_bytes

    def source(self, page: PageId, offset: int, nbytes: int) -> memoryview:
        """The bytes themselves, not a copy."""
        _check_range(offset, nbytes, self._page_bytes)
        first = page * self._page_bytes + offset
        assert first >= 0 and first + nbytes <= len(self._view), f"page {page} is outside the pool"
        return self._view[first : first + nbytes]

    def target(self, page: PageId, offset: int, nbytes: int) -> memoryview:
        """The bytes themselves: what is written is there at once."""
        return self.source(page, offset, nbytes)

    def landed(self, page: PageId) -> None:
        """Nothing to do: the model reads the same bytes."""

    def dropped(self, page: PageId) -> None:
        """Nothing to do: what was written is there."""


class StagedPages:
    """`PageMemory` over a device tensor, through host buffers (pinned where the device is CUDA).

    Copies run on the calling thread's current stream and are complete on return. A page being filled holds one host
    buffer of a page's size from its first `target` until `landed`, for each thread that fills it: several ranks may write
    to different bytes of one page at once.
    """

    def __init__(self, pool: Tensor, page_bytes: int) -> None:
        self._pages = pool.view(torch.uint8).reshape(-1, page_bytes)  # [page, byte]
        self._pinned = pool.is_cuda
        self._filling: dict[tuple[int, PageId], tuple[Tensor, list[tuple[int, int]]]] = {}  # by thread and page

    def source(self, page: PageId, offset: int, nbytes: int) -> memoryview:
        """A host copy of the bytes, private to the caller."""
        _check_range(offset, nbytes, self._pages.shape[1])
        staged = self._host_buffer(nbytes)
        staged.copy_(self._pages[page, offset : offset + nbytes])
        return staged.numpy().data

    def target(self, page: PageId, offset: int, nbytes: int) -> memoryview:
        """A range of the page's host buffer; it reaches the device with `landed`."""
        _check_range(offset, nbytes, self._pages.shape[1])
        key = (threading.get_ident(), page)
        if key not in self._filling:
            self._filling[key] = (self._host_buffer(self._pages.shape[1]), [])
        staged, ranges = self._filling[key]
        ranges.append((offset, offset + nbytes))
        return staged.numpy().data[offset : offset + nbytes]

    def landed(self, page: PageId) -> None:
        """Copy the ranges handed out for this page to the device, in order, and give the host buffer back."""
        staged, ranges = self._filling.pop((threading.get_ident(), page), (None, ()))
        for first, end in ranges:
            assert staged is not None
            self._pages[page, first:end].copy_(staged[first:end])

    def dropped(self, page: PageId) -> None:
        """Give the host buffer back."""
        self._filling.pop((threading.get_ident(), page), None)

    def _host_buffer(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._pinned)


class KVPool:
    """The pool of one rank, zeroed. `tensor` is the whole of it, `memory` the way transfers see it.

    Raises EngineError, naming need and supply, where it would not fit into memory.
    """

    def __init__(self, shape: PoolShape, device: str = "cpu") -> None:
        self.shape = shape
        self.device = torch.device(device)
        self._shared: SealedMemory | None = None
        self.tensor: Tensor
        self.memory: PageMemory
        if self.device.type == "cpu":
            require_memory("the KV pool", shape.pool_bytes, available_bytes(), _REMEDY)
            self._shared = SealedMemory("baton-kv", shape.pool_bytes)
            self.tensor = torch.frombuffer(self._shared.mapping, dtype=shape.dtype).view(shape.dimensions)
            self.memory = HostPages(self._shared.view, shape.page_bytes)
        else:
            free_bytes, _total = torch.cuda.mem_get_info(self.device)
            require_memory("the KV pool", shape.pool_bytes, free_bytes, _REMEDY)
            self.tensor = torch.zeros(shape.dimensions, dtype=shape.dtype, device=self.device)
            self.memory = StagedPages(self.tensor, shape.page_bytes)

    @property
    def pages(self) -> int:
        """Number of pages."""
        return self.shape.pages

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self.shape.page_bytes

    @property
    def file_descriptor(self) -> int | None:
        """The memfd to pass to a peer on this host; None on a device."""
        return None if self._shared is None else self._shared.file_descriptor

    def page_view(self, page: PageId, offset: int, nbytes: int) -> memoryview:
        """Writable bytes of a page, without a copy, for `sendmsg` and `recvmsg_into`. CPU pools only."""
        assert self._shared is not None, "a device pool has no host view: use `memory`"
        return self.memory.target(page, offset, nbytes)

    def close(self) -> None:
        """Release the memory; views that others still hold stay valid until they drop them. Idempotent."""
        self.tensor = torch.empty(0, dtype=self.shape.dtype)
        self.memory = HostPages(memoryview(b""), self.shape.page_bytes)
        if self._shared is not None:
            self._shared.close()


class RowMemory:
    """Metadata rows, `ROW_BYTES` each, in a sealed memfd; the room word of a row tells whether it has been written.

    A reader polls the room word while a writer, perhaps in another process, fills the row: so the word is written last
    and cleared first.
    """

    def __init__(self, rows: int) -> None:
        assert rows > 0
        self.rows = rows
        self._shared = SealedMemory("baton-rows", rows * ROW_BYTES)

    @property
    def file_descriptor(self) -> int:
        """The memfd to pass to a peer on this host."""
        return self._shared.file_descriptor

    def view(self, row: int) -> memoryview:
        """The row's bytes, writable, without a copy."""
        assert 0 <= row < self.rows, f"row {row} is outside the {self.rows} rows"
        return self._shared.view[row * ROW_BYTES : (row + 1) * ROW_BYTES]

    def room_word(self, row: int) -> int:
        """The room word as it is now: 0 while nothing is written."""
        word: int = ROOM_WORD.unpack_from(self.view(row))[0]
        return word

    def read(self, row: int) -> MetadataRow | None:
        """The row, or None while its room word is 0."""
        return MetadataRow.unpack(bytes(self.view(row)))

    def write(self, row: int, raw: bytes | memoryview) -> None:
        """Fill the row with `raw` (`ROW_BYTES` of it), everything but the room word first."""
        assert len(raw) == ROW_BYTES
        view = self.view(row)
        view[ROOM_WORD.size :] = raw[ROOM_WORD.size :]
        view[: ROOM_WORD.size] = raw[: ROOM_WORD.size]

    def clear(self, row: int) -> None:
        """Make the row unwritten again, room word first."""
        view = self.view(row)
        view[: ROOM_WORD.size] = bytes(ROOM_WORD.size)
        view[ROOM_WORD.size :] = bytes(ROW_BYTES - ROOM_WORD.size)

    def close(self) -> None:
        """Release the memory. Idempotent."""
        self._shared.close()


def _check_range(offset: int, nbytes: int, page_bytes: int) -> None:
    assert offset >= 0 and nbytes > 0 and offset + nbytes <= page_bytes, (
        f"bytes {offset}..{offset + nbytes} are outside a page of {page_bytes}"
    )
