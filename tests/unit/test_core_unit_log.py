"""One log a unit: what the leader writes, and in which order a replica applies it."""

from collections.abc import Sequence

import pytest

from baton_core.agreement import KVPoll, MetadataRows, Observation, Watch
from baton_core.effects import Effect
from baton_core.errors import Reason, Verdict
from baton_core.events import Abort, AgreedPoll, Event, LocalPoll, Observed
from baton_core.plan import StepPlan, StepResult
from baton_core.ranks import Parallel
from baton_core.unit_log import DIGEST_EVERY, Divergence, Done, LogEntry, Replica, Report, UnitLeader

GONE = Verdict(reason=Reason.CLIENT_GONE, text="the client left")


def poll(rid: str, state: KVPoll, **more: object) -> AgreedPoll:
    fields: dict[str, object] = {
        "rid": rid,
        "attempt": 1,
        "serial": ord(rid),
        "poll": int(state),
        "writers_stopped": False,
    } | more
    return AgreedPoll(**fields)  # type: ignore[arg-type]


def watch(rid: str) -> Watch:
    return Watch(rid=rid, room=7, attempt=1, host="10.0.0.1", serial=ord(rid))


class Recorder:
    """A core and a site in one, which write down what they are asked in order."""

    rows: MetadataRows | None = None

    def __init__(self, *watches: Watch, plans: int = 0, digest: int = 5) -> None:
        self.said: list[object] = []
        self.reports: list[Report] = []
        self.watches, self.plans, self._digest = list(watches), plans, digest
        self.seen = Observation(poll=KVPoll.WaitingForInput)

    # the core
    def step(self, event: Event, now: int) -> list[Effect]:
        self.said.append(event)
        return []

    def tick(self, now: int) -> list[Effect]:
        self.said.append("tick")
        return []

    def plan(self) -> StepPlan | None:
        if self.plans == 0:
            return None
        self.plans -= 1
        return StepPlan(step=self.plans, slices=())

    def take_effects(self) -> list[Effect]:
        return []

    def commit(self, result: StepResult, now: int) -> list[Effect]:
        self.said.append(result)
        return []

    def watched(self) -> list[Watch]:
        return self.watches

    def digest(self) -> int:
        return self._digest

    # the site
    def perform(self, effects: Sequence[Effect], now: int) -> None:
        assert not effects

    def observe(self, watches: Sequence[Watch]) -> list[Observation]:
        self.said.append(f"observe {len(watches)}")
        return [self.seen for _ in watches]

    def observe_uncovered(self, watches: Sequence[Watch]) -> list[int]:
        self.said.append(f"uncovered {len(watches)}")
        return [int(self.seen.poll) for _ in watches]

    def compare(self, digest: int) -> None:
        self.said.append(f"compare {digest}")

    def flush(self) -> None:
        self.said.append("flush")

    def start(self, plan: StepPlan) -> None:
        self.said.append(f"start {plan.step}")

    def idle(self) -> None:
        self.said.append("idle")

    def report(self, report: Report) -> None:
        self.reports.append(report)


def replica(recorder: Recorder, parallel: Parallel, member: int = 0) -> Replica:
    return Replica(recorder, recorder, parallel, member)


def test_inputs_come_first_then_agreement_then_deadlines_then_results_then_the_next_plan() -> None:
    recorder = Recorder(watch("a"), plans=2)
    abort, result = Abort(rid="b", verdict=GONE), StepResult(step=9, results=())
    replica(recorder, Parallel()).apply(LogEntry(position=1, now=3, inputs=(abort,), results=(result,)), recorder)
    agreed = recorder.said[2]
    assert isinstance(agreed, Observed)
    assert [one.rid for one in agreed.polls] == ["a"]
    said = [one for one in recorder.said if one is not agreed]
    assert said == [abort, "observe 1", "tick", result, "flush", "start 1", "start 0"]


def test_a_gap_in_the_log_is_a_bug() -> None:
    recorder = Recorder()
    with pytest.raises(AssertionError):
        replica(recorder, Parallel()).apply(LogEntry(position=2, now=0), recorder)


def test_with_stages_the_consensus_of_the_entry_is_applied_and_nobody_polls_again() -> None:
    recorder = Recorder(watch("a"))
    parallel = Parallel(pp=2)
    ready = poll("a", KVPoll.WaitingForInput)
    recorder.seen = Observation(poll=KVPoll.Failed)  # what this stage sees by now must not matter
    replica(recorder, parallel).apply(LogEntry(position=1, now=0, consensus=(ready,)), recorder)
    assert recorder.said[0] == Observed(polls=(ready,))
    assert not [said for said in recorder.said if str(said).startswith("uncovered")]
    assert [one.poll for one in recorder.reports[0].polls] == [int(KVPoll.Failed)]  # but enters the next consensus


