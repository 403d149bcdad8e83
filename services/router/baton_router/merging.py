"""The prompt's logprobs, which prefill computes, put in front of decode's in decode's answer; on bytes, without I/O.

    prefill    {"meta_info": {"input_token_logprobs": [a, b], …}}         or the same as server-sent events
    decode     {"meta_info": {"input_token_logprobs": [], …}, …}          or the same as server-sent events
    client     {"meta_info": {"input_token_logprobs": [a, b], …}, …}

In a stream every event of decode's that has the field gets them: SGLang's streams are cumulative. Only the two levels
around the arrays are parsed, and only for a request that asks for logprobs; the arrays themselves move as bytes.
"""

from collections.abc import Iterator, Mapping

import msgspec

MERGED_ROUTE = "/generate"
MAIN_FIELD = "input_token_logprobs"
FIELDS = (MAIN_FIELD, "input_top_logprobs", "input_token_ids_logprobs")

Scores = dict[str, bytes]
"""What prefill says about the prompt: by field, the items of a JSON array, without its brackets."""

_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def asks_for_scores(route: str, fields: Mapping[str, msgspec.Raw]) -> bool:
    """Whether the answer to this request has logprobs of the prompt to be merged."""
    asked = fields.get("return_logprob")
    return route == MERGED_ROUTE and asked is not None and bytes(asked) == b"true"


def scores_in(body: bytes, *, is_event_stream: bool) -> Scores | None:
    """What prefill's answer says about the prompt; None where it says nothing.

    In a stream the first event that has any counts: prefill's answer is one token long, and comes with all of them.
    """
    found: Scores | None = None
    for data in _data_of(body) if is_event_stream else (body,):
        meta = _meta_info(data)
        if meta is None or MAIN_FIELD not in meta:
            continue
        found = {field: _items(meta[field]) for field in FIELDS if field in meta}
        if found[MAIN_FIELD]:
            break
    return found


def merge(body: bytes, scores: Scores) -> bytes:
    """`body`, a JSON object of decode's, with `scores` in front of its own; the very same bytes where nothing fits."""
    meta = _meta_info(body)
    if meta is None or not any(field in meta for field in scores):
        return body
    for field, items in scores.items():
        if field in meta:
            both = b",".join(filter(None, (items, _items(meta[field]))))
            meta[field] = msgspec.Raw(b"[" + both + b"]")
    return msgspec.json.encode(_OBJECT.decode(body) | {"meta_info": msgspec.Raw(msgspec.json.encode(meta))})


def merge_events(events: bytes, scores: Scores) -> bytes:
    """Whole server-sent events of decode's, with `scores` in each that fits; others as the very bytes they came in."""
    return b"".join(_merge_line(line, scores) for line in events.splitlines(keepends=True))


def _merge_line(line: bytes, scores: Scores) -> bytes:
    if not line.startswith(b"data:"):
        return line
    data = line.removeprefix(b"data:").strip()
    merged = merge(data, scores)
    return line if merged is data else b"data: " + merged + line[len(line.rstrip(b"\r\n")) :]


def _data_of(events: bytes) -> Iterator[bytes]:
    return (line.removeprefix(b"data:").strip() for line in events.splitlines() if line.startswith(b"data:"))


def _meta_info(body: bytes) -> dict[str, msgspec.Raw] | None:
    """`meta_info` of a JSON object; None where there is none, or `body` is something else, such as `[DONE]`."""
    try:
        meta = _OBJECT.decode(body).get("meta_info")
        return None if meta is None else _OBJECT.decode(meta)
    except _UNREADABLE:
        return None


def _items(array: msgspec.Raw) -> bytes:
    """The inside of a JSON array; empty for an empty one, and for null."""
    raw = bytes(array).strip()
    return raw[1:-1].strip() if raw.startswith(b"[") else b""
