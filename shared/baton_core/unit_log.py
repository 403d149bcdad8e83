"""One log a unit: how its ranks apply the same facts in the same order, and so stay the same.

    leader   inputs, step results, what all stages report  ──►  LogEntry t  ──►  every member (itself included)
    member   Replica.apply(entry t):  inputs ─► agreement ─► deadlines ─► results ─► next plan
    member   Done (a step is computed here), Report (what a stage sees)  ──►  leader

Inside a stage (its cp * tp ranks) observations are agreed at once, by one fused minimum a position. Between pipeline
stages nobody waits: the first rank of each stage *reports* what its stage agreed on, and entry t+1 carries the minimum of
all stages' reports, the **consensus**. Whatever arrives between consensus and consumption (an abort, say) is an input of
entry t+1 too and precedes it on every stage alike; nobody polls again (S1). A request that the consensus does not cover
is polled inside the stage, and only its failure is applied, to this stage's own transfer.

What a stage sees of an attempt only grows (`agreement`), so the minimum of reports of different age is a lower bound of
the truth, never a lie.

Everything here is pure; the engine's driver and the simulation run the same code.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, assert_never

from baton_core.agreement import KVPoll, MetadataRows, Observation, Watch, agreed_polls
from baton_core.effects import Effect
from baton_core.errors import EngineError
from baton_core.events import AgreedPoll, Event, Input, LocalPoll, Observed
from baton_core.limits import Millis
from baton_core.plan import StepPlan, StepResult
from baton_core.ranks import Member, Parallel

DIGEST_EVERY = 64
"""Siblings compare the digests of their state every so many log positions."""


class Divergence(EngineError):
    """Two ranks of a unit hold different states: the unit must stop before it serves a wrong text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogEntry:
    """Position `position` of a unit's log: what every member applies next, and when that is (the leader's clock)."""

    position: int
    now: Millis
    inputs: tuple[Input, ...] = ()
    results: tuple[StepResult, ...] = ()  # computed by every member, as the speaker computed them
    consensus: tuple[AgreedPoll, ...] = ()  # with pp > 1: what all stages reported
    round: int | None = None  # with DP attention: every unit begins a step now, or idles along


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The first rank of stage `stage` to its leader: what the stage sees after applying `position`."""

    stage: int
    position: int
    polls: tuple[AgreedPoll, ...]  # rows left out: the leader has its own
    digest: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A member to its leader: this step is computed here. The speaker's `result` counts."""

    member: Member
    step: int
    result: StepResult | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Idled:
    """A member to its leader: it has taken part in a round of other units (`rounds`)."""

    member: Member


@dataclass(frozen=True, slots=True)
class Observe:
    """A replica asks its stage: `Stage.observe`."""

    watches: Sequence[Watch]


@dataclass(frozen=True, slots=True)
class ObserveUncovered:
    """A replica asks its stage: `Stage.observe_uncovered`."""

    watches: Sequence[Watch]


@dataclass(frozen=True, slots=True)
class Compare:
    """A replica asks its stage: `Stage.compare`."""

    digest: int


Question = Observe | ObserveUncovered | Compare
"""The collectives of a log position. All ranks of a stage ask the same ones in the same order."""

Applying = Generator[Question, Any, None]


class Core(Protocol):
    """What a replica needs of a prefill or decode core."""

    def step(self, event: Event, now: Millis) -> list[Effect]: ...
    def tick(self, now: Millis) -> list[Effect]: ...
    def plan(self) -> StepPlan | None: ...
    def take_effects(self) -> list[Effect]: ...
    def commit(self, result: StepResult, now: Millis) -> list[Effect]: ...
    def watched(self) -> list[Watch]: ...
    def digest(self) -> int: ...


class Stage(Protocol):
    """How a rank agrees with its stage. Each call is a collective, and blocks until all ranks of the stage have made it."""

    def observe(self, watches: Sequence[Watch]) -> list[Observation]:
        """What this rank sees, gated, and reduced over its stage."""
        ...

    def observe_uncovered(self, watches: Sequence[Watch]) -> list[int]:
        """What this rank sees, reduced over attention CP, then TP (`poll_and_all_reduce_attn_cp_tp_group`)."""
        ...

    def compare(self, digest: int) -> None:
        """Raise Divergence unless every rank of the stage holds this digest."""
        ...


