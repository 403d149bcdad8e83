"""How ranks agree about transfers: each rank's observation is lowered to the minimum over all ranks before anyone acts.

KVPoll is a lattice in which small is dominant, so one Failed rank fails a request everywhere and nobody acts on Success
until every rank has it. One fused minimum a tick carries, per request, the poll, whether the writers stopped, and one
winning reason with the rank it came from.

The gate (`_apply_metadata_gate`): pages and the metadata row arrive by separate writes. A rank whose row is not visible
yet lowers its own Success to Transferring *before* the reduction; so queues, which see agreed polls only, cannot diverge.
(SGLang's pull request 26394 mends the same family of bugs; see docs of S2.)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from baton_core.errors import Reason
from baton_core.events import AgreedPoll
from baton_core.messages import MetadataRow
from baton_core.request import FAKE_HOST, RequestId, Room


class KVPoll(IntEnum):
    """State of one handoff. Small is dominant: agreement is the minimum."""

    Failed = 0
    Bootstrapping = 1
    WaitingForInput = 2
    Transferring = 3
    Success = 4


def merge_status(known: KVPoll | None, news: KVPoll) -> KVPoll | None:
    """A room's status after `news` (S0): Failed is sticky, otherwise the greater; None means there is no such room.

    A room is created only by Bootstrapping or WaitingForInput; creation wipes what an older room of that number left,
    which is why the caller passes `known=None` for a new attempt.
    """
    if known is None:
        return news if news in (KVPoll.Bootstrapping, KVPoll.WaitingForInput) else None
    if KVPoll.Failed in (known, news):
        return KVPoll.Failed
    return max(known, news)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What one rank sees of one attempt right now. `progress` only grows (pages moved)."""

    poll: KVPoll
    writers_stopped: bool = False
    reason: Reason | None = None
    text: str = ""
    progress: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """A handoff whose observation a core wants agreed in the next tick. `row` is None on prefill."""

    rid: RequestId
    room: Room
    attempt: int
    host: str
    row: int | None = None


class Poller(Protocol):
    """One rank's view of one attempt (a sender or a receiver of a transfer backend)."""

    def poll(self) -> Observation:
        """The state right now; must not block."""
        ...


class Group(Protocol):
    """The ranks of one unit, for control only."""

    rank: int

    def all_reduce_min(self, values: Sequence[int]) -> list[int]:
        """Element-wise minimum over all ranks; every rank passes as many values."""
        ...


class MetadataRows(Protocol):
    """This rank's metadata rows."""

    def room_word(self, row: int) -> int:
        """The row's room word; 0 while nothing is written."""
        ...

    def read(self, row: int) -> MetadataRow | None:
        """The whole row, or None while its room word is 0."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GateArgs:
    """What the gate must know of the worker: whether its transfers move nothing at all."""

    backend: str


class Staging(Protocol):
    """Receives chunks into a ring and scatters them later (S8)."""

    def settled(self, room: Room, attempt: int) -> bool:
        """Whether every chunk that arrived has been scattered into the pool."""
        ...


class SoloGroup:
    """The group of a single rank: agreement with oneself."""

    rank = 0

    def all_reduce_min(self, values: Sequence[int]) -> list[int]:
        """The values themselves."""
        return list(values)


_NO_REASON = 1 << 30
_RANKS = 1 << 16


def poll_and_all_reduce(
    pollers: Sequence[Poller],
    group: Group,
    decode_reqs: Sequence[Watch] | None = None,
    metadata_buffers: MetadataRows | None = None,
    server_args: GateArgs | None = None,
) -> list[Observation]:
    """Poll every handoff and return, for each, the minimum over the ranks of the unit.

    With all three of `decode_reqs`, `metadata_buffers` and `server_args` the metadata gate is applied before the
    reduction. Progress and text are reduced too: the least progress, the winning reason's rank.
    """
    seen = [poller.poll() for poller in pollers]
    return _reduce(seen, group, decode_reqs, metadata_buffers, server_args)


def poll_and_all_reduce_with_staging(
    pollers: Sequence[Poller],
    group: Group,
    staging: Staging,
    decode_reqs: Sequence[Watch] | None = None,
    metadata_buffers: MetadataRows | None = None,
    server_args: GateArgs | None = None,
) -> list[Observation]:
    """As `poll_and_all_reduce`, where Success also waits until this rank's staged chunks are scattered."""
    seen = [poller.poll() for poller in pollers]
    for index, watch in enumerate(decode_reqs or ()):
        if seen[index].poll is KVPoll.Success and not staging.settled(watch.room, watch.attempt):
            seen[index] = _lowered(seen[index])
    return _reduce(seen, group, decode_reqs, metadata_buffers, server_args)


