"""How ranks agree about transfers: each rank's observation is lowered to the minimum over all ranks before anyone acts.

KVPoll is a lattice in which small is dominant, so one Failed rank fails a request everywhere and nobody acts on Success
until every rank has it. One fused minimum a tick carries, per request, the poll, whether the writers stopped, and one
winning reason with the rank it came from.

The gate (`_apply_metadata_gate`): pages and the metadata row arrive by separate writes. A rank whose row is not visible
yet lowers its own Success to Transferring *before* the reduction, and one whose row is another's to Failed; so queues,
which see agreed polls only, cannot diverge. (SGLang's pull request 26394 mends the same family of bugs; see docs of S2.)

Between pipeline stages nobody reduces in the same turn: what all stages have reported is carried by the unit's log
(`unit_log`), as the *consensus*. `poll_and_all_reduce_pp` reads polls off it, so that no queue looks a second time (S1).
"""

from array import array
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
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
    """What one rank sees of one attempt right now; reduced, what all of them see. `progress` only grows (pages moved)."""

    poll: KVPoll
    writers_stopped: bool = False
    reason: Reason | None = None
    rank: int = 0  # once reduced: the rank that saw the reason
    text: str = ""  # differs between ranks: only the one that saw the reason knows more than its name
    progress: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """A handoff whose observation a core wants agreed in the next tick. `row` is None on prefill."""

    rid: RequestId
    room: Room
    attempt: int
    host: str
    row: int | None = None
    serial: int = 0


class Poller(Protocol):
    """One rank's view of one attempt (a sender or a receiver of a transfer backend)."""

    def poll(self) -> Observation:
        """The state right now; must not block."""
        ...


class Group(Protocol):
    """Ranks that agree: those of one stage of a unit, or some of them. For control only."""

    rank: int  # in the group
    size: int

    def all_reduce_min(self, values: Sequence[int]) -> Sequence[int]:
        """Element-wise minimum over all ranks; every rank passes as many values, each within 64 bits, signed."""
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
    size = 1

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


def poll_and_all_reduce_attn_cp_tp_group(pollers: Sequence[Poller], cp_group: Group, tp_group: Group) -> list[int]:
    """Poll every handoff and return, for each, the minimum over attention CP, then over attention TP.

    For requests that the pipeline's consensus does not cover: of these polls only Failed may be applied.
    """
    polls: Sequence[int] = [int(poller.poll().poll) for poller in pollers]
    for group in (cp_group, tp_group):
        if group.size > 1:
            polls = group.all_reduce_min(polls)
    return list(polls)


def poll_and_all_reduce_pp(
    rids: Iterable[RequestId],
    ready_poll: int,
    pp_good_rids: Collection[RequestId] | None = None,
    pp_bad_rids: Collection[RequestId] | None = None,
) -> list[int | None]:
    """The pipeline's consensus as a poll for each of `rids`, without polling anybody again (S1).

    Failed where any stage failed, `ready_poll` where all stages are ready, None where the consensus does not say. O(1) a
    request. Raises ValueError where there is no consensus.
    """
    if pp_good_rids is None or pp_bad_rids is None:
        raise ValueError("PP consensus is required")
    polls: dict[RequestId, int] = dict.fromkeys(pp_good_rids, ready_poll)
    polls.update(dict.fromkeys(pp_bad_rids, int(KVPoll.Failed)))  # after the good ones: failure wins
    return list(map(polls.get, rids))


def ready_and_failed(
    polls: Iterable[AgreedPoll], ready_poll: KVPoll
) -> tuple[tuple[RequestId, ...], tuple[RequestId, ...]]:
    """The consensus as ids: those that every stage holds `ready_poll` (or beyond), and those that failed somewhere."""
    good: list[RequestId] = []
    bad: list[RequestId] = []
    for poll in polls:
        if poll.poll == KVPoll.Failed:
            bad.append(poll.rid)
        elif poll.poll >= ready_poll:
            good.append(poll.rid)
    return tuple(good), tuple(bad)


def agreed_polls(
    watches: Sequence[Watch],
    reduced: Sequence[Observation],
    metadata_buffers: MetadataRows | None = None,
    previous: Iterable[AgreedPoll] = (),
) -> tuple[AgreedPoll, ...]:
    """The reduced observations as facts a core may consume; the leader's metadata row joins each Success.

    What is as it was in `previous` is that very object: most of a thousand handoffs stand still, and making values is what
    agreement costs.
    """
    known = {poll.serial: poll for poll in previous}
    out = []
    for watch, one in zip(watches, reduced, strict=True):
        last = known.get(watch.serial)
        stands = last is not None and last.attempt == watch.attempt and _still(last, one)
        out.append(last if last is not None and stands else _agreed_poll(watch, one, metadata_buffers))
    return tuple(out)


