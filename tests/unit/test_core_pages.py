"""Pages: the pool's books."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_core.pages import PagePool, pages_for


def test_pages_are_rounded_up() -> None:
    assert [pages_for(tokens, 4) for tokens in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]


def test_the_pool_hands_out_the_page_that_was_free_longest() -> None:
    pool = PagePool(3)
    assert pool.allocate(2) == (0, 1)
    pool.release((1, 0))
    assert pool.allocate(3) == (2, 1, 0)
    assert pool.free == 0


def test_who_asks_for_too_many_pages_gets_none() -> None:
    pool = PagePool(2)
    assert pool.allocate(3) is None
    assert (pool.free, pool.holds(0)) == (2, False)


def test_a_page_cannot_be_freed_twice() -> None:
    pool = PagePool(2)
    pages = pool.allocate(1)
    assert pages is not None and pool.holds(0)
    pool.release(pages)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.release(pages)


@given(st.lists(st.integers(0, 6), max_size=30))
def test_free_and_held_pages_always_make_the_whole_pool(wishes: list[int]) -> None:
    pool = PagePool(10)
    held: list[tuple[int, ...]] = []
    for wish in wishes:
        if wish == 0 and held:
            pool.release(held.pop(0))
        pages = pool.allocate(wish)
        if pages is not None:
            held.append(pages)
        taken = [page for some in held for page in some]
        assert len(set(taken)) == len(taken) == pool.total - pool.free
        assert all(pool.holds(page) for page in taken)
