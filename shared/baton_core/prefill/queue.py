"""The prefill queues that consume agreed polls: bootstrap (until orders are here) and inflight (until pages are there).

Queue methods never poll and never call a group: what the ranks agreed on comes in as an argument. With pipeline stages
that is the consensus of all stages, as ids that are good (ready everywhere, which is not yet success) or bad (S1).
"""

from collections.abc import Collection, Mapping
from typing import Literal, overload

from baton_core.admission import is_unadmitted_reject
from baton_core.agreement import KVPoll, poll_and_all_reduce_pp
from baton_core.errors import Reason, Verdict
from baton_core.events import AgreedPoll
from baton_core.ledger import Ledger
from baton_core.limits import Millis
from baton_core.machine import Handoff, Phase, move
from baton_core.request import Finish, FinishType, RequestId


class PrefillBootstrapQueue:
    """Requests whose handshake is not complete, in order of arrival.

    `draining` holds those whose transfer failed on this pipeline stage before all stages knew of them. Here its I/O is
    stopped; for everything that stages share it stands where it stood, until a consensus names it.
    """

    def __init__(self, ledger: Ledger, pp_size: int = 1) -> None:
        self._ledger = ledger
        self._pp_size = pp_size
        self.queue: dict[RequestId, Handoff] = {}
        self.draining: dict[RequestId, Handoff] = {}

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

    @overload
    def pop_bootstrapped(
        self,
        return_failed_reqs: Literal[False] = False,
        pp_good_rids: Collection[RequestId] | None = None,
        pp_bad_rids: Collection[RequestId] | None = None,
        *,
        polls: Mapping[RequestId, AgreedPoll],
        uncovered_polls: Mapping[RequestId, int],
        now: Millis,
    ) -> list[Handoff]: ...

    @overload
    def pop_bootstrapped(
        self,
        return_failed_reqs: Literal[True],
        pp_good_rids: Collection[RequestId] | None = None,
        pp_bad_rids: Collection[RequestId] | None = None,
        *,
        polls: Mapping[RequestId, AgreedPoll],
        uncovered_polls: Mapping[RequestId, int],
        now: Millis,
    ) -> tuple[list[Handoff], list[Handoff]]: ...

    def pop_bootstrapped(
        self,
        return_failed_reqs: bool = False,
        pp_good_rids: Collection[RequestId] | None = None,
        pp_bad_rids: Collection[RequestId] | None = None,
        *,
        polls: Mapping[RequestId, AgreedPoll],
        uncovered_polls: Mapping[RequestId, int],
        now: Millis,
    ) -> list[Handoff] | tuple[list[Handoff], list[Handoff]]:
        """Requests that all ranks hold page orders for, now QUEUED; failed ones are ended and leave the queue.

        With one stage `polls` decides. With several the consensus does, and `polls` only says why something failed; of
        what it does not cover, `uncovered_polls` is what this stage sees, and only Failed is applied: into `draining`.
        Raises ValueError where stages wait for a consensus and there is none.
        """
        if not self.queue and not self.draining:
            return ([], []) if return_failed_reqs else []
        ready, failed = [], []
        reqs = in_order(self.queue, self.draining) if self._pp_size > 1 else list(self.queue.values())
        for req, poll in zip(reqs, self._decided(reqs, pp_good_rids, pp_bad_rids, polls), strict=True):
            if poll is None:
                if uncovered_polls.get(req.rid) == KVPoll.Failed:
                    self._drain(req)
            elif poll == KVPoll.Failed:
                self._ledger.fail(req, transfer_verdict(polls.get(req.rid), "prefill bootstrap"), now)
                failed.append(req)
            elif poll >= KVPoll.WaitingForInput:
                self.leave(req)
                move(req, Phase.QUEUED, self._ledger.effects)
                ready.append(req)
        return (ready, failed) if return_failed_reqs else ready

    def leave(self, req: Handoff) -> None:
        """The request is ready, or ended."""
        self.queue.pop(req.rid, None)
        self.draining.pop(req.rid, None)

    def _decided(
        self,
        reqs: list[Handoff],
        pp_good_rids: Collection[RequestId] | None,
        pp_bad_rids: Collection[RequestId] | None,
        polls: Mapping[RequestId, AgreedPoll],
    ) -> list[int | None]:
        if self._pp_size > 1:
            rids = (req.rid for req in reqs)
            return poll_and_all_reduce_pp(rids, KVPoll.WaitingForInput, pp_good_rids, pp_bad_rids)
        return [polls[req.rid].poll if req.rid in polls else None for req in reqs]

    def _drain(self, req: Handoff) -> None:
        self._ledger.revoke_here(req)
        self.draining[req.rid] = req
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
            if agreed is None:
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


def in_order(queue: Mapping[RequestId, Handoff], draining: Mapping[RequestId, Handoff]) -> list[Handoff]:
    """Both together in order of arrival: the order on every stage, whatever drains here."""
    return sorted([*queue.values(), *draining.values()], key=lambda req: req.serial)


def transfer_verdict(agreed: AgreedPoll | None, what: str) -> Verdict:
    """The verdict of an agreed Failed."""
    if agreed is None:
        return Verdict(reason=Reason.TRANSFER_FAILED, text=f"{what} failed")
    return Verdict(reason=agreed.reason or Reason.TRANSFER_FAILED, text=f"{what} failed: {agreed.text or 'no reason'}")
