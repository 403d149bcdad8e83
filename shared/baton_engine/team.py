"""How the products of one rank's shard become the model's: what the other ranks add, at each place where they add it.

    embeddings            looked up in the rank's share of the vocabulary, summed over tp
    attention output      a part of a sum over tp
    MLP                   a part of a sum over ffn, which is tp, or with DP attention tp of all units:
                          then every unit's rows are gathered before it, and each unit takes its own back after it
    output projection     a share of the vocabulary, put together on the first of tp

A model without a team computes all of it alone, and nothing here is called.
"""

import torch
from torch import Tensor
from torch.nn import functional

from baton_core.ranks import Parallel, share
from baton_engine.groups import RankGroup, TensorGroups
from baton_engine.projection import Projection
from baton_engine.shard import Shard


class RowExchange:
    """Puts the rows that each member of a group holds together, on all of them, in the members' order; for one step."""

    def __init__(self, group: RankGroup, counts: tuple[int, ...], like: Tensor) -> None:
        """`counts`: rows of each member, the same on all of them; rows are as long as those of `like` `[…, width]`."""
        assert len(counts) == group.size
        self._group, self._counts = group, counts
        most, width = max(counts), like.shape[-1]
        # Collectives want equal shapes: shorter members send rows that nobody looks at.
        self._own = like.new_zeros(most, width)
        self._padded = like.new_empty(group.size, most, width)
        self._is_even = min(counts) == most
        self._together = self._padded.view(-1, width) if self._is_even else like.new_empty(sum(counts), width)

    def gather(self, rows: Tensor) -> Tensor:
        """All members' rows `[all rows, width]`, good until the next call; `rows` are this one's."""
        self._own[: len(rows)].copy_(rows)
        self._group.gather(self._own, self._padded)
        if not self._is_even:
            pieces = [self._padded[index, :count] for index, count in enumerate(self._counts)]
            torch.cat(pieces, out=self._together)
        return self._together


class Team:
    """This rank's part in the products of its unit, and with DP attention in those of all units."""

    def __init__(self, shard: Shard, parallel: Parallel, groups: TensorGroups) -> None:
        self.shard, self.place = shard, groups.place
        self.cp, self.stages = groups.cp, groups.stages
        self.shares_units = parallel.dp_attention and parallel.dp > 1
        self.speaks = groups.place.member == parallel.speaker
        self._tp, self._ffn = groups.tp, groups.ffn
        self._exchange: RowExchange | None = None
        self._own_rows = slice(0, 0)
        self._own_part = slice(0, 0)

    def begin(self, rows: int, like: Tensor) -> bool:
        """Begin a step in which this rank has `rows` rows, as long as those of `like`; whether anybody has any."""
        if not self.shares_units:
            return rows > 0
        counted = torch.empty(self._ffn.size, 1, dtype=torch.int64, device=like.device)
        self._ffn.gather(counted.new_full((1,), rows), counted)
        # Every rank of a unit has its unit's rows; each brings an even part of them.
        tp = self._tp.size
        of_units: list[int] = counted.flatten()[::tp].tolist()
        before = sum(of_units[: self.place.dp_rank])
        self._own_rows = slice(before, before + rows)
        part = share(rows, self._tp.rank, tp)
        self._own_part = slice(part.start, part.stop)
        counts = tuple(len(share(count, index, tp)) for count in of_units for index in range(tp))
        self._exchange = RowExchange(self._ffn, counts, like) if any(counts) else None
        return self._exchange is not None

    def embedded(self, token_ids: Tensor, table: Tensor) -> Tensor:
        """The embeddings `[rows, hidden]` of tokens, of which `table` has this rank's share."""
        if self._tp.size == 1:
            return functional.embedding(token_ids, table)
        places = token_ids - self.shard.vocab.start
        is_elsewhere = (places < 0) | (places >= len(table))
        rows = functional.embedding(places.masked_fill(is_elsewhere, 0), table).masked_fill_(is_elsewhere[:, None], 0)
        self._tp.sum(rows)
        return rows

    def attention_output(self, product: Projection) -> Projection:
        """`product` of this rank's heads, and those of the others."""
        return product if self._tp.size == 1 else _summed(product, self._tp)

    def gate_up(self, product: Projection) -> Projection:
        """`product` of this rank's columns, for the rows of everybody who shares the MLP."""
        if not self.shares_units:
            return product

        def gathered(values: Tensor) -> Tensor:
            assert self._exchange is not None
            return product(self._exchange.gather(values[self._own_part]))

        return gathered

    def down(self, product: Projection) -> Projection:
        """`product` of this rank's columns, and those of the others, for the rows of this unit."""
        if self._ffn.size == 1:
            return product
        summed = _summed(product, self._ffn)
        return (lambda values: summed(values)[self._own_rows]) if self.shares_units else summed

    def logits(self, part: Tensor) -> Tensor | None:
        """Logits `[rows, vocab]` in float32 on the first of the ranks that share the vocabulary; None on the others.

        `part` `[rows, tokens]` are those of this rank's share.
        """
        if self._tp.size == 1:
            return part.float()
        shares = [len(share(self.shard.model.vocab, index, self._tp.size)) for index in range(self._tp.size)]
        padded = functional.pad(part, (0, max(shares) - part.shape[1]))
        gathered = self._tp.gather_to_first(padded)
        if gathered is None:
            return None
        return torch.cat([one[:, :count] for one, count in zip(gathered, shares, strict=True)], dim=1).float()

    def wanted_rows(self, hidden: Tensor, rows: Tensor, places: tuple[int, ...], total: int) -> Tensor:
        """The states `[total, hidden]` that a step asks for, on all CP ranks; `rows` of `hidden` are at `places` of them."""
        wanted = hidden.new_zeros(total, hidden.shape[1])
        if places:
            wanted[list(places)] = hidden[rows]
        if total:
            self.cp.sum(wanted)  # everything but one of them is 0
        return wanted


def _summed(product: Projection, group: RankGroup) -> Projection:
    def multiply(values: Tensor) -> Tensor:
        result = product(values)
        group.sum(result)
        return result

    return multiply
