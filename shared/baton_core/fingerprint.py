"""A fingerprint is the canonical text of everything that shapes KV and that no plan of `kv_layout` can translate.

It must be equal on both sides, or the handshake refuses, naming both values.
"""

import json
from collections.abc import Mapping


def fingerprint(fields: Mapping[str, str | int | float | bool]) -> str:
    """Canonical text of everything that shapes KV."""
    return json.dumps(dict(fields), sort_keys=True, separators=(",", ":"))


def mismatches(prefill: str, decode: str) -> tuple[str, ...]:
    """The differences between two fingerprints, each naming both values; empty if they fit."""
    if prefill == decode:
        return ()
    try:
        ours, theirs = json.loads(prefill), json.loads(decode)
    except (ValueError, RecursionError):
        return (f"fingerprint is {prefill!r} on prefill and {decode!r} on decode",)
    if not isinstance(ours, dict) or not isinstance(theirs, dict):
        return (f"fingerprint is {prefill!r} on prefill and {decode!r} on decode",)
    names = sorted(ours.keys() | theirs.keys())
    return tuple(
        f"{name} is {ours.get(name)!r} on prefill and {theirs.get(name)!r} on decode"
        for name in names
        if ours.get(name) != theirs.get(name)
    )
