"""Which sequences the next decode step continues, and which prompts a colocated worker computes beside them."""

from baton_core.chunks import prompt_chunk, reusable_tokens
from baton_core.decode.memory import DecodeMemory
from baton_core.ledger import Ledger
from baton_core.machine import Handoff, Phase, move
from baton_core.plan import SequenceSlice
from baton_core.request import RequestId


class DecodeBatch:
    """Requests that have their KV cache: waiting for a place (ARRIVED) or RUNNING; and prompts computed here.

    Every step continues its share of the running sequences by one token (with one pipeline stage: all of them); what is
    left of the token budget goes to local prompts, so that a long prompt never stops the streams for longer than one chunk.
    With several stages as many plans run at a time, and a running sequence is in one of them at most: its next token
    depends on the last.
    """

    def __init__(self, ledger: Ledger, memory: DecodeMemory, plans_max: int = 1) -> None:
        self._ledger = ledger
        self._memory = memory
        self._plans_max = plans_max
        self.arrived: dict[RequestId, Handoff] = {}
        self.running: dict[RequestId, Handoff] = {}
        self.local: dict[RequestId, Handoff] = {}
        self.computing: dict[RequestId, Handoff] = {}  # of `local`: those that have pages

    @property
    def queues(self) -> tuple[dict[RequestId, Handoff], ...]:
        """Where its requests stand, in order."""
        return self.arrived, self.running, self.local, self.computing

    def add(self, req: Handoff) -> None:
        """The KV cache is here."""
        self.arrived[req.rid] = req

    def add_first(self, req: Handoff) -> None:
        """The KV cache is here again: it has waited enough."""
        self.arrived = {req.rid: req, **self.arrived}

    def add_local(self, req: Handoff) -> None:
        """Compute this prompt here, once there are pages for it."""
        self.local[req.rid] = req

    def begin_prompt(self, req: Handoff) -> None:
        """There are pages for what is to be computed of this request: they are its own from now on."""
        granted = self._ledger.take_pages(req, self._memory.pages_known(req), reusable_tokens(req))
        assert granted, f"{req.rid} was granted pages that are not there"
        if not req.outputs:
            req.cached_tokens = req.computed
        if self._ledger.cache is not None and not req.is_retracted:
            self._ledger.cache.count(req.cached_tokens, len(req.request.prompt))
        self.local[req.rid] = self.computing[req.rid] = req
        move(req, Phase.COMPUTING, self._ledger.effects)

    def next_slices(self) -> tuple[SequenceSlice, ...]:
        """One token of each sequence whose turn it is, then chunks of local prompts."""
        self._seat()
        turn = self._turn()
        if not turn and self._seat():  # whoever ran gave way to one that had no seat
            turn = self._turn()
        slices = [self._next_token(req) for req in turn]
        slices += self._chunks(self._ledger.limits.chunk_tokens)
        return tuple(slices)

    def seat_computed(self, req: Handoff) -> None:
        """A local prompt is computed and a token drawn: it runs (its seat was counted while computing)."""
        self.leave(req)
        self.running[req.rid] = req
        req.is_retracted = False
        move(req, Phase.RUNNING, self._ledger.effects)

    def leave(self, req: Handoff) -> None:
        """The request ended, or gives way."""
        for queue in self.queues:
            queue.pop(req.rid, None)

    def between_steps(self) -> list[Handoff]:
        """Requests with a KV cache that no step has in hand."""
        idle = [req for req in self.running.values() if not req.in_step]
        return [*idle, *self.arrived.values()]

    def prompts_wanted(self) -> tuple[int, int]:
        """Seats that are free, and tokens of local prompts that have pages and are in no plan yet."""
        seats = self._ledger.limits.running_max - len(self.running) - len(self.computing)
        return seats, sum([req.known - req.planned for req in self.computing.values()]) if self.computing else 0

    def _seat(self) -> bool:
        if not self.arrived:
            return False
        seats, _ = self.prompts_wanted()
        seated = list(self.arrived.values())[: max(0, seats)]
        for req in seated:
            del self.arrived[req.rid]
            self.running[req.rid] = req
            move(req, Phase.RUNNING, self._ledger.effects)
        return bool(seated)

    def _turn(self) -> list[Handoff]:
        """An even share of the running sequences, of those that no plan has in hand; who waited longest stands first.

        A sequence without a page for its next token waits; perhaps others give way to it.
        """
        share = -(-len(self.running) // self._plans_max)
        idle = [req for req in self.running.values() if not req.in_step]
        turn: dict[RequestId, Handoff] = {}

        def victims() -> list[Handoff]:
            return [req for req in self.between_steps() if req.rid not in turn]

        while idle and len(turn) < share:
            first, idle = idle[: share - len(turn)], idle[share - len(turn) :]
            turn.update((req.rid, req) for req in self._memory.with_room(first, victims))
            idle = [req for req in idle if req.phase is Phase.RUNNING]
        for req in turn.values():
            self.running[req.rid] = self.running.pop(req.rid)
        return list(turn.values())

    def _next_token(self, req: Handoff) -> SequenceSlice:
        req.in_step += 1
        return SequenceSlice(
            rid=req.rid,
            tokens=(req.outputs[-1],),
            start=req.known - 1,
            pages=req.pages,
            sample=True,
            sampling=req.request.sampling,
            output_index=len(req.outputs),
        )

    def _chunks(self, budget: int) -> list[SequenceSlice]:
        chunks: list[SequenceSlice] = []
        for req in self.computing.values():
            count = min(budget, req.known - req.planned)
            if budget == 0:
                break
            if count == 0:
                continue  # its last chunk is being computed
            budget -= count
            chunks.append(prompt_chunk(req, count))
        return chunks
