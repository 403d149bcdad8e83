"""Reads the metadata of a GGUF file, and nothing else of it: a few milliseconds where the `gguf` library takes seconds.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Little-endian files of version 2 and 3.
"""

import mmap
import struct
from collections.abc import Callable, Collection
from pathlib import Path

from baton_core.errors import EngineError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
STRING, ARRAY = 8, 9
ITEMS_MAX = 4_000_000
"""More entries than any vocabulary has: a larger count means a damaged file."""

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
_LENGTH = _SCALARS[10]
_TYPE = _SCALARS[4]

Value = str | int | float | bool | list["Value"]


def read_metadata(path: Path, wanted: Collection[str] | None = None) -> dict[str, Value]:
    """The metadata of the file at `path`; with `wanted`, only those keys. Raises EngineError naming the file."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _Reader(content).metadata(wanted)
    except (OSError, ValueError, struct.error) as error:
        raise EngineError(f"model file {path} cannot be read: {error}") from error


class _Reader:
    """A cursor over the file's bytes. Everything raises ValueError or struct.error on a damaged file."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content = content
        self._at = 0

    def metadata(self, wanted: Collection[str] | None) -> dict[str, Value]:
        if self._content[:4] != MAGIC:
            raise ValueError("it is not a GGUF file")
        self._at = 4
        version = self._scalar(_TYPE)
        if version not in VERSIONS:
            raise ValueError(f"GGUF version {version} is not supported (known: {VERSIONS})")
        self._scalar(_LENGTH)  # number of tensors
        found: dict[str, Value] = {}
        for _ in range(self._count()):
            key = self._string()
            value = self._value(int(self._scalar(_TYPE)))
            if wanted is None or key in wanted:
                found[key] = value
        return found

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
        end = self._at + form.size * count
        _require(end <= len(self._content), "it ends in the middle of an array")
        values = [value for (value,) in form.iter_unpack(self._content[self._at : end])]
        self._at = end
        return values

    def _scalar(self, form: struct.Struct) -> int | float | bool:
        (value,) = form.unpack_from(self._content, self._at)
        self._at += form.size
        assert isinstance(value, int | float)
        return value

    def _string(self) -> str:
        (length,) = _LENGTH.unpack_from(self._content, self._at)
        start, end = self._at + 8, self._at + 8 + length
        _require(end <= len(self._content), "it ends in the middle of a string")
        self._at = end
        # Some vocabularies hold tokens that are not valid UTF-8 on their own.
        return self._content[start:end].decode("utf-8", errors="replace")

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
