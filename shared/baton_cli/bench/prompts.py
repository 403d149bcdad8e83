"""Prompts and arrival times: random, and the same again for the same seed. Pure."""

import random
from dataclasses import dataclass

LOWEST_ID = 100
"""Below lie the control tokens of the usual vocabularies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """Prompts of random token ids below `ids_below`: two of them share no page, so that no prefix cache can help."""

    seed: int
    ids_below: int = 16_384

    def ids(self, name: str, tokens: int) -> list[int]:
        """The prompt called `name`; another name gives another prompt."""
        chance = random.Random(f"{self.seed} {name} {tokens}")
        return chance.choices(range(LOWEST_ID, self.ids_below), k=tokens)


def poisson_arrivals_s(seed: int, rate_per_s: float, requests: int) -> list[float]:
    """When each request is due, in seconds from the start; gaps are exponential with mean 1 / rate."""
    chance = random.Random(f"{seed} arrivals")
    due_s, arrivals_s = 0.0, []
    for _ in range(requests):
        due_s += chance.expovariate(rate_per_s)
        arrivals_s.append(due_s)
    return arrivals_s
