"""The pool, its two kinds of page memory, and the metadata rows."""

import fcntl
import mmap
import os
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from baton_core.errors import EngineError
from baton_core.messages import ROW_BYTES, MetadataRow
from baton_engine.kv_pool import HostPages, KVPool, PageMemory, PoolShape, RowMemory, StagedPages
from baton_engine.sealed_memory import available_bytes, require_memory

SHAPE = PoolShape(pages=5, layers=2, kv_heads=3, page_tokens=4, head_dim=8, dtype=torch.bfloat16)
ROW = MetadataRow(room=77, attempt=2, first_token=11, prompt_tokens=5)


def test_a_page_with_all_its_layers_is_one_run_of_bytes() -> None:
    pool = KVPool(SHAPE)
    pool.tensor[3] = torch.arange(pool.tensor[3].numel()).view(pool.tensor[3].shape)
    assert pool.page_bytes == 2 * 2 * 3 * 4 * 8 * 2
    assert bytes(pool.page_view(3, 0, pool.page_bytes)) == pool.tensor[3].view(torch.uint8).numpy().tobytes()
    assert not any(pool.page_view(2, 0, pool.page_bytes)) and not any(pool.page_view(4, 0, pool.page_bytes))
    pool.close()


def test_bytes_written_through_a_view_are_in_the_tensor() -> None:
    pool = KVPool(SHAPE)
    value = torch.full((8,), 1.5, dtype=torch.bfloat16)
    head_bytes = SHAPE.page_tokens * SHAPE.head_dim * 2
    pool.page_view(4, 7 * head_bytes, 16)[:] = value.view(torch.uint8).numpy().data
    # The eighth head run of a page is layer 1, keys, head 1.
    assert torch.equal(pool.tensor[4, 1, 0, 1, 0], value)
    assert pool.tensor.count_nonzero() == 8
    pool.close()


def test_a_peer_maps_the_same_bytes_and_cannot_resize_them() -> None:
    pool = KVPool(SHAPE)
    assert pool.file_descriptor is not None
    peer = mmap.mmap(pool.file_descriptor, SHAPE.pool_bytes)
    peer[0:2] = torch.ones(1, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()
    assert pool.tensor.flatten()[0] == 1
    seals = fcntl.fcntl(pool.file_descriptor, fcntl.F_GET_SEALS)
    assert seals & fcntl.F_SEAL_SHRINK and seals & fcntl.F_SEAL_GROW
    with pytest.raises(PermissionError):
        os.ftruncate(pool.file_descriptor, 1)
    assert os.fstat(pool.file_descriptor).st_blocks * 512 >= SHAPE.pool_bytes, "allocated at start"
    peer.close()
    pool.close()


def test_close_may_come_twice_and_spares_views_that_are_still_held() -> None:
    pool = KVPool(SHAPE)
    held, descriptor = pool.tensor[1], pool.file_descriptor
    pool.close()
    pool.close()
    held.fill_(3)
    assert held.sum() == 3 * held.numel()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


@pytest.mark.parametrize("kind", ["host", "staged"])
def test_what_lands_in_a_page_can_be_read_from_it(kind: str) -> None:
    pool = KVPool(SHAPE)
    memory: PageMemory = pool.memory if kind == "host" else StagedPages(pool.tensor, pool.page_bytes)
    memory.target(2, 16, 4)[:] = b"abcd"
    memory.target(2, 64, 2)[:] = b"xy"
    memory.landed(2)
    assert bytes(memory.source(2, 16, 4)) == b"abcd"
    assert bytes(memory.source(2, 64, 2)) == b"xy"
    assert bytes(pool.page_view(2, 14, 8)) == b"\0\0abcd\0\0"
    memory.landed(3)
    pool.close()


def test_staged_bytes_reach_the_device_only_once_they_landed() -> None:
    pool = KVPool(SHAPE)
    memory = StagedPages(pool.tensor, pool.page_bytes)
    memory.target(1, 0, 4)[:] = b"abcd"
    assert bytes(pool.page_view(1, 0, 4)) == bytes(4)
    memory.landed(1)
    assert bytes(pool.page_view(1, 0, 4)) == b"abcd"
    pool.close()


@pytest.mark.parametrize(("page", "offset", "nbytes"), [(5, 0, 1), (-1, 0, 1), (0, -1, 2), (0, 767, 2), (0, 0, 0)])
def test_a_range_outside_its_page_is_our_bug(page: int, offset: int, nbytes: int) -> None:
    memory = HostPages(memoryview(bytearray(SHAPE.pool_bytes)), SHAPE.page_bytes)
    with pytest.raises(AssertionError):
        memory.source(page, offset, nbytes)


def test_a_pool_that_does_not_fit_is_refused_naming_need_and_supply() -> None:
    huge = PoolShape(pages=10**9, layers=2, kv_heads=3, page_tokens=4, head_dim=8, dtype=torch.bfloat16)
    with pytest.raises(EngineError, match=r"KV pool needs 715\.26 GiB but only .* GiB is available: lower --kv-tokens"):
        KVPool(huge)
    require_memory("anything", 10, 10, "never said")


def test_memory_is_what_the_machine_or_the_cgroup_leaves_whichever_is_less(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  9000 kB\nMemAvailable:  2000 kB\n")
    assert available_bytes(meminfo, tmp_path) == 2_048_000
    (tmp_path / "memory.current").write_text("500000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes(meminfo, tmp_path) == 2_048_000
    (tmp_path / "memory.max").write_text("600000\n")
    assert available_bytes(meminfo, tmp_path) == 100_000
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 1000\n")
    assert available_bytes(meminfo, tmp_path) == 101_000


def test_a_row_is_unwritten_until_its_room_word_arrives() -> None:
    rows = RowMemory(3)
    raw = ROW.pack()
    rows.view(1)[8:] = raw[8:]
    assert rows.read(1) is None and rows.room_word(1) == 0
    rows.write(1, raw)
    assert rows.read(1) == ROW and rows.room_word(1) == 78
    assert rows.read(0) is None and rows.read(2) is None
    rows.clear(1)
    assert bytes(rows.view(1)) == bytes(ROW_BYTES)
    rows.close()
    rows.close()


def test_the_room_word_is_written_last_and_cleared_first(monkeypatch: pytest.MonkeyPatch) -> None:
    writes: list[tuple[int, int]] = []

    class Recorder:
        def __setitem__(self, where: slice, value: bytes) -> None:
            writes.append((where.start or 0, where.stop or ROW_BYTES))

    rows = RowMemory(1)
    monkeypatch.setattr(rows, "view", lambda row: Recorder())
    rows.write(0, ROW.pack())
    rows.clear(0)
    assert writes == [(8, ROW_BYTES), (0, 8), (0, 8), (8, ROW_BYTES)]
    rows.close()
