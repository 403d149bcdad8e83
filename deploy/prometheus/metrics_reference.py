"""Writes docs/metrics.md: every metric of every process, from the table below.

    python deploy/prometheus/metrics_reference.py                    writes the page
    python deploy/prometheus/metrics_reference.py --check URL …      names what these processes export and it lacks

`tests/unit/test_metrics_page.py` holds the table to the code: what the router, the registry and a worker export, and every
name that the sources of a worker count, set or observe.
"""

import re
import sys
import urllib.request
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs/metrics.md"
WORKERS = ("prefill", "decode")
UNITS = {
    "_seconds": "seconds",
    "_gigabytes_per_second": "GB/s",
    "_ratio": "0 to 1",
    "_bytes": "bytes",
    "_tokens": "tokens",
    "_pages": "pages",
    "_requests": "requests",
    "_fds": "files",
    "_ranks": "ranks",
    "_rooms": "rooms",
    "_instances": "workers",
    "_instances_ready": "workers",
    "_workers": "workers",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One metric. `roles`: of the processes that export it; `name` is what follows `baton_<role>_`, or `vllm:`."""

    roles: tuple[str, ...]
    name: str
    kind: str  # counter, gauge, histogram
    labels: tuple[str, ...]
    text: str
    unit: str = ""  # where the name does not end in it

    @property
    def shown_unit(self) -> str:
        """The unit of its value."""
        base = self.name.removesuffix("_total")
        found = next((unit for ending, unit in UNITS.items() if f"_{base}".endswith(ending)), "")
        return self.unit or found or "–"


def _of(role: str, name: str, kind: str, labels: str, text: str, unit: str = "") -> Entry:
    """`role` may be `workers`, both roles, or `vllm`: both too, under vLLM's names; `labels` are words."""
    roles = WORKERS if role == "workers" else (role,)
    return Entry(roles=roles, name=name, kind=kind, labels=tuple(labels.split()), text=text, unit=unit)


VLLM = "vllm"
TARGET = "role worker dp_rank"

ENTRIES: tuple[Entry, ...] = (
    # -- router
    _of("router", "requests_total", "counter", "route status", "Requests that ended, by the status the client saw; "
        "`other` stands for every status without a series of its own."),
    _of("router", "request_seconds", "histogram", "", "From the request's head to the end of its answer."),
    _of("router", "ttft_seconds", "histogram", "", "From the request's head to the first body byte of a streaming answer: "
        "the time to first token as the client sees it."),
    _of("router", "ttft_stage_seconds", "histogram", "stage", "What that time consists of, each part as its owner tells it: "
        "`router`, until the legs of the last attempt were sent (the body, the queue, the choice, attempts that failed); "
        "`decode`, from the leg's arrival there to its first token, prefill's work included; `unattributed`, the rest: "
        "the ways between the processes. Of streams whose decode worker tells its part."),
    _of("router", "itl_seconds", "histogram", "", "Between two pieces of a streaming answer, as they come from decode: the "
        "time between tokens as the client sees it, migrations included."),
    _of("router", "inflight_requests", "gauge", "", "Requests under way."),
    _of("router", "queue_requests", "gauge", "", "Requests waiting to be let in (`concurrent_max`)."),
    _of("router", "admission_rejections_total", "counter", "reason", "Requests that the router itself refused.", "requests"),
    _of("router", "retries_total", "counter", "reason", "Further pairs tried before anything was streamed, by why.",
        "attempts"),
    _of("router", "migrations_total", "counter", "reason", "Further pairs tried for an answer that had begun, by why.",
        "attempts"),
    _of("router", "local_quotas_total", "counter", "", "Questions about a shared quota that this router answered by its own "
        "count, since Redis was away.", "requests"),
    _of("router", "degraded_total", "counter", "", "Choices of a decode worker alone for want of a prefill worker.",
        "requests"),
    _of("router", "broken_streams_total", "counter", "", "Answers that had begun and ended with an error.", "requests"),
    _of("router", "first_token_waiting_requests", "gauge", "", "Requests that wait for their first token."),
    _of("router", "first_token_expected_seconds", "gauge", "",
        "How long one more request would wait for its first token (0: too few wait to say)."),
    _of("router", "open_breakers", "gauge", "", "Targets whose breaker lets nothing through now.", "targets"),
    _of("router", "workers", "gauge", "role state", "Workers known; all combinations are there, most at 0."),
    _of("router", "target_legs_total", "counter", f"{TARGET} outcome", "Legs that ended well (`served`), or by the target's "
        "own fault (`failed`). A target is a worker, or one DP rank of it.", "legs"),
    _of("router", "target_inflight_requests", "gauge", TARGET, "Legs of this router at a target."),
    _of("router", "target_load_requests", "gauge", TARGET, "Requests at a target, those of other routers too: what "
        "policies weigh."),
    _of("router", "target_breaker_open", "gauge", TARGET, "1 while the target's breaker lets nothing through.", "0 or 1"),
    _of("router", "process_virtual_memory_bytes", "gauge", "", "Address space of the process."),
    _of("router", "process_resident_memory_bytes", "gauge", "", "Memory of the process that is in RAM."),
    _of("router", "process_start_time_seconds", "gauge", "", "When it started, since 1970."),
    _of("router", "process_cpu_seconds_total", "counter", "", "User and system time."),
    _of("router", "process_open_fds", "gauge", "", "Open files and sockets."),
    _of("router", "process_max_fds", "gauge", "", "How many may be open."),
    # -- registry
    _of("bootstrap", "instances", "gauge", "", "Prefill workers registered."),
    _of("bootstrap", "instances_ready", "gauge", "", "Prefill workers all of whose ranks are registered."),
    _of("bootstrap", "ranks", "gauge", "", "Distinct prefill ranks registered."),
    _of("bootstrap", "rooms", "gauge", "", "Rooms whose DP rank is registered."),
    _of("bootstrap", "takes_writes", "gauge", "", "1 while writes can be had; 0 while the Redis that replicas share "
        "is away.", "0 or 1"),
    _of("bootstrap", "requests_total", "counter", "route status", "Answers given."),
    # -- workers: the app
    _of("workers", "ready", "gauge", "", "1 while this worker takes requests.", "0 or 1"),
    _of("workers", "requests_total", "counter", "route status", "Requests answered here, by route and status. Both legs of "
        "a request count, each at its worker."),
    _of("workers", "request_seconds", "histogram", "route", "From a request's arrival at this worker to its last byte."),
    _of("workers", "first_token_seconds", "histogram", "", "From a request's arrival at this worker to its first token."),
    _of("workers", "tpot_seconds", "histogram", "", "Of an answer of this worker: from its first tokens to its end, by the "
        "tokens that followed. Absent until there is one; prefill answers one token and has none."),
    _of("workers", "app_live_requests", "gauge", "", "Requests that the app has handed to a scheduler and that have not "
        "ended."),
    _of("workers", "admission_rejections_total", "counter", "reason", "Requests refused at the door, by app and schedulers "
        "together; reasons are those of `baton_core/errors.py`.", "requests"),
    _of("workers", "rank_progress_age_seconds", "gauge", "", "Since the slowest scheduler was last seen to make progress; "
        "at `loop_stall_ms` the worker ends."),
    _of("workers", "bad_frames_total", "counter", "", "Frames between app and schedulers that made no sense: a bug.",
        "frames"),
    _of("workers", "dropped_series_total", "counter", "", "Updates dropped because there were too many series: a bug. "
        "Absent until it happens.", "updates"),
    # -- workers: queues
    _of("workers", "live_requests", "gauge", "dp_rank", "Requests that the scheduler holds, of any kind."),
    _of("workers", "queue_requests", "gauge", "queue dp_rank", "Requests in each phase of their life "
        "(`baton_core/prefill/phases.py`, `decode/phases.py`)."),
    _of("workers", "poll_state_requests", "gauge", "queue state dp_rank", "Requests by `KVPoll`, the agreed state of their "
        "handoff."),
    _of("workers", "handoff_stage_seconds", "histogram", "stage dp_rank", "How long a request stayed in a phase, when it "
        "left it. Each stage is measured by the worker that owns it; stages do not overlap."),
    _of("workers", "handoffs_total", "counter", "outcome dp_rank", "Requests that ended, `done` or `failed`.", "requests"),
    _of("workers", "failures_total", "counter", "reason dp_rank", "Requests that failed, by reason.", "requests"),
    _of("decode", "running_requests", "gauge", "dp_rank", "Sequences in the batch."),
    _of("prefill", "orphan_hellos", "gauge", "dp_rank", "Rooms where decode's hello waits for prefill's own leg.", "rooms"),
    _of("decode", "farewells", "gauge", "dp_rank", "Prefill workers that are still to be told that a room is over.",
        "rooms"),
    _of("workers", "tombstones", "gauge", "dp_rank", "Failed rooms that are remembered for their late leg.", "rooms"),
    # -- workers: memory
    _of("workers", "pages", "gauge", "dp_rank", "KV pages of the pool.", "pages"),
    _of("workers", "pages_free", "gauge", "dp_rank", "Pages that nobody holds; cached ones are not free, but can be freed.",
        "pages"),
    _of("workers", "pages_cached", "gauge", "dp_rank", "Pages that the prefix cache holds, alone or with requests that "
        "read them.", "pages"),
    _of("workers", "pages_spare", "gauge", "dp_rank", "Pages that may be taken: free ones, and cached ones that nobody "
        "reads.", "pages"),
    _of("workers", "quarantined_pages", "gauge", "dp_rank", "Pages kept because a silent peer might still write to them. "
        "Above 0 for long is an alert."),
    _of("decode", "rows", "gauge", "dp_rank", "Metadata rows: handoffs that may be in flight.", "rows"),
    _of("decode", "rows_free", "gauge", "dp_rank", "Metadata rows that nobody holds.", "rows"),
    _of("workers", "prefix_hit_tokens_total", "counter", "dp_rank", "Prompt tokens that came from the prefix cache: not "
        "computed on prefill, not transferred to decode."),
    _of("workers", "prefix_asked_tokens_total", "counter", "dp_rank", "Prompt tokens that the prefix cache was asked for."),
    _of("decode", "backup_pages", "gauge", "dp_rank", "Pages of host memory for the KV cache of retracted "
        "requests.", "pages"),
    _of("decode", "backup_pages_free", "gauge", "dp_rank", "Pages of it that nobody holds.", "pages"),
    _of("decode", "expected_answer_ratio", "gauge", "dp_rank", "Mean length of answers as a share of what they were "
        "allowed: what admission expects of new ones.", "ratio"),
    _of("decode", "retractions_total", "counter", "way dp_rank", "Running requests that gave their pages up for others: "
        "their KV cache went to the host (`backup`) or is to be computed anew (`recompute`).", "requests"),
    _of("decode", "rebootstraps_total", "counter", "outcome dp_rank", "Retracted requests that went back to prefill to be "
        "computed anew: their KV cache came (`done`), or decode computed it itself after all (`fallback`).", "requests"),
    _of("prefill", "rebootstraps_total", "counter", "dp_rank", "Prompts with the answer so far that decode asked to be "
        "computed anew, and that were let in. No client of this worker waits for them.", "requests"),
    # -- workers: transfers
    _of("workers", "transfer_bytes_total", "counter", "way dp_rank", "Bytes of KV pages moved, `shm` or `tcp`: sent and "
        "acknowledged on prefill, received on decode; by all ranks of the unit."),
    _of("workers", "transfer_seconds", "histogram", "way dp_rank", "For each share (what one rank owes another) that was "
        "finished: how long its pages were being read (prefill) or written (decode), pauses between chunks left out. Over "
        "`shm` decode's time lasts from the grant to the last byte, pauses included."),
    _of("workers", "transfer_bytes_per_second", "histogram", "way dp_rank", "Speed of each finished share: its bytes by "
        "its `transfer_seconds`.", "bytes/s"),
    _of("workers", "transfer_failures_total", "counter", "reason way dp_rank", "Transfers that failed at this end, by "
        "reason and way; `none`: before one was chosen.", "transfers"),
    _of("workers", "transfer_bad_frames_total", "counter", "way dp_rank", "What came in where pages come in and was no "
        "frame of a writer's: its stream was closed, or it was left out.", "frames"),
    # -- workers: speed
    _of("workers", "step_seconds", "histogram", "dp_rank", "One forward: a chunk of prompts on prefill, a token for each "
        "sequence on decode, where it bounds the time between tokens."),
    _of("workers", "steps_total", "counter", "dp_rank", "Forwards begun.", "steps"),
    _of("workers", "step_tokens_total", "counter", "dp_rank", "Tokens that went into forwards: prompt tokens on prefill, "
        "one a sequence on decode. Its rate is the speed in tokens a second."),
    _of("workers", "control_tick_lag_seconds", "histogram", "dp_rank", "How late the scheduler's loop took its turn."),
    _of("workers", "agreement_seconds", "histogram", "dp_rank", "How long the ranks of a stage took to agree on what they "
        "observe; absent where a unit has one rank."),
    _of("workers", "samples_dropped_total", "counter", "dp_rank", "Samples of histograms dropped because there were too "
        "many between two snapshots. Absent until it happens.", "samples"),
    _of("workers", "paused", "gauge", "dp_rank", "1 while generation is paused.", "0 or 1"),
    _of("workers", "running_steps", "gauge", "dp_rank", "Plans that are being computed.", "steps"),
    # -- workers: links
    _of("workers", "links", "gauge", "dp_rank", "Peers to which a control link is open.", "links"),
    _of("workers", "link_bad_frames_total", "counter", "dp_rank", "Frames at a rank's own "
        "ports that made no sense: from peers, siblings, strangers.", "frames"),
    _of("workers", "link_dropped_frames_total", "counter", "dp_rank", "Frames that a full link could not take; they are "
        "sent again.", "frames"),
    # -- workers: vLLM's names
    _of(VLLM, "num_requests_running", "gauge", "model_name", "Requests in forwards.", "requests"),
    _of(VLLM, "num_requests_waiting", "gauge", "model_name", "Requests that are here and in no forward yet: in a "
        "handshake, queued, or waiting for pages.", "requests"),
    _of(VLLM, "kv_cache_usage_perc", "gauge", "model_name", "Share of KV pages that requests hold. What only the prefix "
        "cache holds can be freed at once and does not count.", "0 to 1"),
    _of(VLLM, "cache_config_info", "gauge", "model_name block_size num_gpu_blocks", "Always 1; the labels say how many "
        "tokens a page has, and how many pages there are.", "1"),
)  # fmt: skip

SECTIONS = (
    ("router", "Router", "`GET /metrics` on the router's port."),
    ("bootstrap", "Registry", "`GET /metrics` on the registry's port."),
    (
        "workers",
        "Prefill and decode workers",
        "`GET /metrics` on a worker's port: the app's own figures, and the last snapshot (one a second) of the scheduler of "
        "each DP rank, which has the label `dp_rank`. `*` stands for `prefill` or `decode`.",
    ),
    (
        VLLM,
        "Workers, for a Kubernetes gateway",
        "At the same address, under vLLM's names, which the endpoint picker of the Gateway API Inference Extension asks for "
        "(pod label `llm-d.ai/engine-type: vllm`). One series a worker, all its DP ranks together; `model_name` is the "
        "served name. The colon is vLLM's: `promtool check metrics` advises against it, and against nothing else here.",
    ),
)


def known(role: str) -> dict[str, Entry]:
    """The metrics of one kind of process by their full names, as a `# TYPE` line has them."""
    named = {f"baton_{role}_{entry.name}": entry for entry in ENTRIES if role in entry.roles}
    return named | {f"vllm:{entry.name}": entry for entry in ENTRIES if entry.roles == (VLLM,) and role in WORKERS}


def page() -> str:
    """The whole page."""
    lines = [
        "# Metrics",
        "",
        "Made by `python deploy/prometheus/metrics_reference.py` from the table in it; a test holds the table to the code.",
        "",
        "Names end in their unit; `_total` is a counter, and what it counts is given. Histograms have `_bucket{le}`, `_sum` "
        "and `_count`. Labels are bounded sets. Counters and histograms of the router also have `_created` series, which "
        "say when each began. Alerts: [operations.md](operations.md); `baton top` shows the most important live.",
        "",
    ]
    for role, title, text in SECTIONS:
        lines += [f"## {title}", "", text, "", "| name | type | labels | unit | meaning |", "|---|---|---|---|---|"]
        lines += [_row(entry) for entry in ENTRIES if _section_of(entry) == role]
        lines.append("")
    return "\n".join(lines)


def _section_of(entry: Entry) -> str:
    return "workers" if entry.roles[0] in WORKERS else entry.roles[0]


def _row(entry: Entry) -> str:
    role = "*" if entry.roles == WORKERS else entry.roles[0]
    labels = ", ".join(f"`{label}`" for label in entry.labels) or "–"
    prefix = "vllm:" if role == VLLM else f"baton_{role}_"
    return f"| `{prefix}{entry.name}` | {entry.kind} | {labels} | {entry.shown_unit} | {entry.text} |"


@dataclass(slots=True)
class Family:
    """One metric as a process exports it."""

    kind: str
    labels: set[str]


def families(text: str) -> dict[str, Family]:
    """What a scrape holds, without the `_created` series, by the names of its `# TYPE` lines."""
    found: dict[str, Family] = {}
    for line in text.splitlines():
        declared = re.match(r"# TYPE (\S+) (\S+)", line)
        if declared is not None and not declared[1].endswith("_created"):
            found[declared[1]] = Family(declared[2], set())
        sample = re.match(r"([A-Za-z_:]\w*)\{(.*)\} ", line)
        if sample is None:
            continue
        name = sample[1] if sample[1] in found else re.sub(r"_(bucket|sum|count)$", "", sample[1])
        if name in found:
            found[name].labels |= set(re.findall(r'(\w+)="', sample[2])) - {"le"}
    return found


def differences(text: str) -> list[str]:
    """What a scrape holds and the table does not say, or says otherwise."""
    wrong = []
    table = {name: entry for role in ("router", "bootstrap", *WORKERS) for name, entry in known(role).items()}
    for name, family in families(text).items():
        entry = table.get(name)
        if entry is None:
            wrong.append(f"{name} ({family.kind}) is not in the table")
        elif entry.kind != family.kind:
            wrong.append(f"{name} is a {family.kind}, not a {entry.kind}")
        elif not family.labels <= set(entry.labels):
            wrong.append(f"{name} also has labels {sorted(family.labels - set(entry.labels))}")
    return wrong


def main(arguments: list[str]) -> int:
    """Write the page, or compare it with processes; the number of differences."""
    if arguments[:1] != ["--check"]:
        PAGE.write_text(page(), encoding="utf-8")
        return 0
    wrong = 0
    for url in arguments[1:]:
        text = urllib.request.urlopen(f"{url.rstrip('/')}/metrics", timeout=10).read().decode()
        found = differences(text)
        wrong += len(found)
        sys.stdout.write("\n".join([f"{url}: {len(families(text))} metrics", *(f"  {one}" for one in found), ""]))
    return wrong


if __name__ == "__main__":
    sys.exit(1 if main(sys.argv[1:]) else 0)
