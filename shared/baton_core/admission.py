"""The door: a request that was rejected before it owned anything ends here, before it costs anybody anything (S5).

`is_unadmitted_reject` is the ownership test that both sides' doors and every later abort path share, so that exactly one
of them retires a request. `AnswerShare` is what decode bets on when it admits more than could be served in the worst case.
"""

from baton_core.errors import Reason, Verdict
from baton_core.machine import Handoff
from baton_core.pages import pages_for
from baton_core.request import Request


def is_unadmitted_reject(req: Handoff) -> bool:
    """Whether `req` is aborted, is not re-entering after a retraction, and owns nothing.

    A verdict not yet turned into an answer (`to_finish`) counts as aborted.
    """
    return req.to_finish is not None and not req.is_retracted and not req.owned()


def capacity_verdict(request: Request, *, context_tokens: int, pool_pages: int, page_tokens: int) -> Verdict | None:
    """Why this worker can never serve `request`, or None. Kept apart from retirement: re-entering requests pass it too."""
    tokens = len(request.prompt)
    if tokens >= context_tokens:
        text = f"the prompt has {tokens} tokens; this worker takes at most {context_tokens - 1}. Shorten the prompt."
        return Verdict(reason=Reason.CONTEXT_TOO_LONG, text=text)
    if pages_for(tokens + 1, page_tokens) > pool_pages:
        text = (
            f"the prompt needs {pages_for(tokens + 1, page_tokens)} KV pages; the whole pool has {pool_pages}. "
            "Shorten the prompt or start the worker with a larger --kv-tokens."
        )
        return Verdict(reason=Reason.CONTEXT_TOO_LONG, text=text)
    return None


_WINDOW_TOKENS = 16_384
"""How many tokens of longest answers the learned share looks back on."""


class AnswerShare:
    """What share of the longest answers that clients allow is really used: learned, so that admission can bet on it.

    Counted in tokens and held as two integers, so that every rank bets alike. Starts at `start_percent`, and never falls
    below `floor_percent`.
    """

    def __init__(self, start_percent: int, floor_percent: int) -> None:
        self._floor_percent = floor_percent
        self.allowed = _WINDOW_TOKENS // 4
        self.used = min(self.allowed, self.allowed * start_percent // 100)

    def expected(self, allowed: int) -> int:
        """Tokens to count on of an answer that may have `allowed`."""
        learned = -(-allowed * self.used // self.allowed)
        least = -(-allowed * self._floor_percent // 100)
        return min(allowed, max(learned, least))

    def ended(self, used: int, allowed: int) -> None:
        """An answer ended of itself."""
        self.used += used
        self.allowed += allowed
        while self.allowed > _WINDOW_TOKENS:
            self.used //= 2
            self.allowed //= 2

    def fell_short(self) -> None:
        """The pool ran out: we bet too low."""
        self.used = min(self.allowed, self.used + self.allowed // 8)
