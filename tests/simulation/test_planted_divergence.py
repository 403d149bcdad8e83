"""Planted bugs of many ranks: the original faults of S1, S2 and S3, and other ways to disagree.

As in `test_planted_bugs`, each must be caught within 1,000 seeds; a test says where to begin looking.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from baton_core import agreement, unit_log
from baton_core.agreement import KVPoll, MetadataRows, Observation, Watch
from baton_core.decode.prealloc import DecodePreallocQueue
from baton_core.effects import Offer
from baton_core.errors import Reason, Verdict
from baton_core.events import Abort, AgreedPoll
from baton_core.limits import Millis
from baton_core.machine import Handoff
from baton_core.prefill import rules
from baton_core.prefill.planning import PrefillWaitingQueue
from baton_core.prefill.queue import PrefillBootstrapQueue
from baton_core.unit_log import Applying, LogEntry, ObserveUncovered, Replica, Report
from simulation import worker
from simulation.leader import Leader
from simulation.rank import Rank
from simulation.sender import Sender
from simulation.test_planted_bugs import caught
from simulation.unit import Unit


def test_a_consumer_that_polls_its_own_stage_again_after_the_consensus_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = Replica._agree

    def agree(self: Replica, entry: LogEntry) -> Applying:
        watches = self._core.watched() if self._parallel.pp > 1 else []
        polls = (yield ObserveUncovered(watches)) if watches else []
        again = {(watch.rid, watch.serial): poll for watch, poll in zip(watches, polls, strict=True)}
        consensus = tuple(
            replace(one, poll=min(one.poll, again.get((one.rid, one.serial), one.poll))) for one in entry.consensus
        )
        yield from real(self, replace(entry, consensus=consensus))

    monkeypatch.setattr(Replica, "_agree", agree)
    caught(0, "siblings")


def test_an_abort_that_arrives_between_consensus_and_consumption_on_each_stage_alone_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = Leader._take

    def tell(rank: Rank, abort: Abort, now: Millis) -> None:
        rank.perform(rank.core.step(abort, now), now)

    def take(self: Leader, item: object, now: Millis) -> None:
        if isinstance(item, Abort) and self.unit.parallel.pp > 1:
            for rank in self.unit.ranks:
                self.unit._post(0, rank.member, lambda abort, rank=rank: tell(rank, abort, now), item)
        else:
            real(self, item, now)

    monkeypatch.setattr(Leader, "_take", take)
    caught(0, "siblings")


def test_a_stage_failure_that_is_applied_on_one_stage_only_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def drain(self: PrefillBootstrapQueue | DecodePreallocQueue, req: Handoff) -> None:
        verdict = Verdict(reason=Reason.TRANSFER_FAILED, text="it failed here")
        self._ledger.fail(req, verdict, req.arrived_at)

    monkeypatch.setattr(PrefillBootstrapQueue, "_drain", drain)
    monkeypatch.setattr(DecodePreallocQueue, "_drain", drain)
    caught(350, "siblings")


def test_a_stage_failure_that_is_never_drained_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Rank.report

    def report(self: Rank, report: Report) -> None:
        real(self, replace(report, polls=tuple(poll for poll in report.polls if poll.poll != KVPoll.Failed)))

    monkeypatch.setattr(Rank, "report", report)
    caught(0, "liveness")


def test_a_rank_without_the_metadata_gate_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = agreement._reduce

    def reduce(seen: Any, group: Any, decode_reqs: Any, *rest: Any) -> list[Observation]:
        return real(seen, group, None if group.rank == 1 else decode_reqs, *rest)

    monkeypatch.setattr(agreement, "_reduce", reduce)
    caught(100, "siblings")


def test_a_rank_that_commits_when_its_own_metadata_is_visible_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = agreement.agreed_polls

    def agreed_polls(
        watches: Sequence[Watch], reduced: Sequence[Observation], rows: MetadataRows | None = None, **rest: Any
    ) -> tuple[AgreedPoll, ...]:
        here = [
            replace(one, poll=KVPoll.Transferring)
            if one.poll is KVPoll.Success
            and rows is not None
            and watch.row is not None
            and not rows.room_word(watch.row)
            else one
            for watch, one in zip(watches, reduced, strict=True)
        ]
        return real(watches, here, rows, **rest)

    def init(self: Rank, unit: Unit, member: int) -> None:
        real_init(self, unit, member)
        if unit.parallel.pp == 1:
            self.gate_args = None

    real_init = Rank.__init__
    monkeypatch.setattr(Rank, "__init__", init)
    monkeypatch.setattr(unit_log, "agreed_polls", agreed_polls)
    caught(0, "siblings")


def test_a_replica_that_consumes_what_it_sees_alone_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "_agreed", lambda own, least, rank: own)
    caught(0, "siblings")


def test_a_route_that_decode_does_not_know_of_and_nobody_refuses_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "misplaced", lambda *args, **kwargs: None)
    monkeypatch.setattr(rules, "misplaced", lambda *args, **kwargs: None)
    caught(115, "route")


def test_two_row_writers_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Sender.offer

    def offer(self: Sender, effect: Offer) -> None:
        real(self, effect)
        for way in self.attempts[effect.room, effect.attempt].ways.values():
            way.writes_row = True

    monkeypatch.setattr(Sender, "offer", offer)
    caught(0, "one row writer")


def test_a_sibling_that_iterates_in_another_order_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    born, real = count(), PrefillWaitingQueue.__init__
    backwards: set[int] = set()
    real_slices = PrefillWaitingQueue.next_slices

    def init(self: PrefillWaitingQueue, *args: Any) -> None:
        real(self, *args)
        if next(born) % 2:
            backwards.add(id(self))

    def next_slices(self: PrefillWaitingQueue, sequences_max: int) -> Any:
        if id(self) in backwards:
            self.queue = dict(reversed(self.queue.items()))
        return real_slices(self, sequences_max)

    monkeypatch.setattr(PrefillWaitingQueue, "__init__", init)
    monkeypatch.setattr(PrefillWaitingQueue, "next_slices", next_slices)
    caught(0, "siblings")


def test_an_order_that_comes_before_its_rank_has_offered_and_is_dropped_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = Sender.offer

    def offer(self: Sender, effect: Offer) -> None:
        self._early.clear()
        real(self, effect)

    monkeypatch.setattr(Sender, "offer", offer)
    caught(95, "success", "told in time", "cause")
