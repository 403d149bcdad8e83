"""Reads everything of a GGUF file but the weights: a few milliseconds where the `gguf` library takes seconds.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Little-endian files of version 2 and 3. Values that
nobody asked for, such as the hundred thousand strings of a vocabulary, are stepped over and never made.
"""

import mmap
import struct
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from baton_core.errors import EngineError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
STRING, ARRAY = 8, 9
ALIGNMENT = 32
"""Of the tensors' data, where the file does not say otherwise."""
ITEMS_MAX = 4_000_000
"""More entries than any vocabulary has: a larger count means a damaged file."""
DIMENSIONS_MAX = 4

_SCALARS: dict[int, struct.Struct] = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_ALIGNMENT_KEY = "general.alignment"
_LENGTH = _SCALARS[10]
_TYPE = _SCALARS[4]

Value = str | int | float | bool | list["Value"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """One tensor of the file: `shape` as GGUF gives it, the fastest dimension first; `offset` from the file's start."""

    name: str
    shape: tuple[int, ...]
    kind: int  # a value of ggml's type enumeration
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """What a GGUF file says before its weights begin."""

    values: dict[str, Value]  # those that were asked for, and the alignment
    spans: dict[str, tuple[int, int]]  # of every key: where its value's encoding begins and ends
    tensors: tuple[TensorInfo, ...]
    data_offset: int


def read_header(path: Path, wanted: Callable[[str], bool]) -> GgufHeader:
    """The header of the file at `path`, with the values of the keys that are `wanted`.

    Raises EngineError naming the file.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _Reader(content).header(wanted)
    except (OSError, ValueError, struct.error) as error:
        raise EngineError(f"model file {path} cannot be read: {error}") from error


def read_metadata(path: Path, wanted: Collection[str] | None = None) -> dict[str, Value]:
    """The metadata of the file at `path`; with `wanted`, only those keys. Raises EngineError naming the file."""
    return read_header(path, lambda key: wanted is None or key in wanted).values


class _Reader:
    """A cursor over the file's bytes. Everything raises ValueError or struct.error on a damaged file."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content = content
        self._at = 0

    def header(self, wanted: Callable[[str], bool]) -> GgufHeader:
        _require(self._content[:4] == MAGIC, "it is not a GGUF file")
        self._at = 4
        version = self._scalar(_TYPE)
        _require(version in VERSIONS, f"GGUF version {version} is not supported (known: {VERSIONS})")
        tensors = self._count()
        values: dict[str, Value] = {}
        spans: dict[str, tuple[int, int]] = {}
        for _ in range(self._count()):
            key = self._string()
            first = self._at
            kind = int(self._scalar(_TYPE))
            if key == _ALIGNMENT_KEY or wanted(key):
                values[key] = self._value(kind)
            else:
                self._skip(kind)
            spans[key] = first, self._at
        alignment = values.get(_ALIGNMENT_KEY, ALIGNMENT)
        _require(isinstance(alignment, int) and alignment > 0, f"an alignment of {alignment!r} is not possible")
        assert isinstance(alignment, int)
        infos = [self._tensor() for _ in range(tensors)]
        data_offset = -(-self._at // alignment) * alignment
        placed = tuple(
            TensorInfo(name=name, shape=shape, kind=kind, offset=data_offset + offset)
            for name, shape, kind, offset in infos
        )
        return GgufHeader(values=values, spans=spans, tensors=placed, data_offset=data_offset)

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        dimensions = int(self._scalar(_TYPE))
        _require(0 < dimensions <= DIMENSIONS_MAX, f"tensor {name} has {dimensions} dimensions")
        shape = tuple(int(self._scalar(_LENGTH)) for _ in range(dimensions))
        return name, shape, int(self._scalar(_TYPE)), int(self._scalar(_LENGTH))

    def _value(self, kind: int) -> Value:
        if kind == STRING:
            return self._string()
        if kind == ARRAY:
            return self._array()
        return self._scalar(_scalar_of(kind))

    def _array(self) -> list[Value]:
        kind = int(self._scalar(_TYPE))
        count = self._count()
        if kind in _SCALARS:
            return self._scalars(_SCALARS[kind], count)
        read: Callable[[], Value] = self._string if kind == STRING else self._array
        _require(kind in (STRING, ARRAY), f"array of unknown type {kind}")
        return [read() for _ in range(count)]

    def _scalars(self, form: struct.Struct, count: int) -> list[Value]:
        start = self._at
        self._advance(form.size * count, "an array")
        return [value for (value,) in form.iter_unpack(self._content[start : self._at])]

    def _scalar(self, form: struct.Struct) -> int | float | bool:
        (value,) = form.unpack_from(self._content, self._at)
        self._at += form.size
        assert isinstance(value, int | float)
        return value

    def _string(self) -> str:
        start = self._at + _LENGTH.size
        self._skip_string()
        # Some vocabularies hold tokens that are not valid UTF-8 on their own.
        return self._content[start : self._at].decode("utf-8", errors="replace")

    def _skip_string(self) -> None:
        (length,) = _LENGTH.unpack_from(self._content, self._at)
        self._advance(_LENGTH.size + length, "a string")

    def _skip(self, kind: int) -> None:
        if kind == STRING:
            self._skip_string()
        elif kind == ARRAY:
            self._skip_array()
        else:
            self._advance(_scalar_of(kind).size, "a value")

    def _skip_array(self) -> None:
        kind = int(self._scalar(_TYPE))
        count = self._count()
        if kind in _SCALARS:
            self._advance(_SCALARS[kind].size * count, "an array")
            return
        _require(kind in (STRING, ARRAY), f"array of unknown type {kind}")
        skip = self._skip_string if kind == STRING else self._skip_array
        for _ in range(count):
            skip()

    def _advance(self, nbytes: int, what: str) -> None:
        self._at += nbytes
        _require(self._at <= len(self._content), f"it ends in the middle of {what}")

    def _count(self) -> int:
        count = int(self._scalar(_LENGTH))
        _require(count <= ITEMS_MAX, f"a list of {count} entries is not believable")
        return count


def _scalar_of(kind: int) -> struct.Struct:
    _require(kind in _SCALARS, f"unknown value type {kind}")
    return _SCALARS[kind]


def _require(holds: bool, text: str) -> None:
    if not holds:
        raise ValueError(text)
