"""Whether the ranks that prefill workers registered can be reached: what a decode worker would do before any traffic."""

import itertools
import socket
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from baton_cli.doctor.findings import Finding, fail, ok
from baton_cli.doctor.running import Visit
from baton_cli.fetch import Unreachable

RANKS_MAX = 256
SHOWN_MAX = 4
AT_ONCE = 16
SIZES = ("dp_size", "attn_cp_size", "attn_tp_size", "pp_size")
QUERY = ("prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAddress:
    """One rank of one instance."""

    instance: str
    numbers: tuple[int, ...]  # of dp, cp, tp, pp

    def route(self, registry: str) -> str:
        """Where the registry tells its address."""
        query = dict(zip(QUERY, self.numbers, strict=True)) | {"instance": self.instance}
        return f"{registry}/route?{urllib.parse.urlencode(query)}"


def ranks_of(instances: Sequence[Mapping[str, Any]]) -> Iterator[RankAddress]:
    """Every rank of every instance that is complete."""
    for one in instances:
        layout = one.get("layout")
        if not one.get("ready") or not isinstance(layout, dict):
            continue
        sizes = [int(layout.get(name) or 1) for name in SIZES]
        for numbers in itertools.product(*map(range, sizes)):
            yield RankAddress(instance=str(one.get("instance")), numbers=numbers)


def link_findings(registry: str, instances: Sequence[Mapping[str, Any]], visit: Visit) -> list[Finding]:
    """Look every rank up and connect to it; one line for all."""
    ranks = list(itertools.islice(ranks_of(instances), RANKS_MAX))
    if not ranks:
        return []
    with ThreadPoolExecutor(max_workers=AT_ONCE) as pool:
        faults = [fault for fault in pool.map(lambda rank: _fault(rank, registry, visit), ranks) if fault]
    if not faults:
        return [ok("links", f"all {len(ranks)} prefill ranks accept connections from here")]
    more = f"; and {len(faults) - SHOWN_MAX} more" if len(faults) > SHOWN_MAX else ""
    advice = (
        "run the doctor where decode runs. Then: a firewall or NetworkPolicy (decode must reach prefill's ports, see "
        "docs/operations.md), or a wrong --advertise-host"
    )
    text = f"{len(faults)} of {len(ranks)} prefill ranks cannot be reached from here: {'; '.join(faults[:SHOWN_MAX])}{more}"
    return [fail("links", text, advice)]


def _fault(rank: RankAddress, registry: str, visit: Visit) -> str:
    """Why the rank cannot be reached; empty where it can."""
    name = f"{rank.instance} dp {rank.numbers[0]} cp {rank.numbers[1]} tp {rank.numbers[2]} pp {rank.numbers[3]}"
    try:
        reply = visit.get(rank.route(registry))
    except Unreachable as error:
        return f"{name}: look-up failed ({error})"
    host, port = reply.fields.get("rank_ip"), reply.fields.get("rank_port")
    if reply.status != 200 or not isinstance(host, str) or not isinstance(port, int):
        return f"{name}: look-up answers {reply.status} {reply.text[:100].strip()}"
    try:
        socket.create_connection((host.strip("[]"), port), timeout=visit.timeout_seconds).close()
    except OSError as error:
        return f"{name} at {host}:{port}: {error.strerror or error}"
    return ""
