"""The null backend: moves nothing, so that everything around a transfer can be run and measured without one.

A decode worker that uses it answers from whatever its pages hold: for load tests of the control path only.
"""

from baton_core.agreement import KVPoll, Staging
from baton_core.effects import Push
from baton_core.kv_layout import UnitLayout
from baton_core.messages import MetadataRow, PageOrder
from baton_core.request import Incarnation, PageId, Room
from baton_engine.kv_pool import RowMemory
from baton_engine.transfer.attempts import AttemptTable, Incoming, Outgoing, TableEnd
from baton_engine.transfer.protocol import Poke


class _FakeEnd(TableEnd):
    """Attempts on which nobody ever works."""

    def __init__(self, poke: Poke) -> None:
        super().__init__(AttemptTable(poke))

    def close(self) -> None:
        """Nothing to close."""


class FakeReceiver(_FakeEnd):
    """Every expected transfer has succeeded already, with token 0."""

    backend = "fake"
    address = "nowhere"
    staging: Staging | None = None

    def __init__(self, rows: RowMemory, poke: Poke) -> None:
        super().__init__(poke)
        self._rows = rows

    def expect(
        self,
        room: Room,
        attempt: int,
        peer: Incarnation,
        source: UnitLayout,
        prompt_tokens: int,
        pages: tuple[PageId, ...],
        row: int,
        held_pages: int = 0,
    ) -> None:
        """Write the row at once: nobody owes anything."""
        self._rows.clear(row)
        self._rows.write(row, MetadataRow(room=room, attempt=attempt, first_token=0).pack())
        one = Incoming(room=room, attempt=attempt, prompt_tokens=prompt_tokens, pages=pages, row=row)
        self._table.open(one)
        self._table.advance(one, KVPoll.Success)


class FakeSender(_FakeEnd):
    """Every push has arrived when the last one is made: nobody reads."""

    def __init__(self, layout: UnitLayout, poke: Poke) -> None:
        super().__init__(poke)
        self._layout = layout

    def offer(self, room: Room, attempt: int, peer: Incarnation, target: UnitLayout, prompt_tokens: int) -> None:
        """Ordered from the start."""
        pages_total = self._layout.pages(prompt_tokens)
        one = Outgoing(
            room=room,
            attempt=attempt,
            prompt_tokens=prompt_tokens,
            pages_total=pages_total,
            status=KVPoll.WaitingForInput,
        )
        self._table.open(one)
        self._table.advance(one, KVPoll.WaitingForInput)

    def order(self, peer: Incarnation, order: PageOrder) -> None:
        """Nothing depends on it."""

    def push(self, push: Push) -> None:
        """Success with the row."""
        one = self._table.get(push.room, push.attempt)
        if isinstance(one, Outgoing):
            one.pushed_all = push.row is not None
            self._table.advance(one, KVPoll.Transferring)
