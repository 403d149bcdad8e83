"""Rotary position embedding (2104.09864) and the ways of stretching it over longer contexts.

Every scaling is a different list of frequencies, fixed for the process; YaRN also scales what is rotated. The formulas,
and the order of operations in float32, are those of Transformers.
"""

import math
from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Unscaled:
    """As trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """Positions divided by `factor` (2306.15595)."""

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3:
    """Llama 3.1: slow rotations are divided by `factor`, fast ones kept, those between blended."""

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_context_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Yarn:
    """YaRN (2309.00071): as `Llama3` with bounds in rotations; queries and keys are scaled by `attention_factor`."""

    factor: float
    original_context_tokens: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True  # the bounds to whole dimensions

    @staticmethod
    def default_attention_factor(factor: float, weight: float = 1.0) -> float:
        """What the paper suggests for `factor`; `weight` is DeepSeek's `mscale`."""
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Divided:
    """Every frequency divided by a number of its own: how a GGUF file stores Llama 3.1's scaling."""

    divisors: tuple[float, ...]


RopeScaling = Unscaled | Linear | Llama3 | Yarn | Divided


def inverse_frequencies(theta: float, head_dim: int, scaling: RopeScaling) -> Tensor:
    """Radians a position for each pair of dimensions, `[head_dim / 2]`, float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    plain = 1.0 / (theta**exponents)
    match scaling:
        case Unscaled():
            return plain
        case Linear(factor=factor):
            return plain / factor
        case Divided(divisors=divisors):
            return plain / torch.tensor(divisors, dtype=torch.float32)
        case Llama3():
            return _llama3(plain, scaling)
        case Yarn():
            return _yarn(theta, exponents, scaling)
        case _:
            assert_never(scaling)


def attention_factor(scaling: RopeScaling) -> float:
    """What the cosines and sines are multiplied by."""
    return scaling.attention_factor if isinstance(scaling, Yarn) else 1.0


def _llama3(plain: Tensor, scaling: Llama3) -> Tensor:
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    wavelength = 2 * math.pi / plain
    is_slow = wavelength > scaling.original_context_tokens / low
    is_fast = wavelength < scaling.original_context_tokens / high
    scaled = torch.where(is_slow, plain / scaling.factor, plain)
    share = (scaling.original_context_tokens / wavelength - low) / (high - low)
    blended = (1 - share) * scaled / scaling.factor + share * scaled
    return torch.where(is_slow | is_fast, scaled, blended)


def _yarn(theta: float, exponents: Tensor, scaling: Yarn) -> Tensor:
    frequencies = theta**exponents
    low, high = _yarn_range(theta, 2 * len(exponents), scaling)
    ramp = (torch.arange(len(exponents), dtype=torch.float32) - low) / (high - low)
    kept = 1 - ramp.clamp(0, 1)
    return 1.0 / (scaling.factor * frequencies) * (1 - kept) + 1.0 / frequencies * kept


def _yarn_range(theta: float, head_dim: int, scaling: Yarn) -> tuple[float, float]:
    def dimension(rotations: float) -> float:
        turns = scaling.original_context_tokens / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    return low, high + 0.001 if low == high else high
