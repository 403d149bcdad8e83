"""KV layouts: which rank writes which bytes, by brute force over every pair of units, and what is refused."""

from array import array
from itertools import pairwise, product

import pytest

from baton_core.fingerprint import fingerprint, mismatches
from baton_core.kv_layout import (
    LayoutMismatch,
    Plan,
    UnitLayout,
    bytes_fed,
    plan,
    readers,
    require_translatable,
    row_writer,
    writers,
)

LAYERS = 3
CELL = 2
"""Bytes of one token of one head: one item of the arrays that stand for pools."""
SIZES = [(2, 2), (2, 4), (4, 2), (2, 3), (3, 2), (6, 4)]
SHAPES = [{"tp": tp, "pp": pp, "cp": cp} for tp, pp, cp in product((1, 2, 3, 4), (1, 2), (1, 2))]


def unit(**fields: int) -> UnitLayout:
    """Three layers, four heads of one token of 2 bytes each, pages of 2 tokens."""
    whole = {"layers": LAYERS, "kv_heads": 4, "head_dim": 2, "element_bytes": 1, "page_tokens": 2}
    return UnitLayout(**{**whole, **fields})


def shapes(kv_heads: int) -> list[dict[str, int]]:
    """The shapes that these heads permit."""
    return [one for one in SHAPES if kv_heads % one["tp"] == 0 or one["tp"] % kv_heads == 0]


def cell(token: int, layer: int, value: int, head: int) -> int:
    """A number of its own, never 0, for everything that is ever stored."""
    return 1 + ((token * LAYERS + layer) * 2 + value) * 16 + head


def pages_of(layout: UnitLayout, member: int, tokens: int) -> "array[int]":
    """A rank's pages in prompt order, cell by cell; tokens beyond the prompt are stored too."""
    share = layout.member(member)
    cells = array("I")
    for page in range(layout.pages(tokens)):
        for layer in range(share.first_layer, share.end_layer):
            for value, head in product((0, 1), range(share.first_head, share.end_head)):
                first = page * layout.page_tokens
                cells.extend(cell(token, layer, value, head) for token in range(first, first + layout.page_tokens))
    return cells


def carry(
    source: UnitLayout, target: UnitLayout, target_member: int, tokens: int, pools: dict[int, "array[int]"]
) -> "array[int]":
    """Everything that the source's ranks write to one target rank. Checks that nothing is written twice."""
    there = target.member(target_member).page_bytes // CELL
    pages = array("I", bytes(4 * target.pages(tokens) * there))
    for member in range(source.members):
        here, owed = source.member(member).page_bytes // CELL, 0
        pieces = plan(source, member, target, target_member).pieces(
            range(source.pages(tokens)), range(target.pages(tokens))
        )
        for ordinal, target_ordinal, run in pieces:
            assert run.target_offset + run.nbytes <= there * CELL, "a run ends beyond its page"
            first, count = target_ordinal * there + run.target_offset // CELL, run.nbytes // CELL
            taken = ordinal * here + run.source_offset // CELL
            assert not any(pages[first : first + count]), "a byte has two writers"
            pages[first : first + count] = pools[member][taken : taken + count]
            owed += run.nbytes
        assert owed == bytes_fed(source, member, target, target_member, tokens)
    return pages


@pytest.mark.parametrize("kv_heads", [1, 3, 4, 12])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_byte_of_the_prompt_is_written_once_from_the_byte_that_holds_the_same(
    kv_heads: int, sizes: tuple[int, int]
) -> None:
    tokens = 13
    for source_shape in shapes(kv_heads):
        source = unit(kv_heads=kv_heads, page_tokens=sizes[0], **source_shape)
        pools = {member: pages_of(source, member, tokens) for member in range(source.members)}
        for target_shape in shapes(kv_heads):
            target = unit(kv_heads=kv_heads, page_tokens=sizes[1], **target_shape)
            for member in range(target.members):
                carried, expected = carry(source, target, member, tokens, pools), pages_of(target, member, tokens)
                wrong = [
                    want
                    for got, want in zip(carried, expected, strict=True)
                    if got != want and (got or want < cell(tokens, 0, 0, 0))  # beyond the prompt nothing is owed
                ]
                assert not wrong, f"{source} to {target}, member {member}"


