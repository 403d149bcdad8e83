# tidy: one table of panels; splitting it would only hide half of it
"""What the dashboards show: a panel is a title, a unit, and queries with their legends; `build.py` makes JSON of it.

`W` in a query stands for the selector that every panel shares: namespace and instance, both "all" at first.
"""

from dataclasses import dataclass

RATE = "$__rate_interval"
FULL, HALF, QUARTER = 24, 12, 6


@dataclass(frozen=True)
class Panel:
    """One panel. `queries` are (PromQL, legend); `kind` is Grafana's type."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    help: str = ""
    kind: str = "timeseries"
    width: int = HALF
    stack: bool = False


def rate(metric: str, by: str = "", more: str = "") -> str:
    """Sum of a counter's rate, per second."""
    inner = f"rate({metric}{{W{more}}}[{RATE}])"
    return f"sum by ({by}) ({inner})" if by else f"sum({inner})"


def quantile(q: float, metric: str, by: str = "", more: str = "") -> str:
    """A quantile of a histogram."""
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({q}, sum by ({labels}) (rate({metric}_bucket{{W{more}}}[{RATE}])))"


def mean(metric: str, by: str = "", more: str = "") -> str:
    """Mean of a histogram's observations."""
    group = f" by ({by})" if by else ""
    return f"sum{group} (rate({metric}_sum{{W{more}}}[{RATE}])) / sum{group} (rate({metric}_count{{W{more}}}[{RATE}]))"


def quantiles(metric: str) -> tuple[tuple[str, str], ...]:
    """p50, p90 and p99."""
    return tuple((quantile(q, metric), f"p{round(q * 100)}") for q in (0.5, 0.9, 0.99))


def gauge(metric: str, by: str = "", more: str = "") -> str:
    """Sum of a gauge."""
    return f"sum by ({by}) ({metric}{{W{more}}})" if by else f"sum({metric}{{W{more}}})"


READY = 'state="ready"'
ERRORS = f'(sum(rate(baton_router_requests_total{{W, status=~"5..|other"}}[{RATE}])) or vector(0))'

OVERVIEW = (
    Panel(
        "Prefill workers ready",
        "short",
        ((gauge("baton_router_workers", "", f', role="prefill", {READY}'), "ready"),),
        kind="stat",
        width=QUARTER,
    ),
    Panel(
        "Decode workers ready",
        "short",
        ((gauge("baton_router_workers", "", f', role="decode", {READY}'), "ready"),),
        kind="stat",
        width=QUARTER,
    ),
    Panel(
        "Requests under way",
        "short",
        ((gauge("baton_router_inflight_requests"), "in flight"),),
        kind="stat",
        width=QUARTER,
    ),
    Panel(
        "Ended with 5xx",
        "percentunit",
        ((f"{ERRORS} / {rate('baton_router_requests_total')}", "ratio"),),
        kind="stat",
        width=QUARTER,
    ),
    Panel(
        "Time to first token, as clients see it",
        "s",
        quantiles("baton_router_ttft_seconds"),
        "Measured at the router, from the request's head to the first byte of a stream. Objective: 99 % within 2.5 s.",
    ),
    Panel(
        "Time between tokens",
        "s",
        quantiles("baton_router_itl_seconds"),
        "Measured at the router, between two pieces of a stream. Objective: 99 % within 250 ms.",
    ),
    Panel("Requests by status", "reqps", ((rate("baton_router_requests_total", "status"), "{{status}}"),), stack=True),
    Panel(
        "Tokens computed",
        "short",
        (
            (rate("baton_prefill_step_tokens_total"), "prompt tokens/s (prefill)"),
            (rate("baton_decode_step_tokens_total"), "output tokens/s (decode)"),
        ),
    ),
    Panel(
        "KV pages in use",
        "percentunit",
        (
            (f"1 - {gauge('baton_prefill_pages_free')} / {gauge('baton_prefill_pages')}", "prefill (cache included)"),
            (f"1 - {gauge('baton_decode_pages_free')} / {gauge('baton_decode_pages')}", "decode (cache included)"),
        ),
    ),
    Panel(
        "Late first tokens, share",
        "percentunit",
        (("baton:ttft_late:ratio_rate5m", "5 min"), ("baton:ttft_late:ratio_rate1h", "1 h")),
        "The burn-rate alerts compare these with 14.4 % and 6 %.",
    ),
    Panel(
        "Late tokens, share",
        "percentunit",
        (("baton:itl_late:ratio_rate5m", "5 min"), ("baton:itl_late:ratio_rate1h", "1 h")),
        "The burn-rate alerts compare these with 14.4 % and 6 %.",
    ),
)

