"""A model whose next token depends on every token that lies in a sequence's pages: a wrong page is a wrong answer."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from baton_core.agreement import KVPoll
from baton_core.decode.core import DecodeCore
from baton_core.effects import Backup, Effect, Emit, Restore
from baton_core.events import Abort, Observed, Resolved
from baton_core.plan import SequenceResult, SequenceSlice, StepResult
from unit.cores import (
    GONE,
    INFOS,
    Bench,
    P,
    accepted,
    agreed,
    decode,
    polled,
    request,
    sampling,
    with_limits,
)


def next_token(tokens: Sequence[int]) -> int:
    """What follows these tokens."""
    return (sum((place + 1) * token for place, token in enumerate(tokens)) + 7 * len(tokens)) % 89


def answer(prompt: Sequence[int], length: int) -> list[int]:
    """The uninterrupted answer."""
    tokens = list(prompt)
    for _ in range(length):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


BETS = {"answer_share_start_percent": 1, "answer_share_floor_percent": 1, "chunk_tokens": 512}
"""Limits of a core that counts on next to nothing."""


class Paged:
    """A decode core, its pages, the host's, and what its clients have heard."""

    def __init__(self, bench: Bench[DecodeCore]) -> None:
        self.bench = bench
        self.size = bench.core.page_tokens
        self.pages: dict[int, list[int]] = defaultdict(lambda: [-1] * self.size)
        self.slots: dict[int, list[int]] = {}
        self.copies: list[Backup | Restore] = []
        self.heard: dict[str, list[int]] = defaultdict(list)
        self.ended: dict[str, object] = {}

    def perform(self, effects: Sequence[Effect]) -> None:
        """Do what the core asks for."""
        for effect in effects:
            if isinstance(effect, Emit):
                self.heard[effect.rid] += effect.tokens
                if effect.finish is not None:
                    self.ended[effect.rid] = effect.finish
            elif isinstance(effect, Backup | Restore):
                self.copies.append(effect)

    def compute(self) -> bool:
        """Plan a step and compute it; False if there is nothing to compute now."""
        plan = self.bench.core.plan()
        self.perform(self.bench.core.take_effects())
        if plan is None:
            return False
        drawn = [SequenceResult(rid=one.rid, token=token) for one in plan.slices if (token := self._forward(one)) >= 0]
        result = StepResult(step=plan.step, results=tuple(drawn))
        self.perform(self.bench.core.commit(result, self.bench.now))
        return True

    def copy(self, poll: KVPoll = KVPoll.Success) -> None:
        """The oldest copy is made, and all ranks know."""
        effect = self.copies.pop(0)
        for page, slot in zip(effect.pages, effect.slots, strict=True):
            if isinstance(effect, Backup):
                self.slots[slot] = list(self.pages[page])
            elif poll is KVPoll.Success:
                self.pages[page] = list(self.slots[slot])
        self.perform(self.bench.step(copied(effect, poll)))

    def run(self) -> None:
        """Until nothing is left to do."""
        while self.compute() or self.copies:
            if self.copies:
                self.copy()

    def _forward(self, piece: SequenceSlice) -> int:
        for offset, token in enumerate(piece.tokens):
            page, place = divmod(piece.start + offset, self.size)
            self.pages[piece.pages[page]][place] = token
        end = piece.start + len(piece.tokens)
        seen = [self.pages[piece.pages[place // self.size]][place % self.size] for place in range(end)]
        return next_token(seen) if piece.sample else -1


def copied(effect: Backup | Restore, poll: KVPoll = KVPoll.Success) -> Observed:
    """All ranks are through with this copy."""
    return Observed(polls=(agreed(effect.rid, poll, -effect.copy, writers_stopped=True),))


def local(bench: Bench[DecodeCore], rid: str, most: int, **fields: Any) -> list[Effect]:
    """A request that decode computes alone."""
    return bench.submit(request(rid, bootstrap=None, sampling=sampling(max_new_tokens=most), **fields))


def storm(most: int = 12, count: int = 2, **limits: int) -> Paged:
    """`count` local requests "a", "b", … of 5 + `most` tokens, and a pool of 12 pages of 2 tokens."""
    paged = Paged(decode(with_limits(**{**BETS, **limits}), pool_pages=12))
    for rid in "abcdefgh"[:count]:
        paged.perform(local(paged.bench, rid, most))
    return paged


def until(paged: Paged, phase: str) -> str:
    """Compute until somebody is in this phase; who."""
    stuck = False
    for _ in range(100):
        for rid, one in paged.bench.core.ledger.live.items():
            if one.phase.value == phase:
                return str(rid)
        if stuck:
            paged.copy()
        stuck = not stuck and not paged.compute()
    raise AssertionError(f"nobody is ever {phase}")


def ask(bench: Bench[DecodeCore], rid: str, number: int, most: int, attempt: int = 0) -> None:
    """A request with a peer, accepted by prefill: it waits for pages, or has ordered them."""
    bench.submit(request(rid, number, sampling=sampling(max_new_tokens=most)))
    bench.step(Resolved(rid=rid, infos=INFOS))
    bench.say(accepted(number, attempt or number), P)


def leave(bench: Bench[DecodeCore], rid: str, number: int) -> None:
    """The request ends while it is transferred, and its writers have stopped."""
    bench.step(Abort(rid=rid, verdict=GONE))
    bench.step(polled(rid, KVPoll.Failed, number, writers_stopped=True))
