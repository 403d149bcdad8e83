"""Bugs planted in the way back through prefill, each of which the simulation must catch within 1,000 seeds."""

from typing import Any

import pytest

from baton_core.decode.reentry import Reentry
from baton_core.decode.transfer import DecodeTransferQueue
from baton_core.ledger import Ledger
from baton_core.machine import Handoff, Phase
from simulation.test_planted_bugs import caught


def test_a_token_that_is_counted_twice_when_it_comes_again_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = DecodeTransferQueue._commit_transfer_to_req

    def commit(self: DecodeTransferQueue, req: Handoff, *rest: Any) -> None:
        real(self, req, *rest)
        if req.rebootstraps and req.phase is Phase.ARRIVED:
            req.outputs.append(req.outputs[-1])

    monkeypatch.setattr(DecodeTransferQueue, "_commit_transfer_to_req", commit)
    caught(0, "tokens")


def test_an_answer_that_is_left_out_of_what_prefill_computes_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Handoff.known_tokens

    def known_tokens(self: Handoff, start: int, end: int) -> tuple[int, ...]:
        known = real(self, start, end)
        return (*known[:-1], 0) if self.phase is Phase.GREETING and self.outputs else known

    monkeypatch.setattr(Handoff, "known_tokens", known_tokens)
    caught(0, "tokens")


def test_pages_of_a_failed_rebootstrap_that_are_free_at_once_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Reentry._leave_remains

    def leave_remains(self: Reentry, req: Handoff, *rest: Any) -> None:
        ledger: Ledger = self._ledger
        shared, own = req.pages[: len(req.shared)], req.pages[len(req.shared) :]
        real(self, req, *rest)
        remains = list(ledger.live.values())[-1]
        remains.pages = shared
        ledger.pool.release(own)

    monkeypatch.setattr(Reentry, "_leave_remains", leave_remains)
    caught(0, "law of pages", "tokens")


def test_a_retracted_request_that_is_never_taken_back_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reentry, "due", lambda self: [])
    caught(0, "success", "liveness")
