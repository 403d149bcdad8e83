"""Everything workers say to each other, frozen: a message that exists is valid.

Room messages travel leader to leader, over a reliable link (`link`), and enter the core as inputs. `PageOrder` travels
rank to rank and is an observation. `MetadataRow` is not sent as a message at all: it is the small record that the
prefill side writes next to the pages, room word last.
"""

import struct
from dataclasses import dataclass

from baton_core.errors import Reason, Verdict
from baton_core.request import FAKE_HOST, ROOM_MAX, TOP_LOGPROBS_MAX, Incarnation, PageId, Request, Room, TokenLogprob

TOKEN_MAX = 2**31 - 1

ATTEMPT_MAX = 2**32 - 1
"""What streams and rows have room for."""
INDEX_MAX = 2**31 - 1
"""Greatest id of a page or a row."""
WORDS_CHARS_MAX = 32_768
"""Longest text inside a message: a layout, a fingerprint, an address, a reason in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _RoomMessage:
    room: Room
    attempt: int  # 1-based; a message of an older attempt changes nothing

    def __post_init__(self) -> None:
        if not 0 <= self.room <= ROOM_MAX or not 1 <= self.attempt <= ATTEMPT_MAX:
            raise ValueError(f"room {self.room} attempt {self.attempt}: out of range")

    def _require_short(self, *texts: str) -> None:
        longest = max(map(len, texts))
        if longest > WORDS_CHARS_MAX:
            raise ValueError(f"room {self.room}: a text of {longest} characters, at most {WORDS_CHARS_MAX} are taken")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello(_RoomMessage):
    """Decode to prefill, before decode reserves anything: this is the leg I hold; does yours match?

    With `again` prefill's leg comes along: decode has given up the KV cache of a request that it is answering, and asks for
    it a second time. Its prompt is the prompt and the answer so far; what is drawn next follows them (`Sampling.after`).
    """

    prompt_tokens: int
    digest: int  # `prompt_digest`
    fingerprint: str  # canonical text of the decode side's KV fingerprint
    dp_rank: int  # the prefill DP rank that decode resolved
    layout: str  # text of the decode unit's `kv_layout.UnitLayout`
    again: Request | None = None

    def __post_init__(self) -> None:
        _RoomMessage.__post_init__(self)
        self._require_short(self.fingerprint, self.layout)
        if self.again is not None and not self._fits(self.again):
            raise ValueError(
                f"room {self.room} attempt {self.attempt}: the request that comes along is not of this hello"
            )

    def _fits(self, again: Request) -> bool:
        bootstrap, prompt = again.bootstrap, again.prompt
        if bootstrap is None or bootstrap.room != self.room or bootstrap.host == FAKE_HOST:
            return False
        if again.rejected is not None or len(prompt) != self.prompt_tokens:
            return False
        return bool(prompt) and min(prompt) >= 0 and max(prompt) <= TOKEN_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted(_RoomMessage):
    """Prefill to decode: both legs are here and match; send page orders to this DP rank."""

    dp_rank: int
    layout: str  # text of the prefill unit's `kv_layout.UnitLayout`

    def __post_init__(self) -> None:
        _RoomMessage.__post_init__(self)
        self._require_short(self.layout)


@dataclass(frozen=True, slots=True, kw_only=True)
class NotYet(_RoomMessage):
    """Prefill to decode: your hello is kept; my leg of the room has not arrived."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected(_RoomMessage):
    """Prefill to decode, in answer to a hello: this room will not be served."""

    reason: Reason
    text: str

    @property
    def verdict(self) -> Verdict:
        """The verdict both legs give their clients."""
        return Verdict(reason=self.reason, text=self.text)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomFailed(_RoomMessage):
    """Either side to the other: my leg of this room ended without an answer.

    With `greeted` a hello of this attempt went before, on the same ordered link: who does not know the attempt any more
    has ended it already. Without, decode gave up before it said hello: the room itself is meant.
    """

    reason: Reason
    text: str
    greeted: bool = True

    @property
    def verdict(self) -> Verdict:
        """The verdict both legs give their clients."""
        return Verdict(reason=self.reason, text=self.text)


RoomMessage = Hello | Accepted | NotYet | Rejected | RoomFailed


@dataclass(frozen=True, slots=True, kw_only=True)
class PageOrder:
    """One decode rank to one prefill rank: write this room's pages here.

    `pages` are page ids of the target pool in prompt order, `len == ceil(prompt_tokens / page_tokens)`; `row` is the
    target's metadata row; `address` is where the target's transfer backend listens, in the backend's own words.
    Which member of its unit the sender is, is read off its name (`ranks.member_of`).
    """

    room: Room
    attempt: int
    incarnation: Incarnation  # the sender's own name
    pages: tuple[PageId, ...]
    row: int
    backend: str
    address: str
    layout: str  # text of the decode unit's `kv_layout.UnitLayout`

    def __post_init__(self) -> None:
        numbers = (self.row, min(self.pages, default=0), max(self.pages, default=0))
        if not 1 <= self.attempt <= ATTEMPT_MAX or not all(0 <= number <= INDEX_MAX for number in numbers):
            raise ValueError(f"page order of room {self.room}: attempt, row or page out of range")
        if max(map(len, (self.incarnation, self.backend, self.address, self.layout))) > WORDS_CHARS_MAX:
            raise ValueError(f"page order of room {self.room}: a text is longer than {WORDS_CHARS_MAX} characters")


_ROW = struct.Struct("<QIiIIfhH")  # …, logprob of the first token, likeliest tokens that follow, flags
_TOP = struct.Struct("<if")
_HAS_LOGPROB = 1
ROW_BYTES = 2_048
"""Bytes of one metadata row, a multiple of a cache line, with room for TOP_LOGPROBS_MAX alternatives and for more."""
ROOM_WORD = struct.Struct("<Q")


@dataclass(frozen=True, slots=True, kw_only=True)
class MetadataRow:
    """What decode needs besides the pages. The room word is the first 8 bytes of the row: 0 means not written yet.

    `room` on the wire is `room + 1`, so that the fake room 0 differs from an empty row.
    """

    room: Room
    attempt: int
    first_token: int
    cached_tokens: int = 0
    prompt_tokens: int = 0
    logprob: TokenLogprob | None = None  # of the first token

    def pack(self) -> bytes:
        """The row as `ROW_BYTES` bytes, room word included."""
        top = () if self.logprob is None else self.logprob.top
        raw = _ROW.pack(
            self.room + 1,
            self.attempt,
            self.first_token,
            self.cached_tokens,
            self.prompt_tokens,
            0.0 if self.logprob is None else self.logprob.logprob or 0.0,
            len(top),
            0 if self.logprob is None else _HAS_LOGPROB,
        )
        return (raw + b"".join(_TOP.pack(token, logprob) for token, logprob in top)).ljust(ROW_BYTES, b"\0")

    @staticmethod
    def unpack(raw: bytes) -> "MetadataRow | None":
        """The row in `raw`, or None while its room word is 0."""
        word, attempt, first_token, cached, prompt, logprob, tops, flags = _ROW.unpack_from(raw)
        if word == 0:
            return None
        count = max(0, min(tops, TOP_LOGPROBS_MAX))
        top = tuple(_TOP.unpack_from(raw, _ROW.size + index * _TOP.size) for index in range(count))
        return MetadataRow(
            room=word - 1,
            attempt=attempt,
            first_token=first_token,
            cached_tokens=cached,
            prompt_tokens=prompt,
            logprob=TokenLogprob(token=first_token, logprob=logprob, top=top) if flags & _HAS_LOGPROB else None,
        )
