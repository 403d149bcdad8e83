"""What a stream has told so far, so that another pair can continue it when its decode worker is lost; on bytes.

A decode worker that is asked for token ids ends each of its writes with a record, a field of the last event that no
client knows:

    data: {"text": " the"}                          passes
    baton-part: {"tokens": [262]}                   is kept: the tokens behind all events up to here

    baton-last: {"tokens": [2]}                     likewise, and the answer is complete
    data: {"error": {…}}
    baton-fail: 500                                 the worker ends the answer with this error: nothing passes

No event passes before its record is here, and no record is kept before its events pass: so what the client has seen and
what a continuation begins with are the same, wherever the connection breaks. Records are opaque: they are what the next
worker is given, and it alone reads them.
"""

import msgspec

from baton_router.upstream import UpstreamLost

TOKEN_IDS_HEADER = "x-baton-token-ids"
"""Of a call: give records, please. Of an answer: here they are; the number of tokens that were given with the call."""
HELD_BYTES_MAX = 64 << 20
MARK = b"\nbaton-"
END = b"\n\n"
PART, LAST, FAIL = b"part", b"last", b"fail"
KIND, VALUE = slice(0, 4), slice(6, None)
"""Of what stands behind the mark: `part: {…}`."""


class Journal:
    """The records of one stream, over all the workers that had a share in it."""

    def __init__(self) -> None:
        self.is_complete = False  # the client has the whole answer
        self.error: tuple[int, bytes] | None = None  # status and words of a worker that gave up
        self._records = bytearray()
        self._held = b""

    @property
    def has_begun(self) -> bool:
        """Whether anything passed. If not, another worker may begin anew."""
        return bool(self._records)

    def continuation(self) -> msgspec.Raw:
        """All records, as a JSON array."""
        return msgspec.Raw(b"[" + self._records + b"]")

    def resume(self) -> None:
        """Another worker continues; what the last one left half said is void."""
        self._held, self.error = b"", None

    def take(self, chunk: bytes) -> bytes:
        """The events that may pass now, without their records. Raises UpstreamLost when one never ends."""
        held = self._held + chunk if self._held else chunk
        passed: list[bytes] = []
        records = self._records
        events, *pieces = held.split(MARK)  # each piece: a record, and the events behind it
        for number, piece in enumerate(pieces):
            record, end, following = piece.partition(END)
            if not end:
                events = MARK.join((events, *pieces[number:]))
                break
            kind = record[KIND]
            if kind == FAIL:
                self.error = int(record[VALUE]), events.rpartition(b"data: ")[2]
                events = b""
                break
            if records:
                records += b","
            records += record[VALUE]
            self.is_complete = kind == LAST
            if events:
                passed += (events, END)
            events = following
        self._held = events
        if len(events) > HELD_BYTES_MAX:
            raise UpstreamLost(f"an event is longer than {HELD_BYTES_MAX} bytes")
        return b"".join(passed)

    def rest(self) -> bytes:
        """At the end of a good answer: what came without a record."""
        held, self._held = self._held, b""
        return held
