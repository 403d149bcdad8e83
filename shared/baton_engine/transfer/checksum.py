"""The checksum over what one rank writes to another (`--kv-checksum`): decode finds in its pool what prefill computed.

    prefill: blake2b over the flow's runs, in order, before they are sent ──► CHECKSUM, ahead of the last of them
    decode:  everything is in the pool ──► the same over what lies there ──► equal: Success · else: the attempt fails

Each flow has one of its own, so with many ranks every writer vouches for its share, whatever the two layouts are. A worker
that was told to check takes nothing without a checksum; one that was not checks what comes with one.
"""

from hashlib import blake2b

from baton_core.agreement import KVPoll
from baton_core.errors import Reason
from baton_engine.kv_pool import PageMemory
from baton_engine.transfer.attempts import AttemptTable, Incoming
from baton_engine.transfer.flow import Flow
from baton_engine.transfer.ways import Job

_DIGEST_BYTES = 8


class Checksums:
    """Prefill's side. A flow's pushes come one after the other, on one thread."""

    def __init__(self, memory: PageMemory) -> None:
        self._memory = memory

    def take_in(self, job: Job) -> int | None:
        """Count a push in before it is sent; with the last bytes that the flow owes, its checksum."""
        flow, push = job.flow, job.push
        if not flow.owed_bytes:
            return None
        digest = flow.digest = flow.digest or blake2b(digest_size=_DIGEST_BYTES)
        for ordinal, _, run in flow.plan.pieces(job.ordinals, job.target.wanted):
            digest.update(self._memory.source(push.pages[ordinal - push.first], run.source_offset, run.nbytes))
            flow.digested_bytes += run.nbytes
        if flow.checksum is not None or flow.digested_bytes < flow.owed_bytes:
            return None
        flow.checksum, flow.verified = int.from_bytes(digest.digest()), True
        return flow.checksum


def verify(table: AttemptTable, memory: PageMemory, flow: Flow) -> None:
    """Decode's side, once all of a flow lies in the pool: let it count, or fail its attempt. Nothing where none is due."""
    if not flow.is_whole or flow.verified or not flow.wants_check:
        return
    if not table.enter(flow, flow.carrier):
        return
    try:
        found = _found(memory, flow)
    finally:
        table.leave(flow)
    if flow.checksum == found:
        flow.verified = True
        table.advance(flow.one, KVPoll.Transferring)
        return
    room, told = flow.one.room, "none" if flow.checksum is None else f"{flow.checksum:016x}"
    text = f"KV checksum differs in room {room}: {flow.peer} sent {told}, decode finds {found:016x}"
    table.fail(flow.one, Reason.METADATA_CORRUPT, f"{text} in {flow.owed_bytes} bytes")


def _found(memory: PageMemory, flow: Flow) -> int:
    one = flow.one
    assert isinstance(one, Incoming)
    digest = blake2b(digest_size=_DIGEST_BYTES)
    for _, ordinal, run in flow.plan.pieces(range(flow.plan.source_pages(one.prompt_tokens)), one.wanted):
        digest.update(memory.source(one.pages[ordinal], run.target_offset, run.nbytes))
    return int.from_bytes(digest.digest())
