"""The door: a request that was rejected before it owned anything ends here, before it costs anybody anything (S5).

`is_unadmitted_reject` is the ownership test that both sides' doors and every later abort path share, so that exactly one
of them retires a request.
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
