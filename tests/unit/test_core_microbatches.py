"""Several plans in flight, as many as there are pipeline stages; committed in the order in which they were made."""

import pytest

from baton_core.agreement import KVPoll
from baton_core.decode.core import DecodeCore
from baton_core.effects import Push
from baton_core.errors import Reason, Verdict
from baton_core.events import Abort, Resolved, StopHere
from baton_core.plan import StepPlan, StepResult
from baton_core.request import FinishType
from unit.cores import (
    GONE,
    INFOS,
    PROMPT,
    Bench,
    P,
    accepted,
    decode,
    ends,
    kinds,
    polled,
    prefill,
    queued,
    request,
    row,
    sampling,
    tokens,
    with_limits,
)

FAULT = Verdict(reason=Reason.DEVICE_FAULT, text="out of memory")


def names(plan: StepPlan) -> list[str]:
    return [piece.rid for piece in plan.slices]


def streams(count: int, pp_size: int = 2, **limits: int) -> Bench[DecodeCore]:
    """A decode core with sequences "a", "b", … whose KV cache is here."""
    bench = decode(with_limits(**limits), pp_size=pp_size, pool_pages=64)
    for number, rid in enumerate("abcdefgh"[:count], 1):
        bench.submit(request(rid, number, sampling=sampling(max_new_tokens=9)))
        bench.step(Resolved(rid=rid, infos=INFOS))
        bench.say(accepted(number, number), P)
        bench.step(polled(rid, attempt=number, row=row(attempt=number, room=number)))
    return bench


# -- prefill


def test_the_next_chunk_of_a_prompt_is_planned_while_the_last_one_is_computed() -> None:
    bench = prefill(with_limits(chunk_tokens=2), pp_size=2)
    queued(bench)
    first, second = bench.plan(), bench.plan()
    assert bench.core.plan() is None, "as many run as there are stages"
    assert [(piece.start, piece.tokens, piece.sample) for plan in (first, second) for piece in plan.slices] == [
        (0, PROMPT[:2], False),
        (2, PROMPT[2:4], False),
    ]
    req = bench.core.ledger.live["r"]
    assert (req.planned, req.computed, req.in_step) == (4, 0, 2)
    (push,) = [one for one in bench.commit(first) if isinstance(one, Push)]
    assert (push.first, len(push.pages), req.computed, req.in_step) == (0, 1, 2, 1)
    third = bench.plan()
    assert [(piece.start, piece.sample) for piece in third.slices] == [(4, True)]
    bench.commit(second)
    assert bench.core.plan() is None, "nothing is left to plan of a prompt whose last chunk is computed"
    bench.commit(third, token=33)
    assert bench.phase() == "inflight"
    assert (req.outputs, req.computed) == ([33], 5)


def test_a_prompt_whose_last_chunk_is_in_hand_does_not_hold_up_the_next() -> None:
    bench = prefill(with_limits(chunk_tokens=5), pp_size=3)
    for number, rid in enumerate("ab", 1):
        queued(bench, rid, number)
    assert [names(bench.plan()), names(bench.plan())] == [["a"], ["b"]]
    assert bench.core.plan() is None


def test_results_come_in_the_order_of_plans() -> None:
    bench = prefill(with_limits(chunk_tokens=2), pp_size=2)
    queued(bench)
    bench.plan()
    second = bench.plan()
    with pytest.raises(AssertionError, match="step 2 ends where 1 is the oldest"):
        bench.commit(second)
    with pytest.raises(AssertionError, match="step 1 ends where None"):
        prefill().core.commit(StepResult(step=1, results=()), 0)


def test_an_abort_leaves_pages_owned_until_the_last_plan_that_names_them_is_committed() -> None:
    bench = prefill(with_limits(chunk_tokens=2), pp_size=2)
    queued(bench)
    first, second = bench.plan(), bench.plan()
    assert ends(bench.step(Abort(rid="r", verdict=GONE))) == [("r", Reason.CLIENT_GONE)]
    bench.step(polled(poll=KVPoll.Failed, writers_stopped=True))
    assert (bench.phase(), bench.free) == ("revoking", 5), "nobody reads them; two steps write them"
    assert kinds(bench.commit(first)) == []
    assert (bench.phase(), bench.free) == ("revoking", 5)
    bench.commit(second)
    assert (bench.live, bench.free) == ([], 8)


