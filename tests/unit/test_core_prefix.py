"""The prefix cache: what is shared, what is kept, what goes first."""

import random

from baton_core.ledger import Ledger
from baton_core.limits import Limits
from baton_core.pages import PagePool
from baton_core.prefill.phases import PREFILL
from baton_core.prefix import Node, PrefixCache

SIZE = 4


def made(total: int = 32) -> tuple[PagePool, PrefixCache]:
    pool = PagePool(total)
    return pool, PrefixCache(pool, SIZE)


def cached(pool: PagePool, cache: PrefixCache, tokens: list[int]) -> tuple[int, ...]:
    """A prompt that was computed and finished; returns its pages."""
    pages = pool.allocate(-(-len(tokens) // SIZE))
    assert pages is not None
    pool.release(cache.insert(tokens, pages))
    return pages


def test_a_prompt_that_begins_alike_finds_the_full_pages_in_common() -> None:
    pool, cache = made()
    pages = cached(pool, cache, list(range(10)))
    found = cache.match([*range(8), 99, 98, 97])
    assert [node.page for node in found] == list(pages[:2])
    assert cache.pages == 2, "the half page is not kept"


def test_the_last_token_is_always_left_to_compute() -> None:
    pool, cache = made()
    cached(pool, cache, list(range(8)))
    assert len(cache.match(list(range(8)))) == 1
    assert len(cache.match(list(range(9)))) == 2


def test_what_is_cached_already_is_not_kept_twice() -> None:
    pool, cache = made()
    cached(pool, cache, list(range(8)))
    cached(pool, cache, list(range(8)))
    assert cache.pages == 2
    assert pool.free + cache.pages == pool.total


def test_inserting_the_very_pages_that_were_matched_gives_none_of_them_back() -> None:
    pool, cache = made()
    first = cached(pool, cache, list(range(8)))
    more = pool.allocate(1)
    assert more is not None
    assert cache.insert(list(range(12)), [*first, *more]) == []
    assert cache.pages == 3


def test_the_leaf_used_longest_ago_is_evicted_first_and_a_locked_page_never() -> None:
    pool, cache = made()
    cached(pool, cache, [1] * 8)
    cached(pool, cache, [2] * 8)
    locked = cache.match([1] * 9)
    cache.lock(locked)
    assert cache.evict(1) == 1
    assert len(cache.match([2] * 9)) == 1, "its leaf went, its first page stayed"
    assert cache.evict(9) == 1
    assert cache.pages == 2
    cache.unlock(locked)
    assert cache.evict(9) == 2
    assert pool.free == pool.total


def test_what_is_in_use_when_the_cache_is_flushed_is_found_no_more_and_goes_with_its_last_reader() -> None:
    pool, cache = made()
    cached(pool, cache, [1] * 8)
    first, second = cache.match([1] * 9), cache.match([1] * 5)
    cache.lock(first)
    cache.lock(second)
    assert cache.flush() == 0
    assert cache.match([1] * 9) == []
    pages = cached(pool, cache, [1] * 8)
    assert [node.page for node in cache.match([1] * 9)] == list(pages)
    cache.unlock(first)
    assert (cache.pages, cache.locked) == (3, 1), "one old page has another reader"
    cache.unlock(second)
    assert (cache.pages, cache.locked) == (2, 0)
    assert cache.flush() == 2
    assert pool.free == pool.total


def test_what_is_evicted_is_what_a_search_through_all_leaves_would_find() -> None:
    draw = random.Random(3)
    pool, cache = made(24)
    locked: list[list[Node]] = []

    def leaves(level: dict[tuple[int, ...], Node]) -> list[Node]:
        below = [leaf for node in level.values() for leaf in leaves(node.children)]
        return below + [node for node in level.values() if not node.children and not node.locks]

    for _ in range(3_000):
        before = pool.returned + cache.spared
        spare = pool.free + cache.pages - cache.locked
        tokens = [draw.randrange(2) for _ in range(draw.randrange(1, 24))]
        kind = draw.random()
        if kind < 0.4 and pool.free >= 6:
            cached(pool, cache, tokens)
        elif kind < 0.6:
            locked.append(cache.match(tokens))
            cache.lock(locked[-1])
        elif kind < 0.8 and locked:
            cache.unlock(locked.pop(draw.randrange(len(locked))))
        elif kind < 0.99:
            oldest = min(leaves(cache._roots), key=lambda node: (node.used_at, node.ordinal), default=None)
            held = pool.holds(oldest.page) if oldest is not None else False
            assert cache.evict(1) == (oldest is not None)
            assert pool.returned + cache.spared == before, "nothing more may be allocated"
            assert oldest is None or (held and not pool.holds(oldest.page))
        else:
            cache.flush()
        grown = pool.free + cache.pages - cache.locked - spare
        assert grown <= pool.returned + cache.spared - before
        assert len(cache._leaves) <= 2 * cache.pages + 65
    for nodes in locked:
        cache.unlock(nodes)
    cache.flush()
    assert pool.free == pool.total
    assert len(cache.match([1] * 9)) == 0


def test_a_bound_on_usable_tokens_counts_whole_pages_and_may_take_the_last_token_too() -> None:
    pool, cache = made()
    cached(pool, cache, list(range(12)))
    assert [len(cache.match(list(range(8)), usable)) for usable in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


def test_pages_in_use_are_those_that_somebody_reads_already() -> None:
    pool, cache = made()
    cached(pool, cache, list(range(12)))
    assert cache.in_use(list(range(12))) == 0
    cache.lock(cache.match(list(range(9))))
    assert [cache.in_use(list(range(count))) for count in (3, 4, 12)] == [0, 1, 2]
    assert cache.in_use([7] * 8) == 0


def test_two_ranks_that_see_the_same_keep_the_same_tree() -> None:
    def life(seed: int) -> tuple[int, list[int]]:
        draw = random.Random(seed)
        pool, cache = made(12)
        for _ in range(200):
            tokens = [draw.randrange(2) for _ in range(draw.randrange(1, 20))]
            need = -(-len(tokens) // SIZE)
            if pool.free < need:
                cache.evict(need - pool.free)
            cached(pool, cache, tokens)
            assert pool.free + cache.pages == pool.total
        return cache.pages, [pool.free]

    assert life(5) == life(5)


def test_a_prompt_that_would_not_fit_even_so_costs_the_cache_nothing() -> None:
    pool, cache = made(4)
    ledger = Ledger(PREFILL, Limits(), pool, rows=None)
    ledger.cache = cache
    cached(pool, cache, [1] * 8)
    locked = cache.match([1] * 5)
    cache.lock(locked)
    assert ledger.allocate(4) is None
    assert cache.pages == 2
    assert ledger.allocate(3) is not None, "two are free, and one can be evicted"
    assert cache.pages == 1