def _still(last: AgreedPoll, one: Observation) -> bool:
    """Whether nothing has changed but perhaps the text, which is nobody's business but the leader's."""
    return (
        last.poll == one.poll != KVPoll.Success  # with which comes a row
        and last.progress == one.progress
        and last.writers_stopped == one.writers_stopped
        and last.reason == one.reason
        and last.rank == one.rank
    )


def _agreed_poll(watch: Watch, one: Observation, metadata_buffers: MetadataRows | None) -> AgreedPoll:
    row = None
    if one.poll is KVPoll.Success and watch.row is not None and metadata_buffers is not None:
        row = metadata_buffers.read(watch.row)
    return AgreedPoll(
        rid=watch.rid,
        attempt=watch.attempt,
        serial=watch.serial,
        poll=int(one.poll),
        writers_stopped=one.writers_stopped,
        reason=one.reason,
        rank=one.rank,
        text=one.text,
        progress=one.progress,
        row=row,
        row_index=watch.row,
    )


def _reduce(
    seen: list[Observation],
    group: Group,
    decode_reqs: Sequence[Watch] | None,
    metadata_buffers: MetadataRows | None,
    server_args: GateArgs | None,
) -> list[Observation]:
    if decode_reqs is not None and metadata_buffers is not None and server_args is not None:
        seen = _poll_with_metadata_gate(seen, decode_reqs, metadata_buffers, server_args)
    if group.size == 1:
        return seen
    flat = array("q")  # a buffer: groups reduce it without looking at each number
    for one in seen:
        packed = _NO_REASON if one.reason is None else int(one.reason) * _RANKS + group.rank
        flat.extend((one.poll, one.writers_stopped, packed, one.progress))
    least = group.all_reduce_min(flat)
    assert len(least) == len(flat), f"ranks reduced {len(least)} values where this one has {len(flat)}"
    return [_agreed(seen[index], least[4 * index : 4 * index + 4], group.rank) for index in range(len(seen))]


def _agreed(own: Observation, least: Sequence[int], rank: int) -> Observation:
    if least[2] == _NO_REASON and (own.poll, own.writers_stopped, own.progress) == (least[0], least[1], least[3]):
        return own  # the usual case, and with a thousand handoffs the making of values is what agreement costs
    reason = None if least[2] == _NO_REASON else Reason(least[2] // _RANKS)
    winner = least[2] % _RANKS
    text = "" if reason is None else own.text if winner == rank else f"rank {winner}: {reason.name.lower()}"
    return Observation(
        poll=KVPoll(least[0]),
        writers_stopped=bool(least[1]),
        reason=reason,
        rank=0 if reason is None else winner,
        text=text,
        progress=least[3],
    )


def _poll_with_metadata_gate(
    seen: Sequence[Observation],
    decode_reqs: Sequence[Watch],
    metadata_buffers: MetadataRows,
    server_args: GateArgs,
) -> list[Observation]:
    polls = [int(one.poll) for one in seen]
    _apply_metadata_gate(polls, decode_reqs, metadata_buffers, server_args)
    gated = [one if polls[i] == one.poll else _lowered(one) for i, one in enumerate(seen)]
    for index, watch in enumerate(decode_reqs):
        if gated[index].poll is KVPoll.Success and not _is_fake_transfer(watch, server_args):
            gated[index] = _failed_if_corrupt(gated[index], watch, metadata_buffers)
    return gated


def _apply_metadata_gate(
    polls: list[int], decode_reqs: Sequence[Watch], metadata_buffers: MetadataRows, server_args: GateArgs
) -> None:
    """Lower Success to Transferring wherever this rank's metadata row is not visible yet. Mutates `polls` only."""
    for index, watch in enumerate(decode_reqs):
        if polls[index] != KVPoll.Success or _is_fake_transfer(watch, server_args):
            continue
        if watch.row is not None and metadata_buffers.room_word(watch.row) == 0:
            polls[index] = int(KVPoll.Transferring)


def _failed_if_corrupt(one: Observation, watch: Watch, metadata_buffers: MetadataRows) -> Observation:
    """A visible row of another room or attempt is a failure that all ranks must see, wherever it lies."""
    row = None if watch.row is None else metadata_buffers.read(watch.row)
    if row is None or (row.room, row.attempt) == (watch.room, watch.attempt):
        return one
    text = f"the metadata row of room {watch.room} attempt {watch.attempt} holds room {row.room} attempt {row.attempt}"
    return replace(one, poll=KVPoll.Failed, reason=Reason.METADATA_CORRUPT, text=text)


def _is_fake_transfer(req: Watch, server_args: GateArgs) -> bool:
    """Whether no bytes move for this request: a health probe, or a worker whose backend is the null one."""
    return req.host == FAKE_HOST or server_args.backend == "fake"


def _lowered(one: Observation) -> Observation:
    return replace(one, poll=KVPoll.Transferring)
