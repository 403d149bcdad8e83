"""One request's handoff: the record that both sides keep, and the one place that moves it between phases.

A side is described by its `PhaseTable`: the legal transitions, how each phase shows as a `KVPoll`, and what a deadline in
it is called. Documents, metrics and simulation coverage are drawn from these tables.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from baton_core.agreement import KVPoll
from baton_core.effects import Effect, Moved
from baton_core.errors import Verdict
from baton_core.events import BootstrapInfos
from baton_core.limits import Millis
from baton_core.prefix import Node
from baton_core.request import Incarnation, PageId, Request, RequestId, Room, TokenLogprob


class Phase(Enum):
    """Phases of both sides; each side's table says which of them it uses and how they follow each other."""

    # prefill
    BOOTSTRAPPING = "bootstrapping"  # the app's leg is here, decode's hello is not
    ACCEPTED = "accepted"  # both legs match; page orders are outstanding
    QUEUED = "queued"  # ordered: waits for pages and its turn (waiting queue)
    FORWARDING = "forwarding"  # chunks are computed and pushed
    INFLIGHT = "inflight"  # everything is computed; the last pages are on their way
    # decode
    RESOLVING = "resolving"  # the prefill worker is being looked up
    GREETING = "greeting"  # hello sent
    PREALLOC = "prealloc"  # accepted: waits for pages and a metadata row
    TRANSFERRING = "transferring"  # pages are ordered
    ARRIVED = "arrived"  # KV cache and first token are here: waits for a place in the batch
    RUNNING = "running"
    # decode, where its pool is too small for all that run
    BACKING_UP = "backing_up"  # retracted: its pages are copied to the host
    RETRACTED = "retracted"  # waits for pages, its KV cache on the host or to be computed anew
    RESTORING = "restoring"  # has pages again, and its KV cache is copied back
    # decode alone (colocated)
    LOCAL = "local"  # waits for pages to compute its own prompt
    COMPUTING = "computing"  # its prompt (and what it answered before it was retracted) is computed here
    # both
    INTAKE = "intake"  # at the door
    REVOKING = "revoking"  # failed or aborted; somebody may still read or write its pages
    DONE = "done"
    FAILED = "failed"

    # Members are unique, tables are keyed by them, and the hash of `Enum` is written in Python.
    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTable:
    """The legal life of one side. `stages` names, for clients, what was going on when a deadline passed."""

    side: str
    transitions: Mapping[Phase, tuple[Phase, ...]]
    polls: Mapping[Phase, KVPoll]
    stages: Mapping[Phase, str]

    def edges(self) -> tuple[tuple[Phase, Phase], ...]:
        """Every legal transition, in table order."""
        return tuple((source, target) for source, targets in self.transitions.items() for target in targets)


