"""The digest by which ranks prove that they are alike: everything that decides is in it, and nothing else."""

import os
import subprocess
import sys
import timeit
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest

from baton_core.agreement import KVPoll
from baton_core.errors import Reason, Verdict
from baton_core.events import Abort, DrainBegan, FlushCache, LookupFailed, Observed, Resolved, StopHere
from baton_core.machine import Handoff
from baton_core.pages import PagePool
from baton_core.prefix import PrefixCache
from baton_core.request import RequestId, prompt_digest
from baton_core.trace import DIGEST_MASK, Trace
from unit.cores import (
    GONE,
    INFOS,
    Bench,
    D,
    agreed,
    arrived,
    decode,
    greeting,
    hello,
    inflight,
    polled,
    prefill,
    probe,
    queued,
    request,
    running,
    transferring,
    with_limits,
)


def _with(bench: Bench[Any], begin: Callable[[Bench[Any]], object]) -> Bench[Any]:
    begin(bench)
    return bench


def _computable() -> Bench[Any]:
    return _with(prefill(), queued)


def _pushed() -> Bench[Any]:
    return _with(prefill(), inflight)


def _resolving() -> Bench[Any]:
    return _with(decode(), lambda bench: bench.submit(request()))


DIFFERENT: dict[str, tuple[Callable[[], Bench[Any]], Callable[[Bench[Any]], object]]] = {
    "a request": (prefill, lambda bench: bench.submit(request())),
    "a refused request": (prefill, lambda bench: bench.submit(request(bootstrap=None))),
    "a hello": (prefill, lambda bench: bench.say(hello(), D)),
    "both legs": (prefill, lambda bench: (bench.submit(request()), bench.say(hello(), D))),
    "draining": (prefill, lambda bench: bench.step(DrainBegan())),
    "a probe": (prefill, lambda bench: bench.submit(probe())),
    "a plan": (_computable, lambda bench: bench.plan()),
    "a chunk": (_computable, lambda bench: bench.compute()),
    "progress": (_pushed, lambda bench: bench.step(polled(poll=KVPoll.Transferring, progress=1))),
    "an abort": (_pushed, lambda bench: bench.step(Abort(rid="r", verdict=GONE))),
    "an answer": (_pushed, lambda bench: bench.step(polled(progress=3))),
    "a deadline": (_pushed, lambda bench: bench.after(10_000)),
    "a look-up": (_resolving, lambda bench: bench.step(Resolved(rid="r", infos=INFOS))),
    "a failed look-up": (_resolving, lambda bench: bench.step(LookupFailed(rid="r", verdict=GONE))),
    "a farewell": (decode, lambda bench: bench.submit(request(rejected=GONE))),
    "an order": (lambda: _with(decode(), greeting), lambda bench: transferring(bench, "other", 5, 2)),
    "a token": (lambda: _with(decode(), arrived), lambda bench: bench.compute(token=43)),
    "a stop": (lambda: _with(decode(), running), lambda bench: bench.step(StopHere(rid="r"))),
}


@pytest.mark.parametrize(("made", "happens"), DIFFERENT.values(), ids=DIFFERENT)
def test_whatever_happens_on_one_rank_alone_shows(
    made: Callable[[], Bench[Any]], happens: Callable[[Bench[Any]], object]
) -> None:
    one, other = made(), made()
    assert one.core.digest() == other.core.digest()
    assert 0 <= one.core.digest() <= DIGEST_MASK < 2**62
    happens(one)
    assert one.core.digest() != other.core.digest()
    happens(other)
    assert one.core.digest() == other.core.digest()


def test_a_cache_that_was_flushed_on_one_rank_shows_though_nothing_waits() -> None:
    ranks = [prefill(prefix_cache=True) for _ in range(2)]
    for bench in ranks:
        inflight(bench)
        bench.step(polled(progress=3))
    ranks[0].step(FlushCache())
    assert ranks[0].core.digest() != ranks[1].core.digest()


def test_texts_are_the_leaders_business() -> None:
    ranks = [prefill() for _ in range(2)]
    for bench, text in zip(ranks, ("rank 1: reset by peer", "rank 1: transfer_failed"), strict=True):
        queued(bench)
        bench.step(polled(poll=KVPoll.Failed, reason=Reason.TRANSFER_FAILED, text=text))
    assert ranks[0].core.digest() == ranks[1].core.digest()


