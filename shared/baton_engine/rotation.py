"""Turning queries and keys by their positions (RoPE, 2104.09864), as products of complex numbers.

A pair of dimensions that turn together is one complex number, so the two lie next to each other. Models have them half a
head apart; moving the rows of the projections that make queries and keys, once at load, leaves every score as it was.
Keys lie in the pool in this order too.
"""

import torch
from torch import Tensor


def paired(rows: Tensor, head_dim: int) -> Tensor:
    """`rows` `[heads * head_dim, ...]` of a projection or a norm with the rows of every pair next to each other."""
    halves = rows.view(-1, 2, head_dim // 2, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(rows.shape)


class Rotation:
    """Turns the queries and keys of a step's layers, in float32 whatever they are; holds the memory to do it in.

    `queries` `[rows, query_heads, head_dim]` are the queries that were turned last.
    """

    def __init__(self, turns: Tensor, query_heads: int, kv_heads: int, dtype: torch.dtype) -> None:
        """`turns` `[rows, 1, head_dim / 2]` complex64: what a row's pairs are multiplied by."""
        rows, _, pairs = turns.shape
        self._turns = turns
        self._query_heads = query_heads
        self._turned_heads = query_heads + kv_heads
        self._wide = torch.empty(rows, self._turned_heads, 2 * pairs, dtype=torch.float32, device=turns.device)
        self._complex = torch.view_as_complex(self._wide.view(rows, self._turned_heads, pairs, 2))
        self._wide_queries, self._wide_keys = self._wide[:, :query_heads], self._wide[:, query_heads:]
        self.queries = torch.empty(rows, query_heads, 2 * pairs, dtype=dtype, device=turns.device)

    def turn(self, heads: Tensor) -> None:
        """Turn what `heads` `[rows, query_heads + 2 * kv_heads, head_dim]` holds: the keys in place, the queries into
        `queries`."""
        self._wide.copy_(heads[:, : self._turned_heads])
        self._complex.mul_(self._turns)
        self.queries.copy_(self._wide_queries)
        heads[:, self._query_heads : self._turned_heads].copy_(self._wide_keys)
