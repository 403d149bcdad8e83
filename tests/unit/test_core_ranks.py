"""Where ranks stand and what they are called."""

from itertools import product

import pytest

from baton_core.ranks import Parallel, member_name, member_of, share, unit_name, unit_of, worker_of
from baton_core.rounds import Conductor, Part


def test_every_rank_has_one_place_and_ranks_of_a_unit_are_neighbours() -> None:
    for tp, pp, dp, cp in product((1, 2, 3), repeat=4):
        parallel = Parallel(tp=tp, pp=pp, dp=dp, cp=cp)
        places = [parallel.place(rank) for rank in range(parallel.ranks)]
        coordinates = {(one.dp_rank, one.pp_rank, one.cp_rank, one.tp_rank) for one in places}
        assert coordinates == set(product(range(dp), range(pp), range(cp), range(tp)))
        assert [parallel.rank_of(one.dp_rank, one.member) for one in places] == list(range(parallel.ranks))
        assert [one.rank for one in places if one.leads] == [unit * parallel.members for unit in range(dp)]


def test_the_first_rank_of_the_last_stage_speaks() -> None:
    parallel = Parallel(tp=2, pp=3, cp=2)
    place = parallel.place(parallel.speaker)
    assert (place.pp_rank, place.cp_rank, place.tp_rank) == (2, 0, 0)
    assert Parallel().speaker == 0


@pytest.mark.parametrize("sizes", [{"tp": 0}, {"pp": -1}, {"dp": 4_096, "tp": 2}])
def test_sizes_that_make_no_worker_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError):
        Parallel(**sizes)  # type: ignore[arg-type]


def test_shares_cover_everything_once_and_differ_by_one_at_most() -> None:
    for total, parts in product(range(12), range(1, 6)):
        shares = [share(total, part, parts) for part in range(parts)]
        assert [one for span in shares for one in span] == list(range(total))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_unit_and_worker_are_read_off_the_name_of_a_rank() -> None:
    name = member_name("ab12", 3, 11)
    assert (worker_of(name), unit_of(name), member_of(name)) == ("ab12", unit_name("ab12", 3), 11)
    assert (worker_of("ab12"), unit_of("ab12/3"), member_of("ab12/3")) == ("ab12", "ab12/3", 0)
    assert member_of("1.2.3.4") == 0  # no name of a rank at all


def test_a_round_begins_when_somebody_wants_it_and_ends_when_everybody_is_done() -> None:
    conductor = Conductor(2)
    assert conductor.want() == 1
    assert conductor.want() is None  # while it runs
    assert conductor.over(0, 1) is None
    assert conductor.waiting_for == (1,)
    assert conductor.over(1, 1) == 2  # it was wanted meanwhile
    assert conductor.over(1, 2) is None
    assert conductor.over(0, 2) is None
    assert conductor.want() == 3
    with pytest.raises(AssertionError):
        conductor.over(0, 2)


def test_a_unit_wants_one_round_at_a_time_and_none_that_would_be_for_nothing() -> None:
    part = Part(members=2)
    assert not part.wants(has_work=False)
    assert part.wants(has_work=True)
    assert not part.wants(has_work=True)  # it said so already
    part.began(1, step=7)
    assert not part.wants(has_work=True)  # it runs
    assert part.computed(6) is None
    assert part.computed(7) == 1
    assert part.wants(has_work=True)
    part.began(2, step=None)
    assert (part.idled(0), part.idled(0), part.idled(1)) == (None, None, 2)
    assert not part.wants(has_work=True)  # planning found nothing, and nothing has changed
    part.changed()
    assert part.wants(has_work=True)
