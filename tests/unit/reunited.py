"""A prefill and a decode core that speak to each other, and a model whose next token depends on every token in the pages."""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence

from baton_core.agreement import KVPoll
from baton_core.effects import Effect, Emit, Expect, LookUp, Offer, Push, Revoke, Tell
from baton_core.events import Event, PeerSaid, Resolved
from baton_core.limits import Limits
from baton_core.messages import Hello
from baton_core.plan import SequenceResult, SequenceSlice, StepResult
from unit.cores import INFOS, D, P, decode, polled, prefill, request, sampling, with_limits
from unit.paged import BETS, Paged, next_token

NO_BACKUP = {**BETS, "backup_pages": 0, "rebootstraps_max": 1_000}


class Reunited:
    """Both workers. What they say travels at once and transfers take no time, but what is in `withheld`: "look-up", "said"
    (by decode), "answered" (by prefill), "arrival".

    `hellos` are those by which decode asked for something anew.
    """

    def __init__(self, *, pool_pages: int = 12, prefill_limits: Limits | None = None, **limits: int) -> None:
        made = with_limits(**{**NO_BACKUP, **limits})
        self.paged = Paged(decode(made, pool_pages=pool_pages, context_tokens=400))
        self.decode = self.paged.bench
        self.prefill = prefill(prefill_limits or made, pool_pages=400, context_tokens=400)
        self.pages: dict[int, list[int]] = defaultdict(lambda: [-1] * self.paged.size)  # prefill's
        self.hellos: list[Hello] = []
        self.emitted: list[Emit] = []  # by prefill
        self.withheld: set[str] = set()
        self._orders: dict[tuple[int, int], Expect] = {}
        self._rids: dict[tuple[int, int], str] = {}  # prefill's, by room and attempt
        self._news: deque[Callable[[], None]] = deque()
        self._held: deque[Callable[[], None]] = deque()

    def ask(self, rid: str, room: int, most: int, **fields: object) -> None:
        """Both legs of a request."""
        one = request(rid, room, sampling=sampling(max_new_tokens=most), **fields)
        self.of_prefill(self.prefill.submit(one))
        self.of_decode(self.decode.submit(one))
        self.settle()

    def settle(self) -> None:
        """Until nothing more follows of itself."""
        while self._news:
            self._news.popleft()()

    def release(self) -> None:
        """What was withheld happens now."""
        self.withheld = set()
        self._news += self._held
        self._held.clear()
        self.settle()

    def compute(self) -> bool:
        """A step of each side that has one; False if neither has."""
        planned = self._prefill_step()
        self.settle()
        plan = self.decode.core.plan()
        self.of_decode(self.decode.core.take_effects())
        self.settle()
        if plan is None:
            return planned
        results = [self._result(self.paged.pages, piece) for piece in plan.slices]
        result = StepResult(step=plan.step, results=tuple(one for one in results if one is not None))
        self.of_decode(self.decode.core.commit(result, self.decode.now))
        self.settle()
        return True

    def run(self) -> None:
        """Until all is answered, or nothing moves."""
        while self.compute() or self.paged.copies:
            while self.paged.copies:
                self.paged.copy()

    def step(self, event: Event) -> list[Effect]:
        """Something happens on decode; what it asks for at once, before anybody answers."""
        effects = self.decode.step(event)
        self.of_decode(effects)
        self.settle()
        return effects

    def after(self, ms: int) -> list[Effect]:
        """Time passes on decode."""
        effects = self.decode.after(ms)
        self.of_decode(effects)
        self.settle()
        return effects

    # -- what the two cores ask for

    def of_decode(self, effects: Sequence[Effect]) -> None:
        """Do what decode asks for."""
        self.paged.perform(effects)
        for effect in effects:
            if isinstance(effect, LookUp):
                found = Resolved(rid=effect.rid, infos=INFOS)
                self._later("look-up", lambda found=found: self.of_decode(self.decode.step(found)))
            elif isinstance(effect, Tell):
                if isinstance(effect.message, Hello) and effect.message.again is not None:
                    self.hellos.append(effect.message)
                message = effect.message
                self._later("said", lambda said=message: self.of_prefill(self.prefill.say(said, D)))
            elif isinstance(effect, Expect):
                self._orders[effect.room, effect.attempt] = effect
                self._later("order", lambda order=effect: self._ordered(order))
            elif isinstance(effect, Revoke):
                key = effect.room, effect.attempt
                rids = [watch.rid for watch in self.decode.core.watched() if (watch.room, watch.attempt) == key]
                for rid in rids:
                    over = polled(rid, KVPoll.Failed, effect.attempt, writers_stopped=True)
                    self._later("stop", lambda over=over: self.of_decode(self.decode.step(over)))

    def of_prefill(self, effects: Sequence[Effect]) -> None:
        """Do what prefill asks for."""
        for effect in effects:
            if isinstance(effect, Emit):
                self.emitted.append(effect)
            elif isinstance(effect, Tell):
                heard = PeerSaid(peer=P, message=effect.message)
                self._later("answered", lambda heard=heard: self.of_decode(self.decode.step(heard)))
            elif isinstance(effect, Offer):
                self._rids[effect.room, effect.attempt] = effect.rid
            elif isinstance(effect, Push):
                self._later("push", lambda push=effect: self._pushed(push))
            elif isinstance(effect, Revoke):
                rid = self._rids[effect.room, effect.attempt]
                over = polled(rid, KVPoll.Failed, effect.attempt, writers_stopped=True)
                self._later("stop", lambda over=over: self.of_prefill(self.prefill.step(over)))

    def _later(self, kind: str, happens: Callable[[], None]) -> None:
        (self._held if kind in self.withheld else self._news).append(happens)

    def _ordered(self, order: Expect) -> None:
        rid = self._rids.get((order.room, order.attempt), "")
        if rid in self.prefill.core.ledger.live:
            self.of_prefill(self.prefill.step(polled(rid, KVPoll.WaitingForInput, order.attempt)))

    def _pushed(self, push: Push) -> None:
        order = self._orders[push.room, push.attempt]
        for ordinal, page in enumerate(push.pages, push.first):
            self.paged.pages[order.pages[ordinal]] = list(self.pages[page])
        if push.row is None:
            return
        rid, whole = self._rids[push.room, push.attempt], len(order.pages)
        here = polled(order.rid, KVPoll.Success, push.attempt, row=push.row, progress=whole)
        there = polled(rid, KVPoll.Success, push.attempt, progress=whole)
        self._later("arrival", lambda: self.of_decode(self.decode.step(here)))
        self._later("arrival", lambda: self.of_prefill(self.prefill.step(there)))

    # -- the model

    def _prefill_step(self) -> bool:
        plan = self.prefill.core.plan()
        self.of_prefill(self.prefill.core.take_effects())
        if plan is None:
            return False
        results = [self._result(self.pages, piece) for piece in plan.slices]
        result = StepResult(step=plan.step, results=tuple(one for one in results if one is not None))
        self.of_prefill(self.prefill.core.commit(result, self.prefill.now))
        return True

    def _result(self, pages: dict[int, list[int]], piece: SequenceSlice) -> SequenceResult | None:
        for offset, token in enumerate(piece.tokens):
            page, place = divmod(piece.start + offset, self.paged.size)
            pages[piece.pages[page]][place] = token
        end = piece.start + len(piece.tokens)
        seen = [pages[piece.pages[place // self.paged.size]][place % self.paged.size] for place in range(end)]
        return SequenceResult(rid=piece.rid, token=next_token(seen)) if piece.sample else None
