"""Who may use the router: a TOML file of API keys, each with a quota and a priority, read again when it changes.

    [keys.search]                  # the name, for logs
    key = "sk-…"                   # or sha256 = "hex digest of the key"
    requests_per_s = 20            # optional, as are the next two
    concurrent_max = 64
    priority_max = 10              # the most that counts of x-baton-priority, or of `priority` in a body

A presented key is looked up by its SHA-256: what the time of that tells is about the digest, which nobody can choose.
"""

import hashlib
import hmac
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass

from baton_core.limits import PRIORITY_MOST
from baton_core.routing.fairness import Quota

DIGEST_CHARS = 64
FIELDS = frozenset({"key", "sha256", "requests_per_s", "concurrent_max", "priority_max"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """One holder of a key."""

    name: str
    digest: str
    quota: Quota
    priority_max: int


class KeysError(ValueError):
    """The file makes no sense; names the key at fault and never its secret."""


def parse_keys(content: bytes) -> dict[str, Holder]:
    """Holders by the SHA-256 of their key, in hexadecimal. Raises KeysError."""
    try:
        tables = tomllib.loads(content.decode("utf-8")).get("keys", {})
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise KeysError(f"the file of keys is not valid TOML: {error}") from error
    if not isinstance(tables, dict):
        raise KeysError("the file of keys must have a table [keys.NAME] for each")
    holders = [_holder(name, table) for name, table in tables.items()]
    return {holder.digest: holder for holder in holders}


def find(holders: Mapping[str, Holder], headers: Mapping[bytes, bytes]) -> Holder | None:
    """Whose key the request carries (`authorization: Bearer …`, or `x-api-key`); None: nobody's."""
    given = headers.get(b"x-api-key", b"")
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer":
        given = token.strip()
    digest = hashlib.sha256(given).hexdigest()
    holder = holders.get(digest)
    return holder if holder is not None and hmac.compare_digest(holder.digest, digest) else None


def _holder(name: str, table: object) -> Holder:
    if not isinstance(table, dict):
        raise KeysError(f"keys.{name} must be a table")
    unknown = [field for field in table if field not in FIELDS]
    if unknown:
        raise KeysError(f"keys.{name} has no such field as {unknown[0]}")
    key, digest = table.get("key"), table.get("sha256")
    if isinstance(key, str) and key and digest is None:
        digest = hashlib.sha256(key.encode()).hexdigest()
    elif not (key is None and isinstance(digest, str) and len(digest) == DIGEST_CHARS):
        raise KeysError(f"keys.{name} needs either a key or its sha256, as a text")
    rate, concurrent = table.get("requests_per_s", 0), table.get("concurrent_max", 0)
    priority = table.get("priority_max", 0)
    if not _is_number(rate) or not _is_whole(concurrent) or not _is_whole(priority):
        raise KeysError(f"keys.{name}: requests_per_s, concurrent_max and priority_max must be numbers")
    if abs(priority) > PRIORITY_MOST:
        raise KeysError(f"keys.{name}: priority_max must be between {-PRIORITY_MOST} and {PRIORITY_MOST}")
    try:
        quota = Quota(requests_per_s=float(rate), concurrent_max=concurrent)
    except ValueError as error:
        raise KeysError(f"keys.{name}: {error}") from error
    return Holder(name=name, digest=digest.lower(), quota=quota, priority_max=priority)


def _is_number(value: object) -> bool:
    return isinstance(value, float) or _is_whole(value)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
