"""The simulation is worth its time only if it finds bugs: each of these, planted, must be caught within 1,000 seeds.

A test says which invariant notices and where to begin looking; it stops at the first catch.
"""

from typing import Any

import pytest

from baton_core import agreement
from baton_core.decode.core import DecodeCore
from baton_core.decode.farewells import Farewells
from baton_core.decode.memory import DecodeMemory
from baton_core.effects import Emit, Expect, Forget
from baton_core.errors import Verdict
from baton_core.events import AgreedPoll, PeerGone
from baton_core.ledger import Ledger
from baton_core.limits import Millis
from baton_core.link import Frame, Heard, Link, Switchboard
from baton_core.machine import Handoff, Phase
from baton_core.pages import pages_for
from baton_core.prefill.core import PrefillCore
from baton_core.request import Finish, FinishType, Room
from baton_core.rooms import RoomTable
from simulation.fleet import is_fleet
from simulation.receiver import Receiver
from simulation.run import play

SEEDS = 1_000


def caught(first: int, *names: str) -> None:
    """Assert that some seed from `first` on breaks, and that one of these invariants says so.

    Worlds with routers are left out: there a client may be the first to notice (`test_planted_fleet`).
    """
    for seed in range(first, first + SEEDS):
        failure = "" if is_fleet(seed) else play(seed).failure
        if failure:
            assert any(name in failure for name in names), f"seed {seed}: {failure}"
            return
    raise AssertionError(f"{SEEDS} seeds from {first} on passed with the bug in place")


def test_pages_released_before_the_writers_stopped_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def revoked(self: Ledger, handoff: Handoff, agreed: AgreedPoll) -> None:
        self.transfer_over(handoff)
        self._release_if_quiet(handoff)

    monkeypatch.setattr(Ledger, "revoked", revoked)
    caught(0, "law of pages", "tokens")


def test_pages_released_under_a_running_step_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Ledger._end

    def end(self: Ledger, handoff: Handoff, *rest: Any) -> None:
        handoff.in_step = 0
        real(self, handoff, *rest)

    monkeypatch.setattr(Ledger, "_end", end)
    caught(0, "law of pages", "KeyError")


def test_a_skipped_metadata_gate_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "_apply_metadata_gate", lambda *args: None)
    caught(0, "cause: METADATA_CORRUPT")


def test_a_metadata_row_that_is_used_again_without_being_zeroed_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Receiver.expect

    def expect(self: Receiver, effect: Expect) -> None:
        old = self.rank.metadata[effect.row]
        real(self, effect)
        self.rank.metadata[effect.row] = old

    monkeypatch.setattr(Receiver, "expect", expect)
    caught(0, "cause: METADATA_CORRUPT")


def test_a_receiver_that_checks_neither_attempt_nor_revocation_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(self: Receiver, effect: Forget) -> None:
        self.world.at(50, self.attempts.pop, (effect.room, effect.attempt), None)

    monkeypatch.setattr(Receiver, "may_write", lambda self, attempt, stream: stream.prefill.member in attempt.ways)
    monkeypatch.setattr(Receiver, "forget", forget)
    monkeypatch.setattr(Receiver, "kept", lambda self: [])
    caught(50, "law of pages")


def test_attempts_that_are_not_unique_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DecodeCore, "attempts", property(lambda self: 1, lambda self, value: None), raising=False)
    caught(30, "is open for", "law of pages", "success", "same reason", "told in time")


def test_a_second_answer_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Ledger.fail

    def fail(self: Ledger, handoff: Handoff, verdict: Verdict, now: Millis, *, peer_knows: bool = False) -> None:
        if handoff.phase is Phase.REVOKING:
            self.effects.append(Emit(rid=handoff.rid, finish=Finish(type=FinishType.ABORT, verdict=verdict)))
        real(self, handoff, verdict, now, peer_knows=peer_knows)

    monkeypatch.setattr(Ledger, "fail", fail)
    caught(0, "one outcome")


def test_a_forgotten_tombstone_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RoomTable, "bury", lambda self, room, *args, **kwargs: self.close(room))
    caught(40, "told in time", "same reason")


def test_a_farewell_that_is_never_said_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Farewells, "keep", lambda *args: None)
    caught(130, "told in time", "same reason")


def test_a_link_that_never_repeats_itself_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Link.send

    def send(self: Link, payload: bytes, now: Millis) -> tuple[Frame, ...]:
        frames = real(self, payload, now)
        self._resend_at = None
        return frames

    monkeypatch.setattr(Link, "send", send)
    caught(0, "liveness", "rest")


def test_a_lost_peer_that_is_ignored_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def peer_gone(self: PrefillCore, event: PeerGone, now: Millis) -> None:
        self.orphans.clear()

    monkeypatch.setattr(PrefillCore, "_peer_gone", peer_gone)
    caught(0, "peer gone")


def test_a_message_to_an_earlier_incarnation_that_is_obeyed_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Switchboard.receive

    def receive(self: Switchboard, frame: Frame, now: Millis) -> Heard:
        own, self.own = self.own, frame.target
        try:
            return real(self, frame, now)
        finally:
            self.own = own

    monkeypatch.setattr(Switchboard, "receive", receive)
    caught(95, "old life")


def test_a_row_that_is_never_given_back_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def free_row(self: Ledger, handoff: Handoff) -> None:
        handoff.row = None

    monkeypatch.setattr(Ledger, "free_row", free_row)
    caught(0, "rows")


def test_a_reservation_that_forgets_the_answer_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DecodeMemory, "pages_expected", lambda self, req: pages_for(req.known, self._page_tokens))
    monkeypatch.setattr(DecodeMemory, "_short", lambda self, req: False)
    caught(0, "IndexError")


def test_a_room_that_stays_open_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def close(self: RoomTable, room: Room) -> None:
        pass

    monkeypatch.setattr(RoomTable, "close", close)
    caught(0, "success", "cause", "KeyError")
