"""What a core asks its driver to do. Effects are values: the driver performs them, in order, and logs every `Moved`."""

from dataclasses import dataclass

from baton_core.errors import Reason
from baton_core.events import BootstrapInfos
from baton_core.messages import MetadataRow, RoomMessage
from baton_core.request import Bootstrap, Finish, Incarnation, PageId, RequestId, Room, TokenLogprob


@dataclass(frozen=True, slots=True, kw_only=True)
class Emit:
    """To the app: new tokens of a request, and with `finish` its end (exactly one a request)."""

    rid: RequestId
    tokens: tuple[int, ...] = ()
    finish: Finish | None = None
    cached_tokens: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()  # of `tokens`, one each, if asked for
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # with the first tokens, if asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class Tell:
    """To the leader of another worker's unit. Performed by this unit's leader only."""

    peer: Incarnation
    message: RoomMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class LookUp:
    """Decode: find the prefill worker of this room; answered by `Resolved` or `LookupFailed`."""

    rid: RequestId
    bootstrap: Bootstrap


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisterRank:
    """Prefill: tell the registry of this request that its room runs on this DP rank. Performed by the leader only (S3)."""

    rid: RequestId
    room: Room
    dp_rank: int
    bootstrap: Bootstrap


@dataclass(frozen=True, slots=True, kw_only=True)
class Connect:
    """Decode: keep a link to this prefill worker; answered by `PeerGone` if it cannot be had or is lost."""

    infos: BootstrapInfos


@dataclass(frozen=True, slots=True, kw_only=True)
class Expect:
    """Decode: let this attempt's writers write these pages and this row, then order them from `peer`'s unit.

    Which of its ranks write here follows from the two unit layouts; `source` is the text of prefill's. The first
    `held_pages` of `pages` hold their tokens already and are shared: nobody may write them.
    """

    rid: RequestId
    room: Room
    attempt: int
    peer: Incarnation  # the leader of that unit
    source: str
    prompt_tokens: int
    pages: tuple[PageId, ...]
    row: int
    held_pages: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Prefill: take page orders of this attempt from the ranks of `peer`'s unit, and from nobody else.

    `target` is the text of that unit's layout; `pages_total` counts pages of this side.
    """

    rid: RequestId
    room: Room
    attempt: int
    peer: Incarnation  # the leader of that unit
    target: str
    prompt_tokens: int
    pages_total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """Prefill: send finished pages. `first` is the ordinal of `pages[0]` in the prompt; `row` comes with the last push."""

    room: Room
    attempt: int
    first: int
    pages: tuple[PageId, ...]
    row: MetadataRow | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Revoke:
    """Stop all reading (prefill) or writing (decode) of this attempt's pages; `writers_stopped` reports the end."""

    room: Room
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fence:
    """The peer did not confirm in time: cut it off from this attempt's pages."""

    room: Room
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Forget:
    """This attempt is over and its pages are back in the pool: drop what the transfer backend keeps about it."""

    room: Room
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Backup:
    """Decode: copy these pages to the host, page by page, into these slots. Every rank copies its own share.

    Copies are numbered from 1 and made in that order. The end is an observation of this rank (`ledger.copy_watch`), with
    `writers_stopped`: until it is agreed, pages and slots belong to the copy.
    """

    rid: RequestId
    copy: int
    pages: tuple[PageId, ...]
    slots: tuple[PageId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Restore:
    """Decode: copy these slots back into these pages; otherwise as `Backup`."""

    rid: RequestId
    copy: int
    slots: tuple[PageId, ...]
    pages: tuple[PageId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """A request changed its phase: one log line, one metric."""

    rid: RequestId
    room: Room
    source: str
    target: str
    reason: Reason | None = None
    text: str = ""


Effect = (
    Emit
    | Tell
    | LookUp
    | RegisterRank
    | Connect
    | Expect
    | Offer
    | Push
    | Revoke
    | Fence
    | Forget
    | Backup
    | Restore
    | Moved
)