def agreed_polls(
    watches: Sequence[Watch], reduced: Sequence[Observation], metadata_buffers: MetadataRows | None = None
) -> tuple[AgreedPoll, ...]:
    """The reduced observations as facts a core may consume; the leader's metadata row joins each Success."""
    out = []
    for watch, one in zip(watches, reduced, strict=True):
        wants_row = one.poll is KVPoll.Success and watch.row is not None and metadata_buffers is not None
        out.append(
            AgreedPoll(
                rid=watch.rid,
                attempt=watch.attempt,
                poll=int(one.poll),
                writers_stopped=one.writers_stopped,
                reason=one.reason,
                text=one.text,
                progress=one.progress,
                row=metadata_buffers.read(watch.row) if wants_row else None,  # type: ignore[union-attr, arg-type]
            )
        )
    return tuple(out)


def _reduce(
    seen: list[Observation],
    group: Group,
    decode_reqs: Sequence[Watch] | None,
    metadata_buffers: MetadataRows | None,
    server_args: GateArgs | None,
) -> list[Observation]:
    if decode_reqs is not None and metadata_buffers is not None and server_args is not None:
        seen = _poll_with_metadata_gate(seen, decode_reqs, metadata_buffers, server_args)
    flat: list[int] = []
    for one in seen:
        packed = _NO_REASON if one.reason is None else int(one.reason) * _RANKS + group.rank
        flat += (int(one.poll), int(one.writers_stopped), packed, one.progress)
    least = group.all_reduce_min(flat)
    assert len(least) == len(flat), f"ranks reduced {len(least)} values where this one has {len(flat)}"
    return [_agreed(seen[index], least[4 * index : 4 * index + 4], group.rank) for index in range(len(seen))]


def _agreed(own: Observation, least: Sequence[int], rank: int) -> Observation:
    reason = None if least[2] == _NO_REASON else Reason(least[2] // _RANKS)
    winner = least[2] % _RANKS
    text = "" if reason is None else own.text if winner == rank else f"rank {winner}: {reason.name.lower()}"
    return Observation(
        poll=KVPoll(least[0]), writers_stopped=bool(least[1]), reason=reason, text=text, progress=least[3]
    )


def _poll_with_metadata_gate(
    seen: Sequence[Observation],
    decode_reqs: Sequence[Watch],
    metadata_buffers: MetadataRows,
    server_args: GateArgs,
) -> list[Observation]:
    polls = [int(one.poll) for one in seen]
    _apply_metadata_gate(polls, decode_reqs, metadata_buffers, server_args)
    return [one if polls[i] == one.poll else _lowered(one) for i, one in enumerate(seen)]


def _apply_metadata_gate(
    polls: list[int], decode_reqs: Sequence[Watch], metadata_buffers: MetadataRows, server_args: GateArgs
) -> None:
    """Lower Success to Transferring wherever this rank's metadata row is not visible yet. Mutates `polls` only."""
    for index, watch in enumerate(decode_reqs):
        if polls[index] != KVPoll.Success or _is_fake_transfer(watch, server_args):
            continue
        if watch.row is not None and metadata_buffers.room_word(watch.row) == 0:
            polls[index] = int(KVPoll.Transferring)


def _is_fake_transfer(req: Watch, server_args: GateArgs) -> bool:
    """Whether no bytes move for this request: a health probe, or a worker whose backend is the null one."""
    return req.host == FAKE_HOST or server_args.backend == "fake"


def _lowered(one: Observation) -> Observation:
    return Observation(
        poll=KVPoll.Transferring,
        writers_stopped=one.writers_stopped,
        reason=one.reason,
        text=one.text,
        progress=one.progress,
    )