def test_a_failed_step_fails_the_request_once_though_later_steps_name_it_too() -> None:
    bench = prefill(with_limits(chunk_tokens=2), pp_size=2)
    queued(bench)
    first, second = bench.plan(), bench.plan()
    assert ends(bench.commit(first, failed=FAULT)) == [("r", Reason.DEVICE_FAULT)]
    bench.step(polled(poll=KVPoll.Failed, writers_stopped=True))
    assert kinds(bench.commit(second)) == []
    assert (bench.live, bench.free) == ([], 8)


def test_cached_pages_are_pushed_when_the_first_plan_is_made() -> None:
    bench = prefill(pp_size=2, prefix_cache=True)
    queued(bench)
    bench.commit(bench.plan())
    bench.commit(bench.plan())
    bench.step(polled(progress=3))
    queued(bench, "again")
    bench.plan()
    (push,) = [one for one in bench.core.take_effects() if isinstance(one, Push)]
    assert (push.first, len(push.pages)) == (0, 2)


# -- decode


def test_running_sequences_are_spread_evenly_and_each_is_in_one_plan_at_a_time() -> None:
    bench = streams(5)
    first, second = bench.plan(), bench.plan()
    assert (names(first), names(second)) == (["a", "b", "c"], ["d", "e"])
    assert bench.core.plan() is None
    bench.commit(first)
    assert names(bench.plan()) == ["a", "b", "c"]
    bench.commit(second)
    assert names(bench.plan()) == ["d", "e"]


def test_every_sequence_has_its_turn_when_shares_change() -> None:
    bench = streams(5, pp_size=3)
    plans = [bench.plan() for _ in range(3)]
    assert [len(plan.slices) for plan in plans] == [2, 2, 1]
    made = dict.fromkeys("abcde", 0)
    bench.step(StopHere(rid="b"))
    for _ in range(12):
        for rid in names(plans[0]):
            made[rid] += 1
        bench.commit(plans.pop(0))
        plan = bench.core.plan()
        if plan is not None:
            plans.append(plan)
    rest = [made[rid] for rid in "acde"]
    assert max(rest) - min(rest) <= 1, made


def test_one_sequence_runs_by_itself_however_many_plans_there_might_be() -> None:
    bench = streams(1, pp_size=4)
    plan = bench.plan()
    assert names(plan) == ["a"]
    assert bench.core.plan() is None
    assert tokens(bench.commit(plan, token=43)) == [43]
    assert names(bench.plan()) == ["a"]


def test_a_stopped_sequence_keeps_its_pages_until_its_own_plan_is_committed() -> None:
    bench = streams(2)
    first, second = bench.plan(), bench.plan()
    before = bench.free
    assert ends(bench.step(StopHere(rid="b"))) == [("b", FinishType.STOP)]
    bench.commit(first)
    assert (bench.phase("b"), bench.free) == ("revoking", before)
    bench.commit(second)
    assert bench.free > before
    assert bench.live == ["a"]


def test_local_prompts_are_computed_ahead_beside_the_streams() -> None:
    bench = streams(1, chunk_tokens=2)
    bench.submit(request("local", bootstrap=None))
    first, second = bench.plan(), bench.plan()
    assert [(piece.rid, piece.start) for plan in (first, second) for piece in plan.slices] == [
        ("a", 5),
        ("local", 0),
        ("local", 2),
    ]
    bench.commit(first)
    third = bench.plan()
    assert [(piece.rid, piece.start, piece.sample) for piece in third.slices] == [("a", 6, True), ("local", 4, True)]
    bench.commit(second)
    assert bench.core.plan() is None, "its last chunk is in hand, and so is the stream"
    assert tokens(bench.commit(third, token=7)) == [7, 7]
    assert bench.phase("local") == "running"


def test_one_stage_plans_one_step_at_a_time_with_everything_in_it() -> None:
    bench = streams(3, pp_size=1)
    plan = bench.plan()
    assert names(plan) == ["a", "b", "c"]
    assert bench.core.plan() is None
    bench.commit(plan)
    assert names(bench.plan()) == ["a", "b", "c"]
