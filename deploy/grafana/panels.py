"""The dashboards: what each shows."""

from panel import FULL, QUARTER, RATE, Panel, gauge, mean, quantile, quantiles, rate
from worker_panels import DECODE, PREFILL

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
        "Time to first token, by who spent it",
        "s",
        ((mean("baton_router_ttft_stage_seconds", "stage"), "{{stage}}"),),
        "Means, which add up to the time to first token. Each part is told by its owner; decode's includes prefill's work.",
        stack=True,
    ),
    Panel(
        "Time to first token that nobody owns",
        "s",
        tuple(
            (quantile(q, "baton_router_ttft_stage_seconds", "", ', stage="unattributed"'), f"p{round(q * 100)}")
            for q in (0.5, 0.95)
        ),
        "The ways between router and decode. p95 is to stay below 3 ms, or 3 % of the time to first token.",
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
