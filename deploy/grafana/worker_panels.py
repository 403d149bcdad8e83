"""The dashboards of prefill and decode workers."""

from panel import QUARTER, Panel, gauge, quantiles, rate


def worker(role: str) -> tuple[Panel, ...]:
    """What both kinds of workers show."""
    return (*_standing(f"baton_{role}"), *_work(f"baton_{role}"))


def _standing(own: str) -> tuple[Panel, ...]:
    """How they are, and what they hold."""
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
            # The app counts without a DP rank, each unit with its own: only their sums can be added.
            (
                (
                    f"{gauge(f'{own}_bad_frames_total', 'instance')} + {gauge(f'{own}_link_bad_frames_total', 'instance')}",
                    "bad frames {{instance}}",
                ),
            ),
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
    )


def _work(own: str) -> tuple[Panel, ...]:
    """What they do, and how fast."""
    return (
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