def test_what_the_consensus_does_not_cover_is_polled_inside_the_stage() -> None:
    recorder = Recorder(watch("a"), watch("b"))
    recorder.seen = Observation(poll=KVPoll.Failed)
    replica(recorder, Parallel(pp=2)).apply(
        LogEntry(position=1, now=0, consensus=(poll("a", KVPoll.Success),)), recorder
    )
    assert recorder.said[0] == "uncovered 1"
    observed = recorder.said[1]
    assert isinstance(observed, Observed)
    assert observed.uncovered == (LocalPoll(rid="b", attempt=1, serial=ord("b"), poll=int(KVPoll.Failed)),)


def test_only_the_first_rank_of_a_stage_reports_and_only_what_is_new() -> None:
    parallel = Parallel(pp=2, tp=2)
    first, second = Recorder(watch("a")), Recorder(watch("a"))
    for recorder, member in ((first, 2), (second, 3)):
        one = replica(recorder, parallel, member)
        one.apply(LogEntry(position=1, now=0), recorder)
        one.apply(LogEntry(position=2, now=0), recorder)
    assert [report.stage for report in first.reports] == [1]
    assert second.reports == []
    assert first.said.count("observe 1") == second.said.count("observe 1") == 2  # the stage agrees all the same


def test_siblings_compare_their_states_now_and_then() -> None:
    recorder = Recorder()
    one = replica(recorder, Parallel(tp=2))
    for position in range(1, DIGEST_EVERY + 1):
        one.apply(LogEntry(position=position, now=0), recorder)
    assert recorder.said.count("compare 5") == 1


def test_with_dp_attention_a_step_begins_with_a_round_only_and_a_unit_without_work_idles_along() -> None:
    recorder = Recorder(plans=1)
    one = replica(recorder, Parallel(dp=2, dp_attention=True))
    one.apply(LogEntry(position=1, now=0), recorder)
    one.apply(LogEntry(position=2, now=0, round=1), recorder)
    one.apply(LogEntry(position=3, now=0, round=2), recorder)
    assert [said for said in recorder.said if said not in ("tick", "flush")] == ["start 0", "idle"]


def test_a_step_is_a_fact_when_every_member_has_computed_it_and_the_speaker_says_what() -> None:
    leader = UnitLeader(Parallel(pp=2))
    spoken = StepResult(step=1, results=())
    assert not leader.done(Done(member=0, step=1, result=StepResult(step=1, results=())))
    assert leader.late() == {1: (1,)}
    assert not leader.wants
    assert leader.done(Done(member=1, step=1, result=spoken))
    assert leader.next_entry(5).results == (spoken,)
    assert not leader.wants


def test_one_member_that_failed_fails_the_step_for_all() -> None:
    leader = UnitLeader(Parallel(tp=2))
    failed = StepResult(step=1, results=(), failed=GONE)
    leader.done(Done(member=1, step=1, result=failed))
    leader.done(Done(member=0, step=1, result=StepResult(step=1, results=())))
    assert leader.next_entry(5).results == (failed,)


def test_the_consensus_is_the_least_of_all_stages_for_what_all_of_them_report() -> None:
    leader = UnitLeader(Parallel(pp=2))
    leader.report(Report(stage=0, position=1, polls=(poll("a", KVPoll.Success), poll("b", KVPoll.Success))))
    assert not leader.wants  # one stage is no consensus
    blamed = poll("a", KVPoll.Failed, reason=Reason.PEER_LOST, rank=3, text="gone", progress=1, writers_stopped=True)
    leader.report(Report(stage=1, position=1, polls=(blamed,)))
    assert leader.wants
    (agreed,) = leader.next_entry(0).consensus
    assert (agreed.rid, agreed.poll, agreed.reason, agreed.rank) == ("a", KVPoll.Failed, Reason.PEER_LOST, 3)
    assert not agreed.writers_stopped  # stage 0 has not stopped


def test_stages_that_hold_different_states_stop_the_unit() -> None:
    leader = UnitLeader(Parallel(pp=2))
    leader.report(Report(stage=0, position=64, polls=(), digest=1))
    with pytest.raises(Divergence, match="position 64"):
        leader.report(Report(stage=1, position=64, polls=(), digest=2))
