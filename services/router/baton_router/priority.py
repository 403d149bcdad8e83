"""A request's priority: one number, for the router's queue and for both workers.

    x-baton-priority, else the body's `priority`, else 0  ->  at most the key's `priority_max`  ->  queue, both bodies

The header comes first because a gateway can set it for clients whose bodies it does not touch. Both must be valid, also
where only one of them counts.
"""

from collections.abc import Mapping

import msgspec

from baton_core.limits import PRIORITY_MOST
from baton_router.caller import Refused
from baton_router.exchange import Fields
from baton_router.failures import Rejection

HEADER = b"x-baton-priority"
FIELD = "priority"
CHARS_MAX = len(str(-PRIORITY_MOST))

_NUMBER = msgspec.json.Decoder(int | None)


def asked_in_head(headers: Mapping[bytes, bytes]) -> int | None:
    """What the header asks for; None: nothing. Raises Refused."""
    given = headers.get(HEADER)
    if given is None:
        return None
    if len(given) > CHARS_MAX or not given.removeprefix(b"-").isdigit():
        raise _out_of_range(HEADER.decode())
    return _in_range(int(given), HEADER.decode())


def settle(fields: Fields, head: int | None, most: int) -> int:
    """The priority in force. Mutates `fields`, so that they say the same; a request that says nothing, and of which
    nothing else is known, goes on saying nothing. Raises Refused."""
    raw = fields.get(FIELD)
    body = None if raw is None else _asked_in_body(raw)
    asked = body if head is None else head
    priority = min(asked or 0, most)
    if priority != (body or 0):
        fields[FIELD] = msgspec.Raw(b"%d" % priority)
    return priority


def _asked_in_body(raw: msgspec.Raw) -> int | None:
    try:
        asked = _NUMBER.decode(raw)
    except msgspec.MsgspecError as error:
        raise _out_of_range(FIELD) from error
    return None if asked is None else _in_range(asked, FIELD)


def _in_range(priority: int, name: str) -> int:
    if abs(priority) > PRIORITY_MOST:
        raise _out_of_range(name)
    return priority


def _out_of_range(name: str) -> Refused:
    text = f"{name} must be a whole number from {-PRIORITY_MOST} to {PRIORITY_MOST}"
    return Refused(Rejection.INVALID_REQUEST, text)
