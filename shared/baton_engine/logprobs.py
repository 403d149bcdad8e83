"""Logprobs: how likely the model itself finds a token.

They are the log-softmax, in float32, of the logits as the model gives them: before temperature, filters and masks. So
one number means the same at every temperature, a greedy answer has logprobs too, and prompt and answer are judged alike.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from baton_core.errors import EngineError
from baton_core.plan import SequenceSlice
from baton_core.request import TokenLogprob

BLOCK_ROWS = 256
"""Rows that are judged at a time: with 50,000 tokens in the vocabulary a block of logits takes 50 MB."""


def judge(logits: Tensor, tokens: Sequence[int], tops: Sequence[int]) -> list[TokenLogprob]:
    """The logprob of `tokens[i]`, and the `tops[i]` likeliest tokens, by row i of `logits` `[rows, vocab]` float32.

    Equal ones are ordered by id, lowest first. Raises EngineError where logits are not finite.
    """
    assert logits.dim() == 2 and len(logits) == len(tokens) == len(tops) and logits.dtype == torch.float32
    if not tokens:
        return []
    totals = logits.logsumexp(dim=-1)
    if not bool(torch.isfinite(totals).all()):
        raise EngineError("the model produced logits that are not finite")
    picked = logits.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0]
    logprobs: list[float] = (picked - totals).tolist()
    most = min(max(tops), logits.shape[1])
    best, ids = _likeliest(logits, most)
    best_logprobs: list[list[float]] = (best - totals[:, None]).tolist()
    best_ids: list[list[int]] = ids.tolist()
    return [
        TokenLogprob(
            token=token,
            logprob=logprobs[row],
            top=tuple(zip(best_ids[row][:top], best_logprobs[row][:top], strict=True)),
        )
        for row, (token, top) in enumerate(zip(tokens, tops, strict=True))
    ]


def logit_blocks(hidden: Tensor, head: Callable[[Tensor], Tensor]) -> Iterator[Tensor]:
    """What `head` makes of `hidden` `[rows, hidden]`, a block at a time, so that a long chunk needs no logits of all its
    rows at once."""
    for start in range(0, len(hidden), BLOCK_ROWS):
        yield head(hidden[start : start + BLOCK_ROWS])


def score(blocks: Iterable[Tensor], slices: Sequence[SequenceSlice]) -> list[TokenLogprob]:
    """The logprobs of the `score` tokens of all `slices`, one after the other.

    `blocks` `[rows, vocab]` float32 are the logits of the rows that precede those tokens, see `logit_blocks`.
    """
    tokens = [token for item in slices for token in item.score]
    tops = [item.sampling.logprobs or 0 for item in slices for _ in item.score]
    scored: list[TokenLogprob] = []
    for logits in blocks:
        block = slice(len(scored), len(scored) + len(logits))
        scored += judge(logits, tokens[block], tops[block])
    assert len(scored) == len(tokens)
    return scored


def _likeliest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Values and ids `[rows, count]` of the largest logits, largest first, equal ones by id."""
    if count == 0:
        nothing = logits[:, :0]
        return nothing, nothing.long()
    values, ids = logits.topk(count, dim=-1)
    _settle_ties(logits, values[:, -1], ids)
    ids, _ = ids.sort(dim=-1)
    values, order = logits.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _settle_ties(logits: Tensor, least: Tensor, ids: Tensor) -> None:
    """Where more tokens are worth `least` than `ids` has room for, take those with the lowest ids; mutates `ids`."""
    reached = (logits >= least[:, None]).sum(dim=-1)
    for row in (reached > ids.shape[1]).nonzero()[:, 0].tolist():
        above = (logits[row] > least[row]).nonzero()[:, 0]
        equal = (logits[row] == least[row]).nonzero()[:, 0]
        ids[row] = torch.cat((above, equal))[: ids.shape[1]]
