"""Which sequences the next decode step continues, and which prompts a colocated worker computes beside them."""

from collections.abc import Callable

from baton_core.chunks import prompt_chunk
from baton_core.ledger import Ledger
from baton_core.machine import Handoff, Phase, move
from baton_core.plan import SequenceSlice
from baton_core.request import RequestId

PagesWanted = Callable[[Handoff], int]
"""Pages for a request's prompt and longest answer."""


class DecodeBatch:
    """Requests that have their KV cache: waiting for a place (ARRIVED) or RUNNING; and prompts computed here.

    Every step continues its share of the running sequences by one token (with one pipeline stage: all of them); what is
    left of the token budget goes to local prompts, so that a long prompt never stops the streams for longer than one chunk.
    With several stages as many plans run at a time, and a running sequence is in one of them at most: its next token
    depends on the last.
    """

    def __init__(self, ledger: Ledger, plans_max: int = 1) -> None:
        self._ledger = ledger
        self._plans_max = plans_max
        self.arrived: dict[RequestId, Handoff] = {}
        self.running: dict[RequestId, Handoff] = {}
        self.local: dict[RequestId, Handoff] = {}

    @property
    def queues(self) -> tuple[dict[RequestId, Handoff], ...]:
        """Where its requests stand, in order."""
        return self.arrived, self.running, self.local

    def add(self, req: Handoff) -> None:
        """The KV cache is here."""
        self.arrived[req.rid] = req

    def add_local(self, req: Handoff) -> None:
        """Compute this prompt here."""
        self.local[req.rid] = req

    def next_slices(self, pages_wanted: PagesWanted) -> tuple[SequenceSlice, ...]:
        """One token of each sequence whose turn it is, then chunks of local prompts."""
        self._seat()
        slices = [self._next_token(req) for req in self._turn()]
        slices += self._chunks(self._ledger.limits.chunk_tokens, pages_wanted)
        return tuple(slices)

    def seat_computed(self, req: Handoff) -> None:
        """A local prompt is computed and its first token drawn: it runs (its seat was counted while computing)."""
        del self.local[req.rid]
        self.running[req.rid] = req
        move(req, Phase.RUNNING, self._ledger.effects)

    def leave(self, req: Handoff) -> None:
        """The request ended."""
        for queue in self.queues:
            queue.pop(req.rid, None)

    def _seats_left(self) -> int:
        computing = sum(1 for req in self.local.values() if req.phase is Phase.COMPUTING)
        return self._ledger.limits.running_max - len(self.running) - computing

    def _seat(self) -> None:
        for req in list(self.arrived.values())[: max(0, self._seats_left())]:
            del self.arrived[req.rid]
            self.running[req.rid] = req
            move(req, Phase.RUNNING, self._ledger.effects)

    def _turn(self) -> list[Handoff]:
        """An even share of the running sequences, of those that no plan has in hand; who waited longest stands first."""
        share = -(-len(self.running) // self._plans_max)
        free = [req for req in self.running.values() if not req.in_step][:share]
        for req in free:
            self.running[req.rid] = self.running.pop(req.rid)
        return free

    def _next_token(self, req: Handoff) -> SequenceSlice:
        req.in_step += 1
        return SequenceSlice(
            rid=req.rid,
            tokens=(req.outputs[-1],),
            start=len(req.request.prompt) + len(req.outputs) - 1,
            pages=req.pages,
            sample=True,
            sampling=req.request.sampling,
            output_index=len(req.outputs),
        )

    def _chunks(self, budget: int, pages_wanted: PagesWanted) -> list[SequenceSlice]:
        chunks: list[SequenceSlice] = []
        for req in self.local.values():
            if budget == 0:
                break
            if req.phase is Phase.LOCAL and not self._admit(req, pages_wanted):
                break
            count = min(budget, len(req.request.prompt) - req.planned)
            if count == 0:
                continue  # its last chunk is being computed
            budget -= count
            chunks.append(prompt_chunk(req, count))
        return chunks

    def _admit(self, req: Handoff, pages_wanted: PagesWanted) -> bool:
        if self._seats_left() < 1:
            return False
        pages = self._ledger.pool.allocate(pages_wanted(req))
        if pages is None:
            return False
        req.pages = pages
        move(req, Phase.COMPUTING, self._ledger.effects)
        return True