FLOW = (
    Panel(
        "Mean time per stage, in order",
        "s",
        (
            (
                mean("baton_decode_handoff_stage_seconds", "stage", ', stage=~"resolving|greeting|prealloc"'),
                "decode: {{stage}}",
            ),
            (
                mean(
                    "baton_prefill_handoff_stage_seconds",
                    "stage",
                    ', stage=~"bootstrapping|accepted|queued|forwarding|inflight"',
                ),
                "prefill: {{stage}}",
            ),
            (
                mean("baton_decode_handoff_stage_seconds", "stage", ', stage=~"transferring|arrived"'),
                "decode: {{stage}}",
            ),
        ),
        "Decode's `transferring` spans prefill's queueing and forward: it waits for the pages. Do not add the two sides up.",
        width=FULL,
    ),
    Panel(
        "Prefill: p99 per stage", "s", ((quantile(0.99, "baton_prefill_handoff_stage_seconds", "stage"), "{{stage}}"),)
    ),
    Panel(
        "Decode: p99 per stage",
        "s",
        ((quantile(0.99, "baton_decode_handoff_stage_seconds", "stage", ', stage!="running"'), "{{stage}}"),),
    ),
    Panel(
        "Prefill: requests per stage",
        "short",
        ((gauge("baton_prefill_queue_requests", "queue", ', queue!~"done|failed"'), "{{queue}}"),),
        stack=True,
    ),
    Panel(
        "Decode: requests per stage",
        "short",
        ((gauge("baton_decode_queue_requests", "queue", ', queue!~"done|failed"'), "{{queue}}"),),
        stack=True,
    ),
    Panel(
        "Handoffs by outcome",
        "reqps",
        (
            (rate("baton_prefill_handoffs_total", "outcome"), "prefill: {{outcome}}"),
            (rate("baton_decode_handoffs_total", "outcome"), "decode: {{outcome}}"),
        ),
    ),
    Panel(
        "Failures by reason",
        "reqps",
        (
            (rate("baton_prefill_failures_total", "reason"), "prefill: {{reason}}"),
            (rate("baton_decode_failures_total", "reason"), "decode: {{reason}}"),
        ),
        stack=True,
    ),
)


def worker(role: str) -> tuple[Panel, ...]:
    """What both kinds of workers show."""
    own = f"baton_{role}"
    return (
        Panel("Ready", "short", ((f"{own}_ready{{W}}", "{{instance}}"),), kind="stat", width=QUARTER),
        Panel("Live requests", "short", ((f"{own}_live_requests{{W}}", "{{instance}}"),), kind="stat", width=QUARTER),
        Panel(
            "Since last progress",
            "s",
            ((f"{own}_rank_progress_age_seconds{{W}}", "{{instance}}"),),
            "The app kills a scheduler at 15 s.",
            "stat",
            QUARTER,
        ),
        Panel(
            "Frames not understood",
            "short",
            ((f"{own}_bad_frames_total{{W}} + {own}_link_bad_frames_total{{W}}", "bad frames {{instance}}"),),
            kind="stat",
            width=QUARTER,
        ),
        Panel(
            "Requests per stage",
            "short",
            ((gauge(f"{own}_queue_requests", "queue", ', queue!~"done|failed"'), "{{queue}}"),),
            stack=True,
        ),
        Panel(
            "Handshake states (KVPoll)",
            "short",
            ((gauge(f"{own}_poll_state_requests", "state"), "{{state}}"),),
            stack=True,
        ),
        Panel(
            "Pages",
            "short",
            (
                (f"{own}_pages{{W}} - {own}_pages_free{{W}}", "used {{instance}}"),
                (f"{own}_pages_cached{{W}}", "cached {{instance}}"),
                (f"{own}_pages{{W}}", "total {{instance}}"),
            ),
        ),
        Panel("Step time", "s", quantiles(f"{own}_step_seconds")),
        Panel("Steps", "ops", ((rate(f"{own}_steps_total", "instance"), "{{instance}}"),)),
        Panel(
            "Tokens per step",
            "short",
            (
                (
                    f"{rate(f'{own}_step_tokens_total', 'instance')} / {rate(f'{own}_steps_total', 'instance')}",
                    "{{instance}}",
                ),
            ),
        ),
        Panel("Time to first token at this worker", "s", quantiles(f"{own}_first_token_seconds")),
        Panel(
            "Control tick lag",
            "s",
            quantiles(f"{own}_control_tick_lag_seconds"),
            "How late the scheduler's loop turns. Objective: p99 20 ms.",
        ),
        Panel(
            "Requests by route and status",
            "reqps",
            ((rate(f"{own}_requests_total", "route, status"), "{{route}} {{status}}"),),
            stack=True,
        ),
        Panel(
            "Refused at the door",
            "reqps",
            ((rate(f"{own}_admission_rejections_total", "reason"), "{{reason}}"),),
            stack=True,
        ),
    )


