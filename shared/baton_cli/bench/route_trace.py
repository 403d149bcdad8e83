"""Requests as a fleet of chat applications sends them: shared beginnings, conversations that grow, and a seed.

    application (popularity by Zipf's law) -- its system prompt: blocks that all its conversations share
      conversation (turns drawn)           -- each turn: everything said before, and a new question
        think time                         -- between one turn and the next, whatever the fleet does meanwhile

The trace depends on its settings alone, never on what a fleet does with it: every policy meets the same requests.
"""

import heapq
import math
import random
from bisect import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from baton_cli.errors import UsageError
from baton_core.routing.prefixes import BLOCKS_MAX

BLOCK_TOKENS = 64
"""Tokens of one block of `baton_core.routing.prefixes`: 256 bytes of English."""
PREFIX_BLOCKS = (2, 30)  # of an application's system prompt: 128 to 1,920 tokens, drawn evenly
QUESTION_BLOCKS_MEAN = 4
OUTPUT_TOKENS_MAX = 1_000
CONTEXT_BLOCKS_MAX = BLOCKS_MAX
"""A conversation that grows beyond this is over."""
OWN_BLOCK_BITS = 12
"""Of a block's name that number it within its conversation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceShape:
    """What the requests look like. Raises UsageError."""

    applications: int = 2_000
    turns_mean: float = 3.0
    think_s: float = 10.0
    output_tokens_mean: int = 200

    def __post_init__(self) -> None:
        if not 1 <= self.applications <= 1_000_000:
            raise UsageError(f"--applications must be 1 to 1,000,000, not {self.applications}")
        if not 1 <= self.turns_mean <= 100:
            raise UsageError(f"--turns must be 1 to 100, not {self.turns_mean:g}")
        if not self.think_s > 0:
            raise UsageError(f"--think-seconds must be above 0, not {self.think_s:g}")
        if not 1 <= self.output_tokens_mean <= OUTPUT_TOKENS_MAX:
            raise UsageError(f"--output-tokens must be 1 to {OUTPUT_TOKENS_MAX}, not {self.output_tokens_mean}")

    @property
    def prompt_tokens_mean(self) -> float:
        """Of all requests, leaving out that the longest conversations end early."""
        # With a geometric number of turns, a turn has `turns_mean - 1` turns before it on average.
        answer_blocks = self.output_tokens_mean / BLOCK_TOKENS + 0.5
        grown = (self.turns_mean - 1) * (QUESTION_BLOCKS_MEAN + answer_blocks)
        return BLOCK_TOKENS * (sum(PREFIX_BLOCKS) / 2 + QUESTION_BLOCKS_MEAN + grown)


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request. `known_blocks`: its first blocks that some earlier request had too, the most a cache could give."""

    at_s: float
    session: str
    prefix: tuple[bytes, ...]
    output_tokens: int
    known_blocks: int

    @property
    def prompt_tokens(self) -> int:
        return BLOCK_TOKENS * len(self.prefix)


class _Conversation:
    """What was said so far."""

    __slots__ = ("blocks", "known", "name", "number", "turns_left")

    def __init__(self, number: int, blocks: tuple[bytes, ...], known: int, turns_left: int) -> None:
        self.number = number
        self.name = f"c{number}"
        self.blocks = blocks
        self.known = known
        self.turns_left = turns_left

    def grow(self, blocks: int) -> None:
        """Add blocks that nobody else has."""
        first = len(self.blocks)
        head = self.number << OWN_BLOCK_BITS | 1 << 63
        self.blocks += tuple((head | index).to_bytes(8, "big") for index in range(first, first + blocks))


