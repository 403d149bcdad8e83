"""Workers from a TOML file that is read again when it changes:

prefill = ["http://10.0.0.1:8100"]
decode = ["http://10.0.0.2:8200", "http://10.0.0.3:8200"]
"""

import tomllib
from pathlib import Path

from baton_core.limits import Millis
from baton_router.config import check_url
from baton_router.discovery.source import ROLES, Name, Named, SourceFault
from baton_router.watched_file import contents


class WorkersFile:
    """A static list that operators may change. A file that makes no sense changes nothing."""

    def __init__(self, path: Path, interval_ms: Millis) -> None:
        self._path = path
        self._interval_ms = interval_ms
        self.name = f"file {path}"

    async def follow(self, name: Name) -> None:
        """See Source."""
        async for content in contents(self._path, self._interval_ms):
            name(self.name, parse_workers(content))


def parse_workers(content: bytes) -> list[Named]:
    """The workers of a file. Raises SourceFault."""
    try:
        lists = tomllib.loads(content.decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SourceFault(f"the file of workers is not valid TOML: {error}") from error
    found: list[Named] = []
    for key, urls in lists.items():
        if key not in ROLES or not isinstance(urls, list) or not all(isinstance(url, str) for url in urls):
            raise SourceFault(f"the file of workers must hold lists of URLs named {' and '.join(ROLES)}, not {key}")
        for url in urls:
            try:
                check_url(key, url)
            except ValueError as error:
                raise SourceFault(str(error)) from error
            found.append((ROLES[key], url))
    return found
