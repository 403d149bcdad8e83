"""The prefill end of a transfer: it takes the orders of decode's ranks and gives each the best way that both ends have.

    offer ──► order of each rank that reads from here ──► (a way is tried, or known) ──► WaitingForInput ──► push …

With `auto` decode offers every way in one address and prefill chooses, once for each decode rank, and says why in the
log. The choice is prefill's because only it can try: it takes the boot id for a hint and the descriptor of decode's
memory for the proof. A prefill worker that was told to use one way chooses too, among one; so every worker fits a decode
worker in `auto`.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from baton_core.agreement import KVPoll
from baton_core.effects import Push
from baton_core.errors import Reason
from baton_core.kv_layout import LayoutMismatch, UnitLayout, plan, readers, row_writer
from baton_core.messages import PageOrder
from baton_core.ranks import Member, member_of
from baton_core.request import Incarnation, Room
from baton_engine.transfer.attempts import AttemptTable, Key, Outgoing, TableEnd, TablePoller, sibling
from baton_engine.transfer.flow import Flow
from baton_engine.transfer.shm_wire import own_boot_id
from baton_engine.transfer.ways import Doors, Job, Probe, Reach, Target, Way

log = structlog.get_logger(__name__)

EARLY_ORDERS_MAX = 4_096
EARLY_PAGES_MAX = 1_048_576
"""Of orders kept for attempts that are not offered yet, or not any more."""


@dataclass(frozen=True, slots=True)
class _Ordered:
    """An order that was taken."""

    way: Way
    target: Target


@dataclass(frozen=True, slots=True, kw_only=True)
class _Undecided:
    """An order that waits until the better way was tried."""

    flow: Flow
    better: _Ordered
    other: _Ordered
    probe: Probe


class _EarlyOrders:
    """Orders that came before their offer: this unit may have accepted, and decode ordered, before this rank applied the
    same log entry. Bounded, for those whose offer never comes; the oldest are dropped first.
    """

    def __init__(self) -> None:
        self._orders: OrderedDict[tuple[Room, int, Incarnation], PageOrder] = OrderedDict()
        self._pages = 0

    def keep(self, peer: Incarnation, order: PageOrder) -> None:
        """Until it is offered."""
        self.take(peer, order.room, order.attempt)
        self._orders[(order.room, order.attempt, peer)] = order
        self._pages += len(order.pages)
        while len(self._orders) > EARLY_ORDERS_MAX or self._pages > EARLY_PAGES_MAX:
            (room, attempt, late), dropped = self._orders.popitem(last=False)
            self._pages -= len(dropped.pages)
            log.info("transfer.order_ignored", room=room, attempt=attempt, peer=late)

    def take(self, peer: Incarnation, room: Room, attempt: int) -> PageOrder | None:
        """What `peer` ordered, if it did; from now on it is not kept."""
        order = self._orders.pop((room, attempt, peer), None)
        if order is not None:
            self._pages -= len(order.pages)
        return order

    def drop(self, peer: Incarnation) -> None:
        """All orders of a peer."""
        for room, attempt, _ in [key for key in self._orders if key[2] == peer]:
            self.take(peer, room, attempt)


class PageSender(TableEnd):
    """Sends this rank's pages: rank `member` of a unit laid out as `layout`. `ways`: the better one first.

    Not thread-safe: everything happens on the driver's thread. A choice that waits for an answer is made by the next
    `poller` call after the poke that announced it.
    """

    def __init__(self, table: AttemptTable, layout: UnitLayout, member: Member, ways: Sequence[Way]) -> None:
        assert ways, "a sender without a way to send"
        super().__init__(table)
        self._layout, self._member, self._ways = layout, member, tuple(ways)
        self._boot_id = own_boot_id()
        self._offers: dict[Key, UnitLayout] = {}
        self._orders: dict[Key, dict[Incarnation, _Ordered]] = {}
        self._undecided: dict[tuple[Room, int, Incarnation], _Undecided] = {}
        self._chosen: dict[Incarnation, str] = {}
        self._early = _EarlyOrders()

    def offer(self, room: Room, attempt: int, peer: Incarnation, target: UnitLayout, prompt_tokens: int) -> None:
        """The ranks of `peer`'s unit that have a share here may order this attempt."""
        one = Outgoing(
            room=room,
            attempt=attempt,
            prompt_tokens=prompt_tokens,
            pages_total=self._layout.pages(prompt_tokens),
        )
        for reader in readers(self._layout, target, self._member):
            carries_row = row_writer(self._layout, target, reader) == self._member
            one.add_flow(
                sibling(peer, reader), plan(self._layout, self._member, target, reader), carries_row=carries_row
            )
        self._offers[(room, attempt)] = target
        self._orders[(room, attempt)] = {}
        self._table.open(one)
        self._wait_for_input(one)
        for name in one.flows:
            order = self._early.take(name, room, attempt)
            if order is not None:
                self.order(name, order)

    def order(self, peer: Incarnation, order: PageOrder) -> None:
        """Take a page order, or keep it until it is offered; one that comes twice, or from a wrong rank, is ignored."""
        key = (order.room, order.attempt)
        one = self._table.get(*key)
        if one is None:
            self._early.keep(peer, order)
            return
        flow = one.flows.get(peer)
        if flow is None or one.is_given_up or self._is_ordered(key, peer):
            log.info("transfer.order_ignored", room=order.room, attempt=order.attempt, peer=peer)
            return
        try:
            self._take(flow, order)
        except ValueError as error:
            self._table.fail(one, Reason.LAYOUT_MISMATCH, str(error))

    def push(self, push: Push) -> None:
        """Hand finished pages to the ways of all that ordered them."""
        key = (push.room, push.attempt)
        one = self._table.get(*key)
        assert isinstance(one, Outgoing)
        orders = self._orders[key]
        assert len(orders) == len(one.flows), "pushed before it was ordered"
        assert push.first + len(push.pages) <= one.pages_total, "pushed more than was offered"
        one.pushed_all = one.pushed_all or push.row is not None
        self._table.advance(one, KVPoll.Transferring)
        if one.is_given_up:
            return
        for peer, ordered in orders.items():
            flow = one.flows[peer]
            if not flow.complete:
                ordered.way.put(Job(flow, ordered.target, push))

    def poller(self, room: Room, attempt: int) -> TablePoller:
        """This rank's view of the attempt; Bootstrapping until every reader has a way."""
        if self._undecided:
            self._settle()
        return super().poller(room, attempt)

    def revoke(self, room: Room, attempt: int) -> None:
        """Skip what is queued of the attempt; what is under way ends with its frame or batch."""
        self._drop_undecided(room, attempt)
        super().revoke(room, attempt)
        self._nudge(room, attempt)

    def fence(self, room: Room, attempt: int) -> None:
        """Cut the streams whose readers do not take their frame."""
        super().fence(room, attempt)
        self._nudge(room, attempt)

    def forget(self, room: Room, attempt: int) -> None:
        """Drop the attempt and its orders."""
        super().forget(room, attempt)
        self._drop_undecided(room, attempt)
        self._offers.pop((room, attempt), None)
        self._orders.pop((room, attempt), None)

    def peer_gone(self, peer: Incarnation) -> None:
        """Keep nothing about this rank, the choice made for it included."""
        self._chosen.pop(peer, None)
        self._early.drop(peer)
        for key in [key for key in self._undecided if key[2] == peer]:
            del self._undecided[key]
        for way in self._ways:
            way.peer_gone(peer)
        super().peer_gone(peer)

    def close(self) -> None:
        """All ways."""
        for way in self._ways:
            way.close()

    # -- orders

    def _is_ordered(self, key: Key, peer: Incarnation) -> bool:
        return peer in self._orders[key] or (*key, peer) in self._undecided

    def _wait_for_input(self, one: Outgoing) -> None:
        """Go on once every reader has ordered; at once where none reads from here."""
        if len(self._orders[(one.room, one.attempt)]) == len(one.flows):
            self._table.advance(one, KVPoll.WaitingForInput)

    def _take(self, flow: Flow, order: PageOrder) -> None:
        """Understand an order and find its way. Raises ValueError where it cannot be met."""
        addresses, same_host = self._addresses(order)
        usable = [way for way in self._ways if way.name in addresses]
        if not usable:
            ours = ", ".join(way.name for way in self._ways)
            raise ValueError(f"transfer backend is {ours} on prefill and {order.backend} on decode")
        for way in usable:
            way.check(addresses[way.name])
        ways = [_Ordered(way, self._target(flow, order, addresses[way.name])) for way in usable]
        if len(ways) == 1:
            reason = f"decode offers {', '.join(addresses)}; prefill has {', '.join(way.name for way in self._ways)}"
            self._decide(flow, ways[0], reason)
        elif not same_host:
            self._decide(flow, ways[-1], "decode runs on another host")
        elif self._chosen.get(flow.peer) == ways[-1].way.name:
            self._decide(flow, ways[-1], "as before")
        else:
            probe = ways[0].way.probe(flow.peer, ways[0].target.address)
            assert probe is not None, "the better way can be tried"
            key = (order.room, order.attempt, flow.peer)
            self._undecided[key] = _Undecided(flow=flow, better=ways[0], other=ways[-1], probe=probe)
            self._settle()

    def _addresses(self, order: PageOrder) -> tuple[dict[str, str], bool]:
        """The address for each way that decode offers, and whether decode runs on this host. Raises ValueError."""
        if order.backend != "auto":
            return {order.backend: order.address}, True
        doors = Doors.from_text(order.address)
        return {"shm": doors.shm, "tcp": doors.tcp}, doors.boot_id == self._boot_id

    def _target(self, flow: Flow, order: PageOrder, address: str) -> Target:
        offered = self._offers[(order.room, order.attempt)]
        theirs = UnitLayout.from_text(order.layout)
        if theirs != offered:
            raise LayoutMismatch(f"layout is {order.layout} in the order and was {offered.to_text()} in decode's hello")
        pages = offered.pages(flow.one.prompt_tokens)
        if len(order.pages) != pages:
            raise ValueError(f"{len(order.pages)} pages are ordered; the prompt has {pages}")
        page_bytes = offered.member(member_of(flow.peer)).page_bytes
        return Target(
            address=address,
            pages=order.pages,
            row=order.row,
            page_bytes=page_bytes,
            held_pages=order.held_pages,
        )

    # -- choosing

    def _settle(self) -> None:
        """Decide what could be tried since."""
        for key, waiting in list(self._undecided.items()):
            if waiting.probe.reach is Reach.CONNECTING:
                continue
            del self._undecided[key]
            if waiting.probe.reach is Reach.OPEN:
                self._decide(waiting.flow, waiting.better, "decode's memory is mapped")
            else:
                self._decide(waiting.flow, waiting.other, waiting.probe.closed_by)

    def _decide(self, flow: Flow, ordered: _Ordered, reason: str) -> None:
        one = flow.one
        assert isinstance(one, Outgoing)
        if self._chosen.get(flow.peer) != ordered.way.name:
            self._chosen[flow.peer] = ordered.way.name
            log.info("transfer.chosen", peer=flow.peer, backend=ordered.way.name, reason=reason)
        self._orders[(one.room, one.attempt)][flow.peer] = ordered
        flow.way = ordered.way.name
        self._table.ordered(flow, ordered.target.held_pages)
        self._wait_for_input(one)
        ordered.way.prepare(flow, ordered.target)

    def _nudge(self, room: Room, attempt: int) -> None:
        one = self._table.get(room, attempt)
        for peer, ordered in self._orders.get((room, attempt), {}).items():
            if one is not None:
                ordered.way.nudge(one.flows[peer], ordered.target)

    def _drop_undecided(self, room: Room, attempt: int) -> None:
        for key in [key for key in self._undecided if key[:2] == (room, attempt)]:
            del self._undecided[key]
