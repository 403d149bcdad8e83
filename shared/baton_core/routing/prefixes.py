"""Where prompts went before, by their prefixes: an approximation of the workers' own prefix caches.

A prompt's bytes are cut into blocks; each block's digest covers everything before it too, so that one dictionary holds
the whole tree, and the same bytes after another beginning are another block.
"""

import hashlib
from collections import OrderedDict

BLOCK_BYTES = 256
BLOCKS_MAX = 128
"""Of a longer prompt only this much is compared: 32 KiB, some 8,000 tokens."""
BLOCKS_A_TARGET = 2_048
"""What a target's own cache may hold of prompts: 512 KiB, some 131,000 tokens. Where less is remembered than the fleet
caches, prompts are sent away from what they would have found there."""
MEMORY_BLOCKS_MIN, MEMORY_BLOCKS_MAX = 131_072, 1_048_576
"""Whatever the number of targets; some 25 and 200 MiB."""
HOLDERS_MAX = 4
"""Targets remembered for one block, the latest last."""
DIGEST_BYTES = 8


def prefix_blocks(prompt: bytes) -> tuple[bytes, ...]:
    """The chained digests of the whole blocks of `prompt`; of a prompt shorter than a block, its own."""
    length = min(len(prompt), BLOCK_BYTES * BLOCKS_MAX)
    if length < BLOCK_BYTES:
        return (hashlib.blake2b(prompt, digest_size=DIGEST_BYTES).digest(),) if prompt else ()
    chain = hashlib.blake2b(digest_size=DIGEST_BYTES)
    blocks = []
    for start in range(0, length - BLOCK_BYTES + 1, BLOCK_BYTES):
        chain.update(prompt[start : start + BLOCK_BYTES])
        blocks.append(chain.digest())
    return tuple(blocks)


class PrefixMemory:
    """Which targets were sent which blocks; the block not met for longest is forgotten."""

    def __init__(self, blocks_max: int = MEMORY_BLOCKS_MIN) -> None:
        self.blocks_max = blocks_max
        # In order of last use. An OrderedDict, because a plain one steps over everything that was taken from its front.
        self._holders: OrderedDict[bytes, tuple[str, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def depths(self, prefix: tuple[bytes, ...]) -> dict[str, int]:
        """How many blocks from the beginning each target was sent before."""
        depths: dict[str, int] = {}
        for number, block in enumerate(prefix, 1):
            holders = self._holders.get(block)
            if holders is None:
                break
            for key in holders:
                if depths.get(key, 0) == number - 1:
                    depths[key] = number
        return depths

    def remember(self, prefix: tuple[bytes, ...], key: str) -> None:
        """That target is sent this prompt."""
        # The deepest first: what is forgotten first is then the end of a prompt, never its beginning.
        for block in reversed(prefix):
            holders = self._holders.pop(block, ())
            if not holders or holders[-1] != key:
                holders = (*(one for one in holders if one != key), key)[-HOLDERS_MAX:]
            self._holders[block] = holders
        while len(self._holders) > self.blocks_max:
            self._holders.popitem(last=False)


def blocks_for(targets: int) -> int:
    """How many blocks are worth remembering for so many targets."""
    return min(max(MEMORY_BLOCKS_MIN, BLOCKS_A_TARGET * targets), MEMORY_BLOCKS_MAX)