@pytest.mark.parametrize("sizes", [(16, 16), (16, 32), (32, 16), (16, 24)], ids=str)
@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 33, 48, 95])
def test_prompts_of_any_length_fit_pages_of_common_sizes(sizes: tuple[int, int], tokens: int) -> None:
    source, target = unit(page_tokens=sizes[0], cp=2), unit(page_tokens=sizes[1], tp=2)
    pools = {member: pages_of(source, member, tokens) for member in range(source.members)}
    for member in range(target.members):
        carried, expected = carry(source, target, member, tokens, pools), pages_of(target, member, tokens)
        limit = cell(tokens, 0, 0, 0)
        pairs = list(zip(carried, expected, strict=True))
        assert all(got == want or (got == 0 and want >= limit) for got, want in pairs)


@pytest.mark.parametrize("kv_heads", [1, 3, 4, 12])
def test_writers_and_readers_are_two_views_of_one_relation(kv_heads: int) -> None:
    for source_shape, target_shape in product(shapes(kv_heads), shapes(kv_heads)):
        source, target = unit(kv_heads=kv_heads, **source_shape), unit(kv_heads=kv_heads, **target_shape)
        pairs = {(one, member) for member in range(target.members) for one in writers(source, target, member)}
        assert pairs == {(one, member) for one in range(source.members) for member in readers(source, target, one)}
        for member in range(target.members):
            feeding = writers(source, target, member)
            assert sum(bytes_fed(source, one, target, member, 13) for one in feeding) > 0
            place = source.place(row_writer(source, target, member))
            assert place[0] == max(source.place(one)[0] for one in feeding)
            assert place == min(source.place(one) for one in feeding if source.place(one)[0] == place[0])
            assert bytes_fed(source, row_writer(source, target, member), target, member, 1) > 0


def test_equal_units_need_one_run_a_page_from_rank_to_rank() -> None:
    both = unit(tp=2, pp=2)
    for member in range(4):
        assert writers(both, both, member) == (member,) == readers(both, both, member)
        (piece,) = plan(both, member, both, member).pieces(range(4, 5), range(9))
        ordinal, target_ordinal, run = piece
        assert (ordinal, target_ordinal, run.source_offset, run.target_offset) == (4, 4, 0, 0)
        assert run.nbytes == both.member(member).page_bytes
    assert [row_writer(both, both, member) for member in range(4)] == [0, 1, 2, 3]


def test_runs_are_joined_as_far_as_both_pages_allow() -> None:
    def count(source: UnitLayout, target: UnitLayout) -> int:
        return len(list(plan(source, 0, target, 0).pieces(range(1), range(9))))

    assert count(unit(), unit(pp=3)) == 1, "a stage's layers are one run"
    assert count(unit(), unit(tp=2)) == 2 * LAYERS, "half the heads are a run for keys and one for values a layer"
    assert count(unit(), unit(page_tokens=4)) == 2 * LAYERS * 4, "another page size is a run a head"
    for source, target in product((unit(), unit(tp=4), unit(pp=2)), (unit(), unit(tp=2), unit(page_tokens=3))):
        for (_, ordinal, before), (_, next_ordinal, after) in pairwise(
            plan(source, 0, target, 0).pieces(range(1), range(9))
        ):
            if ordinal == next_ordinal:
                assert before.target_offset + before.nbytes <= after.target_offset, "in target order"
                touching = before.target_offset + before.nbytes == after.target_offset
                assert not (touching and before.source_offset + before.nbytes == after.source_offset)


