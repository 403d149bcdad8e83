"""A chunk of a prompt as a slice of a step, and what comes back from it: the same for prefill and colocated decode.

A request that was retracted without a backup computes its answer so far along with its prompt, and draws the next token.
"""

from baton_core.machine import Handoff
from baton_core.plan import SequenceResult, SequenceSlice
from baton_core.request import TokenLogprob


def prompt_chunk(req: Handoff, tokens: int) -> SequenceSlice:
    """The next `tokens` tokens that are known, with the scoring that the client asked for; the request is in the step.

    They may follow tokens that an earlier plan still computes: plans are computed in order.
    """
    start, end = req.planned, req.planned + tokens
    score_from, score = _scoring(req, start, end)
    req.planned = end
    req.in_step += 1
    return SequenceSlice(
        rid=req.rid,
        tokens=req.known_tokens(start, end),
        start=start,
        pages=req.pages,
        sample=end == req.known,
        sampling=req.request.sampling,
        output_index=len(req.outputs),
        score_from=score_from,
        score=score,
    )


def take_chunk(req: Handoff, piece: SequenceSlice, result: SequenceResult | None) -> None:
    """The chunk is computed: note its scores and, at the end of the prompt, the first token. Mutates `req`."""
    req.computed += len(piece.tokens)
    if piece.start == 0 and not req.outputs and req.request.sampling.prompt_logprobs_from == 0:
        req.prompt_logprobs.append(TokenLogprob(token=req.request.prompt[0], logprob=None))
    if result is not None:
        req.prompt_logprobs += result.scored
        take_token(req, result)


def take_token(req: Handoff, result: SequenceResult) -> None:
    """Note a drawn token and its logprob. Mutates `req`."""
    if result.token is not None:
        req.outputs.append(result.token)
        req.newest_logprob = result.logprob


def scored_from(req: Handoff) -> int:
    """First position whose logits must be computed for the client's prompt logprobs; the prompt's length if none are."""
    start = req.request.sampling.prompt_logprobs_from
    return len(req.request.prompt) if start is None or req.outputs else max(start, 1) - 1


def reusable_tokens(req: Handoff) -> int:
    """How many tokens from the first on need not be computed if the cache has them.

    The last must be, for its logits; so must all whose logits the client asks for.
    """
    last = req.known - 1
    return last if req.outputs else min(last, scored_from(req))


def _scoring(req: Handoff, start: int, end: int) -> tuple[int, tuple[int, ...]]:
    first = max(start, scored_from(req))
    if first >= end:
        return 0, ()
    # The logits of position p judge the token at p + 1; the last position's judge the token that is drawn.
    return first - start, req.request.prompt[first + 1 : end + 1]
