"""The host store: pages go out and come back as they were, in order, and the loop hears of every end."""

import threading
from collections.abc import Iterator

import pytest

pytest.importorskip("torch")

import torch

from baton_core.agreement import KVPoll
from baton_core.effects import Backup, Restore
from baton_core.errors import EngineError, Reason
from baton_engine import backup
from baton_engine.backup import HostStore
from baton_engine.kv_pool import KVPool, PoolShape

SHAPE = PoolShape(pages=6, layers=2, kv_heads=3, page_tokens=4, head_dim=8, dtype=torch.float32)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


class Loop:
    """Counts pokes, as a driver's loop would."""

    def __init__(self) -> None:
        self._pokes = threading.Semaphore(0)

    def __call__(self) -> None:
        self._pokes.release()

    def hears(self, pokes: int) -> None:
        """Wait for that many."""
        for _ in range(pokes):
            assert self._pokes.acquire(timeout=10), "no poke came"


@pytest.fixture(params=DEVICES)
def pool(request: pytest.FixtureRequest) -> Iterator[KVPool]:
    made = KVPool(SHAPE, request.param)
    made.tensor.copy_(torch.arange(made.tensor.numel()).view(made.tensor.shape))
    yield made
    made.close()


def test_pages_come_back_elsewhere_as_they_left_though_others_took_their_place(pool: KVPool) -> None:
    loop = Loop()
    store = HostStore(pool, 4, loop)
    kept = pool.tensor[[4, 1]].clone()
    store.start(Backup(rid="a", copy=1, pages=(4, 1), slots=(3, 0)))
    loop.hears(1)
    pool.tensor[[4, 1]] = -1
    store.start(Restore(rid="a", copy=2, slots=(3, 0), pages=(0, 5)))
    loop.hears(1)
    store.close(5)
    assert torch.equal(pool.tensor[[0, 5]], kept)
    assert bool((pool.tensor[[4, 1]] == -1).all())


def test_copies_end_in_the_order_in_which_they_were_asked_for(pool: KVPool) -> None:
    loop = Loop()
    store = HostStore(pool, 2, loop)
    assert store.poller(1).poll().poll is KVPoll.Transferring
    kept = pool.tensor[3].clone()
    store.start(Backup(rid="a", copy=1, pages=(3,), slots=(0,)))
    store.start(Restore(rid="a", copy=2, slots=(0,), pages=(2,)))
    store.start(Backup(rid="b", copy=3, pages=(2,), slots=(1,)))
    store.start(Restore(rid="b", copy=4, slots=(1,), pages=(5,)))
    loop.hears(4)
    seen = [store.poller(copy).poll() for copy in range(1, 6)]
    assert [one.poll for one in seen] == [KVPoll.Success] * 4 + [KVPoll.Transferring]
    assert [one.writers_stopped for one in seen] == [True] * 4 + [False]
    assert torch.equal(pool.tensor[5], kept)
    store.close(5)


def test_a_copy_that_fails_says_so_and_those_behind_it_are_made() -> None:
    pool, loop = KVPool(SHAPE), Loop()
    pool.tensor[2] = 7
    store = HostStore(pool, 2, loop)
    store._slots = torch.empty(1, pool.page_bytes - 1, dtype=torch.uint8)  # as a device that went wrong would
    store.start(Backup(rid="a", copy=1, pages=(2,), slots=(0,)))
    loop.hears(1)
    store._slots = torch.empty(2, pool.page_bytes, dtype=torch.uint8)
    store.start(Backup(rid="b", copy=2, pages=(2,), slots=(1,)))
    loop.hears(1)
    failed, made = store.poller(1).poll(), store.poller(2).poll()
    assert (failed.poll, failed.writers_stopped, failed.reason) == (KVPoll.Failed, True, Reason.DEVICE_FAULT)
    assert failed.text
    assert (made.poll, made.reason) == (KVPoll.Success, None)
    store.close(5)
    pool.close()


def test_failures_of_long_ago_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backup, "FAILURES_KEPT", 2)
    pool, loop = KVPool(SHAPE), Loop()
    store = HostStore(pool, 1, loop)
    store._slots = torch.empty(1, pool.page_bytes - 1, dtype=torch.uint8)  # as a device that went wrong would
    for copy in range(1, 6):
        store.start(Backup(rid="a", copy=copy, pages=(2,), slots=(0,)))
    loop.hears(5)
    assert list(store._failed) == [4, 5]
    store.close(5)
    pool.close()


def test_a_backup_that_does_not_fit_is_refused_at_start_naming_the_remedy() -> None:
    pool = KVPool(SHAPE)
    with pytest.raises(EngineError, match="--backup-pages"):
        HostStore(pool, 1 << 50, lambda: None)
    pool.close()


def test_no_slots_is_a_store_that_is_never_asked() -> None:
    pool = KVPool(SHAPE)
    store = HostStore(pool, 0, lambda: None)
    store.close(5)
    pool.close()
