"""How a case goes wrong: seeded damage to bytes, to values, and to the JSON they are written as.

Everything is drawn from (seed, port, case number) and from nothing else, so that any case can be thrown again alone.
"""

import json
from collections.abc import Callable, Sequence
from copy import deepcopy
from random import Random
from typing import Any

SIZES = (0, 1, 2, 7, 63, 255, 256, 65_535, 65_536, 2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)
"""Numbers at which lengths, counters and signs go over."""

_RAW = "\ue000"
"""Stands around JSON that no value of Python is written as."""


def dice_of(seed: int, port: str, number: int) -> Random:
    """All chance of one case."""
    return Random(f"{seed}/{port}/{number}")


def raw_json(text: str) -> str:
    """A value that `as_json` writes as `text`, whatever that is."""
    return _RAW + text + _RAW


def as_json(value: Any) -> bytes:
    """JSON with everything in it that Python allows: NaN, Infinity, lone surrogates as escapes; and `raw_json`."""
    written = json.dumps(value)
    mark = json.dumps(_RAW)[1:-1]
    return written.replace(f'"{mark}', "").replace(f'{mark}"', "").encode()


def _nested(dice: Random) -> str:
    depth = dice.choice((3, 50, 500, 900, 1_010, 5_000, 50_000))
    opening, inside, closing = dice.choice((("[", "", "]"), ('{"a":', "1", "}"), ('[{"a":', "null", "}]")))
    return raw_json(opening * depth + inside + closing * dice.choice((depth, depth, depth - 1)))


_HOSTILE: tuple[Callable[[Random], Any], ...] = (
    lambda dice: None,
    lambda dice: dice.random() < 0.5,
    lambda dice: dice.choice(SIZES),
    lambda dice: -dice.choice(SIZES) - 1,
    lambda dice: dice.choice((2**64, 2**70, -(2**64), 10**30, -(10**400))),
    lambda dice: dice.choice((0.5, -0.0, 1e-320, 1e308, -1e308, 1.0, 2.0**53)),
    lambda dice: dice.choice((float("nan"), float("inf"), float("-inf"))),
    lambda dice: raw_json(dice.choice(("1e999", "-1e999", "1e-999", "0x1", "01", "+1", ".5", "1.", "nul", "'a'"))),
    lambda dice: dice.choice(("", " ", "x", "0", "-1", "true", "null", "\0", "\r\n", "../..", "%00", "a" * 300)),
    lambda dice: dice.choice(("\ud800", "a\udfffb", "\ud83d", "\U0001f600", "\u202e", "é" * 40, "\ufffe")),
    lambda dice: "y" * dice.choice((1_000, 20_000, 70_000)),
    lambda dice: dice.choice(([], [[]], [None], [True], [-1], [1.5], ["a"], [2**64], [{}], ["\ud800"], [[1], [2]])),
    lambda dice: [dice.choice((0, "x", None, "\ud800"))] * dice.choice((70, 300, 5_000)),
    lambda dice: dice.choice(({}, {"": 1}, {"a": {}}, {"type": "text"}, {"\ud800": 1}, {"n": -1}, {"id": [1]})),
    _nested,
)


def hostile(dice: Random) -> Any:
    """A value that nobody asked for."""
    return dice.choice(_HOSTILE)(dice)


def bent(dice: Random, good: Any, others: Sequence[str] = ()) -> Any:
    """A copy of `good`, in one to three places hostile; `others`: keys that an object of this kind may have, too."""
    value = deepcopy(good)
    for _ in range(dice.choice((1, 1, 1, 2, 3))):
        value = _bent_once(dice, value, others)
    return value


def _bent_once(dice: Random, value: Any, others: Sequence[str]) -> Any:
    if dice.random() < 0.03:
        return hostile(dice)
    if others and isinstance(value, dict) and dice.random() < 0.4:
        return value | {dice.choice(others): hostile(dice)}
    if isinstance(value, dict) and value:
        key = dice.choice(list(value))
        what = dice.random()
        if what < 0.08:
            del value[key]
        elif what < 0.14:
            value[str(hostile(dice))[:200]] = value.pop(key)
        elif isinstance(value[key], dict | list) and what < 0.6:
            value[key] = _bent_once(dice, value[key], ())
        else:
            value[key] = hostile(dice)
        return value
    if isinstance(value, list) and value:
        index = dice.randrange(len(value))
        if dice.random() < 0.2:
            return value * dice.choice((0, 2, 50))
        value[index] = _bent_once(dice, value[index], ()) if dice.random() < 0.5 else hostile(dice)
        return value
    return hostile(dice)


# -- bytes


def _flip(dice: Random, raw: bytearray) -> None:
    for _ in range(dice.choice((1, 1, 2, 8))):
        raw[dice.randrange(len(raw))] ^= 1 << dice.randrange(8)


def _cut(dice: Random, raw: bytearray) -> None:
    del raw[dice.randrange(len(raw)) :]


def _drop(dice: Random, raw: bytearray) -> None:
    first = dice.randrange(len(raw))
    del raw[first : first + dice.choice((1, 2, 4, 8, 40))]


def _double(dice: Random, raw: bytearray) -> None:
    first = dice.randrange(len(raw))
    piece = raw[first : first + dice.choice((1, 4, 16, 200))]
    raw[first:first] = piece * dice.choice((1, 1, 3))


def _number(dice: Random, raw: bytearray) -> None:
    """A length or a counter goes over, in either byte order."""
    width = dice.choice((1, 2, 4, 8))
    first = dice.randrange(len(raw))
    number = dice.choice(SIZES) % 256**width
    raw[first : first + width] = number.to_bytes(width, dice.choice(("little", "big")))


def _noise(dice: Random, raw: bytearray) -> None:
    first = dice.randrange(len(raw))
    raw[first:first] = dice.randbytes(dice.choice((1, 2, 8, 100)))


def _swap(dice: Random, raw: bytearray) -> None:
    middle = dice.randrange(len(raw))
    raw[:] = raw[middle:] + raw[:middle]


_DAMAGE = (_flip, _flip, _cut, _cut, _drop, _double, _number, _number, _noise, _swap)


def damaged(dice: Random, good: bytes) -> bytes:
    """`good` with one to three kinds of damage."""
    raw = bytearray(good)
    for _ in range(dice.choice((1, 1, 2, 3))):
        if raw:
            dice.choice(_DAMAGE)(dice, raw)
    return bytes(raw)
