"""What a registry is told about rooms, and when they are taken back."""

from baton_core.limits import RegistrarLimits
from baton_core.room_news import RoomNews

LIMITS = RegistrarLimits(room_kept_ms=100, room_renew_ms=1_000, rooms_max=3)


def told(news: RoomNews, now: int = 0) -> tuple[dict[int, int], dict[int, int]]:
    """What is to be told now, and is."""
    running, over = news.take(now, 100)
    news.heard(running, over, now)
    return running, over


def test_a_room_is_told_once_and_again_after_a_while() -> None:
    news = RoomNews(LIMITS)
    news.open(7, 1)
    assert news.has_any
    assert told(news) == ({7: 1}, {})
    assert not news.has_any and news.due() == 1_000
    assert told(news, 999) == ({}, {})
    assert told(news, 1_000) == ({7: 1}, {})


def test_a_room_that_went_well_is_taken_back_at_once() -> None:
    news = RoomNews(LIMITS)
    news.open(7, 1)
    told(news)
    news.close(7, 5, went_well=True)
    assert news.has_any and told(news, 5) == ({}, {7: 1})
    assert not news.has_any and news.due() is None


def test_a_room_that_failed_is_kept_for_its_late_leg_and_then_taken_back() -> None:
    news = RoomNews(LIMITS)
    news.open(7, 1)
    told(news)
    news.close(7, 5, went_well=False)
    assert not news.has_any and news.due() == 105
    assert told(news, 104) == ({}, {}) and told(news, 105) == ({}, {7: 1})


def test_a_room_that_failed_before_it_was_told_is_told_once_and_then_taken_back() -> None:
    news = RoomNews(LIMITS)
    news.open(7, 1)
    news.close(7, 0, went_well=False)
    assert told(news) == ({7: 1}, {}) and news.due() == 100
    assert told(news, 100) == ({}, {7: 1}) and news.due() is None


def test_a_room_that_is_opened_again_is_not_taken_back() -> None:
    news = RoomNews(LIMITS)
    for went_well in (True, False):
        news.open(7, 1)
        told(news)
        news.close(7, 0, went_well=went_well)
        news.open(7, 0)
        assert told(news, 200) == ({7: 0}, {})


def test_what_is_opened_or_closed_while_the_call_is_on_its_way_is_still_to_be_told() -> None:
    news = RoomNews(LIMITS)
    news.open(7, 1)
    running, over = news.take(0, 100)
    news.open(7, 0)
    news.heard(running, over, 0)
    assert told(news) == ({7: 0}, {})
    running, over = news.take(1_000, 100)
    news.close(7, 1_000, went_well=True)
    news.heard(running, over, 1_000)
    assert told(news, 1_000) == ({}, {7: 0})


def test_what_is_remembered_about_a_registry_that_is_gone_is_bounded() -> None:
    news = RoomNews(LIMITS)
    for room in range(1, 10):
        news.open(room, 0)
    assert list(news.take(0, 100)[0]) == [7, 8, 9]
    for room in range(1, 10):
        news.open(room, 0)
        news.close(room, 0, went_well=True)
    assert list(news.take(0, 100)[1]) == [7, 8, 9]


def test_a_registry_that_forgot_everything_has_nothing_to_take_back() -> None:
    news = RoomNews(LIMITS)
    news.open(7, 1)
    told(news)
    news.close(7, 0, went_well=True)
    news.forgotten()
    assert not news.has_any
