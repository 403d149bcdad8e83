"""Values that are cheap to make, for long runs of seeds.

A frozen dataclass sets each field through `object.__setattr__`, which costs more than an assignment, and seeds make
many values. That nobody assigns to one is what mypy proves, and what the seeds of the test suite, in which
values stay frozen, would notice; so a long run need not pay for it. Equality, hashes and slots stay as they are.
"""

import dataclasses
from collections.abc import Callable
from typing import Any


def thaw_values() -> None:
    """From now on `@dataclass(frozen=True)` makes classes that compare and hash as ever, but are not frozen."""
    real: Callable[..., Any] = dataclasses.dataclass

    def thawed(cls: type[Any] | None = None, /, *, frozen: bool = False, **options: Any) -> Any:
        return real(cls, unsafe_hash=True, **options) if frozen else real(cls, **options)

    dataclasses.dataclass = thawed
