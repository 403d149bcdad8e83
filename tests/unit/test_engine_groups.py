"""Groups of ranks: who is in them, what they do, and what is said when somebody does not come. Real processes, gloo."""

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from torch.testing import assert_close

from baton_core.errors import EngineError
from baton_core.ranks import Parallel
from baton_engine.groups import RankGroup, join
from ports import free_port
from rank_pool import Fault, RankPool, agreed, everything_grouped, left, rank_pool, started, summed


@pytest.fixture
def ranks() -> RankPool:
    return rank_pool()


def rendezvous(tmp_path: Path) -> str:
    return f"file://{tmp_path}/meet"


def free_address() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


def test_every_rank_is_in_its_groups_and_every_group_works(ranks: RankPool, tmp_path: Path) -> None:
    parallel = Parallel(pp=2, tp=2)
    answers = ranks.run(everything_grouped, range(4), parallel, rendezvous(tmp_path))
    assert not any(isinstance(answer, Fault) for answer in answers), answers
    assert [answer["tp"] for answer in answers] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert [answer["stages"] for answer in answers] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert [answer["ffn"] for answer in answers] == [answer["tp"] for answer in answers]
    assert [answer["cp"] for answer in answers] == [(0,), (1,), (2,), (3,)]
    assert all(answer["control_unit"] == (0, 1, 2, 3) and answer["least"] == [0, -3] for answer in answers)
    assert all(answer["control_stage"] == answer["control_tp"] == answer["tp"] for answer in answers)
    assert [answer["gathered"] for answer in answers] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [answer["first"] for answer in answers] == [[0, 1], None, [2, 3], None]
    assert [answer["sum"] for answer in answers] == [[1], [1], [5], [5]]
    assert [answer["passed"] for answer in answers] == [[0], [1], [0], [1]]
    each = [torch.randn(40_003, generator=torch.Generator().manual_seed(rank)) for rank in range(4)]
    assert_close(answers[0]["large"], torch.stack(each).sum(0))
    assert all(torch.equal(answer["large"], answers[0]["large"]) for answer in answers), "to the last bit"


def test_with_dp_attention_the_mlp_is_shared_by_all_units_and_across_hosts_ranks_meet_by_tcp(ranks: RankPool) -> None:
    parallel = Parallel(cp=2, dp=2, dp_attention=True)
    answers = ranks.run(everything_grouped, range(4), parallel, free_address())
    assert not any(isinstance(answer, Fault) for answer in answers), answers
    assert [answer["ffn"] for answer in answers] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert [answer["cp"] for answer in answers] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert [answer["control_unit"] for answer in answers] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert [answer["least"] for answer in answers] == [[0, -1], [0, -1], [2, -3], [2, -3]]


def test_a_member_that_never_comes_is_named_by_all_the_others(ranks: RankPool, tmp_path: Path) -> None:
    answers = ranks.run(summed, range(3), Parallel(tp=3), rendezvous(tmp_path), 1, 500)
    assert answers[1] == []
    for rank in (0, 2):
        text = answers[rank].text
        assert answers[rank].kind == "GroupLost"
        assert f"group tp of ranks 0, 1, 2: sum, operation 1, failed on rank {rank}" in text
        assert "limit 500 ms" in text and ": rank 1 did not answer the roll call." in text


def test_a_stopped_rank_is_named_even_where_it_is_the_host_of_the_rendezvous(ranks: RankPool) -> None:
    ranks.begin(summed, range(3), Parallel(tp=3), free_address(), 0, 1_000)
    assert ranks.answer(0) == []
    with ranks.stopped(0):
        answers = [ranks.answer(rank) for rank in (1, 2)]
    for answer in answers:
        assert answer.kind == "GroupLost"
        assert ": the rendezvous does not answer, so its host, rank 0, is missing." in answer.text


def test_a_rank_that_ends_in_the_middle_is_named_at_once(ranks: RankPool, tmp_path: Path) -> None:
    answers = ranks.run(left, range(3), Parallel(tp=3), rendezvous(tmp_path), 2)
    assert answers[2] == 1
    for answer in answers[:2]:
        assert answer.kind == "GroupLost" and "sum, operation 2, failed" in answer.text
        assert ": rank 2 did not answer the roll call." in answer.text
        took_ms = int(answer.text.partition(" after ")[2].split()[0])
        assert took_ms < 10_000, "long before the limit of 20 s"


def test_a_rank_that_does_not_start_is_named_and_nobody_waits_longer_than_told(ranks: RankPool, tmp_path: Path) -> None:
    answers = ranks.run(started, (0, 2), Parallel(tp=4), rendezvous(tmp_path), 300)
    assert [answer.text for answer in answers] == ["ranks 1, 3 did not come to 'start' within 300 ms"] * 2


def test_agreements_have_any_length_and_members_that_disagree_about_it_are_named(
    ranks: RankPool, tmp_path: Path
) -> None:
    counts = (0, 1, 511, 512, 4_096)
    answers = ranks.run(agreed, range(3), Parallel(cp=3), rendezvous(tmp_path), counts)
    for *least, said in answers:
        assert least == [[0 if index % 2 == 0 else -2 for index in range(count)] for count in counts]
        assert said == (
            "group control_stage: members brought different numbers of values to an agreement: "
            "rank 0 2, rank 1 602, rank 2 1202"
        )


def test_units_of_plain_dp_do_not_wait_for_each_other(ranks: RankPool, tmp_path: Path) -> None:
    answers = ranks.run(everything_grouped, (2, 3), Parallel(dp=2, tp=2), rendezvous(tmp_path))
    assert [answer["control_unit"] for answer in answers] == [(2, 3), (2, 3)]


def test_a_unit_of_one_rank_needs_no_rendezvous() -> None:
    groups = join(Parallel(dp=3), 2, "nowhere", "cpu", 1_000)
    assert groups.tp.ranks == groups.control_unit.ranks == (2,) and groups.tp.size == 1
    assert groups.control_stage.all_reduce_min([3, -4]) == [3, -4]
    groups.meet("anything")
    groups.close()


def test_a_group_of_one_keeps_everything_to_itself() -> None:
    group = RankGroup("tp", (5,), 5, 1_000)
    values, gathered = torch.tensor([1.0, 2.0]), torch.empty(1, 2)
    group.sum(values)
    group.gather(values, gathered)
    first = group.gather_to_first(values)
    assert values.tolist() == [1, 2] == gathered[0].tolist()
    assert first is not None and first.tolist() == [[1, 2]]


@pytest.mark.parametrize("where", ["nowhere", "http://host:80", "tcp://host", "file://host/path"])
def test_a_rendezvous_of_another_kind_is_refused(where: str) -> None:
    with pytest.raises(EngineError, match="is neither file:///path nor tcp://host:port"):
        join(Parallel(tp=2), 0, where, "cpu", 1_000)
