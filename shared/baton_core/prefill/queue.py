"""The prefill queues that consume agreed polls: bootstrap (until orders are here) and inflight (until pages are there).

Queue methods never poll and never call a group: what the ranks agreed on comes in as an argument.
"""

from collections.abc import Mapping

from baton_core.admission import is_unadmitted_reject
from baton_core.agreement import KVPoll
from baton_core.errors import Reason, Verdict
from baton_core.events import AgreedPoll
from baton_core.ledger import Ledger
from baton_core.limits import Millis
from baton_core.machine import Handoff, Phase, move
from baton_core.request import Finish, FinishType, RequestId


class PrefillBootstrapQueue:
    """Requests whose handshake is not complete, in order of arrival."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.queue: dict[RequestId, Handoff] = {}

    def add(self, req: Handoff, now: Millis) -> bool:
        """Past the door into BOOTSTRAPPING; a request rejected at intake is retired here, before it costs anything.

        Returns whether the request is queued.
        """
        if is_unadmitted_reject(req):
            self._ledger.retire_unadmitted_request(req)
            return False
        if not self._ledger.claim_room(req, now):
            return False
        deadline = now + self._ledger.limits.other_leg_ms
        move(req, Phase.BOOTSTRAPPING, self._ledger.effects, stage_deadline_at=deadline)
        self.queue[req.rid] = req
        return True

    def pop_bootstrapped(self, polls: Mapping[RequestId, AgreedPoll], now: Millis) -> list[Handoff]:
        """Requests that all ranks hold page orders for, now QUEUED; failed ones are ended and leave the queue."""
        if not self.queue:
            return []
        ready = []
        for req in list(self.queue.values()):
            agreed = polls.get(req.rid)
            if agreed is None or agreed.attempt != req.attempt:
                continue
            if agreed.poll == KVPoll.Failed:
                self._ledger.fail(req, transfer_verdict(agreed, "prefill bootstrap"), now)
            elif agreed.poll >= KVPoll.WaitingForInput:
                del self.queue[req.rid]
                move(req, Phase.QUEUED, self._ledger.effects)
                ready.append(req)
        return ready

    def leave(self, req: Handoff) -> None:
        """The request ended."""
        self.queue.pop(req.rid, None)


class PrefillInflightQueue:
    """Requests that are being pushed: from the first chunk's push to the last page's arrival."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.queue: dict[RequestId, Handoff] = {}

    def add(self, req: Handoff) -> None:
        """A transfer began."""
        self.queue[req.rid] = req

    def process(self, polls: Mapping[RequestId, AgreedPoll], now: Millis) -> None:
        """Apply agreed polls: end what failed, answer what arrived, and give stuck transfers their deadline."""
        for req in list(self.queue.values()):
            agreed = polls.get(req.rid)
            if agreed is None or agreed.attempt != req.attempt:
                continue
            if agreed.poll == KVPoll.Failed:
                self._ledger.fail(req, transfer_verdict(agreed, "prefill transfer"), now)
            elif agreed.poll == KVPoll.Success and req.phase is Phase.INFLIGHT:
                self._ledger.transfer_over(req)
                finish = Finish(type=FinishType.LENGTH)
                self._ledger.finish(req, finish, now, tokens=tuple(req.outputs))
            else:
                self.watch_progress(req, agreed.progress, now)

    def watch_progress(self, req: Handoff, progress: int, now: Millis) -> None:
        """A transfer with pages outstanding must move within `transfer_stall_ms`; one without has nothing to prove."""
        stalled = req.stage_deadline_at is not None
        outstanding = req.pushed > progress or req.phase is Phase.INFLIGHT
        if progress > req.progress or (outstanding and not stalled):
            req.stage_deadline_at = now + self._ledger.limits.transfer_stall_ms
        if not outstanding:
            req.stage_deadline_at = None
        req.progress = max(req.progress, progress)

    def leave(self, req: Handoff) -> None:
        """The request ended."""
        self.queue.pop(req.rid, None)


def transfer_verdict(agreed: AgreedPoll, what: str) -> Verdict:
    """The verdict of an agreed Failed."""
    return Verdict(reason=agreed.reason or Reason.TRANSFER_FAILED, text=f"{what} failed: {agreed.text or 'no reason'}")
