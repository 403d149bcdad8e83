"""Worlds in which decode's memory is too small for what it admits, and those in which somebody pauses generation."""

from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

from baton_core.decode.reentry import Reentry
from baton_core.events import Continue, Pause, PauseMode, StopHere
from baton_core.limits import Limits
from baton_core.machine import Phase
from baton_core.pages import pages_for
from baton_core.request import RequestId
from simulation.shape import Shape

if TYPE_CHECKING:
    from simulation.unit import Unit
    from simulation.world import World

TIGHT = (0, 1, 3, 5)
"""Of eight worlds, those with too little memory: one of them has units of several ranks."""
PAUSED_EVERY = 5


def is_tight(seed: int) -> bool:
    """Whether this world's decode units have too little memory."""
    return seed % 8 in TIGHT


def goes_back(limits: Limits) -> bool:
    """Whether what is retracted goes back to its prefill worker."""
    return limits.rebootstraps_max > 0 and not limits.backup_pages


def tightened(shape: Shape, seed: int) -> Shape:
    """One of a few worlds bets on short answers, gets long ones, and has a pool for very few of them."""
    if not is_tight(seed):
        return shape
    random = Random(f"memory {seed}")
    together = any(one.dp_attention for one in shape.parallels.values())
    page_tokens = min(shape.decode_page_tokens, random.choice((1, 2, 2, 4)))
    prompt_most, answer_most = 6, random.choice((16, 30, 50))
    giant = pages_for(prompt_most + answer_most, page_tokens)
    limits = replace(
        shape.limits,
        answer_share_start_percent=random.choice((1, 1, 70)),
        answer_share_floor_percent=1,
        backup_pages=random.choice((0, 0, giant, 10 * giant)),
        overtakings_max=random.choice((1, 3, 16)),
        running_max=random.choice((3, 64, 64)),
        metadata_rows=random.choice((3, 256)),
        waiting_max=2_048,
        chunk_tokens=shape.limits.chunk_tokens if together else random.choice((5, 512)),
        request_budget_ms=max(20_000, shape.limits.request_budget_ms),
        rebootstraps_max=random.choice((0, 2, 100, 100)),
        rebootstrap_ms=random.choice((300, 10_000)),
    )
    return replace(
        shape,
        limits=limits,
        rates=replace(shape.rates, copy_failed=random.choice((0.0, 0.2))),
        decode_page_tokens=page_tokens,
        prompt_most=prompt_most,
        answer_most=answer_most,
        context_tokens=random.choice((prompt_most + answer_most + 1, 4_096, 4_096)),
        decode_pages=giant + random.randrange(1 + giant // 2),
        requests=7 * sum(one.dp for name, one in shape.parallels.items() if name[0] == "D"),
        arrivals_ms=min(shape.arrivals_ms, 50),
        step_ms=20,
        answer_least=answer_most // 2,
        other_layouts=False,
        prefill_pages=10 * shape.prefill_pages,
        manners=replace(
            shape.manners,
            colocated=random.choice((0.1, 0.1, 0.6) if goes_back(limits) else (0.1, 0.6)),
            fake_host=0.1,
            leg_missing=0.0,
            leg_repeated=0.0,
            prompt_differs=0.0,
            intake_reject=0.0,
            room_reused=0.0,
            client_abort=min(shape.manners.client_abort, 0.2),
            lone_abort=min(shape.manners.lone_abort, 0.2),
        ),
    )


HUNTS = {"writing.away": "transferring.away"}
"""Moments that no log entry shows, and the phase in which they come."""


class Pressure:
    """What happens where memory is short: clients leave or stop, and processes fail, just while somebody is retracted.

    And generation is paused now and then, and always continued.
    """

    PHASES = ("backing_up", "backing_up", "retracted", *("restoring",) * 5)
    AWAY = (
        *("greeting.away",) * 6,
        *("prealloc.away",) * 6,
        *("resolving.away", "transferring.away", "writing.away") * 3,
        *("transferring.away", "writing.away"),
    )
    OF_PREFILL = ("prefill abort_all", "prefill crash", "prefill drain", "prefill pause")
    STRIKES = 6

    def __init__(self, world: "World") -> None:
        self.world = world
        self._random = random = Random(f"pressure {world.seed}")
        self._aims: list[tuple[str, str]] = []
        tight = is_tight(world.seed)
        often = 0.8 if goes_back(world.shape.limits) else 0.3
        if world.seed % PAUSED_EVERY == 0 or (tight and random.random() < often):
            for _ in range(random.randint(1, 3)):
                world.at(random.randrange(world.shape.heal_ms if not tight else 300), self._pause)
        if tight and world.shape.profile != "free":
            kinds = ["client_abort", "stop"]
            if world.shape.process_faults:
                kinds += world.chaos.KINDS
            # Whoever is struck while it gives way never waits to be restored: one phase a world.
            phase = random.choice(self.PHASES)
            self._aims = [(phase, kind) for kind in random.sample(kinds, min(self.STRIKES, len(kinds)))]
            self._aims += [(random.choice(self.PHASES), random.choice(("client_abort", "stop"))) for _ in range(2)]
            # A prompt that is computed here is between two steps only while others, or nobody, compute.
            self._aims += [("again", "hold"), ("again.idle", random.choice(("retract", "stop")))] * 3
            kinds += self.OF_PREFILL if world.shape.process_faults else self.OF_PREFILL[:1]
            for away in random.sample(self.AWAY, 2):
                self._aims += [(away, kind) for kind in ("stop", random.choice(kinds), "stop", random.choice(kinds))]

    def look(self, unit: "Unit") -> None:
        """A unit has come to a new state: does anything aim at it?"""
        if not self._aims or not unit.phases or self.world.healed or unit.side != "decode":
            return
        phases = _phases(unit)
        seen = set(phases.values())
        aims = [aim for aim in self._aims if HUNTS.get(aim[0], aim[0]) in seen]
        away = [aim for aim in aims if aim[0] in self.AWAY]
        # Of these one after another, each with a victim of its own.
        for aim in [*(aim for aim in aims if aim[0] not in self.AWAY), *away[:1]]:
            self._aims.remove(aim)
            begins = HUNTS.get(aim[0])
            rid = next(rid for rid, phase in phases.items() if phase == (begins or aim[0]))
            if begins is None:
                self.world.at(0, self._strike, unit, rid, *aim)
            else:
                self._hunt(unit, rid, begins, aim[1])

    def _hunt(self, unit: "Unit", rid: RequestId, phase: str, kind: str) -> None:
        """Strike in the very moment in which a page is written."""
        if self.world.healed or not unit.alive or _phases(unit).get(rid) != phase:
            return
        one = unit.ranks[0].ledger.live[rid]
        attempts = [rank.transfer.attempts.get((one.room, one.attempt)) for rank in unit.ranks]
        if any(attempt is not None and attempt.busy for attempt in attempts):
            self._strike(unit, rid, phase, kind)
        else:
            self.world.at(1, self._hunt, unit, rid, phase, kind)

    def _strike(self, unit: "Unit", rid: RequestId, phase: str, kind: str) -> None:
        if self.world.healed or not unit.alive or _phases(unit).get(rid) != phase:
            return
        if kind == "stop":
            self._stop(unit, rid)
        elif kind in self.OF_PREFILL:
            infos = unit.ranks[0].ledger.live[rid].infos
            rank = None if infos is None else self.world.ranks.get(infos.leader)
            if rank is not None and rank.alive:
                self.world.chaos.strike(kind.partition(" ")[2], rank.unit, "")
        elif kind in ("retract", "hold"):
            mode = PauseMode.RETRACT if kind == "retract" else PauseMode.IN_PLACE
            unit.leader.note(Pause(mode=mode))
            self.world.at(self._random.choice((50, 300)), self._continue, unit)
        else:
            self.world.chaos.strike(kind, unit, unit.phases[rid])

    def _stop(self, unit: "Unit", rid: RequestId) -> None:
        """The app finds a stop string in what this request has answered."""
        leg = self.world.clients.legs.get((unit.name, rid))
        if leg is not None and leg.tokens and leg.ended_at is None:
            leg.stopping = True
            unit.leader.note(StopHere(rid=rid))

    def _pause(self) -> None:
        living = self.world.living()
        if not living or self.world.healed:
            return
        unit = self._random.choice(living)
        free = self.world.shape.profile == "free"
        modes = (PauseMode.IN_PLACE, PauseMode.RETRACT, PauseMode.RETRACT, PauseMode.ABORT)[: 3 if free else 4]
        mode = self._random.choice(modes)
        if mode is PauseMode.ABORT:
            self.world.fault("abort_all", unit.ranks[0])
        unit.leader.put(Pause(mode=mode))
        self.world.at(self._random.choice((5, 50, 300)), self._continue, unit)

    def _continue(self, unit: "Unit") -> None:
        unit.leader.put(Continue())


def _phases(unit: "Unit") -> dict[RequestId, str]:
    """Phases of its requests. What was retracted is told apart: "again", or "again.idle" between steps, where it is
    computed here, and with ".away" where it is on its way through prefill.
    """
    found = dict(unit.phases)
    for rid, one in unit.ranks[0].ledger.live.items():
        if one.phase is Phase.COMPUTING and one.is_retracted:
            found[rid] = "again" if one.in_step else "again.idle"
        elif Reentry.is_away(one):
            found[rid] += ".away"
    return found