def test_stripes_are_the_same_runs_taken_together() -> None:
    units = [unit(), unit(tp=2), unit(tp=4, pp=2), unit(page_tokens=3), unit(page_tokens=3, tp=2, cp=2)]
    for source, target in product(units, units):
        single = plan(source, 0, target, 0)
        expanded = [
            (ordinal, first + stripe.target_ordinal, stripe.source_offset + row * stripe.source_step, at, stripe.nbytes)
            for ordinal, first, stripes in single.stripes(range(7), range(6))
            for stripe in stripes
            for row in range(stripe.count)
            for at in [stripe.target_offset + row * stripe.target_step]
        ]
        assert expanded == [
            (ordinal, target_ordinal, run.source_offset, run.target_offset, run.nbytes)
            for ordinal, target_ordinal, run in single.pieces(range(7), range(6))
        ]
    ((_, _, stripes),) = plan(unit(), 0, unit(tp=2), 0).stripes(range(1), range(1))
    assert len(stripes) == 1, "half the heads are one stripe"


def test_replicated_heads_are_written_by_the_lowest_rank_that_holds_them() -> None:
    source = unit(kv_heads=1, tp=4)
    assert readers(source, unit(kv_heads=1, tp=2), 0) == (0, 1)
    assert [readers(source, unit(kv_heads=1, tp=2), one) for one in (1, 2, 3)] == [(), (), ()]
    assert writers(unit(kv_heads=2, tp=4), unit(kv_heads=2), 0) == (0, 2)
    assert [writers(unit(kv_heads=2, tp=2), unit(kv_heads=2, tp=4), one) for one in range(4)] == [
        (0,),
        (0,),
        (1,),
        (1,),
    ]


def test_context_parallel_ranks_take_turns_page_by_page() -> None:
    source, target = unit(cp=2), unit()
    assert writers(source, target, 0) == (0, 1) and row_writer(source, target, 0) == 0
    turns = [[ordinal for ordinal, _, _ in plan(source, one, target, 0).pieces(range(5), range(5))] for one in (0, 1)]
    assert turns == [[0, 2, 4], [1, 3]]
    assert bytes_fed(source, 1, target, 0, 2) == 0, "a prompt of one page"


def expanded(one: Plan, ordinals: range, wanted: range) -> list[tuple[int, int, int, int, int]]:
    """The runs of all stripes."""
    return [
        (ordinal, first + stripe.target_ordinal, stripe.source_offset + row * stripe.source_step, at, stripe.nbytes)
        for ordinal, first, stripes in one.stripes(ordinals, wanted)
        for stripe in stripes
        for row in range(stripe.count)
        for at in [stripe.target_offset + row * stripe.target_step]
    ]


@pytest.mark.parametrize("sizes", [*SIZES, (4, 8), (8, 4)], ids=str)
def test_what_the_target_holds_is_left_out_and_nothing_else_changes(sizes: tuple[int, int]) -> None:
    tokens = 21
    for source_shape, target_shape in product(shapes(4), shapes(4)):
        source, target = unit(page_tokens=sizes[0], **source_shape), unit(page_tokens=sizes[1], **target_shape)
        ordinals, pages = range(source.pages(tokens)), target.pages(tokens)
        for member, target_member in product(range(source.members), range(target.members)):
            one = plan(source, member, target, target_member)
            whole = list(one.pieces(ordinals, range(pages)))
            for held in range(pages + 1):
                left = list(one.pieces(ordinals, range(held, pages)))
                assert left == [piece for piece in whole if piece[1] >= held]
                owed = sum(run.nbytes for _, _, run in left)
                assert owed == bytes_fed(source, member, target, target_member, tokens, held)
                runs = [(ordinal, at, run.source_offset, run.target_offset, run.nbytes) for ordinal, at, run in left]
                assert expanded(one, ordinals, range(held, pages)) == runs


@pytest.mark.parametrize("sizes", [*SIZES, (4, 8), (8, 4)], ids=str)
@pytest.mark.parametrize("cp", [1, 2, 3])
def test_leading_pages_count_from_what_the_target_holds(sizes: tuple[int, int], cp: int) -> None:
    source, target = unit(page_tokens=sizes[0], cp=cp), unit(page_tokens=sizes[1])
    tokens = 25
    ordinals, pages = range(source.pages(tokens)), target.pages(tokens)
    for member, held in product(range(cp), range(pages + 1)):
        one, sent = plan(source, member, target, 0), 0
        owed = one.owed_bytes(tokens, held)
        pieces = list(one.pieces(ordinals, range(held, pages)))
        for done, (ordinal, _, run) in enumerate(pieces):
            assert one.leading_pages(sent, held) == ordinal, "the first that lacks something"
            assert one.leading_pages(sent + run.nbytes - 1, held) == ordinal
            sent += run.nbytes
            assert (sent == owed) == (done == len(pieces) - 1)


