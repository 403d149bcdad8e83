"""One unit: its ranks, the channel that carries its log and the notes to its leader, and what must hold between siblings.

The channel delivers in order for each pair of ranks, and each pair takes its own time.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton_core.decode.core import DecodeCore
from baton_core.kv_layout import UnitLayout
from baton_core.limits import Millis
from baton_core.prefill.core import PrefillCore
from baton_core.ranks import Parallel, unit_name
from baton_core.request import RequestId
from baton_core.unit_log import LogEntry
from simulation.invariants import Broken
from simulation.leader import Leader
from simulation.rank import Rank
from simulation.stage import Stage
from simulation.tensors import Tensors

if TYPE_CHECKING:
    from simulation.worker import Worker

FINGERPRINT = '{"kv":"one"}'
OTHER_FINGERPRINT = '{"kv":"two"}'


@dataclass(slots=True)
class Position:
    """The state that siblings hold after a log position, and how many have said so."""

    state: tuple[list[int], bytes]
    ranks: int = 0


class Unit:
    """One attention-DP rank of a worker, for one life."""

    def __init__(self, worker: "Worker", dp_rank: int, parallel: Parallel) -> None:
        self.worker, self.dp_rank, self.parallel = worker, dp_rank, parallel
        self.world, self.side = worker.world, worker.side
        shape = self.world.shape
        self.name = unit_name(worker.incarnation, dp_rank)
        self.alive = True
        decode = self.side == "decode"
        self.pages = shape.decode_pages if decode else shape.prefill_pages
        self.page_tokens = shape.decode_page_tokens if decode else shape.page_tokens
        self.layout = UnitLayout(
            layers=shape.layers,
            kv_heads=shape.kv_heads,
            head_dim=1,
            element_bytes=8,
            page_tokens=self.page_tokens,
            tp=parallel.tp,
            pp=parallel.pp,
            cp=parallel.cp,
        )
        self._newest: dict[tuple[int, int], Millis] = {}  # when the newest message of a way arrives
        self._positions: dict[int, Position] = {}
        self.ranks = [Rank(self, member) for member in range(parallel.members)]
        size = parallel.stage_members
        self.stages = [Stage(self, self.ranks[first : first + size]) for first in range(0, parallel.members, size)]
        self.tensors = Tensors(self)
        self.leader = Leader(self, self.ranks[0])
        self.world.tally.groups[parallel.members] += 1

    def __repr__(self) -> str:
        return self.name

    def new_core(self) -> PrefillCore | DecodeCore:
        """A core as every rank of this unit begins with."""
        shape, name = self.world.shape, self.worker.name
        fingerprint = OTHER_FINGERPRINT if shape.other_layouts and name == "D0" else FINGERPRINT
        if self.side == "prefill":
            return PrefillCore(
                limits=shape.limits,
                pool_pages=self.pages,
                context_tokens=shape.context_tokens,
                fingerprint=fingerprint,
                prefix_cache=shape.prefix_cache,
                layout=self.layout,
                pp_size=self.parallel.pp,
                dp_rank=self.dp_rank,
                dp_size=self.parallel.dp,
                load_balance_method=shape.balance,
            )
        return DecodeCore(
            limits=shape.limits,
            pool_pages=self.pages,
            context_tokens=shape.context_tokens,
            fingerprint=fingerprint,
            prefix_cache=shape.decode_prefix_cache,
            layout=self.layout,
            pp_size=self.parallel.pp,
        )

    @property
    def phases(self) -> dict[RequestId, str]:
        """Phases of its live requests, as its leader sees them."""
        return self.ranks[0].phases

    @property
    def idle(self) -> dict[RequestId, str]:
        """Likewise, of those that no step and no transfer has in hand."""
        live = self.ranks[0].ledger.live
        return {rid: one.phase.value for rid, one in live.items() if one.pages and not one.in_step and not one.opened}

    @property
    def quiet(self) -> bool:
        """Whether nothing is live, unread or unacknowledged."""
        if self.leader.inbox or self.leader.nudged or self.leader.unacknowledged():
            return False
        at = self.leader.log.position
        return all(not rank.ledger.live and rank.replica.position == at and not rank.busy for rank in self.ranks)

    # -- the channel

    def publish(self, entry: LogEntry) -> None:
        """The leader writes an entry: every other rank gets it."""
        for rank in self.ranks[1:]:
            self._post(0, rank.member, rank.take, entry)

    def to_leader(self, rank: Rank, note: object) -> None:
        """A rank tells its leader something."""
        if rank.leads:
            self.leader.note(note)
        else:
            self._post(rank.member, 0, self.leader.note, note)

    def _post(self, source: int, target: int, call: Callable[..., None], message: object) -> None:
        world = self.world
        slowness = self.ranks[source].slowness
        arrives = world.now + int(world.random.random() * (world.shape.channel_ms + 1)) * slowness
        arrives = self._newest[source, target] = max(arrives, self._newest.get((source, target), 0))
        world.at(arrives - world.now, call, message)

    # -- siblings

    def applied(self, rank: Rank, entry: LogEntry) -> None:
        """A rank applied an entry: its state must be that of the others at this position."""
        if len(self.ranks) > 1:
            state = rank.core.state()
            known = self._positions.get(entry.position)
            if known is None:
                known = self._positions[entry.position] = Position(state)
            elif known.state != state:
                raise Broken("siblings", f"{rank} differs at log position {entry.position} ({entry})")
            known.ranks += 1
            if known.ranks == len(self.ranks):
                del self._positions[entry.position]
        if rank.leads:
            self.world.chaos.look(self)
            self.world.pressure.look(self)
            self.leader.applied(entry)

    def lost(self, why: str) -> None:
        """The unit cannot go on: it ends, and so does its worker."""
        self.world.fault("collective_timeout", self.ranks[0])
        self.world.note(self.ranks[0], why)
        self.worker.unit_died(self)
