"""Drawing tokens: greedy, or by one counter-based uniform number a token.

The uniform number is a pure function of (seed, sample index, output position). So stopping, retrying, migrating to another
worker and splitting a model over ranks need no generator state, and a batch's other members change nothing.

Filters follow SGLang: temperature, then top-k, top-p and min-p over the probabilities of the *whole* vocabulary; a token
stays under top-p while the mass before it is at most `top_p`, under min-p while it has `min_p` of the best one's.
"""

import hashlib
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from baton_core.errors import EngineError
from baton_core.plan import SequenceSlice
from baton_core.request import Sampling

_COUNTER = struct.Struct("<QQQ")
_TOP_CANDIDATES = 1_024
"""How many of the best tokens top-p looks at before it sorts the whole vocabulary; nearly always enough."""


def sample(logits: Tensor, slices: Sequence[SequenceSlice]) -> list[int]:
    """One token for each row of `logits` `[rows, vocab]` float32, drawn as its slice says.

    Mutates `logits`: stop tokens are masked while a request is below its `min_new_tokens`. Equal logits: the lowest id
    wins. Raises EngineError naming the request whose logits are not finite.
    """
    assert logits.dim() == 2 and len(logits) == len(slices) and logits.dtype == torch.float32
    if not slices:
        return []
    _mask_stops(logits, slices)
    best, tokens = logits.max(dim=-1)
    for item, is_finite in zip(slices, torch.isfinite(best).tolist(), strict=True):
        if not is_finite:
            raise EngineError(f"the model produced logits that are not finite for request {item.rid}")
    drawn: list[int] = tokens.tolist()
    plain, filtered = _rows_by_kind(slices)
    if plain:
        _draw_plain(logits, slices, plain, drawn)
    for row in filtered:
        drawn[row] = _draw_filtered(logits[row], slices[row])
    return drawn


def uniform(sampling: Sampling, output_index: int) -> float:
    """The random number in [0, 1) behind output `output_index` of this worker's share of a sample. Pure; 53 bits."""
    counter = _COUNTER.pack(sampling.seed, sampling.sample_index, sampling.output_offset + output_index)
    return (int.from_bytes(hashlib.blake2b(counter, digest_size=8).digest(), "little") >> 11) / 2**53


def _mask_stops(logits: Tensor, slices: Sequence[SequenceSlice]) -> None:
    for row, item in enumerate(slices):
        stops = item.sampling.stop_token_ids
        if stops and item.output_index < item.sampling.min_new_tokens:
            logits[row, [stop for stop in stops if stop < logits.shape[1]]] = float("-inf")


def _rows_by_kind(slices: Sequence[SequenceSlice]) -> tuple[list[int], list[int]]:
    """Rows that draw from the whole vocabulary, and rows whose candidates must be sorted. Greedy rows are in neither."""
    plain: list[int] = []
    filtered: list[int] = []
    for row, item in enumerate(slices):
        if item.sampling.temperature == 0 or item.sampling.top_k == 1:
            continue
        is_filtered = item.sampling.top_k > 0 or item.sampling.top_p < 1
        (filtered if is_filtered else plain).append(row)
    return plain, filtered


def _draw_plain(logits: Tensor, slices: Sequence[SequenceSlice], rows: list[int], drawn: list[int]) -> None:
    """Draw `rows` together, in vocabulary order, without sorting; mutates `drawn`."""
    temperatures = torch.tensor([slices[row].sampling.temperature for row in rows], device=logits.device)
    floors = torch.tensor([slices[row].sampling.min_p for row in rows], device=logits.device)
    picked = logits if len(rows) == len(logits) else logits[rows]
    probabilities = torch.softmax(picked / temperatures[:, None], dim=-1)
    if any(slices[row].sampling.min_p > 0 for row in rows):
        best = probabilities.amax(dim=-1)
        probabilities = probabilities.masked_fill_(probabilities < (floors * best)[:, None], 0.0)
    for place, row in enumerate(rows):
        chosen = _invert(probabilities[place], uniform(slices[row].sampling, slices[row].output_index))
        drawn[row] = int(chosen)


def _draw_filtered(logits: Tensor, item: SequenceSlice) -> int:
    """Draw from one row `[vocab]`, best candidates first."""
    sampling = item.sampling
    scaled = logits / sampling.temperature
    total = torch.logsumexp(scaled, dim=-1)
    vocab = len(scaled)
    limit = min(vocab, sampling.top_k) if sampling.top_k > 0 else vocab
    probabilities, tokens = _best(scaled, total, min(limit, _TOP_CANDIDATES))
    if limit > _TOP_CANDIDATES and float(probabilities.sum()) <= sampling.top_p:
        probabilities, tokens = _best(scaled, total, limit)
    before = probabilities.cumsum(dim=-1) - probabilities
    dropped = (before > sampling.top_p) | (probabilities < sampling.min_p * probabilities[0])
    chosen = _invert(probabilities.masked_fill(dropped, 0.0), uniform(sampling, item.output_index))
    return int(tokens[chosen])


def _best(scaled: Tensor, total: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` best tokens and their probabilities, best first, equal ones by id."""
    if count == len(scaled):
        values, tokens = scaled.sort(descending=True, stable=True)
    else:
        values, tokens = scaled.topk(count)
        by_id = tokens.argsort()
        order = by_id[values[by_id].argsort(descending=True, stable=True)]
        values, tokens = values[order], tokens[order]
    return (values.double() - total.double()).exp(), tokens


def _invert(probabilities: Tensor, number: float) -> int:
    """The index at which the running sum of `probabilities` `[n]` passes `number` times their total."""
    running = probabilities.cumsum(dim=-1, dtype=torch.float64)
    chosen = int(torch.searchsorted(running, running[-1:] * number, right=True))
    if chosen < len(running):
        return chosen
    # Rounding put the target on the total itself: the last token that has any mass.
    return int(probabilities.nonzero()[-1])
