"""The two legs of one attempt: opened at once, ended together, unless prefill only has its own end left to say.

Which failure the client sees: a wrong request (4xx) at once, whichever leg says it first. Any other failure that a
worker put into words may be the echo of the other leg's, so the other leg gets a moment to name the cause.
"""

import asyncio

from baton_core.limits import Millis
from baton_core.routing.pace import Waiter
from baton_core.routing.pair import Pair
from baton_router.directory import Directory
from baton_router.failures import CAUSES, Failure, FailureKind, leg_failure, prefer
from baton_router.legs import Call, DecodeLeg, FirstBytes, PrefillLeg, named
from baton_router.merging import Scores
from baton_router.upstream import Upstream

CAUSE_GRACE_MS: Millis = 50


class Attempt:
    """Both legs of one room. `end` or `leave` must follow."""

    def __init__(
        self,
        pair: Pair,
        call: Call,
        *,
        upstream: Upstream,
        directory: Directory,
        loop: asyncio.AbstractEventLoop,
        waiter: Waiter | None = None,
    ) -> None:
        self.pair = pair
        self._loop = loop
        self._waiter = waiter  # for a first token
        self._news: asyncio.Future[None] | None = None  # of a leg that comes to its result, while somebody waits
        self._prefill: PrefillLeg | None = None
        if pair.prefill is not None:
            self._prefill = PrefillLeg(
                pair.prefill, call, call.prefill_body, self._tell, upstream=upstream, directory=directory
            )
            self._prefill.end_when_done()
        self._decode = DecodeLeg(
            pair.decode, call, call.decode_body, self._tell, upstream=upstream, directory=directory
        )

    async def outcome(self) -> FirstBytes | Failure:
        """Decode's first bytes, or the failure that the client should see."""
        if not self._decode.is_done:
            self._news = self._loop.create_future()
            await self._news
        if not self._decode.went_well:
            return await self._settled()
        self._came()
        return self._decode.result

    async def _settled(self) -> FirstBytes | Failure:
        """The outcome where a leg failed, or is still to be read before it is known whether it did."""
        pending: list[DecodeLeg | PrefillLeg] = [self._decode]
        if self._prefill is not None:
            pending.append(self._prefill)
        failure: Failure | None = None
        while pending:
            finished = [leg for leg in pending if leg.is_done]
            if not finished:
                if not await self._any_result(None if failure is None else CAUSE_GRACE_MS / 1000):
                    break
                continue
            pending = [leg for leg in pending if not leg.is_done]
            for leg in finished:
                result = leg.result
                if isinstance(result, Failure):
                    failure = result if failure is None else prefer(failure, result)
                    continue
                self._came()
                if isinstance(result, FirstBytes):
                    return result
            if failure is not None and _stands(failure):
                break
        assert failure is not None, "decode ended with neither an answer nor a failure"
        return failure

    async def prompt_scores(self) -> Scores | Failure | None:
        """What prefill says about the prompt, with `wants_scores`; None where no prefill worker takes part.

        An answer without them is a failure: the client would take what is left for all that it asked for.
        """
        prefill = self._prefill
        if prefill is None:
            return None
        while not prefill.is_done:
            await self._any_result(None)
        if prefill.result is not None:
            return prefill.result
        text = f"{named(prefill.worker)} answered without the prompt's logprobs"
        return leg_failure(FailureKind.ANSWERED, text, prefill.worker.url)

    def end(self) -> None:
        """Close both legs. Harmless when repeated."""
        if self._waiter is not None:
            self._waiter.gave_up(1000 * self._loop.time())
        self._decode.end()
        if self._prefill is not None:
            self._prefill.end()

    async def ended(self) -> None:
        """After `end`: wait until both connections are closed, so that a retry never overlaps what it replaces."""
        for leg in (self._decode, self._prefill):
            if leg is not None:
                await leg.closed()

    def leave(self, deadline_s: float) -> None:
        """Decode's answer was complete, so prefill's work is done: let it say so and keep its connection."""
        self._decode.end()
        if self._prefill is not None:
            self._prefill.end_at(deadline_s)
            self._prefill = None

    def _tell(self) -> None:
        """A leg came to its result. Prefill's good end, which nearly always comes first, wakes nobody: it ends no wait."""
        if self._prefill is not None and self._prefill.went_well and not self._decode.is_done:
            self._came()
        elif self._news is not None and not self._news.done():
            self._news.set_result(None)

    def _came(self) -> None:
        """The first token is computed: prefill's answer is its end, and decode's begins with it."""
        if self._waiter is not None:
            self._waiter.came(1000 * self._loop.time())

    async def _any_result(self, timeout_s: float | None) -> bool:
        """Wait until a leg comes to its result; False: time was up first."""
        self._news = news = self._loop.create_future()
        if timeout_s is None:
            await news
        else:
            await asyncio.wait([news], timeout=timeout_s)
        return news.done()


def _stands(failure: Failure) -> bool:
    """Whether no other leg's failure could explain this one better."""
    return failure.is_root_cause or failure.kind in CAUSES
