"""The null backend: moves nothing, so that everything around a transfer can be run and measured without one.

A decode worker that uses it answers from whatever its pages hold: for load tests of the control path only.
"""

from baton_core.agreement import KVPoll, Poller
from baton_core.effects import Push
from baton_core.messages import MetadataRow, PageOrder
from baton_core.request import Incarnation, PageId, Room
from baton_engine.kv_pool import RowMemory
from baton_engine.transfer.attempts import Attempt, AttemptTable, TablePoller
from baton_engine.transfer.protocol import Poke


class _FakeEnd:
    """What both ends share: attempts on which nobody ever works."""

    def __init__(self, poke: Poke) -> None:
        self._table = AttemptTable(poke)

    def poller(self, room: Room, attempt: int) -> Poller:
        """This end's view of the attempt."""
        return TablePoller(self._table, room, attempt)

    def revoke(self, room: Room, attempt: int) -> None:
        """Writers have stopped at once: there are none."""
        self._table.revoke(room, attempt)

    def fence(self, room: Room, attempt: int) -> None:
        """Nobody to cut off."""

    def forget(self, room: Room, attempt: int) -> None:
        """Drop the attempt."""
        self._table.forget(room, attempt)

    def close(self) -> None:
        """Nothing to close."""


class FakeReceiver(_FakeEnd):
    """Every expected transfer has succeeded already, with token 0."""

    backend = "fake"
    address = "nowhere"

    def __init__(self, rows: RowMemory, poke: Poke) -> None:
        super().__init__(poke)
        self._rows = rows

    def expect(self, room: Room, attempt: int, writer: Incarnation, pages: tuple[PageId, ...], row: int) -> None:
        """Write the row at once."""
        self._rows.clear(row)
        self._rows.write(row, MetadataRow(room=room, attempt=attempt, first_token=0).pack())
        one = Attempt(
            room=room,
            attempt=attempt,
            peer=writer,
            status=KVPoll.WaitingForInput,
            pages_total=len(pages),
            pages=pages,
            row=row,
        )
        self._table.open(one)
        self._table.advance(one, KVPoll.Success, len(pages))


class FakeSender(_FakeEnd):
    """Every push has arrived when the last one is made."""

    def offer(self, room: Room, attempt: int, peer: Incarnation, pages_total: int) -> None:
        """Ordered from the start."""
        one = Attempt(room=room, attempt=attempt, peer=peer, status=KVPoll.WaitingForInput, pages_total=pages_total)
        self._table.open(one)
        self._table.advance(one, KVPoll.WaitingForInput)

    def order(self, peer: Incarnation, order: PageOrder) -> None:
        """Nothing depends on it."""

    def push(self, push: Push) -> None:
        """Success with the row."""
        one = self._table.get(push.room, push.attempt)
        if one is not None:
            status = KVPoll.Transferring if push.row is None else KVPoll.Success
            self._table.advance(one, status, push.first + len(push.pages))

    def peer_gone(self, peer: Incarnation) -> None:
        """There are no connections."""
