"""One HTTP call to a registry, with every fault of the world turned into one exception that names the registry."""

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

import aiohttp
import msgspec

from baton_core.errors import PeerError, Reason
from baton_core.limits import Millis

REGISTRY_INCARNATION = "x-baton-registry-incarnation"
"""Header: the life of the registry that answers; a change means that it forgot everything."""

INSTANCE = "x-baton-instance"
"""Header: the prefill worker that the answer is about."""

INCARNATION = "x-baton-incarnation"
"""Header: the life of that worker. On a worker's own `/health`: its own life."""

REPLY_BYTES_MAX = 8 * 1024 * 1024
"""Longest answer that is read; more is a fault of the registry."""


class RegistryError(PeerError):
    """A registry did not give a usable answer. The text names its URL and the cause."""

    default_reason = Reason.LOOKUP_FAILED


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What a registry answered."""

    url: str
    status: int
    body: bytes
    headers: Mapping[str, str]

    @property
    def text(self) -> str:
        """The body as a text for people, shortened."""
        return self.body[:500].decode("utf-8", "replace").strip()

    def json(self) -> object:
        """The body as JSON. Raises RegistryError."""
        try:
            value: object = msgspec.json.decode(self.body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise RegistryError(f"{self.url} answered {self.status} with malformed JSON ({error})") from error
        return value


def url_of(host: str, port: int) -> str:
    """Base URL of an HTTP server; IPv6 addresses get their brackets."""
    bare = host.strip("[]")
    return f"http://[{bare}]:{port}" if ":" in bare else f"http://{bare}:{port}"


def address_of(url: str) -> tuple[str, int | None]:
    """Host and port of a server, by which two URLs of it are the same."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    return "loopback" if is_loopback(host) else host, parts.port or {"http": 80, "https": 443}.get(parts.scheme)


def is_loopback(host: str) -> bool:
    """Whether `host` names this machine itself, in any notation."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


async def call(
    session: aiohttp.ClientSession,
    method: str,
    url: str,
    *,
    limit_ms: Millis,
    params: Mapping[str, str] | None = None,
    body: object = None,
    token: str | None = None,
) -> Reply:
    """Send one request and read the whole answer, within `limit_ms`. Raises RegistryError; any status is an answer."""
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    data = None if body is None else msgspec.json.encode(body)
    if data is not None:
        headers["content-type"] = "application/json"
    timeout = aiohttp.ClientTimeout(total=limit_ms / 1000)
    try:
        # A registry has no business sending us elsewhere: with redirects, an allowed host could point at any other.
        async with session.request(
            method, url, params=params, data=data, headers=headers, timeout=timeout, allow_redirects=False
        ) as response:
            content = await _read(response, url)
            return Reply(url=url, status=response.status, body=content, headers=response.headers)
    except TimeoutError as error:
        raise RegistryError(f"{url} did not answer within {limit_ms} ms") from error
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise RegistryError(f"{url} cannot be reached ({_cause(error)})") from error


async def _read(response: aiohttp.ClientResponse, url: str) -> bytes:
    content = bytearray()
    async for part in response.content.iter_any():
        content += part
        if len(content) > REPLY_BYTES_MAX:
            raise RegistryError(f"{url} answered with more than {REPLY_BYTES_MAX} bytes")
    return bytes(content)


def _cause(error: Exception) -> str:
    return str(error) or type(error).__name__