class Site(Protocol):
    """What a replica needs of the process it lives in. Nothing here blocks."""

    @property
    def rows(self) -> MetadataRows | None:
        """This rank's metadata rows (decode)."""
        ...

    def perform(self, effects: Sequence[Effect], now: Millis) -> None:
        """Do what the core asks for, in order."""
        ...

    def flush(self) -> None:
        """Tokens leave now, before the next step begins to compete for the processor."""
        ...

    def start(self, plan: StepPlan) -> None:
        """Compute this plan after those that were started before."""
        ...

    def idle(self) -> None:
        """DP attention: another unit computes; take part with nothing of our own."""
        ...

    def report(self, report: Report) -> None:
        """To the leader (first rank of a stage, pp > 1)."""
        ...


class Replica:
    """One member's copy of the unit's core. `apply` is everything that happens at a log position."""

    def __init__(self, core: Core, site: Site, parallel: Parallel, member: Member) -> None:
        self._core, self._site, self._parallel = core, site, parallel
        self._stage, inside = divmod(member, parallel.stage_members)
        self._reports = parallel.pp > 1 and inside == 0
        self._position = 0
        self._agreed: tuple[AgreedPoll, ...] = ()
        self._reported: tuple[AgreedPoll, ...] = ()

    @property
    def position(self) -> int:
        """The last position applied."""
        return self._position

    def apply(self, entry: LogEntry, stage: Stage) -> None:
        """Take the entry. Raises Divergence; AssertionError on a gap in the log, which is a bug."""
        asking = self.applying(entry)
        answer: object = None
        while True:
            try:
                question = asking.send(answer)
            except StopIteration:
                return
            match question:
                case Observe():
                    answer = stage.observe(question.watches)
                case ObserveUncovered():
                    answer = stage.observe_uncovered(question.watches)
                case Compare():
                    answer = stage.compare(question.digest)  # type: ignore[func-returns-value]
                case _:
                    assert_never(question)

    def applying(self, entry: LogEntry) -> Applying:
        """`apply` as a generator: it yields what the stage must agree on, and is sent the answer.

        For those who cannot block in a collective: the simulation plays all ranks of a unit in one thread.
        """
        assert entry.position == self._position + 1, f"entry {entry.position} after {self._position}"
        self._position = entry.position
        core, site, now = self._core, self._site, entry.now
        for event in entry.inputs:
            site.perform(core.step(event, now), now)
        yield from self._agree(entry)
        site.perform(core.tick(now), now)
        for result in entry.results:
            site.perform(core.commit(result, now), now)
        site.flush()
        self._plan(entry)
        yield from self._account(entry)

    def _agree(self, entry: LogEntry) -> Applying:
        watches = self._core.watched()
        if self._parallel.pp == 1:
            if watches:
                seen = yield Observe(watches)
                self._agreed = agreed_polls(watches, seen, self._site.rows, previous=self._agreed)
                self._step(Observed(polls=self._agreed), entry.now)
            return
        covered = {_name(poll) for poll in entry.consensus}
        uncovered = [watch for watch in watches if _name(watch) not in covered]
        polls_here = (yield ObserveUncovered(uncovered)) if uncovered else []
        local = tuple(
            LocalPoll(rid=watch.rid, attempt=watch.attempt, serial=watch.serial, poll=poll)
            for watch, poll in zip(uncovered, polls_here, strict=True)
        )
        if entry.consensus or local:
            self._step(Observed(polls=entry.consensus, uncovered=local), entry.now)

    def _step(self, event: Event, now: Millis) -> None:
        self._site.perform(self._core.step(event, now), now)

    def _plan(self, entry: LogEntry) -> None:
        core, site = self._core, self._site
        if self._parallel.dp_attention and self._parallel.dp > 1:
            if entry.round is not None:
                plan = core.plan()
                site.perform(core.take_effects(), entry.now)  # planning moves requests, too
                site.idle() if plan is None else site.start(plan)
            return
        while (plan := core.plan()) is not None:
            site.perform(core.take_effects(), entry.now)
            site.start(plan)
        site.perform(core.take_effects(), entry.now)  # requests may give way though there is nothing to compute

    def _account(self, entry: LogEntry) -> Applying:
        """Compare states now and then, and with pp > 1 tell the leader what this stage sees."""
        digest = None
        if self._parallel.members > 1 and entry.position % DIGEST_EVERY == 0:
            digest = self._core.digest()
            if self._parallel.stage_members > 1:
                yield Compare(digest)
        if self._parallel.pp == 1:
            return
        watches = self._core.watched()
        seen = (yield Observe(watches)) if watches else []
        polls = agreed_polls(watches, seen, previous=self._reported)
        if self._reports and (polls != self._reported or digest is not None):
            self._reported = polls
            self._site.report(Report(stage=self._stage, position=entry.position, polls=polls, digest=digest))