class Trace:
    """An endless, seeded stream of arrivals at `rate_per_s`; stationary from the first second on."""

    def __init__(self, shape: TraceShape, *, rate_per_s: float, seed: int) -> None:
        self._shape = shape
        self._random = random.Random(f"trace {seed}")
        self._beginnings_per_s = rate_per_s / shape.turns_mean
        self._popularity = list(accumulate(1 / rank for rank in range(1, shape.applications + 1)))
        self._prefixes: dict[int, tuple[bytes, ...]] = {}
        self._met: set[int] = set()
        self._begun = 0
        self._lengths = _Geometric(self._random, shape.turns_mean)
        self._questions = _Geometric(self._random, QUESTION_BLOCKS_MEAN)
        self._outputs = _Geometric(self._random, shape.output_tokens_mean)
        self._turns: list[tuple[float, int, _Conversation]] = []
        # Those that are under way when the trace begins, each somewhere in the middle.
        for _ in range(round(self._beginnings_per_s * (shape.turns_mean - 1) * shape.think_s)):
            conversation = self._begin()
            for _ in range(self._lengths.draw()):
                conversation.grow(self._questions.draw() + _answer_blocks(self._output_tokens()))
            self._schedule(conversation, self._random.expovariate(1 / shape.think_s))

    def __iter__(self) -> Iterator[Arrival]:
        beginning_s = self._random.expovariate(self._beginnings_per_s)
        while True:
            if self._turns and self._turns[0][0] < beginning_s:
                at_s, _, conversation = heapq.heappop(self._turns)
            else:
                at_s, conversation = beginning_s, self._begin()
                beginning_s += self._random.expovariate(self._beginnings_per_s)
            yield self._turn(at_s, conversation)

    def _begin(self) -> _Conversation:
        weight = self._random.random() * self._popularity[-1]
        application = bisect(self._popularity, weight)
        self._begun += 1
        return _Conversation(self._begun, self._prefix(application), application, self._lengths.draw())

    def _prefix(self, application: int) -> tuple[bytes, ...]:
        prefix = self._prefixes.get(application)
        if prefix is None:
            length = self._random.randint(*PREFIX_BLOCKS)
            head = application << OWN_BLOCK_BITS
            prefix = tuple((head | index).to_bytes(8, "big") for index in range(length))
            self._prefixes[application] = prefix
        return prefix

    def _turn(self, at_s: float, conversation: _Conversation) -> Arrival:
        known = self._known(conversation)
        conversation.grow(self._questions.draw())
        output_tokens = self._output_tokens()
        arrival = Arrival(
            at_s, conversation.name, conversation.blocks[:CONTEXT_BLOCKS_MAX], output_tokens, min(known, BLOCKS_MAX)
        )
        conversation.known = -len(arrival.prefix)
        conversation.grow(_answer_blocks(output_tokens))
        conversation.turns_left -= 1
        if conversation.turns_left > 0 and len(conversation.blocks) < CONTEXT_BLOCKS_MAX:
            self._schedule(conversation, at_s + self._random.expovariate(1 / self._shape.think_s))
        return arrival

    def _known(self, conversation: _Conversation) -> int:
        """`known` is the application before the first turn, and minus the blocks already asked after it."""
        if conversation.known < 0:
            return -conversation.known
        application = conversation.known
        if application in self._met:
            return len(self._prefixes[application])
        self._met.add(application)
        return 0

    def _schedule(self, conversation: _Conversation, at_s: float) -> None:
        heapq.heappush(self._turns, (at_s, conversation.number, conversation))

    def _output_tokens(self) -> int:
        return min(OUTPUT_TOKENS_MAX, self._outputs.draw())


def _answer_blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)


class _Geometric:
    """Draws counts of at least 1, geometric with that mean."""

    def __init__(self, chance: random.Random, mean: float) -> None:
        self._chance = chance
        # What lies between two whole numbers of an exponential distribution is geometric.
        self._rate = -math.log1p(-1 / mean) if mean > 1 else math.inf

    def draw(self) -> int:
        """The next."""
        return 1 if self._rate == math.inf else 1 + int(self._chance.expovariate(self._rate))
