"""Bugs planted around decode's prefix cache, each of which the simulation must catch within 1,000 seeds."""

from dataclasses import replace

import pytest

from baton_core.decode.prealloc import DecodePreallocQueue
from baton_core.effects import Expect
from baton_core.kv_layout import Plan
from baton_core.ledger import Ledger
from baton_core.machine import Handoff
from baton_core.request import PageId
from simulation.test_planted_bugs import caught


def test_an_order_that_lets_held_pages_be_written_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = DecodePreallocQueue.order_pages

    def order_pages(self: DecodePreallocQueue, req: Handoff) -> None:
        real(self, req)
        effects = self._ledger.effects
        effects[:] = [replace(one, held_pages=0) if isinstance(one, Expect) else one for one in effects]

    monkeypatch.setattr(DecodePreallocQueue, "order_pages", order_pages)
    caught(0, "law of pages")


def test_a_writer_that_also_writes_the_last_held_page_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Plan.pieces
    monkeypatch.setattr(
        Plan,
        "pieces",
        lambda self, ordinals, wanted: real(self, ordinals, range(max(0, wanted.start - 1), wanted.stop)),
    )
    caught(0, "law of pages")


def test_what_is_older_than_a_flush_and_enters_the_cache_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def flush_cache(self: Ledger) -> None:
        if self.cache is not None:
            self.cache.flush()

    monkeypatch.setattr(Ledger, "flush_cache", flush_cache)
    caught(0, "flush", "pages")


def test_pages_of_a_failed_transfer_that_enter_the_cache_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = DecodePreallocQueue.order_pages

    def order_pages(self: DecodePreallocQueue, req: Handoff) -> None:
        real(self, req)
        req.computed = len(req.request.prompt)

    monkeypatch.setattr(DecodePreallocQueue, "order_pages", order_pages)
    caught(0, "tokens")


def test_shared_pages_that_are_not_locked_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Ledger.take_pages

    def take_pages(self: Ledger, handoff: Handoff, pages: int, usable_tokens: int) -> bool:
        taken = real(self, handoff, pages, usable_tokens)
        if taken and self.cache is not None:
            self.cache.unlock(handoff.shared)
        return taken

    def pages_to_free(self: Ledger, handoff: Handoff) -> list[PageId]:
        if self.cache is not None:
            self.cache.lock([node for node in handoff.shared if not node.forgotten])
            handoff.shared = tuple(node for node in handoff.shared if not node.forgotten)
        return real_free(self, handoff)

    real_free = Ledger._pages_to_free
    monkeypatch.setattr(Ledger, "take_pages", take_pages)
    monkeypatch.setattr(Ledger, "_pages_to_free", pages_to_free)
    caught(0, "pages", "law of pages", "tokens", "AssertionError")


def test_an_answer_that_is_kept_one_token_too_long_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Ledger.give_up_pages

    def give_up_pages(self: Ledger, handoff: Handoff) -> None:
        if handoff.computed and handoff.outputs:
            handoff.computed = handoff.known  # the last token was drawn, and its KV never computed
        real(self, handoff)

    monkeypatch.setattr(Ledger, "give_up_pages", give_up_pages)
    caught(0, "tokens")
