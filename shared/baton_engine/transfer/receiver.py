"""The decode end of a transfer: it expects attempts, and has one or two doors through which prefill ranks come in.

Whoever comes first through whichever door carries its flow; the table sees to it that one does.
"""

from collections.abc import Sequence
from typing import Protocol

from baton_core.agreement import Staging
from baton_core.kv_layout import UnitLayout, plan, row_writer, writers
from baton_core.ranks import Member
from baton_core.request import Incarnation, PageId, Room
from baton_engine.kv_pool import RowMemory
from baton_engine.transfer.attempts import AttemptTable, Incoming, TableEnd, sibling
from baton_engine.transfer.shm_wire import own_boot_id
from baton_engine.transfer.ways import Doors


class Door(Protocol):
    """Where prefill ranks come in."""

    name: str
    address: str
    bytes_received: int
    staging: Staging | None

    def close(self) -> None:
        """Let nobody in any more, and end every conversation."""
        ...


class PageReceiver(TableEnd):
    """Takes in the pages of this rank: rank `member` of a unit laid out as `layout`."""

    def __init__(
        self,
        table: AttemptTable,
        layout: UnitLayout,
        member: Member,
        rows: RowMemory,
        doors: Sequence[Door],
        *,
        checksum: bool = False,
    ) -> None:
        super().__init__(table)
        self._must_verify = checksum
        self._layout, self._member, self._rows, self.doors = layout, member, rows, tuple(doors)
        self.staging: Staging | None = next((door.staging for door in doors if door.staging is not None), None)
        addresses = {door.name: door.address for door in doors}
        if len(addresses) == 1:
            ((self.backend, self.address),) = addresses.items()
        else:
            self.backend = "auto"
            self.address = Doors(**addresses, boot_id=own_boot_id()).to_text()

    @property
    def bytes_received(self) -> int:
        """Bytes of pages, through all doors."""
        return sum(door.bytes_received for door in self.doors)

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
        """Let the ranks of `peer`'s unit that have a share fill these pages but the held ones, and one of them this row."""
        assert len(pages) == self._layout.pages(prompt_tokens), f"{len(pages)} pages for {prompt_tokens} tokens"
        assert 0 <= held_pages <= len(pages), f"{held_pages} of {len(pages)} pages are held"
        self._rows.clear(row)
        one = Incoming(
            room=room, attempt=attempt, prompt_tokens=prompt_tokens, pages=pages, row=row, held_pages=held_pages
        )
        speaker = row_writer(source, self._layout, self._member)
        for writer in writers(source, self._layout, self._member):
            one.add_flow(
                sibling(peer, writer),
                plan(source, writer, self._layout, self._member),
                carries_row=writer == speaker,
                must_verify=self._must_verify,
            )
        self._table.open(one)

    def close(self) -> None:
        """All doors."""
        for door in self.doors:
            door.close()
