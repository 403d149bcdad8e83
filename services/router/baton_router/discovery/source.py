"""What every source of workers is, and how one is kept going."""

import asyncio
from collections.abc import Callable, Iterable
from typing import Protocol

import aiohttp
import structlog

from baton_core.limits import Millis
from baton_core.routing.workers import Role

Named = tuple[Role, str]
Name = Callable[[str, Iterable[Named]], None]
"""Takes the source's name, and every worker that it knows now."""

ROLES = {role.value: role for role in Role}

log = structlog.get_logger()


class SourceFault(Exception):
    """A source could not be read. What it named before stays: an outage of discovery is no outage of workers."""


class Source(Protocol):
    """One place that knows workers."""

    @property
    def name(self) -> str:
        """Tells it from other sources."""
        ...

    async def follow(self, name: Name) -> None:
        """Name workers as they come and go; returns, or raises SourceFault, when it is time to start over."""
        ...


async def keep_following(source: Source, name: Name, pause_ms: Millis) -> None:
    """Follow a source for ever, starting over after every fault."""
    fault = ""
    while True:
        try:
            await source.follow(name)
            fault = ""
        except SourceFault as error:
            if str(error) != fault:
                log.warning("router.discovery_failed", source=source.name, error=str(error))
            fault = str(error)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            if str(error) != fault:
                log.warning("router.discovery_failed", source=source.name, error=str(error) or type(error).__name__)
            fault = str(error)
        await asyncio.sleep(pause_ms / 1000)
