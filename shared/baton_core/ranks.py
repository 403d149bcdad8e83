"""How the ranks of one worker are laid out, and what they are called.

A worker has pp * dp * cp * tp ranks. One attention-DP rank with its pp * cp * tp ranks is a **unit**: it runs one
replicated core. Ranks are numbered unit by unit, and inside a unit by (pp, cp, tp), the last fastest; that number inside
the unit is the **member**. Member 0 leads.

    worker "ab12" with --pp 2 --tp 2 --dp 2        unit ab12/0                    unit ab12/1
                                       stage 0     rank 0 = ab12/0.0, 1 = .1      rank 4 = ab12/1.0, 5 = .1
                                       stage 1     rank 2 = ab12/0.2, 3 = .3      rank 6 = ab12/1.2, 7 = .3
"""

from dataclasses import dataclass

from baton_core.request import Incarnation

Member = int
"""A rank's number inside its unit."""

RANKS_MAX = 4_096


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one rank stands in its worker."""

    rank: int  # in the worker
    dp_rank: int
    member: Member
    pp_rank: int
    cp_rank: int
    tp_rank: int

    @property
    def leads(self) -> bool:
        """Whether this rank leads its unit."""
        return self.member == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """Sizes of one worker. With `dp_attention` the layers outside attention are sharded over dp * tp.

    Raises ValueError at construction when a size is not positive or the product is absurd.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    dp_attention: bool = False

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "dp", "cp"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.ranks > RANKS_MAX:
            raise ValueError(f"tp {self.tp} * pp {self.pp} * dp {self.dp} * cp {self.cp} is over {RANKS_MAX} ranks")

    @property
    def members(self) -> int:
        """Ranks of one unit."""
        return self.pp * self.cp * self.tp

    @property
    def ranks(self) -> int:
        """Ranks of the worker."""
        return self.dp * self.members

    @property
    def stage_members(self) -> int:
        """Ranks of one pipeline stage of one unit."""
        return self.cp * self.tp

    @property
    def speaker(self) -> Member:
        """The member whose step results count: the first of the last stage."""
        return (self.pp - 1) * self.stage_members

    def place(self, rank: int) -> Place:
        """Where rank number `rank` of the worker stands."""
        assert 0 <= rank < self.ranks, f"rank {rank} of {self.ranks}"
        dp_rank, member = divmod(rank, self.members)
        stage, inside = divmod(member, self.stage_members)
        cp_rank, tp_rank = divmod(inside, self.tp)
        return Place(rank=rank, dp_rank=dp_rank, member=member, pp_rank=stage, cp_rank=cp_rank, tp_rank=tp_rank)

    def rank_of(self, dp_rank: int, member: Member) -> int:
        """The worker's number for a member of a unit."""
        return dp_rank * self.members + member


def share(total: int, part: int, parts: int) -> range:
    """The contiguous share number `part` of `parts` of `total` things, as even as can be."""
    return range(total * part // parts, total * (part + 1) // parts)


def unit_name(worker: Incarnation, dp_rank: int) -> Incarnation:
    """The name of a unit."""
    return f"{worker}/{dp_rank}"


def member_name(worker: Incarnation, dp_rank: int, member: Member) -> Incarnation:
    """The name of one rank; its unit and its worker are read off it by `unit_of` and `worker_of`."""
    return f"{worker}/{dp_rank}.{member}"


def worker_of(name: Incarnation) -> Incarnation:
    """The worker's incarnation in the name of one of its units or ranks."""
    return name.partition("/")[0]


def unit_of(name: Incarnation) -> Incarnation:
    """The unit's name in the name of one of its ranks."""
    worker, slash, rest = name.partition("/")
    return worker + slash + rest.partition(".")[0]


def member_of(name: Incarnation) -> Member:
    """The member's number in its name; 0 where it has none."""
    number = name.rpartition(".")[2]
    return int(number) if number.isdecimal() and "/" in name else 0