@dataclass(slots=True, kw_only=True)
class Handoff:
    """Everything one side knows about one request. Mutated only by its core; `phase` only by `move`."""

    request: Request
    serial: int  # how many came before it on this unit, itself included: its name among ranks
    table: PhaseTable
    arrived_at: Millis
    deadline_at: Millis  # the request's own
    phase: Phase = Phase.INTAKE
    stage_deadline_at: Millis | None = None  # the phase's own, when it is earlier
    attempt: int = 1
    peer: Incarnation | None = None  # the leader of the other side's unit
    peer_layout: str = ""  # that unit's layout, once it said so
    infos: BootstrapInfos | None = None
    pages: tuple[PageId, ...] = ()
    shared: tuple[Node, ...] = ()  # the first of `pages`, which the prefix cache owns and this request has locked
    epoch: int = 0  # of the ledger when it got its pages: its KV cache is not older
    row: int | None = None
    opened: bool = False  # the transfer backend knows this attempt: Offer or Expect was performed
    slots: tuple[PageId, ...] = ()  # of the host: a copy of its pages, in their order
    copy: int = 0  # number of the copy to or from `slots` that is under way
    in_step: int = 0  # running plans that name it
    planned: int = 0  # tokens of the prompt (or of `known`) that running plans compute, or that are computed
    computed: int = 0  # likewise, of prompt and answer: whose KV is in `pages`
    pushed: int = 0  # pages handed to the transfer backend (prefill)
    progress: int = 0
    outputs: list[int] = field(default_factory=list)
    newest_logprob: TokenLogprob | None = None  # of the last of `outputs`, if asked for
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    cached_tokens: int = 0
    to_finish: Verdict | None = None
    answered: bool = False
    fenced: bool = False
    is_retracted: bool = False
    retractions: int = 0
    rebootstraps: int = 0  # times that prefill was asked for its KV cache once more
    computes_here: bool = False  # retracted, and prefill cannot help: to be computed anew on decode itself
    overtaken: int = 0  # requests that got pages before it while it waited for more than there were
    # This pipeline stage alone has stopped its part of the transfer (S1): the one field in which stages may differ.
    revoked_here: bool = False

    @property
    def rid(self) -> RequestId:
        """The request's id."""
        return self.request.rid

    @property
    def room(self) -> Room:
        """The request's room, 0 where it has none."""
        return self.request.room

    @property
    def known(self) -> int:
        """Tokens of the prompt and of the answer so far."""
        return len(self.request.prompt) + len(self.outputs)

    def known_tokens(self, start: int, end: int) -> tuple[int, ...]:
        """Those from position `start` to before `end`."""
        prompt = self.request.prompt
        if end <= len(prompt):
            return prompt[start:end]
        drawn = self.outputs[max(0, start - len(prompt)) : end - len(prompt)]
        return (*prompt[start:], *drawn)

    @property
    def conclude_state(self) -> KVPoll:
        """How this handoff shows to the outside (S0): a view of `phase`."""
        return self.table.polls[self.phase]

    @property
    def bootstrap_infos(self) -> BootstrapInfos | None:
        """What the look-up found; None before it, and for ever after it failed (S4)."""
        return self.infos

    @property
    def kv_receiver(self) -> int | None:
        """The attempt that may still write this request's pages, or None (S2)."""
        return self.attempt if self.opened else None

    @property
    def due_at(self) -> Millis:
        """When the first of its deadlines passes."""
        stage = self.stage_deadline_at
        return stage if stage is not None and stage < self.deadline_at else self.deadline_at

    def owned(self) -> tuple[str, ...]:
        """What this request holds, by name: the one list that admission and release go by."""
        held = (
            ("pages", bool(self.pages)),
            ("row", self.row is not None),
            ("transfer", self.opened),
            ("host backup", bool(self.slots)),
        )
        return tuple(name for name, holds in held if holds)


def overdue(handoffs: Iterable[Handoff], now: Millis) -> list[Handoff]:
    """Those one of whose deadlines has passed, and that were not fenced for it. Asked at every log position."""
    return [
        one
        for one in handoffs
        if one.deadline_at <= now or (one.stage_deadline_at is not None and one.stage_deadline_at <= now)
        if not one.fenced
    ]


def deadlines(handoffs: Collection[Handoff]) -> list[Millis]:
    """All deadlines of those that were not fenced: whichever passes first is what `overdue` waits for."""
    dues = [one.deadline_at for one in handoffs if not one.fenced]
    dues += [one.stage_deadline_at for one in handoffs if one.stage_deadline_at is not None and not one.fenced]
    return dues


def move(
    handoff: Handoff,
    target: Phase,
    effects: list[Effect],
    *,
    stage_deadline_at: Millis | None = None,
    verdict: Verdict | None = None,
) -> None:
    """Move a handoff to `target`: the only line in the repository that assigns a phase.

    Appends `Moved` to `effects` and sets the new phase's own deadline. Asserts that the table allows it.
    """
    source = handoff.phase
    assert target in handoff.table.transitions[source], f"{handoff.table.side}: {source} -> {target} is not legal"
    handoff.phase = target
    handoff.stage_deadline_at = stage_deadline_at
    effects.append(
        Moved(
            rid=handoff.rid,
            room=handoff.room,
            source=source._value_,  # `value` is a descriptor written in Python, and this is the busiest line of a core
            target=target._value_,
            reason=None if verdict is None else verdict.reason,
            text="" if verdict is None else verdict.text,
        )
    )
