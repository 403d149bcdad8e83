"""Cores in known states, for unit tests: everything is driven through `step`, `tick`, `plan` and `commit`."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, Generic, TypeVar

from baton_core.agreement import KVPoll
from baton_core.decode.core import DecodeCore
from baton_core.effects import Effect, Emit, Moved, Tell
from baton_core.errors import Reason, Verdict
from baton_core.events import (
    AgreedPoll,
    BootstrapInfos,
    Event,
    LocalPoll,
    Observed,
    PeerSaid,
    RankEndpoint,
    Resolved,
    Submit,
)
from baton_core.kv_layout import UnitLayout
from baton_core.limits import Limits
from baton_core.messages import Accepted, Hello, MetadataRow, RoomMessage
from baton_core.plan import SequenceResult, StepPlan, StepResult
from baton_core.prefill.core import PrefillCore
from baton_core.request import FAKE_HOST, Bootstrap, Request, Sampling, prompt_digest

PROMPT = (5, 6, 7, 8, 9)
ROOM = 77
P, D = "P#1/0.0", "D#1/0.0"
"""Leaders of a prefill and of a decode unit."""
FINGERPRINT = '{"dtype":"fp32"}'
PAGE_TOKENS = 2
LAYOUT = UnitLayout(layers=2, kv_heads=2, head_dim=4, element_bytes=4, page_tokens=PAGE_TOKENS)
INFOS = BootstrapInfos(incarnation="P#1", dp_rank=0, endpoints=(RankEndpoint(host="10.0.0.1", port=9),))
GONE = Verdict(reason=Reason.CLIENT_GONE, text="the client left")
LIMITS = Limits(chunk_tokens=4)
ACCEPTED = Accepted(room=ROOM, attempt=1, dp_rank=0, layout=LAYOUT.to_text())
LOST = Verdict(reason=Reason.PEER_LOST, text="silence")


def sampling(**fields: Any) -> Sampling:
    """Three tokens at most, unless told otherwise."""
    return Sampling(**{"max_new_tokens": 3, **fields})


def request(rid: str = "r", room: int = ROOM, **fields: Any) -> Request:
    """A request with a room; `host` FAKE_HOST makes it a probe, `bootstrap=None` a colocated one."""
    host = fields.pop("host", "10.0.0.1")
    made = {"prompt": PROMPT, "sampling": sampling(), "bootstrap": Bootstrap(host=host, port=1, room=room), **fields}
    return Request(rid=rid, **made)


def probe(rid: str = "probe", **fields: Any) -> Request:
    """A request with the fake host."""
    return request(rid, 0, host=FAKE_HOST, **fields)


def hello(room: int = ROOM, attempt: int = 1, **fields: Any) -> Hello:
    """Decode's hello for `request()`."""
    made = {
        "prompt_tokens": len(PROMPT),
        "digest": prompt_digest(PROMPT),
        "fingerprint": FINGERPRINT,
        "dp_rank": 0,
        "layout": LAYOUT.to_text(),
        **fields,
    }
    return Hello(room=room, attempt=attempt, **made)


def polled(rid: str = "r", poll: KVPoll = KVPoll.Success, attempt: int = 1, **fields: Any) -> Observed:
    """One agreed poll. `Bench.step` adds the serial of the live request, unless it is given here."""
    return Observed(polls=(agreed(rid, poll, attempt, **fields),))


def agreed(rid: str = "r", poll: KVPoll = KVPoll.Success, attempt: int = 1, **fields: Any) -> AgreedPoll:
    """What all ranks agree on about one handoff."""
    return AgreedPoll(rid=rid, attempt=attempt, poll=int(poll), **{"writers_stopped": False, **fields})


T = TypeVar("T")
C = TypeVar("C", PrefillCore, DecodeCore)
Poll = TypeVar("Poll", AgreedPoll, LocalPoll)


class Meeting:
    """One rank's end of a group whose ranks are threads, and which waits for everybody, as a real one does."""

    def __init__(self, rank: int, barrier: threading.Barrier, values: list[list[int]]) -> None:
        self.rank, self.size = rank, barrier.parties
        self._barrier, self._values = barrier, values

    def all_reduce_min(self, values: Sequence[int]) -> list[int]:
        """The minimum; BrokenBarrierError where somebody does not come."""
        self._values[self.rank] = list(values)
        self._barrier.wait(timeout=5)
        least = [min(column) for column in zip(*self._values, strict=True)]
        self._barrier.wait(timeout=5)
        return least


