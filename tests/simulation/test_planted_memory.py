"""Bugs planted in decode's memory, each of which the simulation must catch within 1,000 seeds."""

from collections.abc import Iterable
from dataclasses import replace

import pytest

from baton_core.decode.memory import DecodeMemory
from baton_core.decode.planning import DecodeBatch
from baton_core.effects import Restore
from baton_core.events import AgreedPoll
from baton_core.ledger import Ledger
from baton_core.machine import Handoff
from baton_core.unit_log import LogEntry, Replica
from simulation.test_planted_bugs import caught


def test_pages_released_before_every_rank_has_copied_them_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Ledger.copied

    def copied(self: Ledger, polls: Iterable[AgreedPoll]) -> list[tuple[Handoff, bool]]:
        return real(self, [replace(poll, writers_stopped=True) for poll in polls])

    monkeypatch.setattr(Ledger, "copied", copied)
    caught(0, "law of pages", "tokens")


def test_a_backup_that_comes_back_in_another_order_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Ledger.restore

    def restore(self: Ledger, handoff: Handoff) -> None:
        real(self, handoff)
        effect = self.effects[-1]
        assert isinstance(effect, Restore)
        self.effects[-1] = replace(effect, slots=effect.slots[::-1])

    monkeypatch.setattr(Ledger, "restore", restore)
    caught(0, "tokens")


def test_a_page_that_the_backup_leaves_out_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Ledger.back_up
    monkeypatch.setattr(Ledger, "back_up", lambda self, handoff, pages: real(self, handoff, max(1, pages - 1)))
    caught(0, "tokens", "law of pages", "IndexError")


def test_an_answer_that_is_left_out_when_its_prompt_is_computed_again_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def known_tokens(self: Handoff, start: int, end: int) -> tuple[int, ...]:
        drawn = [0] * len(self.outputs)
        return (*self.request.prompt, *drawn)[start:end]

    monkeypatch.setattr(Handoff, "known_tokens", known_tokens)
    caught(0, "tokens")


def test_a_request_retracted_under_a_running_step_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def between_steps(self: DecodeBatch) -> list[Handoff]:
        return [*self.running.values(), *self.arrived.values()]

    monkeypatch.setattr(DecodeBatch, "between_steps", between_steps)
    caught(0, "AssertionError", "law of pages", "tokens")


def test_what_planning_asks_for_and_nobody_does_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def plan(self: Replica, entry: LogEntry) -> None:
        while (plan := self._core.plan()) is not None:
            self._site.perform(self._core.take_effects(), entry.now)
            self._site.start(plan)

    monkeypatch.setattr(Replica, "_plan", plan)
    caught(0, "success", "liveness")


def test_a_request_that_gives_way_to_nobody_and_waits_for_ever_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DecodeMemory, "_coming", lambda self: 1_000)
    caught(0, "success", "liveness")