class UnitLeader:
    """Writes the log: gathers inputs, results and reports, and says when there is something to write."""

    def __init__(self, parallel: Parallel, rows: MetadataRows | None = None) -> None:
        self._parallel = parallel
        self._rows = rows
        self._position = 0
        self._inputs: list[Input] = []
        self._done: dict[int, set[Member]] = {}  # by step
        self._results: dict[int, StepResult] = {}
        self._ready: list[StepResult] = []
        self._reports: dict[int, Report] = {}
        self._digests: dict[int, dict[int, int]] = {}
        self._consensus: tuple[AgreedPoll, ...] = ()
        self._news = False

    @property
    def wants(self) -> bool:
        """Whether an entry would say something new."""
        return bool(self._inputs or self._ready or self._news)

    @property
    def position(self) -> int:
        """The last position written."""
        return self._position

    def put(self, event: Input) -> None:
        """An input for the next entry."""
        self._inputs.append(event)

    def done(self, note: Done) -> bool:
        """A member computed a step; with the last of them its result becomes a fact, and this is True."""
        members = self._done.setdefault(note.step, set())
        members.add(note.member)
        if note.result is not None and (note.member == self._parallel.speaker or note.result.failed is not None):
            kept = self._results.get(note.step)
            if kept is None or kept.failed is None:
                self._results[note.step] = note.result
        if len(members) < self._parallel.members:
            return False
        del self._done[note.step]
        self._ready.append(self._results.pop(note.step))
        return True

    def late(self) -> dict[int, tuple[Member, ...]]:
        """Steps that some members have computed and others have not, and those others: for people, when it hangs."""
        everybody = range(self._parallel.members)
        return {step: tuple(one for one in everybody if one not in done) for step, done in self._done.items()}

    def report(self, report: Report) -> None:
        """A stage says what it sees. Raises Divergence when its state differs from another stage's."""
        self._reports[report.stage] = report
        if report.digest is not None:
            self._compare(report)
        merged = self._merged()
        if merged != self._consensus:
            self._consensus, self._news = merged, True

    def next_entry(self, now: Millis, round: int | None = None) -> LogEntry:
        """The next entry, whether or not it says something new."""
        self._position += 1
        entry = LogEntry(
            position=self._position,
            now=now,
            inputs=tuple(self._inputs),
            results=tuple(self._ready),
            consensus=tuple(self._with_row(poll) for poll in self._consensus),
            round=round,
        )
        self._inputs.clear()
        self._ready.clear()
        self._news = False
        return entry

    def _merged(self) -> tuple[AgreedPoll, ...]:
        """The minimum of all stages' latest reports, for what all of them report."""
        if len(self._reports) < self._parallel.pp:
            return ()
        first, *others = [self._reports[stage] for stage in range(self._parallel.pp)]
        tables = [{_name(poll): poll for poll in other.polls} for other in others]
        merged: list[AgreedPoll] = []
        for poll in first.polls:
            found = [table.get(_name(poll)) for table in tables]
            present = [one for one in found if one is not None]
            if len(present) == len(tables):
                merged.append(_least([poll, *present]))
        return tuple(merged)

    def _with_row(self, poll: AgreedPoll) -> AgreedPoll:
        if self._rows is None or poll.row_index is None or poll.poll != KVPoll.Success:
            return poll
        return replace(poll, row=self._rows.read(poll.row_index))

    def _compare(self, report: Report) -> None:
        assert report.digest is not None
        known = self._digests.setdefault(report.position, {})
        known[report.stage] = report.digest
        if len(set(known.values())) > 1:
            raise divergence(report.position, {f"stage {stage}": digest for stage, digest in sorted(known.items())})
        if len(known) == self._parallel.pp:
            del self._digests[report.position]


def _name(one: Watch | AgreedPoll) -> tuple[int, int]:
    """What tells a watched attempt from every other that this unit ever had."""
    return (one.serial, one.attempt)


def _least(polls: Sequence[AgreedPoll]) -> AgreedPoll:
    blamed = min(
        (poll for poll in polls if poll.reason is not None), key=lambda poll: (poll.reason, poll.rank), default=None
    )
    return replace(
        polls[0],
        poll=min(poll.poll for poll in polls),
        writers_stopped=all(poll.writers_stopped for poll in polls),
        reason=None if blamed is None else blamed.reason,
        rank=0 if blamed is None else blamed.rank,
        text="" if blamed is None else blamed.text,
        progress=min(poll.progress for poll in polls),
    )


def divergence(position: int, digests: dict[str, int]) -> Divergence:
    """The report of a divergence."""
    listed = ", ".join(f"{who} has {digest:016x}" for who, digest in digests.items())
    return Divergence(f"the ranks of this unit hold different states at log position {position}: {listed}")
