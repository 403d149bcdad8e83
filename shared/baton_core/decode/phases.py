"""The life of a request on the decode side.

INTAKE ──► RESOLVING ──► GREETING ──► PREALLOC ──► TRANSFERRING ──► ARRIVED ──► RUNNING ──► DONE
            which          hello        waits for     pages are        waits for    tokens
            prefill?       sent         pages, row    ordered          a place      stream
INTAKE ──► LOCAL ──► COMPUTING ──► RUNNING    (colocated: no room, or the fake host)
ARRIVED, RUNNING ──► BACKING_UP ──► RETRACTED ──► RESTORING ──► ARRIVED    (the pool ran out; the KV cache waits on the host)
ARRIVED, RUNNING ──► RETRACTED ──► RESOLVING ──► … ──► ARRIVED    (or prefill computes it anew, where the host has no room:
            from each of RESOLVING … TRANSFERRING back to RETRACTED, where that fails; pages that somebody may still write
            stay with a record of their own, INTAKE ──► REVOKING; see `reentry`)
ARRIVED, RUNNING ──► RETRACTED ──► COMPUTING ──► RUNNING    (or it is computed anew here)
any of them ──► REVOKING (somebody may still write its pages, or a running step names it) ──► FAILED or DONE
"""

from baton_core.agreement import KVPoll
from baton_core.machine import Phase, PhaseTable

DECODE = PhaseTable(
    side="decode",
    transitions={
        Phase.INTAKE: (Phase.RESOLVING, Phase.LOCAL, Phase.REVOKING, Phase.FAILED),
        Phase.RESOLVING: (Phase.GREETING, Phase.RETRACTED, Phase.FAILED),
        Phase.GREETING: (Phase.PREALLOC, Phase.RETRACTED, Phase.FAILED),
        Phase.PREALLOC: (Phase.TRANSFERRING, Phase.RETRACTED, Phase.FAILED),
        Phase.TRANSFERRING: (Phase.ARRIVED, Phase.RETRACTED, Phase.REVOKING),
        Phase.ARRIVED: (Phase.RUNNING, Phase.BACKING_UP, Phase.RETRACTED, Phase.DONE, Phase.FAILED),
        Phase.LOCAL: (Phase.COMPUTING, Phase.FAILED),
        Phase.COMPUTING: (Phase.RUNNING, Phase.RETRACTED, Phase.REVOKING, Phase.DONE, Phase.FAILED),
        Phase.RUNNING: (Phase.BACKING_UP, Phase.RETRACTED, Phase.DONE, Phase.REVOKING, Phase.FAILED),
        Phase.BACKING_UP: (Phase.RETRACTED, Phase.REVOKING),
        Phase.RETRACTED: (Phase.RESTORING, Phase.RESOLVING, Phase.COMPUTING, Phase.DONE, Phase.FAILED),
        Phase.RESTORING: (Phase.ARRIVED, Phase.RETRACTED, Phase.REVOKING),
        Phase.REVOKING: (Phase.FAILED, Phase.DONE),
        Phase.DONE: (),
        Phase.FAILED: (),
    },
    polls={
        Phase.INTAKE: KVPoll.Bootstrapping,
        Phase.RESOLVING: KVPoll.Bootstrapping,
        Phase.GREETING: KVPoll.Bootstrapping,
        Phase.PREALLOC: KVPoll.WaitingForInput,
        Phase.TRANSFERRING: KVPoll.Transferring,
        Phase.ARRIVED: KVPoll.Success,
        Phase.RUNNING: KVPoll.Success,
        Phase.BACKING_UP: KVPoll.Success,
        Phase.RETRACTED: KVPoll.Success,
        Phase.RESTORING: KVPoll.Success,
        Phase.LOCAL: KVPoll.WaitingForInput,
        Phase.COMPUTING: KVPoll.WaitingForInput,
        Phase.REVOKING: KVPoll.Failed,
        Phase.DONE: KVPoll.Success,
        Phase.FAILED: KVPoll.Failed,
    },
    stages={
        Phase.INTAKE: "intake",
        Phase.RESOLVING: "looking up the prefill worker",
        Phase.GREETING: "waiting for prefill's leg",
        Phase.PREALLOC: "waiting for KV pages",
        Phase.TRANSFERRING: "waiting for the KV cache",
        Phase.ARRIVED: "waiting for a place in the batch",
        Phase.RUNNING: "decoding",
        Phase.BACKING_UP: "copying the KV cache to the host",
        Phase.RETRACTED: "waiting for KV pages after a retraction",
        Phase.RESTORING: "copying the KV cache back",
        Phase.LOCAL: "waiting for KV pages",
        Phase.COMPUTING: "computing the prompt",
        Phase.REVOKING: "stopping the transfer",
    },
)