def meetings(size: int) -> list[Meeting]:
    """The ends of one group."""
    barrier, values = threading.Barrier(size), [[] for _ in range(size)]
    return [Meeting(rank, barrier, values) for rank in range(size)]


def at_once(calls: Sequence[Callable[[], T]]) -> list[T]:
    """What each of them returns, on a thread of its own."""
    with ThreadPoolExecutor(len(calls)) as threads:
        return [one.result() for one in [threads.submit(call) for call in calls]]


def together(ranks: int, run: Callable[[int, Meeting], T]) -> list[T]:
    """What `run(rank, group)` returns on each rank of one group."""
    return at_once([partial(run, one.rank, one) for one in meetings(ranks)])


class Bench(Generic[C]):
    """A core, its clock, and what it said so far."""

    def __init__(self, core: C) -> None:
        self.core: C = core
        self.now = 1_000

    def step(self, event: Event) -> list[Effect]:
        """Let an event happen now."""
        if isinstance(event, Observed):
            event = Observed(
                polls=tuple(map(self._named, event.polls)), uncovered=tuple(map(self._named, event.uncovered))
            )
        return self.core.step(event, self.now)

    def _named(self, poll: Poll) -> Poll:
        handoff = self.core.ledger.live.get(poll.rid)
        return poll if poll.serial or handoff is None else replace(poll, serial=handoff.serial)

    def submit(self, one: Request) -> list[Effect]:
        """A request arrives."""
        return self.step(Submit(request=one))

    def say(self, message: RoomMessage, peer: str) -> list[Effect]:
        """A peer says something."""
        return self.step(PeerSaid(peer=peer, message=message))

    def after(self, ms: int) -> list[Effect]:
        """Let time pass, then tick."""
        self.now += ms
        return self.core.tick(self.now)

    def plan(self) -> StepPlan:
        """The next plan; there must be one."""
        plan = self.core.plan()
        assert plan is not None
        return plan

    def compute(self, token: int = 42, failed: Verdict | None = None) -> list[Effect]:
        """Plan a step and commit it; every sampled slice draws `token`."""
        return self.commit(self.plan(), token, failed)

    def commit(self, plan: StepPlan, token: int = 42, failed: Verdict | None = None) -> list[Effect]:
        """Commit a plan."""
        drawn = tuple(SequenceResult(rid=piece.rid, token=token) for piece in plan.slices if piece.sample)
        return self.core.commit(StepResult(step=plan.step, results=() if failed else drawn, failed=failed), self.now)

    @property
    def free(self) -> int:
        """Free pages."""
        return self.core.ledger.pool.free

    @property
    def live(self) -> list[str]:
        """Live request ids."""
        return list(self.core.ledger.live)

    def phase(self, rid: str = "r") -> str:
        """Where a live request is."""
        return self.core.ledger.live[rid].phase.value


def prefill(limits: Limits = LIMITS, **fields: Any) -> Bench[PrefillCore]:
    """A prefill core with 8 pages of 2 tokens and no prefix cache."""
    made = {
        "pool_pages": 8,
        "layout": LAYOUT,
        "context_tokens": 32,
        "fingerprint": FINGERPRINT,
        "prefix_cache": False,
        **fields,
    }
    return Bench(PrefillCore(limits=limits, **made))


def decode(limits: Limits = LIMITS, **fields: Any) -> Bench[DecodeCore]:
    """A decode core with 8 pages of 2 tokens and no prefix cache."""
    made = {
        "pool_pages": 8,
        "layout": LAYOUT,
        "context_tokens": 32,
        "fingerprint": FINGERPRINT,
        "prefix_cache": False,
        **fields,
    }
    return Bench(DecodeCore(limits=limits, **made))


def with_limits(**fields: Any) -> Limits:
    """The usual limits, some of them changed."""
    return replace(LIMITS, **fields)