def test_bytes_sent_say_how_many_leading_pages_nobody_waits_for_any_more() -> None:
    first, second = (plan(unit(cp=2), one, unit(), 0) for one in (0, 1))
    page = first.source_page_bytes
    assert page == unit().member(0).page_bytes
    assert [first.leading_pages(sent) for sent in (0, page - 1, page, 2 * page)] == [0, 0, 2, 4]
    assert [second.leading_pages(sent) for sent in (0, page)] == [1, 3], "page 0 is not its own"
    assert first.source_pages(5) == 3


def test_a_plan_knows_whether_there_is_anything_to_gather() -> None:
    assert plan(unit(), 0, unit(pp=3), 0).is_one_run
    assert not plan(unit(), 0, unit(tp=2), 0).is_one_run
    assert not plan(unit(tp=2), 0, unit(tp=2), 1).is_one_run, "nothing is sent at all"


@pytest.mark.parametrize("name", ["layers", "kv_heads", "head_dim", "element_bytes"])
def test_what_no_plan_translates_is_refused_naming_both_values(name: str) -> None:
    text = rf"{name} is {getattr(unit(), name)} on prefill and 8 on decode"
    for refuses in (
        lambda other: require_translatable(unit(), other),
        lambda other: plan(unit(), 0, other, 0),
        lambda other: writers(unit(), other, 0),
        lambda other: readers(unit(), other, 0),
    ):
        with pytest.raises(LayoutMismatch, match=text):
            refuses(unit(**{name: 8}))
    require_translatable(unit(tp=2, pp=3, cp=5, page_tokens=7), unit(tp=4))


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"tp": 3}, "4 KV heads cannot be shared by tp 3"),
        ({"kv_heads": 3, "tp": 4}, "3 KV heads cannot be shared by tp 4"),
        ({"pp": 4}, "3 layers cannot be shared by pp 4"),
        ({"page_tokens": 0}, "page_tokens must be a number of at least 1, not 0"),
        ({"page_tokens": 10**6}, "at most 65536 tokens"),
        ({"kv_heads": 1, "tp": 5000}, "over 4096 ranks"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_with_both_numbers(wrong: dict[str, int], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        unit(**wrong)


def test_a_layout_survives_its_text() -> None:
    layout = unit(tp=2, pp=3, cp=5, page_tokens=7)
    assert UnitLayout.from_text(layout.to_text()) == layout


@pytest.mark.parametrize(
    "text", ["", "no json", "3", "[1]", "{}", '{"page_tokens": 3}', unit().to_text().replace("4", '"4"'), "[" * 100_000]
)
def test_a_text_that_is_no_layout_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        UnitLayout.from_text(text)


def test_equal_fingerprints_fit_whatever_their_order() -> None:
    ours = fingerprint({"dtype": "fp32", "rope": 16})
    assert mismatches(ours, fingerprint({"rope": 16, "dtype": "fp32"})) == ()


def test_a_difference_of_fingerprints_names_both_values() -> None:
    ours, theirs = fingerprint({"dtype": "fp32", "rope": 1}), fingerprint({"dtype": "bf16"})
    assert mismatches(ours, theirs) == (
        "dtype is 'fp32' on prefill and 'bf16' on decode",
        "rope is 1 on prefill and None on decode",
    )


@pytest.mark.parametrize("other", ["no json", "[1]", "3"])
def test_a_fingerprint_that_is_none_is_quoted(other: str) -> None:
    assert mismatches("{}", other) == (f"fingerprint is '{{}}' on prefill and {other!r} on decode",)
