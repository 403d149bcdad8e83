"""Bytes for messages: one table from tag to class, msgpack through msgspec, never pickle.

Decoding validates: unknown tags, wrong types and values that a message's constructor refuses all raise `FrameError`,
and nothing else does.
"""

from collections.abc import Mapping
from typing import Any

import msgspec


class FrameError(ValueError):
    """A frame is not one of ours; it is counted and dropped, and harms nobody."""


class Codec:
    """Encodes and decodes a closed set of dataclasses. `table` maps a tag (stable on the wire) to a class."""

    def __init__(self, table: Mapping[int, type[Any]]) -> None:
        self._tags = {cls: tag for tag, cls in table.items()}
        self._decoders = {tag: msgspec.msgpack.Decoder(cls) for tag, cls in table.items()}
        self._encoder = msgspec.msgpack.Encoder()

    def encode(self, message: object) -> bytes:
        """One byte of tag, then msgpack. KeyError if the class is not in the table (our bug)."""
        return bytes((self._tags[type(message)],)) + self._encoder.encode(message)

    def decode(self, frame: bytes | memoryview) -> Any:
        """The message in `frame`. Raises FrameError."""
        if len(frame) < 2 or frame[0] not in self._decoders:
            raise FrameError(f"unknown frame ({len(frame)} bytes, tag {frame[0] if len(frame) else None})")
        try:
            return self._decoders[frame[0]].decode(frame[1:])
        except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
            raise FrameError(f"bad frame, tag {frame[0]}: {error}") from error