def test_the_reason_of_a_failure_is_everybodys() -> None:
    ranks = [prefill() for _ in range(2)]
    for bench, reason in zip(ranks, (Reason.TRANSFER_FAILED, Reason.PEER_LOST), strict=True):
        queued(bench)
        bench.step(Abort(rid="r", verdict=Verdict(reason=reason, text="same")))
    assert ranks[0].core.digest() != ranks[1].core.digest()


def test_pages_handed_out_or_returned_in_another_order_show() -> None:
    ranks = [decode(pool_pages=16) for _ in range(2)]
    for bench in ranks:
        for number, rid in enumerate("ab", 1):
            transferring(bench, rid, number, number)
    polls = [agreed(rid, KVPoll.Failed, number, writers_stopped=True) for number, rid in enumerate("ab", 1)]
    for bench, order in zip(ranks, (polls, polls[::-1]), strict=True):
        for rid in "ab":
            bench.step(Abort(rid=rid, verdict=GONE))
        bench.step(Observed(polls=tuple(order)))
    assert ranks[0].free == ranks[1].free == 16
    assert ranks[0].core.digest() != ranks[1].core.digest()


def test_histories_of_pool_and_cache_tell_what_happened_and_in_which_order() -> None:
    told = [Trace(), Trace(), Trace()]
    for trace, notes in zip(told, ((1, 2), (2, 1), (1, 2)), strict=True):
        for note in notes:
            trace.note("page", note)
    assert told[0].digest() == told[2].digest() != told[1].digest()
    pools = [PagePool(4), PagePool(4)]
    caches = [PrefixCache(pool, 1) for pool in pools]
    for cache, pool in zip(caches, pools, strict=True):
        cache.insert((1, 2), pool.allocate(2) or ())
    assert caches[0].trace.digest() == caches[1].trace.digest()
    caches[0].lock(caches[0].match((1, 2)))
    assert caches[0].trace.digest() != caches[1].trace.digest()


_SCRIPT = """
from unit.cores import *
bench = prefill(prefix_cache=True)
inflight(bench)
bench.submit(request("b", 5))
print(bench.core.digest())
"""


def test_the_seed_of_hashes_changes_nothing() -> None:
    found = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        run = subprocess.run(
            [sys.executable, "-c", _SCRIPT], env=environment, capture_output=True, text=True, check=True
        )
        found.add(run.stdout.strip())
    assert len(found) == 1


def test_a_thousand_requests_are_digested_in_the_time_of_reading_them_a_few_times() -> None:
    bench = prefill(with_limits(waiting_max=2_048, chunk_tokens=1 << 20), pool_pages=1_024 * 32, context_tokens=4_096)
    prompt = tuple(range(64))
    joined = hello(prompt_tokens=64, digest=prompt_digest(prompt))
    for number in range(1, 1_025):
        bench.submit(request(f"request-{number}", number, prompt=prompt))
        bench.say(hello(number, number, prompt_tokens=64, digest=joined.digest), D)
    polls = [agreed(one.rid, KVPoll.WaitingForInput, one.attempt, serial=one.serial) for one in bench.core.watched()]
    bench.step(Observed(polls=tuple(polls)))
    while (plan := bench.core.plan()) is not None:
        bench.commit(plan)
    assert len(bench.live) == 1_024 and bench.free == 0
    tracer = sys.gettrace()
    sys.settrace(None)  # what is measured is the digest, not that its lines are counted
    try:
        best_s = min(timeit.repeat(bench.core.digest, number=1, repeat=30))
        read_s = min(timeit.repeat(partial(_read_once, bench.core.ledger.live), number=1, repeat=30))
    finally:
        sys.settrace(tracer)
    print(f"digest of {len(bench.live)} requests: {best_s * 1e3:.2f} ms, {best_s / read_s:.1f} readings")
    assert best_s <= 12 * read_s, "about 8 readings; machines differ, their ratio hardly does"


def _read_once(live: Mapping[RequestId, Handoff]) -> int:
    """Five fields of each request, and its pages."""
    return sum(
        len((one.rid, one.attempt, one.serial, one.computed, one.deadline_at, *one.pages)) for one in live.values()
    )
