"""The transfer queue: pages are reserved and ordered; they and the metadata row are on their way."""

from collections.abc import Mapping

from baton_core.agreement import KVPoll
from baton_core.decode.reentry import Reentry
from baton_core.errors import Reason, Verdict
from baton_core.events import AgreedPoll
from baton_core.ledger import Ledger
from baton_core.limits import Millis
from baton_core.machine import Handoff, Phase, move
from baton_core.pages import pages_for
from baton_core.prefill.queue import transfer_verdict
from baton_core.request import RequestId


class DecodeTransferQueue:
    """Requests whose KV cache is expected."""

    def __init__(self, ledger: Ledger, reentry: Reentry, page_tokens: int) -> None:
        self._ledger = ledger
        self._reentry = reentry
        self._page_tokens = page_tokens
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

        The gate let this Success pass, so an empty row, or one of another room or attempt, is corruption: 500.
        """
        row = agreed.row
        if row is None or (row.room, row.attempt) != (req.room, req.attempt):
            what = "is empty" if row is None else f"holds room {row.room} attempt {row.attempt}"
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

    def _watch_gate(self, req: Handoff, progress: int, now: Millis) -> None:
        """All pages are here but not the row: it must follow within `transfer_stall_ms`.

        Before that, prefill queues and computes (the request's own budget), and prefill itself watches its pushes. Where
        the whole prompt was held already, pages say nothing about prefill.
        """
        whole = pages_for(req.known, self._page_tokens)
        if progress >= whole and req.progress < whole and len(req.shared) < whole:
            req.stage_deadline_at = now + self._ledger.limits.transfer_stall_ms
        req.progress = max(req.progress, progress)