PREFILL = (
    *worker("prefill"),
    Panel(
        "Prefix cache: share of prompt tokens found",
        "percentunit",
        (
            (
                f"{rate('baton_prefill_prefix_hit_tokens_total')} / {rate('baton_prefill_prefix_asked_tokens_total')}",
                "hit ratio",
            ),
        ),
    ),
    Panel(
        "Orphan hellos",
        "short",
        (("baton_prefill_orphan_hellos{W}", "{{instance}}"),),
        "Greetings of decode whose other leg has not come yet.",
    ),
)

DECODE = (
    *worker("decode"),
    Panel("Running batch", "short", (("baton_decode_running_requests{W}", "{{instance}}"),)),
    Panel(
        "Time per output token",
        "s",
        quantiles("baton_decode_tpot_seconds"),
        "Of each answer: from its first tokens to its end, by the tokens that followed.",
    ),
    Panel(
        "Retractions",
        "reqps",
        ((rate("baton_decode_retractions_total", "way"), "{{way}}"),),
        "Running requests that gave their pages up. Many: the pool is too small for what runs.",
        stack=True,
    ),
    Panel(
        "Metadata rows in use",
        "short",
        (
            ("baton_decode_rows{W} - baton_decode_rows_free{W}", "used {{instance}}"),
            ("baton_decode_rows{W}", "total {{instance}}"),
        ),
    ),
)

KV = (
    Panel(
        "Pages in quarantine",
        "short",
        (
            (gauge("baton_decode_quarantined_pages", "instance"), "decode {{instance}}"),
            (gauge("baton_prefill_quarantined_pages", "instance"), "prefill {{instance}}"),
        ),
        "Pages that a silent writer or reader may still touch. Anything but 0 for minutes: see the runbook.",
    ),
    Panel("Handoff failures, share", "percentunit", (("baton:handoff_failures:ratio_rate5m", "5 min"),)),
    Panel(
        "KV bytes moved",
        "Bps",
        (
            (rate("baton_prefill_transfer_bytes_total", "way"), "prefill: {{way}}"),
            (rate("baton_decode_transfer_bytes_total", "way"), "decode: {{way}}"),
        ),
    ),
    Panel(
        "Speed of transfers",
        "Bps",
        (
            (quantile(0.5, "baton_prefill_transfer_bytes_per_second", "way"), "prefill p50: {{way}}"),
            (quantile(0.5, "baton_decode_transfer_bytes_per_second", "way"), "decode p50: {{way}}"),
            ("baton:transfer_bytes_per_second:rate5m", "all bytes by all time, {{role}} {{way}}"),
        ),
        "Bytes of a share by the time its pages were touched. Over shm decode's time holds prefill's pauses, too.",
    ),
    Panel(
        "Time of a transfer",
        "s",
        (
            (quantile(0.99, "baton_prefill_transfer_seconds", "way"), "prefill p99: {{way}}"),
            (quantile(0.99, "baton_decode_transfer_seconds", "way"), "decode p99: {{way}}"),
        ),
    ),
    Panel(
        "Failed transfers",
        "ops",
        (
            (rate("baton_prefill_transfer_failures_total", "reason, way"), "prefill: {{reason}} ({{way}})"),
            (rate("baton_decode_transfer_failures_total", "reason, way"), "decode: {{reason}} ({{way}})"),
        ),
        stack=True,
    ),
    Panel(
        "Waiting for the KV cache (decode)",
        "s",
        tuple(
            (quantile(q, "baton_decode_handoff_stage_seconds", "", ', stage="transferring"'), f"p{round(q * 100)}")
            for q in (0.5, 0.9, 0.99)
        ),
        "From ordering pages to the last of them: prefill's queue and forward are inside.",
    ),
    Panel(
        "Last pages on the wire (prefill)",
        "s",
        tuple(
            (quantile(q, "baton_prefill_handoff_stage_seconds", "", ', stage="inflight"'), f"p{round(q * 100)}")
            for q in (0.5, 0.9, 0.99)
        ),
        "What of the transfer the forward did not hide.",
    ),
    Panel(
        "Stopping transfers",
        "short",
        (
            (gauge("baton_decode_queue_requests", "", ', queue="revoking"'), "decode"),
            (gauge("baton_prefill_queue_requests", "", ', queue="revoking"'), "prefill"),
        ),
    ),
    Panel(
        "Links between workers",
        "short",
        (("baton_prefill_links{W}", "prefill {{instance}}"), ("baton_decode_links{W}", "decode {{instance}}")),
    ),
    Panel(
        "Frames dropped or not understood",
        "ops",
        (
            (
                f"{rate('baton_prefill_link_dropped_frames_total')} + {rate('baton_decode_link_dropped_frames_total')}",
                "dropped",
            ),
            (f"{rate('baton_prefill_link_bad_frames_total')} + {rate('baton_decode_link_bad_frames_total')}", "bad"),
        ),
    ),
    Panel(
        "Pages free",
        "short",
        (
            (gauge("baton_prefill_pages_free", "instance"), "prefill {{instance}}"),
            (gauge("baton_decode_pages_free", "instance"), "decode {{instance}}"),
        ),
    ),
    Panel(
        "Tombstones of rooms",
        "short",
        (
            ("baton_prefill_tombstones{W}", "prefill {{instance}}"),
            ("baton_decode_tombstones{W}", "decode {{instance}}"),
        ),
    ),
    Panel("Goodbyes not yet acknowledged (decode)", "short", (("baton_decode_farewells{W}", "{{instance}}"),)),
)

