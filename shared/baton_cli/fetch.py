"""One HTTP call to a process of ours, with its time: for commands that look at a stack from outside.

Proxies of the environment are not used: they would send loopback requests elsewhere.
"""

import http.client
import json
import time
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from baton_cli.errors import UsageError

REPLY_BYTES_MAX = 32 * 1024 * 1024


class Unreachable(Exception):
    """No answer. The text says why, without the URL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """An answer, whatever its status."""

    status: int
    headers: Mapping[str, str]  # names in lower case
    body: bytes
    seconds: float

    @property
    def text(self) -> str:
        return self.body.decode("utf-8", "replace")

    @property
    def json(self) -> Any:
        """The body as JSON, or None where it is none."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None

    @property
    def fields(self) -> dict[str, Any]:
        """The body as a JSON object; empty where it is none."""
        found = self.json
        return found if isinstance(found, dict) else {}


def fetch(
    url: str,
    *,
    timeout_seconds: float,
    body: Any = None,
    key: str | None = None,
) -> Reply:
    """GET, or POST where there is a body. Raises Unreachable."""
    parts = urllib.parse.urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    content = None
    if body is not None:
        content, headers["content-type"] = json.dumps(body).encode(), "application/json"
    began_s = time.monotonic()
    connection = kind(parts.hostname or "", parts.port, timeout=timeout_seconds)
    try:
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection.request("GET" if body is None else "POST", path, body=content, headers=headers)
        response = connection.getresponse()
        read = response.read(REPLY_BYTES_MAX)
    except TimeoutError as error:
        raise Unreachable(f"no answer within {timeout_seconds:g} s") from error
    except (OSError, http.client.HTTPException) as error:
        raise Unreachable(_cause(error)) from error
    finally:
        connection.close()
    seconds = time.monotonic() - began_s
    return Reply(
        status=response.status,
        headers={name.lower(): value for name, value in response.getheaders()},
        body=read,
        seconds=seconds,
    )


def base_url(flag: str, text: str) -> str:
    """`http://host:port` without a slash at the end; host:port is taken for http. Raises UsageError."""
    url = text if "//" in text else f"http://{text}"
    parts = urllib.parse.urlsplit(url)
    try:
        port_is_fine = parts.port is None or parts.port > 0
    except ValueError:
        port_is_fine = False
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or not port_is_fine:
        raise UsageError(f"{flag} {text}: give the address of a server, such as http://127.0.0.1:8000")
    return url.rstrip("/")


def _cause(error: Exception) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "nothing listens there (connection refused)"
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
