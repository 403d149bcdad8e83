"""Bugs of routers, registries and registrars, planted: each must be caught within 1,000 seeds (see `test_planted_bugs`)."""

import pytest

from baton_core.registry import RegistryTable
from baton_core.request import Incarnation, Room
from baton_core.routing.breaker import Breaker, RetryBudget
from baton_core.routing.workers import Target, Worker
from baton_io import peers
from baton_io.registrar import Registrar, _Link
from baton_router import road
from baton_router.calls import Calls
from baton_router.directory import Directory
from baton_router.failures import FailureKind
from baton_router.journal import Journal
from baton_router.legs import Leg
from simulation.fleet import is_fleet
from simulation.run import play

SEEDS = 1_000


def caught(*names: str, first: int = 0) -> None:
    """Assert that some seed from `first` on breaks, and that one of these invariants says so."""
    for seed in range(first, first + SEEDS):
        failure = play(seed).failure if is_fleet(seed) else ""
        if failure:
            assert any(name in failure for name in names), f"seed {seed}: {failure}"
            return
    raise AssertionError(f"{SEEDS} seeds passed with the bug in place")


def test_a_router_that_begins_a_stream_again_after_a_token_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Journal, "has_begun", property(lambda self: False))
    caught("tokens", first=120)


def test_a_router_that_tries_a_wrong_request_again_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(road, "RETRYABLE", frozenset(FailureKind))
    caught("retry:")


def test_a_router_that_counts_no_retries_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RetryBudget, "spend", lambda self: True)
    caught("retry budget")


def test_a_router_that_uses_a_room_again_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Calls._room_for

    def room_for(self: Calls, prefill: Target, wanted: int) -> int:
        self.kept = getattr(self, "kept", None) or real(self, prefill, wanted)  # type: ignore[attr-defined]
        return int(self.kept)  # type: ignore[attr-defined]

    monkeypatch.setattr(Calls, "_room_for", room_for)
    caught("rooms", "DUPLICATE_ROOM")


def test_a_router_that_leaves_the_other_leg_running_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Leg, "end", lambda self: self._directory.ended(self.target, self))
    caught("router rest", "liveness", "process", "one outcome")


def test_a_leg_that_is_counted_for_ever_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Directory.ended

    def ended(self: Directory, target: Target, leg: Leg[object]) -> None:
        if leg.is_done:
            real(self, target, leg)

    monkeypatch.setattr(Directory, "ended", ended)
    caught("router rest")


def test_a_breaker_that_never_closes_again_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Breaker, "state", lambda self, now: self._state)
    caught("recovery", first=100)


def test_a_registry_that_keeps_the_dead_life_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RegistryTable, "drop", lambda self, name, incarnation: False)
    monkeypatch.setattr(RegistryTable, "expire", lambda self, now: None)
    caught("recovery", "registry")


def test_a_registrar_that_does_not_notice_a_new_registry_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def renew(self: _Link) -> None:
        self._renew_due_ms = self._clock() + self._limits.lease_ms // 3

    monkeypatch.setattr(_Link, "_renew", renew)
    caught("recovery", "registry")


def test_a_room_that_stays_registered_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def close_room(self: Registrar, room: Room, *, went_well: bool) -> None:
        pass

    monkeypatch.setattr(Registrar, "close_room", close_room)
    caught("rooms")


def test_look_ups_that_remember_the_dead_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(self: peers.Peers, peer: Incarnation) -> None:
        pass

    monkeypatch.setattr(peers.Peers, "forget", forget)
    caught("recovery", first=100)


def test_a_worker_that_is_never_probed_again_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Directory._take

    def take(self: Directory, entry: object, after: Worker) -> None:
        was_lost = entry.view.incarnation and not entry.view.usable  # type: ignore[attr-defined]
        if not was_lost:
            real(self, entry, after)  # type: ignore[arg-type]

    monkeypatch.setattr(Directory, "_take", take)
    caught("recovery")