ROUTER = (
    Panel(
        "Workers by state", "short", ((gauge("baton_router_workers", "role, state"), "{{role}} {{state}}"),), width=FULL
    ),
    Panel("Requests by route", "reqps", ((rate("baton_router_requests_total", "route"), "{{route}}"),), stack=True),
    Panel("Requests by status", "reqps", ((rate("baton_router_requests_total", "status"), "{{status}}"),), stack=True),
    Panel("Time to first token", "s", quantiles("baton_router_ttft_seconds")),
    Panel("Time between tokens", "s", quantiles("baton_router_itl_seconds")),
    Panel("Whole request", "s", quantiles("baton_router_request_seconds")),
    Panel("Retries by cause", "reqps", ((rate("baton_router_retries_total", "reason"), "{{reason}}"),), stack=True),
    Panel(
        "Refused by the router",
        "reqps",
        ((rate("baton_router_admission_rejections_total", "reason"), "{{reason}}"),),
        stack=True,
    ),
    Panel("Streams that broke off", "reqps", ((rate("baton_router_broken_streams_total"), "broken"),)),
    Panel("Requests under way", "short", ((gauge("baton_router_inflight_requests", "instance"), "{{instance}}"),)),
    Panel(
        "Processor and memory",
        "short",
        (
            (rate("baton_router_process_cpu_seconds_total", "instance"), "cores {{instance}}"),
            ("baton_router_process_resident_memory_bytes{W} / 1e9", "GB {{instance}}"),
            ("baton_router_process_open_fds{W} / baton_router_process_max_fds{W}", "share of descriptors {{instance}}"),
        ),
    ),
    Panel(
        "Registry",
        "short",
        (
            (gauge("baton_bootstrap_instances"), "workers known"),
            (gauge("baton_bootstrap_instances_ready"), "workers ready"),
            (gauge("baton_bootstrap_ranks"), "ranks"),
            (gauge("baton_bootstrap_rooms"), "rooms"),
        ),
    ),
    Panel(
        "Registry: answers",
        "reqps",
        ((rate("baton_bootstrap_requests_total", "route, status"), "{{route}} {{status}}"),),
        stack=True,
    ),
)

DASHBOARDS: dict[str, tuple[str, tuple[Panel, ...]]] = {
    "overview": ("Overview", OVERVIEW),
    "request-flow": ("Request flow", FLOW),
    "prefill": ("Prefill workers", PREFILL),
    "decode": ("Decode workers", DECODE),
    "kv-plane": ("KV plane", KV),
    "router": ("Router and registry", ROUTER),
}
