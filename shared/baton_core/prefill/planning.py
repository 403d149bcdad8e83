"""Which prompt chunks the next prefill step computes."""

from baton_core.chunks import prompt_chunk, reusable_tokens
from baton_core.ledger import Ledger
from baton_core.machine import Handoff, Phase, move
from baton_core.pages import pages_for
from baton_core.plan import SequenceSlice
from baton_core.request import RequestId


class PrefillWaitingQueue:
    """Requests that are ordered and wait to be computed, or are being computed; first come, first served.

    A request gets the pages of its whole prompt at once before its first chunk, so that two half-computed prompts can
    never wait for each other's pages.
    """

    def __init__(self, ledger: Ledger, page_tokens: int) -> None:
        self._ledger = ledger
        self._page_tokens = page_tokens
        self.queue: dict[RequestId, Handoff] = {}

    def add(self, req: Handoff) -> None:
        """The request may be computed when its turn comes."""
        self.queue[req.rid] = req

    def next_slices(self, sequences_max: int) -> tuple[SequenceSlice, ...]:
        """Chunks that fill one step's token budget, in order of arrival; the requests they name are in that step."""
        budget = self._ledger.limits.chunk_tokens
        slices: list[SequenceSlice] = []
        for req in self.queue.values():
            if budget == 0 or len(slices) == sequences_max:
                break
            if not self._admit(req):
                break  # strictly in order: a later, smaller prompt must not starve this one
            count = min(budget, len(req.request.prompt) - req.planned)
            if count == 0:
                continue  # its last chunk is being computed
            budget -= count
            slices.append(prompt_chunk(req, count))
        return tuple(slices)

    def leave(self, req: Handoff) -> None:
        """The request is computed, or ended."""
        self.queue.pop(req.rid, None)

    def _admit(self, req: Handoff) -> bool:
        if req.phase is Phase.FORWARDING:
            return True
        cache, prompt = self._ledger.cache, req.request.prompt
        if not self._ledger.take_pages(req, pages_for(len(prompt), self._page_tokens), reusable_tokens(req)):
            return False
        req.cached_tokens = req.computed
        if cache is not None:
            cache.count(req.cached_tokens, len(prompt))
        move(req, Phase.FORWARDING, self._ledger.effects)
        return True
