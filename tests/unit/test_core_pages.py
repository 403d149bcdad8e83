"""Pages: the pool's books, and which bytes of a page travel between ranks of different shape."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_core.kv_layout import Layout, LayoutMismatch, fingerprint, mismatches, plan
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


def layout(**fields: int) -> Layout:
    """Four layers, two heads, pages of 3 tokens."""
    made = {"first_layer": 0, "end_layer": 4, "first_head": 0, "end_head": 2, **fields}
    return Layout(**{"page_tokens": 3, "head_dim": 5, "element_bytes": 2, **made})


def test_equal_ranks_need_one_run_of_the_whole_page() -> None:
    (run,) = plan(layout(), layout())
    assert (run.source_offset, run.target_offset, run.nbytes) == (0, 0, layout().page_bytes)


def test_a_rank_with_half_the_heads_needs_a_run_per_layer_and_kind() -> None:
    runs = plan(layout(), layout(first_head=1))
    assert len(runs) == 2 * 4
    assert {run.nbytes for run in runs} == {layout().head_bytes}


def test_a_rank_with_half_the_layers_needs_one_run() -> None:
    stage = layout(first_layer=2)
    (run,) = plan(layout(), stage)
    assert (run.source_offset, run.target_offset, run.nbytes) == (stage.page_bytes, 0, stage.page_bytes)
    (back,) = plan(stage, layout())
    assert (back.source_offset, back.target_offset) == (0, stage.page_bytes)


def test_ranks_that_share_nothing_exchange_nothing() -> None:
    assert plan(layout(end_head=1), layout(first_head=1)) == ()
    assert plan(layout(end_layer=1), layout(first_layer=1)) == ()


@pytest.mark.parametrize("name", ["page_tokens", "head_dim", "element_bytes"])
def test_what_no_plan_translates_is_refused_naming_both_values(name: str) -> None:
    with pytest.raises(LayoutMismatch, match=rf"{name} is \d+ on prefill and 7 on decode"):
        plan(layout(), layout(**{name: 7}))


def test_a_layout_survives_its_text_and_other_texts_are_refused() -> None:
    assert Layout.from_text(layout().to_text()) == layout()
    with pytest.raises(ValueError, match="not a KV layout"):
        Layout.from_text('{"page_tokens": 3}')


@pytest.mark.parametrize("wrong", [{"end_layer": 0}, {"end_head": 0}, {"first_layer": -1}, {"page_tokens": 0}])
def test_an_empty_layout_cannot_be_made(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="layout has"):
        layout(**wrong)


layouts = st.builds(
    lambda layers, heads: layout(
        first_layer=min(layers), end_layer=max(layers) + 1, first_head=min(heads), end_head=max(heads) + 1
    ),
    st.tuples(st.integers(0, 5), st.integers(0, 5)),
    st.tuples(st.integers(0, 5), st.integers(0, 5)),
)


def page_of(one: Layout) -> list[tuple[int, int, int, int]]:
    """A page in which every byte says which (layer, k|v, head, byte of it) it is."""
    return [
        (layer, value, head, byte)
        for layer in range(one.first_layer, one.end_layer)
        for value in (0, 1)
        for head in range(one.first_head, one.end_head)
        for byte in range(one.head_bytes)
    ]


@given(layouts, layouts)
def test_the_runs_carry_exactly_the_common_bytes_to_their_places(source: Layout, target: Layout) -> None:
    there, here = page_of(source), page_of(target)
    carried: list[tuple[int, int, int, int] | None] = [None] * target.page_bytes
    for run in plan(source, target):
        for index in range(run.nbytes):
            assert carried[run.target_offset + index] is None, "no byte is written twice"
            carried[run.target_offset + index] = there[run.source_offset + index]
    known = set(there)
    assert carried == [byte if byte in known else None for byte in here]


@given(layouts, layouts)
def test_runs_are_merged_and_in_target_order(source: Layout, target: Layout) -> None:
    runs = plan(source, target)
    for before, after in pairwise(runs):
        assert before.target_offset + before.nbytes <= after.target_offset
        touching = before.target_offset + before.nbytes == after.target_offset
        assert not (touching and before.source_offset + before.nbytes == after.source_offset)


def test_equal_fingerprints_fit_whatever_their_order() -> None:
    ours = fingerprint({"dtype": "fp32", "page_tokens": 16})
    assert mismatches(ours, fingerprint({"page_tokens": 16, "dtype": "fp32"})) == ()


def test_a_difference_of_fingerprints_names_both_values() -> None:
    ours, theirs = fingerprint({"dtype": "fp32", "rope": 1}), fingerprint({"dtype": "bf16"})
    assert mismatches(ours, theirs) == (
        "dtype is 'fp32' on prefill and 'bf16' on decode",
        "rope is 1 on prefill and None on decode",
    )


@pytest.mark.parametrize("other", ["no json", "[1]", "3"])
def test_a_fingerprint_that_is_none_is_quoted(other: str) -> None:
    assert mismatches("{}", other) == (f"fingerprint is '{{}}' on prefill and {other!r} on decode",)
