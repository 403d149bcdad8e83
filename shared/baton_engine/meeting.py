"""How the ranks of one worker find each other: process groups, the unit's log, and the rounds of DP attention.

A rank by itself meets nobody, and pays for nothing of this.
"""

from pathlib import Path
from typing import Protocol

from baton_core.agreement import Group
from baton_core.limits import Limits
from baton_core.ranks import Parallel, Place
from baton_core.unit_log import Report
from baton_engine.control_group import ShmGroup
from baton_engine.groups import RankGroup, TensorGroups, join
from baton_engine.performer import Groups
from baton_io.rounds_channel import ConductorRounds, Rounds, UnitRounds
from baton_io.unit_channel import LeaderChannel, MemberChannel


class MeetingSettings(Protocol):
    """What a rank must be told to find its siblings."""

    @property
    def rank(self) -> int: ...
    @property
    def parallel(self) -> Parallel: ...
    @property
    def rendezvous(self) -> str: ...
    @property
    def log_address(self) -> str: ...
    @property
    def run_dir(self) -> str: ...
    @property
    def control(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def limits(self) -> Limits: ...


class Meeting:
    """Everything that this rank shares with its siblings. Building it waits for all ranks of the worker."""

    def __init__(self, settings: MeetingSettings) -> None:
        """Raises EngineError where ranks do not come within `start_ms`."""
        parallel, limits = settings.parallel, settings.limits
        self.place: Place = parallel.place(settings.rank)
        self.tensors: TensorGroups | None = None
        self.leader: LeaderChannel | None = None
        self.member: MemberChannel | None = None
        self.rounds: Rounds | None = None
        self._settings = settings
        self._shm: list[ShmGroup] = []
        self.groups = Groups.solo()
        if parallel.ranks == 1:
            return
        self.tensors = join(
            parallel,
            settings.rank,
            settings.rendezvous,
            settings.device,
            limits.tensor_collective_ms,
            control_timeout_ms=limits.control_collective_ms,
            start_ms=limits.start_ms,
        )
        self.groups = self._control_groups(self.tensors)
        if parallel.members > 1:
            if self.place.leads:
                self.leader = LeaderChannel(settings.log_address, parallel.members)
            else:
                self.member = MemberChannel(settings.log_address, self.place.member)
        if parallel.dp_attention and parallel.dp > 1 and self.place.leads:
            first = self.place.dp_rank == 0
            address = _rounds_address(settings, self.place.dp_rank)
            self.rounds = ConductorRounds(address, parallel.dp) if first else UnitRounds(address, self.place.dp_rank)

    def gather(self) -> None:
        """Wait until every rank that computes with this one is loaded. Raises EngineError naming who is not."""
        if self.tensors is not None:
            self.tensors.meet("loaded")
        for channel in (self.leader, self.member, self.rounds):
            if channel is not None:
                channel.gather(self._settings.limits.start_ms)

    def least(self, value: int) -> int:
        """The least of a value over the unit: pools may differ, the unit must not."""
        return value if self.tensors is None else self.tensors.control_unit.all_reduce_min((value,))[0]

    def note(self, report: Report) -> None:
        """A stage's report, to the leader."""
        assert self.member is not None, "the leader takes its own report"
        self.member.note(report)

    def farewell(self) -> None:
        """The leader says that its log is complete; the others leave when they hear it."""
        if self.leader is not None:
            self.leader.farewell()

    def close(self) -> None:
        """Leave."""
        for channel in (self.leader, self.member, self.rounds, *self._shm):
            if channel is not None:
                channel.close()
        if self.tensors is not None:
            self.tensors.close()

    def _control_groups(self, tensors: TensorGroups) -> Groups:
        return Groups(
            stage=self._control_group("stage", tensors.control_stage),
            cp=self._control_group("cp", tensors.control_cp),
            tp=self._control_group("tp", tensors.control_tp),
        )

    def _control_group(self, kind: str, over_gloo: RankGroup) -> Group:
        """Shared memory where all ranks are on one host, which a rendezvous at a path says."""
        settings = self._settings
        one_host = settings.rendezvous.startswith("file:")
        if over_gloo.size == 1 or settings.control == "gloo" or not one_host:
            return over_gloo
        path = Path(settings.run_dir) / f"{kind}-{over_gloo.ranks[0]}.control"
        group = ShmGroup(path, over_gloo.rank, over_gloo.ranks, settings.limits.control_collective_ms)
        self._shm.append(group)
        return group


def _rounds_address(settings: MeetingSettings, dp_rank: int) -> str:
    """Where the leaders of the units meet: beside the units' logs, of which unit n listens n ports after the first."""
    if settings.log_address.startswith("ipc://"):
        return f"ipc://{settings.run_dir}/rounds"
    where, _, port = settings.log_address.rpartition(":")
    return f"{where}:{int(port) - dp_rank + settings.parallel.dp}"
