"""The residual stream of a step, laid out so that RMSNorm (1910.07467) of it is two operations instead of eight.

Torch's CPU has no kernel for RMSNorm, but one that scales rows to a given length. The two differ by the epsilon under
the root: so every row carries one more element, whose square is what the epsilon adds to the sum of squares.
"""

import math

import torch
from torch import Tensor


class ResidualStream:
    """What the layers of one step add to, `[rows, hidden]`, and its norms."""

    def __init__(self, embedded: Tensor, norm_eps: float) -> None:
        """Start from `embedded` `[rows, hidden]`, contiguous, whose memory is used up."""
        rows, hidden = embedded.shape
        self._rows = embedded.new_empty(rows, hidden + 1)
        self._rows[:, hidden:] = math.sqrt(hidden * norm_eps)
        self._lengths = embedded.new_full((rows, 1), math.sqrt(hidden))
        self._normed = embedded
        self.hidden = self._rows[:, :hidden]
        self.hidden.copy_(embedded)

    def add(self, part: Tensor) -> None:
        """Add what a block computed, `[rows, hidden]`."""
        self.hidden.add_(part)

    def normed(self, weight: Tensor) -> Tensor:
        """RMSNorm of the stream with a `norm_weight`; `[rows, hidden]`, good until the next call.

        Sums and roots are float32 whatever the stream is.
        """
        scaled, _ = torch._weight_norm_interface(self._rows, self._lengths, 0)
        return torch.mul(scaled[:, :-1], weight, out=self._normed)


def norm_weight(weight: Tensor) -> Tensor:
    """A norm's `weight` `[hidden]`, ready for `ResidualStream.normed`.

    The length that rows are scaled to, the root of `hidden`, may not exist in the weights' dtype; the weights make up.
    """
    length = math.sqrt(len(weight))
    rounded = weight.new_full((), length).item()
    return (weight.float() * (length / rounded)).to(weight.dtype)
