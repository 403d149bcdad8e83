"""What `compare` needs of anybody who takes part: ourselves, a server over HTTP, or a library behind a shim."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import aiohttp

from baton_cli.bench.client import HttpEndpoint
from baton_cli.bench.prompts import Prompts
from baton_cli.bench.runner import closed_loop
from baton_cli.bench.sample import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One point of the comparison; each round sends `requests` requests, `concurrency` at a time."""

    input_tokens: int
    output_tokens: int
    concurrency: int
    requests: int

    def prompt(self, prompts: Prompts, round_name: str, number: int) -> list[int]:
        """The same for every rival, another for each request of each cell: no prefix cache has seen it."""
        return prompts.ids(f"{round_name} {self.output_tokens} {self.concurrency} {number}", self.input_tokens)


class Rival(Protocol):
    """Takes part in a comparison."""

    @property
    def name(self) -> str:
        """For tables."""
        ...

    @property
    def about(self) -> dict[str, str]:
        """Versions and the like, for the record."""
        ...

    @property
    def leaders(self) -> Sequence[int]:
        """Processes from which everything of this rival descends."""
        ...

    async def run(self, session: aiohttp.ClientSession, cell: Cell, prompts: Prompts, round_name: str) -> list[Sample]:
        """One round of a cell. Failures are in the samples."""
        ...

    def pause(self) -> None:
        """The other one is measured now: use no CPU. Raises nothing where that needs no action."""
        ...

    def resume(self) -> None:
        """This one is measured next."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpRival:
    """A completion server that uses no CPU while it idles."""

    name: str
    url: str
    model: str
    route: str = "/v1/completions"
    leaders: Sequence[int] = ()
    about: dict[str, str] = field(default_factory=dict)

    async def run(self, session: aiohttp.ClientSession, cell: Cell, prompts: Prompts, round_name: str) -> list[Sample]:
        """As `Rival`: a closed loop."""
        endpoint = HttpEndpoint(session=session, url=self.url, route=self.route, model=self.model)
        origin_s = time.perf_counter()
        samples: list[Sample] = []

        async def ask(index: int, _due_s: float | None) -> None:
            prompt = cell.prompt(prompts, round_name, index)
            samples.append(await endpoint.complete(prompt, cell.output_tokens, origin_s))

        await closed_loop(ask, cell.requests, cell.concurrency)
        return samples

    def pause(self) -> None:
        """An idle server of this kind uses no CPU."""

    def resume(self) -> None:
        """Nothing was paused."""
