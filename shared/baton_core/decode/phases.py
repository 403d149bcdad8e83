"""The life of a request on the decode side.

INTAKE ──► RESOLVING ──► GREETING ──► PREALLOC ──► TRANSFERRING ──► ARRIVED ──► RUNNING ──► DONE
            which          hello        waits for     pages are        waits for    tokens
            prefill?       sent         pages, row    ordered          a place      stream
INTAKE ──► LOCAL ──► COMPUTING ──► RUNNING    (colocated: no room, or the fake host)
any of them ──► REVOKING (somebody may still write its pages, or a running step names it) ──► FAILED or DONE
"""

from baton_core.agreement import KVPoll
from baton_core.machine import Phase, PhaseTable

DECODE = PhaseTable(
    side="decode",
    transitions={
        Phase.INTAKE: (Phase.RESOLVING, Phase.LOCAL, Phase.FAILED),
        Phase.RESOLVING: (Phase.GREETING, Phase.FAILED),
        Phase.GREETING: (Phase.PREALLOC, Phase.FAILED),
        Phase.PREALLOC: (Phase.TRANSFERRING, Phase.FAILED),
        Phase.TRANSFERRING: (Phase.ARRIVED, Phase.REVOKING),
        Phase.ARRIVED: (Phase.RUNNING, Phase.DONE, Phase.FAILED),
        Phase.LOCAL: (Phase.COMPUTING, Phase.FAILED),
        Phase.COMPUTING: (Phase.RUNNING, Phase.REVOKING, Phase.FAILED),
        Phase.RUNNING: (Phase.DONE, Phase.REVOKING, Phase.FAILED),
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
        Phase.LOCAL: "waiting for KV pages",
        Phase.COMPUTING: "computing the prompt",
        Phase.REVOKING: "stopping the transfer",
    },
)
