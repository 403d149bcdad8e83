"""The transfer queue: pages are reserved and ordered; they and the metadata row are on their way."""

from collections.abc import Mapping

from baton_core.agreement import KVPoll
from baton_core.decode.reentry import Reentry
from baton_core.errors import Reason, Verdict
from baton_core.events import AgreedPoll
from baton_core.ledger import Ledger
from baton_core.limits import Millis
from baton_core.machine import Handoff, Phase, move
from baton_core.messages import MetadataRow
from baton_core.pages import pages_for
from baton_core.prefill.queue import transfer_verdict
from baton_core.request import RequestId


class DecodeTransferQueue:
    """Requests whose KV cache is expected."""

    def __init__(self, ledger: Ledger, reentry: Reentry, page_tokens: int, vocab_size: int | None) -> None:
        self._ledger = ledger
        self._reentry = reentry
        self._page_tokens = page_tokens
        self._vocab_size = vocab_size
        self.queue: dict[RequestId, Handoff] = {}

    def add(self, req: Handoff) -> None:
        """Pages were ordered."""
        self.queue[req.rid] = req

    def pop_transferred(self, polls: Mapping[RequestId, AgreedPoll], now: Millis) -> list[Handoff]:
        """Requests whose pages and row all ranks have, ARRIVED with their first token; failed ones are ended."""
        arrived = []
        for req in list(self.queue.values()):
            agreed = polls.get(req.rid)
            if agreed is None:
                continue
            if agreed.poll == KVPoll.Failed:
                self._reentry.fail(req, transfer_verdict(agreed, "decode transfer"), now)
            elif agreed.poll == KVPoll.Success:
                self._commit_transfer_to_req(req, agreed, now)
                if req.phase is Phase.ARRIVED:
                    arrived.append(req)
            else:
                self._watch_gate(req, agreed.progress, now)
        return arrived

    def leave(self, req: Handoff) -> None:
        """The request ended."""
        self.queue.pop(req.rid, None)

    def _commit_transfer_to_req(self, req: Handoff, agreed: AgreedPoll, now: Millis) -> None:
        """Take the metadata row into the request. Nothing is retried silently (S2).

        The gate let this Success pass, so an empty row, or one of another room or attempt, is corruption: 500. So is a
        token that the model does not have: a step with it would end the unit.
        """
        row = agreed.row
        what = self._wrong_with(req, row)
        if row is None or what is not None:
            text = f"the metadata row of room {req.room} attempt {req.attempt} {what}: the transfer cannot be trusted"
            self._reentry.fail(req, Verdict(reason=Reason.METADATA_CORRUPT, text=text), now)
            return
        self._ledger.transfer_over(req)
        self._ledger.free_row(req)
        req.computed = req.known
        if req.is_retracted:
            req.is_retracted = False  # past both doors
            self._reentry.arrivals += 1
        else:
            req.cached_tokens = row.cached_tokens
        req.outputs.append(row.first_token)
        req.newest_logprob = row.logprob
        del self.queue[req.rid]
        move(req, Phase.ARRIVED, self._ledger.effects)

    def _wrong_with(self, req: Handoff, row: MetadataRow | None) -> str | None:
        if row is None:
            return "is empty"
        if (row.room, row.attempt) != (req.room, req.attempt):
            return f"holds room {row.room} attempt {row.attempt}"
        if row.first_token < 0 or (self._vocab_size is not None and row.first_token >= self._vocab_size):
            return f"holds token {row.first_token}, and there are {self._vocab_size or 'no such'}"
        if not 0 <= row.cached_tokens <= req.known:
            return f"says that {row.cached_tokens} of {req.known} tokens were cached"
        return None

    def _watch_gate(self, req: Handoff, progress: int, now: Millis) -> None:
        """All pages are here but not the row: it must follow within `transfer_stall_ms`.

        Before that, prefill queues and computes (the request's own budget), and prefill itself watches its pushes. Where
        the whole prompt was held already, pages say nothing about prefill.
        """
        whole = pages_for(req.known, self._page_tokens)
        if progress >= whole and req.progress < whole and len(req.shared) < whole:
            req.stage_deadline_at = now + self._ledger.limits.transfer_stall_ms
        req.progress = max(req.progress, progress)
