"""What clients ask: something new, something that begins like an earlier prompt, or the next turn of a conversation."""

from collections.abc import Iterable
from random import Random
from typing import TYPE_CHECKING

from simulation.oracle import VOCABULARY, Oracle

if TYPE_CHECKING:
    from simulation.clients import Leg
    from simulation.world import World

Prompt = tuple[int, ...]


class Prompts:
    """Draws prompts such that prefix caches have something to share."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._drawn: list[Prompt] = []
        self._talk = Random(f"talk {world.seed}")

    def draw(self, length: int, legs: Iterable["Leg"]) -> Prompt:
        """A prompt of about this length; `legs` are those that were sent so far."""
        random = self._world.random
        prompt = tuple(random.randrange(VOCABULARY) for _ in range(length))
        if self._drawn and random.random() < 0.5:
            like = self._drawn[random.randrange(len(self._drawn))][: random.randint(1, length)]
            prompt = like + prompt[len(like) :]
        if self._talk.random() < self._world.shape.conversations:
            prompt = self._next_turn(prompt, legs)
        self._drawn.append(prompt)
        return prompt

    def _next_turn(self, words: Prompt, legs: Iterable["Leg"]) -> Prompt:
        """An earlier prompt, what decode answered to it, and a few words more; hardly longer than any other."""
        shape = self._world.shape
        most = max(shape.prompt_most, (shape.prompt_most + shape.answer_most) // 2)
        told = [
            leg
            for leg in legs
            if leg.side == "decode" and leg.tokens and leg.verdict is None and len(leg.request.prompt) < most
        ]
        if not told:
            return words
        leg = told[self._talk.randrange(len(told))]
        oracle = Oracle(leg.request.prompt)
        heard = (*leg.request.prompt, *(oracle.next() for _ in range(leg.tokens)))[: most - self._talk.randrange(2)]
        return heard + words[: self._talk.randrange(1 + most - len(heard))]
