"""What the choice of workers may know about a request: its conversation, its prompt's prefix, its length."""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from baton_core.routing.policies import Ask, PolicyName
from baton_core.routing.prefixes import prefix_blocks
from baton_router.exchange import Fields

PROMPT_FIELDS = ("text", "prompt", "messages", "input_ids")
SESSION_FIELDS = ("conversation_id", "session_id", "user")
SESSION_HEADER = b"x-session-id"
SESSION_CHARS_MAX = 256
BYTES_A_TOKEN = 4
"""Of English text; an estimate of a prompt's length is only compared with room in a pool of many thousands."""

_SESSION = msgspec.json.Decoder(dict[str, msgspec.Raw])


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Which facts somebody asks for: the others are not gathered."""

    session: bool = False
    prefix: bool = False
    tokens: bool = False


def needs_of(*names: PolicyName, tokens: bool) -> Needs:
    """What these policies ask for."""
    return Needs(
        session=any(name in (PolicyName.SESSION, PolicyName.CONSISTENT_HASH) for name in names),
        prefix=PolicyName.CACHE_AWARE in names,
        tokens=tokens,
    )


def ask_of(fields: Fields, headers: Mapping[bytes, bytes], needs: Needs) -> Ask:
    """The facts. A prompt is compared as the JSON it came in: equal beginnings of it are equal beginnings of tokens."""
    prompt = b"" if not (needs.prefix or needs.tokens) else prompt_of(fields)
    return Ask(
        session=_session(fields, headers) if needs.session else "",
        prefix=prefix_blocks(prompt) if needs.prefix else (),
        prompt_tokens=_tokens(fields, prompt) if needs.tokens else 0,
    )


def prompt_of(fields: Fields) -> bytes:
    """The prompt's JSON without what closes it, so that a longer conversation begins with a shorter one."""
    for name in PROMPT_FIELDS:
        if name in fields:
            return bytes(fields[name]).rstrip(b']}" \r\n\t')
    return b""


def _tokens(fields: Fields, prompt: bytes) -> int:
    if prompt.startswith(b"[") and b'"' not in prompt:
        return prompt.count(b",") + 1
    return len(prompt) // BYTES_A_TOKEN


def _session(fields: Fields, headers: Mapping[bytes, bytes]) -> str:
    """The name of the conversation, the header first; empty where there is none."""
    given = headers.get(SESSION_HEADER, b"").decode("latin-1")
    if not given and "session_params" in fields:
        given = _text_in(fields["session_params"], "id")
    for name in SESSION_FIELDS:
        if not given and name in fields:
            given = _text(fields[name])
    return given[:SESSION_CHARS_MAX]


def _text_in(raw: msgspec.Raw, name: str) -> str:
    try:
        inner = _SESSION.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ""  # whatever it is, it is the worker's to judge
    return _text(inner[name]) if name in inner else ""


def _text(raw: msgspec.Raw) -> str:
    try:
        return msgspec.json.decode(raw, type=str)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return ""
