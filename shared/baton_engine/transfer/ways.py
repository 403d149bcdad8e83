"""What the ways from prefill to decode have in common, and how a decode rank says which of them lead to it."""

import json
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Protocol

from baton_core.effects import Push
from baton_core.request import Incarnation, PageId
from baton_engine.transfer.flow import Flow


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What one decode rank ordered: where to write."""

    address: str
    pages: tuple[PageId, ...]
    row: int
    page_bytes: int
    held_pages: int = 0  # the first of `pages`, which nobody may write

    @property
    def wanted(self) -> range:
        """The pages to write, by ordinal in the prompt."""
        return range(self.held_pages, len(self.pages))


@dataclass(frozen=True, slots=True)
class Job:
    """One push for one decode rank, with what its order says."""

    flow: Flow
    target: Target
    push: Push

    @property
    def row(self) -> bytes | None:
        """The row to write after the pages, where this rank owes it."""
        if self.push.row is None or not self.flow.carries_row:
            return None
        return self.push.row.pack()

    @property
    def ordinals(self) -> range:
        """Of the pages, in the prompt."""
        return range(self.push.first, self.push.first + len(self.push.pages))


class Reach(Enum):
    """How far the way to a decode rank is."""

    CONNECTING = "connecting"
    OPEN = "open"
    CLOSED = "closed"


class Probe(Protocol):
    """A try to reach a decode rank."""

    reach: Reach
    closed_by: str


class Way(Protocol):
    """One way to move bytes to decode ranks. All of this is called on the driver's thread and blocks nothing."""

    name: str

    def check(self, address: str) -> None:
        """Raise ValueError unless this is an address of this way."""
        ...

    def probe(self, peer: Incarnation, address: str) -> Probe | None:
        """Try whether `peer` can be reached; None where only carrying can tell."""
        ...

    def prepare(self, flow: Flow, target: Target) -> None:
        """The flow will be carried this way."""
        ...

    def put(self, job: Job) -> None:
        """Carry a push, after those before it."""
        ...

    def nudge(self, flow: Flow, target: Target) -> None:
        """The flow's attempt was revoked: look for it."""
        ...

    def peer_gone(self, peer: Incarnation) -> None:
        """Close what leads there."""
        ...

    def close(self) -> None:
        """End every thread."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Doors:
    """An `auto` address: where a decode rank listens, and on which host."""

    shm: str
    tcp: str
    boot_id: str

    def to_text(self) -> str:
        """The address in a page order."""
        return json.dumps(asdict(self), sort_keys=True)

    @staticmethod
    def from_text(text: str) -> "Doors":
        """The address in `text`. Raises ValueError if it is none."""
        try:
            doors = Doors(**json.loads(text))
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"{text!r} is no address of auto: {error}") from error
        if not all(isinstance(value, str) for value in asdict(doors).values()):
            raise ValueError(f"{text!r} is no address of auto")
        return doors
