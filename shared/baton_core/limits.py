"""Every limit and every deadline of Baton, in one place, each with its unit and a named outcome when it is reached.

All deadlines of one request derive from its budget (`request_budget_ms`): a state's deadline is the earlier of its own
and the request's, and the error names the stage that ran out.
"""

from dataclasses import dataclass, fields

Millis = int


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one worker; each field is a flag of the same name (`--lookup-ms`).

    Raises ValueError at construction when a value is not positive.
    """

    # -- deadlines of a request (reached: the request fails, `Reason.DEADLINE`, the stage is named)
    request_budget_ms: Millis = 600_000  # whole request, unless the router sends what is left
    lookup_ms: Millis = 2_000  # all look-ups at the registry together
    other_leg_ms: Millis = 10_000  # the other worker's leg of this room arrives
    transfer_stall_ms: Millis = 5_000  # a transfer, or its metadata row, makes no progress
    revoking_ms: Millis = 2_000  # writers confirm that they stopped; then the peer is fenced
    # -- links between workers (reached: every room of that peer fails, `Reason.PEER_LOST`)
    heartbeat_ms: Millis = 1_000
    link_silent_ms: Millis = 5_000
    link_suspect_ms: Millis = 700  # a peer whose connection broke says a word again
    link_resend_ms: Millis = 200  # an unacknowledged message is sent again
    link_window: int = 4_096  # unacknowledged messages; more: the peer counts as lost
    # -- worker (reached: the worker turns unready and exits)
    loop_stall_ms: Millis = 15_000  # scheduler loop without a turn
    step_ms: Millis = 60_000  # one forward
    start_ms: Millis = 300_000  # ranks load the model and say ready
    drain_ms: Millis = 120_000  # running requests finish after SIGTERM
    # -- memory of rooms
    tombstone_ms: Millis = 60_000
    tombstones_max: int = 65_536  # the oldest is forgotten: may cost a deadline, never correctness
    orphan_hellos_max: int = 4_096  # hellos without a request; more are answered `WAITING_FULL`
    # -- queues (reached: 503 with Retry-After, `Reason.WAITING_FULL`)
    waiting_max: int = 2_048  # live requests of one scheduler
    retry_after_ms: Millis = 1_000
    # -- batches
    running_max: int = 64  # sequences in one decode batch
    metadata_rows: int = 256  # handoffs in flight on one decode rank
    chunk_tokens: int = 512  # prompt tokens computed in one prefill step
    # -- bodies (reached: 400, or 413 for bytes)
    body_bytes_max: int = 16 * 1024 * 1024
    stop_strings_max: int = 64
    stop_string_chars_max: int = 1_024
    stop_ids_max: int = 1_024

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int) or value <= 0:
                raise ValueError(f"limit {field.name} must be a positive integer, not {value!r}")
