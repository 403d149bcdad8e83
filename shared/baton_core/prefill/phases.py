"""The life of a request on the prefill side.

    INTAKE ──► BOOTSTRAPPING ──► ACCEPTED ──► QUEUED ──► FORWARDING ──► INFLIGHT ──► DONE
                 app's leg        hello        page        chunks are     last pages
                 is here          matches      orders      computed and   are moving
                                               are here    pushed
    any of them ──► REVOKING (somebody may still read its pages, or a running step names it) ──► FAILED

A request without a peer (fake host) goes INTAKE ──► QUEUED ──► FORWARDING ──► DONE.
"""

from baton_core.agreement import KVPoll
from baton_core.machine import Phase, PhaseTable

PREFILL = PhaseTable(
    side="prefill",
    transitions={
        Phase.INTAKE: (Phase.BOOTSTRAPPING, Phase.QUEUED, Phase.FAILED),
        Phase.BOOTSTRAPPING: (Phase.ACCEPTED, Phase.FAILED),
        Phase.ACCEPTED: (Phase.QUEUED, Phase.REVOKING),
        Phase.QUEUED: (Phase.FORWARDING, Phase.REVOKING, Phase.FAILED),
        Phase.FORWARDING: (Phase.INFLIGHT, Phase.DONE, Phase.REVOKING, Phase.FAILED),
        Phase.INFLIGHT: (Phase.DONE, Phase.REVOKING),
        Phase.REVOKING: (Phase.FAILED,),
        Phase.DONE: (),
        Phase.FAILED: (),
    },
    polls={
        Phase.INTAKE: KVPoll.Bootstrapping,
        Phase.BOOTSTRAPPING: KVPoll.Bootstrapping,
        Phase.ACCEPTED: KVPoll.Bootstrapping,
        Phase.QUEUED: KVPoll.WaitingForInput,
        Phase.FORWARDING: KVPoll.Transferring,
        Phase.INFLIGHT: KVPoll.Transferring,
        Phase.REVOKING: KVPoll.Failed,
        Phase.DONE: KVPoll.Success,
        Phase.FAILED: KVPoll.Failed,
    },
    stages={
        Phase.INTAKE: "intake",
        Phase.BOOTSTRAPPING: "waiting for decode's leg",
        Phase.ACCEPTED: "waiting for decode's page orders",
        Phase.QUEUED: "waiting for KV pages and a turn",
        Phase.FORWARDING: "computing the prompt",
        Phase.INFLIGHT: "transferring the last pages",
        Phase.REVOKING: "stopping the transfer",
    },
)
