"""Pages of running requests: how much each may come to need, how it grows, and who gives way when the pool runs out.

Admission bets (`line`): it counts on a learned share of the longest answer, and pages are taken as the answer grows. When
the bet is lost, somebody is *retracted*: its KV cache goes to the host, where there is room, or is given up and computed
anew, by prefill (`reentry`) or here; its stream pauses and goes on later, exactly where it was.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable

from baton_core.admission import AnswerShare
from baton_core.errors import Verdict
from baton_core.ledger import Ledger
from baton_core.machine import Handoff, Phase, move
from baton_core.pages import pages_for
from baton_core.request import RequestId


class DecodeMemory:
    """Sizes, growth and retraction. `backing_up`, `retracted` and `restoring` are requests that gave way, in order."""

    def __init__(self, ledger: Ledger, page_tokens: int, context_tokens: int) -> None:
        self._ledger = ledger
        self._page_tokens = page_tokens
        self._tokens_most = min(context_tokens, ledger.pool.total * page_tokens)
        limits = ledger.limits
        self.share = AnswerShare(limits.answer_share_start_percent, limits.answer_share_floor_percent)
        self.backing_up: dict[RequestId, Handoff] = {}
        self.retracted: dict[RequestId, Handoff] = {}
        self.restoring: dict[RequestId, Handoff] = {}
        # Since the beginning, for metrics.
        self.backups = 0
        self.recomputations = 0
        self.fallbacks = 0  # of these: computed here after all, because prefill could not
        self.outdated = False  # somebody may have a KV cache that is older than permitted

    @property
    def queues(self) -> tuple[dict[RequestId, Handoff], ...]:
        """Where its requests stand, in order."""
        return self.backing_up, self.retracted, self.restoring

    # -- sizes

    def tokens_most(self, req: Handoff) -> int:
        """Longest prompt + answer of this request, clipped to context and pool."""
        return min(len(req.request.prompt) + req.request.sampling.max_new_tokens, self._tokens_most)

    def pages_known(self, req: Handoff) -> int:
        """Pages of the prompt and of the answer so far."""
        return pages_for(req.known, self._page_tokens)

    def pages_expected(self, req: Handoff) -> int:
        """Pages that admission counts on for the whole of this request.

        At least one page more than it has come to; and each bet on it that was lost doubles that, so that nobody is
        retracted many times.
        """
        most, prompt = self.tokens_most(req), len(req.request.prompt)
        least = (len(req.outputs) + self._page_tokens) << req.retractions
        return pages_for(min(most, prompt + max(self.share.expected(most - prompt), least)), self._page_tokens)

    # -- growth

    def with_room(self, turn: list[Handoff], victims: Callable[[], list[Handoff]]) -> list[Handoff]:
        """Those of `turn` that have a page for their next token, after others have given way where need be.

        `victims`, of which none is in a step, may be retracted, in the order of `_gives_way`; one of them remains.
        """
        needy = [req for req in turn if self._short(req)]
        if not needy:
            return turn
        left = sorted(victims(), key=_gives_way) if len(needy) > self._ledger.spare else []
        while len(needy) > self._ledger.spare + self._coming() and len(left) > 1:
            self.share.fell_short()
            self.retract(left.pop(0))
            needy = [req for req in needy if req.phase is Phase.RUNNING]
        for req in sorted(needy, key=_gives_way, reverse=True):
            page = self._ledger.allocate(1)
            if page is None:
                break
            req.pages += page
        return [req for req in turn if req.phase is Phase.RUNNING and not self._short(req)]

    def _short(self, req: Handoff) -> bool:
        return len(req.pages) < self.pages_known(req)

    def _coming(self) -> int:
        """Pages that are free as soon as they are copied."""
        return sum(len(req.pages) for req in self.backing_up.values()) - _read_by_others(self.backing_up.values())

    def make_way(self, req: Handoff, missing: int, victims: list[Handoff]) -> None:
        """Retract requests of lesser priority than `req`, if that frees the `missing` pages.

        Of `victims` none is in a step.
        """
        lesser = [one for one in sorted(victims, key=_gives_way) if one.request.priority < req.request.priority]
        missing -= self._coming()
        if missing > sum(self._held(one) for one in lesser) - _read_by_others(lesser):
            return
        for one in lesser:
            if missing <= 0:
                return
            missing -= self._held(one) - _read_by_others((one,))
            self.retract(one)

    def _held(self, req: Handoff) -> int:
        """Pages that it has, or that are kept for it."""
        return max(len(req.pages), self.pages_expected(req))

    # -- retraction

    def retract(self, req: Handoff, *, backup: bool = True) -> None:
        """Take the pages of a request that no step has in hand. It keeps its place in everything else."""
        self._ledger.on_leave(req)
        req.is_retracted, req.computes_here = True, False
        req.retractions += 1
        if backup and req.outputs and self._ledger.back_up(req, pages_for(req.known - 1, self._page_tokens)):
            self.backups += 1
            self.backing_up[req.rid] = req
            move(req, Phase.BACKING_UP, self._ledger.effects)
            return
        self.recomputations += 1
        self._ledger.give_up_pages(req)
        if not req.outputs:
            req.prompt_logprobs.clear()
        self.wait(req)

    def wait(self, req: Handoff, verdict: Verdict | None = None) -> None:
        """It is RETRACTED, perhaps because of `verdict` for the second time."""
        move(req, Phase.RETRACTED, self._ledger.effects, verdict=verdict)
        self.retracted[req.rid] = req

    def wants_prefill(self, req: Handoff) -> bool:
        """Whether a retracted request is to be computed anew by the prefill worker that computed it before."""
        if req.slots or req.computes_here or req.infos is None:
            return False
        return req.rebootstraps < self._ledger.limits.rebootstraps_max

    def outdate(self) -> None:
        """The weights may change: every KV cache that exists, or is on its way, is to be computed anew."""
        self._ledger.flush_cache()
        self._ledger.stale_before = self._ledger.epoch
        self.outdated = True

    def retract_outdated(self, holders: Iterable[Handoff]) -> None:
        """Of `holders` of a KV cache, who has no step in hand gives it up if it is outdated; so do those on the host."""
        for req in holders:
            if not req.in_step and self._is_outdated(req):
                self.retract(req, backup=False)
        for req in self.retracted.values():
            if req.slots and self._is_outdated(req):
                self._ledger.give_up_slots(req)
        live = self._ledger.live.values()
        self.outdated = any((one.pages or one.slots) and self._is_outdated(one) for one in live)

    def _is_outdated(self, req: Handoff) -> bool:
        return req.epoch < self._ledger.stale_before

    def restore(self, req: Handoff) -> None:
        """A retracted request gets pages for what it has on the host; there are as many."""
        del self.retracted[req.rid]
        pages = self._ledger.allocate(len(req.slots))
        assert pages is not None, f"{req.rid} was granted pages that are not there"
        req.pages = pages
        self._ledger.restore(req)
        move(req, Phase.RESTORING, self._ledger.effects)
        self.restoring[req.rid] = req

    def copied(self, req: Handoff, good: bool) -> bool:
        """Its copy is over on every rank, and `good` on all of them. Whether it has its KV cache again, and may run.

        What was copied badly is computed anew.
        """
        restored = req.phase is Phase.RESTORING
        self.backing_up.pop(req.rid, None)
        self.restoring.pop(req.rid, None)
        if restored or not good:
            self._ledger.give_up_slots(req)
        if restored and good:
            req.is_retracted = False
            req.planned = req.computed = req.known - 1
            move(req, Phase.ARRIVED, self._ledger.effects)
            return True
        self._ledger.give_up_pages(req)
        self.recomputations += not good
        self.wait(req)
        return False

    def leave(self, req: Handoff) -> None:
        """The request ended, or gives way."""
        for queue in self.queues:
            queue.pop(req.rid, None)

    def numbers(self) -> list[int]:
        """What decides here beside the queues, for the digest."""
        return [self.share.used, self.share.allowed]


def _read_by_others(reqs: Collection[Handoff]) -> int:
    """Pages of these that stay in use when all of them give theirs up."""
    readers = Counter(node for req in reqs for node in req.shared)
    return sum(node.locks > count for node, count in readers.items())


def _gives_way(req: Handoff) -> tuple[int, int, int, int]:
    """Who is retracted first: the least priority, then the shortest answer, the longest prompt, the youngest."""
    return req.request.priority, len(req.outputs), -len(req.request.prompt), -req.serial
