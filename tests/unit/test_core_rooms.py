"""Rooms and tombstones: who is told what, once, and for how long."""

import pytest

from baton_core.errors import Reason, Verdict
from baton_core.limits import Limits
from baton_core.rooms import RoomTable

LIMITS = Limits(tombstone_ms=100, tombstones_max=2)
VERDICT = Verdict(reason=Reason.ABORTED, text="stopped")
ROOM = 5


def test_a_room_has_one_holder_and_may_be_used_again_when_it_is_closed() -> None:
    rooms = RoomTable(LIMITS)
    rooms.open(ROOM, "a")
    assert rooms.holder(ROOM) == "a"
    with pytest.raises(AssertionError, match="held by a"):
        rooms.open(ROOM, "b")
    rooms.close(ROOM)
    assert rooms.holder(ROOM) is None
    rooms.open(ROOM, "b")
    assert rooms.holder(ROOM) == "b"


def test_each_leg_hears_a_failed_rooms_verdict_once() -> None:
    rooms = RoomTable(LIMITS)
    rooms.bury(ROOM, VERDICT, 0, app_answered=False, peer_answered=False)
    assert rooms.verdict_for_app(ROOM, 1) == VERDICT
    assert rooms.verdict_for_app(ROOM, 1) is None
    assert rooms.tombstones == 1
    assert rooms.verdict_for_peer(ROOM, 1) == VERDICT
    assert rooms.verdict_for_peer(ROOM, 1) is None
    assert rooms.tombstones == 0, "both legs know: nothing is left to say"


def test_a_leg_that_was_answered_is_not_answered_again() -> None:
    rooms = RoomTable(LIMITS)
    rooms.bury(ROOM, VERDICT, 0, app_answered=True, peer_answered=False)
    assert rooms.verdict_for_app(ROOM, 1) is None
    assert rooms.verdict_for_peer(ROOM, 1) == VERDICT


def test_no_stone_is_set_where_both_legs_know() -> None:
    rooms = RoomTable(LIMITS)
    rooms.open(ROOM, "a")
    rooms.bury(ROOM, VERDICT, 0, app_answered=True, peer_answered=True)
    assert (rooms.holder(ROOM), rooms.tombstones) == (None, 0)


def test_a_new_life_of_a_room_wipes_its_stone() -> None:
    rooms = RoomTable(LIMITS)
    rooms.bury(ROOM, VERDICT, 0, app_answered=True, peer_answered=False)
    rooms.open(ROOM, "again")
    assert rooms.verdict_for_peer(ROOM, 1) is None
    rooms.bury(ROOM, VERDICT, 0, app_answered=False, peer_answered=True)
    rooms.wipe(ROOM)
    assert rooms.verdict_for_app(ROOM, 1) is None


def test_stones_expire() -> None:
    rooms = RoomTable(LIMITS)
    rooms.bury(ROOM, VERDICT, 0, app_answered=False, peer_answered=True)
    rooms.bury(ROOM + 1, VERDICT, 50, app_answered=False, peer_answered=True)
    assert rooms.next_expiry() == 100
    rooms.sweep(99)
    assert rooms.tombstones == 2
    assert rooms.verdict_for_app(ROOM, 100) is None, "expired, though not yet swept"
    rooms.sweep(100)
    assert (rooms.tombstones, rooms.next_expiry()) == (1, 150)
    rooms.sweep(150)
    assert (rooms.tombstones, rooms.next_expiry()) == (0, None)


def test_of_too_many_stones_the_oldest_is_forgotten() -> None:
    rooms = RoomTable(LIMITS)
    for room in (1, 2, 3):
        rooms.bury(room, VERDICT, room, app_answered=False, peer_answered=True)
    assert rooms.tombstones == LIMITS.tombstones_max
    assert rooms.verdict_for_app(1, 5) is None
    assert rooms.verdict_for_app(3, 5) == VERDICT


def test_a_room_that_fails_again_counts_as_young() -> None:
    rooms = RoomTable(LIMITS)
    rooms.bury(1, VERDICT, 0, app_answered=False, peer_answered=True)
    rooms.bury(2, VERDICT, 10, app_answered=False, peer_answered=True)
    rooms.bury(1, VERDICT, 20, app_answered=False, peer_answered=True)
    assert rooms.next_expiry() == 110
