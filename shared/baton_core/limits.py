"""Every limit and every deadline of Baton, in one place, each with its unit and a named outcome when it is reached.

All deadlines of one request derive from its budget (`request_budget_ms`): a state's deadline is the earlier of its own
and the request's, and the error names the stage that ran out.
"""

from dataclasses import dataclass, field, fields

Millis = int


def limit(default: int, help: str, *, least: int = 1) -> int:
    """A limit with its default, and what `--help` says of it."""
    value: int = field(default=default, metadata={"help": help, "least": least})
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one worker; each field is a flag of the same name (`--lookup-ms`).

    Raises ValueError at construction when a value is not positive (or, where nothing is a limit too, negative).
    """

    # -- deadlines of a request (reached: the request fails, `Reason.DEADLINE`, the stage is named)
    request_budget_ms: Millis = limit(600_000, "whole request, unless the router sends what is left of it")
    lookup_ms: Millis = limit(2_000, "all look-ups at the registry together")
    other_leg_ms: Millis = limit(10_000, "the other worker's leg of a room arrives")
    transfer_stall_ms: Millis = limit(5_000, "a transfer, or its metadata row, makes progress")
    revoking_ms: Millis = limit(2_000, "writers confirm that they stopped; then the peer is fenced")
    # -- links between workers (reached: every room of that peer fails, `Reason.PEER_LOST`)
    heartbeat_ms: Millis = limit(1_000, "a link with nothing to say gives a sign of life")
    link_silent_ms: Millis = limit(5_000, "a link is silent; then the peer is lost")
    link_suspect_ms: Millis = limit(700, "a peer whose connection broke says a word again")
    link_resend_ms: Millis = limit(200, "an unacknowledged message is sent again")
    link_window: int = limit(4_096, "unacknowledged messages; with more the peer is lost")
    # -- ranks of one unit (reached: the unit is at fault and ends; the error names the ranks that did not come)
    control_collective_ms: Millis = limit(10_000, "the ranks of a unit agree; else the unit ends")
    tensor_collective_ms: Millis = limit(60_000, "the ranks of a unit exchange tensors; else the unit ends")
    # -- worker (reached: the worker turns unready and exits)
    loop_stall_ms: Millis = limit(15_000, "the scheduler loop takes a turn; else the worker exits")
    step_ms: Millis = limit(60_000, "one forward; else the worker exits")
    start_ms: Millis = limit(300_000, "ranks load the model and say ready")
    drain_ms: Millis = limit(120_000, "running requests finish after SIGTERM")
    # -- memory of rooms
    tombstone_ms: Millis = limit(60_000, "a failed room is remembered for its late leg")
    tombstones_max: int = limit(65_536, "failed rooms remembered; the oldest is forgotten first")
    orphan_hellos_max: int = limit(4_096, "rooms that wait at prefill for their own leg; more are refused")
    # -- queues (reached: 503 with Retry-After, `Reason.WAITING_FULL`)
    waiting_max: int = limit(2_048, "live requests of one scheduler; more get 503")
    retry_after_ms: Millis = limit(1_000, "what Retry-After says")
    # -- batches
    running_max: int = limit(64, "sequences in one decode batch")
    metadata_rows: int = limit(256, "handoffs in flight on one decode rank")
    chunk_tokens: int = limit(512, "prompt tokens computed in one step")
    # -- memory of decode
    backup_pages: int = limit(512, "KV pages of retracted requests kept on the host; others are recomputed", least=0)
    rebootstraps_max: int = limit(
        2, "times that prefill computes a retracted request anew; otherwise decode does it itself", least=0
    )
    rebootstrap_ms: Millis = limit(10_000, "prefill computes a retracted request anew; then decode does it itself")
    overtakings_max: int = limit(16, "requests that pass one that waits for KV pages; then it stands first")
    answer_share_start_percent: int = limit(70, "share of the longest answer that decode counts on at first")
    answer_share_floor_percent: int = limit(10, "least share of the longest answer that decode counts on")
    # -- bodies (reached: 400, or 413 for bytes)
    body_bytes_max: int = limit(16 * 1024 * 1024, "request body; a larger one gets 413")
    stop_strings_max: int = limit(64, "stop strings of one request")
    stop_string_chars_max: int = limit(1_024, "characters of one stop string")
    stop_ids_max: int = limit(1_024, "stop token ids of one request")

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if not isinstance(value, int) or value < one.metadata["least"]:
                kind = "a positive" if one.metadata["least"] else "no negative"
                raise ValueError(f"limit {one.name} must be {kind} integer, not {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryLimits:
    """Bounds of one registry; the named outcome of each is `Refused` with 503 (or 400 for a layout that never fits)."""

    ranks_max: int = 10_000
    rooms_max: int = 1_000_000
    room_ms: Millis = 120_000  # life of a room's entry, unless it is registered again

    def __post_init__(self) -> None:
        for name in ("ranks_max", "rooms_max", "room_ms"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistrarLimits:
    """Times and bounds of registering. Raises ValueError when a value is not positive."""

    lease_ms: Millis = 10_000  # renewed three times in this time
    call_ms: Millis = 1_500  # one HTTP call; longer than a registry's probe of the worker we supersede
    retry_first_ms: Millis = 100  # pause after a failure, doubled each time …
    retry_max_ms: Millis = 2_000  # … up to this; attempts never end
    room_renew_ms: Millis = 40_000  # an open room is registered again; registries keep rooms for 120 s
    room_kept_ms: Millis = 10_000  # a room that failed stays registered so long: decode's leg may come late, and ask
    rooms_max: int = 65_536  # open rooms; more: `Overloaded`
    deregister_ms: Millis = 1_000  # all registries together, at shutdown

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")


HEAD_BYTES_MAX = 64 * 1024
"""Head of an HTTP request, beside what one read brings; also of a chunk's extensions and of trailers (431)."""
HEAD_MS: Millis = 10_000
"""From the first byte of a request to the end of its head (408)."""
BODY_STALL_MS: Millis = 120_000
"""Between two bytes of a body; then the client counts as gone. The router says 408 before that (client_silence_ms)."""
PRIORITY_MOST = 1_000_000
"""Greatest `priority` of a request, and its negative the least; greater is served first, 0 is normal."""
PROMPT_LOGPROBS_MAX = 1 << 17
"""Logprobs of a prompt's tokens and of the likeliest beside them, all together: as many as are put into words in about
50 ms, for which nothing else of this worker moves."""