def queued(bench: Bench[PrefillCore], rid: str = "r", room: int = ROOM) -> None:
    """Prefill: both legs are here and the pages are ordered."""
    bench.submit(request(rid, room))
    bench.say(hello(room), D)
    bench.step(polled(rid, KVPoll.WaitingForInput))


def accepted(room: int = ROOM, attempt: int = 1, **fields: Any) -> Accepted:
    """Prefill's answer to a hello that fits."""
    return Accepted(room=room, attempt=attempt, **{"dp_rank": 0, "layout": LAYOUT.to_text(), **fields})


def inflight(bench: Bench[PrefillCore]) -> list[Effect]:
    """Prefill: everything is computed and pushed; the effects of the last commit."""
    queued(bench)
    bench.compute()
    return bench.compute()


def greeting(bench: Bench[DecodeCore], rid: str = "r", room: int = ROOM) -> list[Effect]:
    """Decode: hello is said."""
    bench.submit(request(rid, room))
    return bench.step(Resolved(rid=rid, infos=INFOS))


def transferring(bench: Bench[DecodeCore], rid: str = "r", room: int = ROOM, attempt: int = 1) -> list[Effect]:
    """Decode: pages are ordered."""
    greeting(bench, rid, room)
    return bench.say(accepted(room, attempt), P)


def row(token: int = 42, attempt: int = 1, room: int = ROOM, **fields: Any) -> MetadataRow:
    """A metadata row of this attempt."""
    return MetadataRow(room=room, attempt=attempt, first_token=token, prompt_tokens=len(PROMPT), **fields)


def arrived(bench: Bench[DecodeCore], token: int = 42) -> list[Effect]:
    """Decode: the cache is here."""
    transferring(bench)
    return bench.step(polled(row=row(token), progress=3))


def running(bench: Bench[DecodeCore]) -> None:
    """Decode: two tokens are streamed."""
    arrived(bench)
    bench.compute(token=43)
    assert bench.phase() == "running"


def tokens(effects: list[Effect]) -> list[int]:
    """Tokens that clients hear."""
    return [token for one in effects if isinstance(one, Emit) for token in one.tokens]


def ends(effects: list[Effect]) -> list[tuple[str, object]]:
    """Who was answered, and how: the reason of a failure, else the finish type."""
    found: list[tuple[str, object]] = []
    for one in effects:
        if isinstance(one, Emit) and one.finish is not None:
            verdict = one.finish.verdict
            found.append((one.rid, one.finish.type if verdict is None else verdict.reason))
    return found


def told(effects: list[Effect]) -> list[RoomMessage]:
    """What peers are told."""
    return [one.message for one in effects if isinstance(one, Tell)]


def moves(effects: list[Effect]) -> list[tuple[str, str]]:
    """How phases changed."""
    return [(one.source, one.target) for one in effects if isinstance(one, Moved)]


def kinds(effects: list[Effect]) -> list[str]:
    """Names of effects, `Moved` left out."""
    return [type(one).__name__ for one in effects if not isinstance(one, Moved)]


class Siblings(Generic[C]):
    """The ranks of one unit that are the first of their pipeline stages: the same events, the same state, or it raises."""

    def __init__(self, benches: Sequence[Bench[C]]) -> None:
        self.ranks = list(benches)

    @property
    def alike(self) -> bool:
        """Whether they hold the same state."""
        return len({one.core.digest() for one in self.ranks}) == 1

    def each(self, happen: Callable[[Bench[C]], T]) -> list[T]:
        """Let the same thing happen on every rank; what it was there."""
        results = [happen(one) for one in self.ranks]
        assert self.alike, "the siblings diverged"
        return results

    def observe(self, *polls: AgreedPoll, failed_on: int | None = None, rid: str = "r", attempt: int = 1) -> list[Any]:
        """A consensus, and beside it the failure of an uncovered request on one stage."""
        local = LocalPoll(rid=rid, attempt=attempt, poll=int(KVPoll.Failed))
        results = [
            one.step(Observed(polls=polls, uncovered=(local,) if stage == failed_on else ()))
            for stage, one in enumerate(self.ranks)
        ]
        assert self.alike, "the siblings diverged"
        return results
