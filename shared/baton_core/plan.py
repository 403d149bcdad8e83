"""What a step computes: the contract between a core and the engine that runs its plans.

One step is one ragged forward. A slice that is one token long continues a sequence, a longer one is a prompt chunk;
the engine need not tell them apart. What a running plan names (pages, sequences) is owned by that step until `commit`.
"""

from dataclasses import dataclass

from baton_core.errors import Verdict
from baton_core.request import PageId, RequestId, Sampling, TokenLogprob


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSlice:
    """The tokens of one sequence that this step computes.

    `tokens` take positions `start … start+len-1`; their KV is written to `pages[position // page_tokens]`, and attention
    reads positions `0 … start+len-1` through the same table. With `sample` the next token is drawn from the logits of
    the last position, as output number `output_index` (0-based) of the request.
    """

    rid: RequestId
    tokens: tuple[int, ...]
    start: int
    pages: tuple[PageId, ...]
    sample: bool
    sampling: Sampling
    output_index: int = 0
    # Prompt tokens whose logprobs are wanted: `score[i]` is the token that really follows `tokens[score_from + i]`.
    score_from: int = 0
    score: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One batch, frozen; `step` counts up by one a plan."""

    step: int
    slices: tuple[SequenceSlice, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceResult:
    """What the step made of one slice: the drawn token where it was to be sampled, and the logprobs asked for."""

    rid: RequestId
    token: int | None
    logprob: TokenLogprob | None = None  # of `token`, with `sampling.logprobs`
    scored: tuple[TokenLogprob, ...] = ()  # of `score`, one each


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The agreed outcome of a step: one result for every slice with `sample` or `score`, in plan order.

    `failed` names a fault of the whole step; then every request in it fails and `results` is empty.
    """

    step: int
    results: tuple[SequenceResult, ...]
    failed: Verdict | None = None
