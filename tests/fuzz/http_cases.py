"""What is said to the HTTP ports: bodies that are nearly right, and requests that are hardly HTTP."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from baton_core.request import FAKE_HOST
from baton_worker.schemas import INDIFFERENT, NO_OPS, ChatBody, CompletionBody, GenerateBody, SamplingParams
from fuzz.dice import as_json, bent, damaged, hostile

LEG_FIELDS = (
    "rid",
    "bootstrap_room",
    "bootstrap_port",
    "bootstrap_instance",
    "routed_dp_rank",
    "data_parallel_rank",
    "disagg_prefill_dp_rank",
    "priority",
    "baton_continuation",
)
PART = {
    "tokens": [5, 6],
    "logprobs": [{"token": 5, "logprob": -0.5, "top": [[5, -0.5]]}],
    "start": {"rid": "r", "created": 1, "seed": 1, "prompt_tokens": 3, "prompt_digest": 1, "cached_tokens": 0},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpCase:
    """One exchange. `raw` is what is sent, `ends` what comes then; `whole`: it is HTTP, and has one answer."""

    raw: bytes
    whole: bool
    ends: str = "wait"  # or: close, half, drip
    method: str = ""
    target: str = ""
    body: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """One kind of thing that may be said to a port: a method, paths, and a body that would do."""

    method: str
    targets: Sequence[str]
    body: Any = None
    others: Sequence[str] = ()
    weight: int = 1


def _sampling(dice: Random) -> dict[str, Any]:
    return {"temperature": 0, "max_new_tokens": dice.choice((1, 2)), "ignore_eos": True}


def _generate(dice: Random, leg: Mapping[str, Any]) -> dict[str, Any]:
    prompt = {"input_ids": [2, 3, 4]} if dice.random() < 0.6 else {"text": "Nobody knew"}
    sampling = _sampling(dice)
    if dice.random() < 0.5:
        name = dice.choice(SamplingParams.__struct_fields__)
        sampling[name] = hostile(dice)
    return prompt | {"sampling_params": sampling} | dict(leg)


def generating(dice: Random, leg: Mapping[str, Any]) -> Said:
    """A request for text, good as it stands; `leg`: what the port wants beside."""
    kind = dice.random()
    leg = dict(leg)
    if dice.random() < 0.1:
        leg["baton_continuation"] = [bent(dice, PART) if dice.random() < 0.8 else PART]
    if kind < 0.5:
        others = (*GenerateBody.__struct_fields__, *NO_OPS[GenerateBody], *LEG_FIELDS)
        return Said(method="POST", targets=("/generate",), body=_generate(dice, leg), others=others)
    common = {"max_tokens": dice.choice((1, 2)), "temperature": 0} | leg
    if kind < 0.75:
        body = {"model": "m", "prompt": dice.choice(("Water", [2, 3], ["Water"]))} | common
        others = (*CompletionBody.__struct_fields__, *NO_OPS[CompletionBody], *INDIFFERENT)
        return Said(method="POST", targets=("/v1/completions",), body=body, others=others)
    message = {"role": "user", "content": dice.choice(("Water", [{"type": "text", "text": "Water"}]))}
    body = {"model": "m", "messages": [message]} | common
    others = (*ChatBody.__struct_fields__, *NO_OPS[ChatBody], *INDIFFERENT)
    return Said(method="POST", targets=("/v1/chat/completions",), body=body, others=others)


GETS = ("/health", "/ready", "/metrics", "/server_info", "/v1/models", "/get_server_info", "/docs", "/openapi.json")
WORKER_GETS = (*GETS, "/v1/loads", "/model_info", "/get_model_info", "/debug/snapshot", "/flush_cache")


def said_to_worker(dice: Random, leg: Mapping[str, Any]) -> Said:
    """To a prefill or decode worker. `/drain` is left out: to obey it is right, and ends the worker's work."""
    kind = dice.random()
    if kind < 0.85:
        return generating(dice, leg)
    if kind < 0.9:
        return Said(method="GET", targets=WORKER_GETS)
    if kind < 0.96:
        return Said(method="POST", targets=("/abort_request",), body={"rid": "none", "abort_all": False})
    return Said(method="POST", targets=("/pause_generation",), body={"mode": dice.choice(("abort", "retract", "x"))})


def said_to_prefill(dice: Random) -> Said:
    """A leg without a peer, so that nothing waits for one."""
    return said_to_worker(dice, {"bootstrap_host": FAKE_HOST, "bootstrap_room": 0})


def said_to_decode(dice: Random) -> Said:
    """Colocated, or a leg of a prefill worker that is not allowed."""
    away = {"bootstrap_host": "10.1.2.3", "bootstrap_port": 9, "bootstrap_room": 5}
    return said_to_worker(dice, dice.choice(({}, {}, {"bootstrap_host": FAKE_HOST, "bootstrap_room": 0}, away)))


def said_to_router(dice: Random) -> Said:
    """Everything that a client may say; several answers at once among it."""
    kind = dice.random()
    if kind < 0.8:
        said = generating(dice, {})
        if dice.random() < 0.15 and isinstance(said.body, dict):
            said.body["n"] = hostile(dice)
            said.body["seed"] = dice.choice((1, 2**63, 2**64 - 1, 2**64, hostile(dice)))
        if dice.random() < 0.1 and "sampling_params" in said.body:
            said.body["sampling_params"] |= {"n": dice.choice((0, 2, 3, 300, 10**9)), "seed": 2**64 - 1}
        return said
    if kind < 0.9:
        return Said(method="GET", targets=GETS)
    targets = ("/abort_request", "/abort_request?x=%ff", "/abort_request?" + "q" * 2_000)
    return Said(method="POST", targets=targets, body={"rid": "none"})


def said_to_admin(dice: Random) -> Said:
    """Workers that do not exist come and go; those that do are left alone."""
    url = dice.choice(("http://127.0.0.1:9", "http%3A%2F%2F127.0.0.1%3A9", "x", "%ff%fe", "http://[", "a" * 3_000))
    kind = dice.random()
    if kind < 0.6:
        body = {"url": "http://127.0.0.1:9", "role": dice.choice(("prefill", "decode"))}
        if dice.random() < 0.5:
            body["url"] = dice.choice(
                ("http://[::1", "http://127.0.0.1:99999999", "ftp://x", "http://\ud800", "http://")
            )
        return Said(method="POST", targets=("/workers",), body=body)
    if kind < 0.8:
        return Said(method="POST", targets=(f"/workers/{url}/drain", f"/workers/{url}/undrain"))
    if kind < 0.9:
        return Said(method="DELETE", targets=(f"/workers/{url}",))
    return Said(method="GET", targets=("/", "/workers", "/openapi.json", "/nothing"))


REGISTRATION = {
    "attn_tp_size": 1, "attn_tp_rank": 0, "attn_cp_size": 1, "attn_cp_rank": 0, "attn_dp_size": 1, "attn_dp_rank": 0,
    "pp_size": 1, "pp_rank": 0, "system_dp_size": 1, "system_dp_rank": 0, "rank_ip": "127.0.0.1", "rank_port": 9,
    "page_size": 16, "kv_cache_dtype": "float32", "load_balance_method": "follow_bootstrap_room",
    "instance": "fuzz", "incarnation": "fuzz", "lease_ms": 100, "kv_layout": {"a": [1]}, "fingerprint": "x",
    "prefill_http_port": None, "http_host": "127.0.0.1", "bootstrap_host": "127.0.0.1", "bootstrap_port": 9,
}  # fmt: skip
RANKS = "prefill_dp_rank={}&prefill_cp_rank={}&target_tp_rank={}&target_pp_rank={}"


def said_to_registry(dice: Random) -> Said:
    """Registrations of a worker that does not exist, whose lease is the shortest there is; rooms; look-ups."""
    kind = dice.random()
    number = str(hostile(dice))[:300].encode("utf-8", "replace").hex("%", 1)
    numbers = [dice.choice(("0", "-1", "9" * 30, "x", "", "1_0", "%ff", "%" + number)) for _ in range(4)]
    instance = dice.choice(("fuzz", "nobody", "%00", "%ff", "a" * 3_000, "..", "x%2fy"))
    if kind < 0.35:
        body = REGISTRATION | {"instance": f"fuzz{dice.randrange(4)}"}
        return Said(method="PUT", targets=("/route",), body=body)
    if kind < 0.5:
        room = {"bootstrap_room": dice.choice((1, "2", 2**63 - 1, "99999999999999999999")), "dp_rank": 0}
        many = {"dp_ranks": {"1": 0, "2": "0"}, "instance": "fuzz"}
        return Said(method="POST", targets=("/register_dp_rank",), body=dice.choice((room, many)))
    if kind < 0.6:
        rooms = [1, 2, "3", 2**63 - 1]
        return Said(method="POST", targets=("/query_dp_ranks",), body={"bootstrap_rooms": rooms, "instance": "fuzz0"})
    if kind < 0.8:
        return Said(method="GET", targets=("/route?" + RANKS.format(*numbers) + "&instance=" + instance,))
    if kind < 0.9:
        said = (f"/v1/instances/{instance}/lease?incarnation=" + numbers[0],)
        return Said(method="PUT", targets=said)
    if kind < 0.95:
        return Said(method="DELETE", targets=(f"/v1/instances/{instance}?dp_rank=" + numbers[0],))
    return Said(method="GET", targets=("/health", "/ready", "/metrics", "/v1/instances?instance=" + instance))


SAYS: Mapping[str, Callable[[Random], Said]] = {
    "router": said_to_router,
    "admin": said_to_admin,
    "registry": said_to_registry,
    "prefill": said_to_prefill,
    "decode": said_to_decode,
}


def body_of(dice: Random, said: Said) -> bytes:
    """Mostly JSON with something odd in it, sometimes no JSON at all, rarely as it should be, very rarely enormous."""
    if said.body is None and dice.random() < 0.9:
        return b""
    kind = dice.random()
    if kind < 0.03:
        return as_json(said.body)
    if kind < 0.8:
        return as_json(bent(dice, said.body, said.others))
    if kind < 0.95:
        return damaged(dice, as_json(said.body))
    if kind < 0.9995:
        return dice.choice((b"", b"\xff\xfe", b"\xef\xbb\xbf{}", b"[]", b"null", b'""', dice.randbytes(60)))
    million = ["stop"] * 1_000_000
    where = dice.choice(({"stop": million}, {"sampling_params": {"stop": million}, "input_ids": [2]}, {"a": million}))
    return json.dumps((said.body if isinstance(said.body, dict) else {}) | where).encode()


HEADERS = (
    b"x-baton-budget-ms: ", b"x-request-id: ", b"x-baton-priority: ", b"authorization: ", b"content-type: ",
    b"traceparent: ", b"x-baton-token-ids: ", b"expect: ", b"connection: ", b"host: ", b"upgrade: ", b"x-session-id: ",
    b"accept: ", b"cookie: ", b"origin: ", b"transfer-encoding: ", b"content-length: ", b"tracestate: ",
)  # fmt: skip
VALUES = (
    b"", b"-1", b"0", b"1", b"9" * 19, b"9" * 30, b"9" * 5_000, b"x" * 2_000, b"\xff\xfe", b"\xc2\xb2", b"100-continue",
    b"[", b"a:b:c", b"chunked", b"Bearer ", b"00-" + b"0" * 32 + b"-" + b"0" * 16 + b"-01", b"websocket", b"1.5", b"close",
)  # fmt: skip


def http_case(port: str, dice: Random) -> HttpCase:
    """One case of a port."""
    said = SAYS[port](dice)
    target, body = dice.choice(said.targets), body_of(dice, said)
    if dice.random() < 0.9:
        return _whole(dice, said.method, target, body)
    return _broken(dice, said.method, target, body)


def request(method: str, target: str, body: bytes, *headers: bytes) -> bytes:
    """A request as HTTP has it."""
    head = [f"{method} {target} HTTP/1.1".encode("latin-1", "replace"), b"host: fuzz", *headers]
    return b"\r\n".join([*head, b"content-length: %d" % len(body), b"", body])


def _whole(dice: Random, method: str, target: str, body: bytes) -> HttpCase:
    """HTTP without fault, perhaps with one odd header that says nothing about where the request ends."""
    headers = []
    if dice.random() < 0.15:
        headers = [dice.choice(HEADERS[:9]) + dice.choice(VALUES[:8])]
    return HttpCase(raw=request(method, target, body, *headers), whole=True, method=method, target=target, body=body)


def _broken(dice: Random, method: str, target: str, body: bytes) -> HttpCase:
    good = request(method, target, body[:5_000])
    kind = dice.randrange(9)
    ends = dice.choice(("wait", "close", "half"))
    if kind == 0:
        raw = damaged(dice, good)
    elif kind == 1:  # it breaks off
        raw, ends = good[: dice.randrange(1, len(good))], dice.choice(("close", "half"))
    elif kind == 2:  # a length that is not the body's
        raw = good.replace(b"content-length: ", b"content-length: " + dice.choice((b"9", b"-", b"+", b"1e", b"0x")), 1)
    elif kind == 3:
        raw = _chunked(dice, method, target, body[:3_000])
    elif kind == 4:
        odd = [dice.choice(HEADERS) + dice.choice(VALUES) for _ in range(dice.choice((1, 2, 200)))]
        raw = request(method, target, body[:5_000], *odd)
    elif kind == 5:  # many at once
        raw = good * dice.choice((2, 20)) + good[: dice.randrange(len(good))]
    elif kind == 6:
        line = dice.choice((b"GET", b"POST  /", b"\0", b"PRI * HTTP/2.0", b"CONNECT a:1 HTTP/1.1", b"OPTIONS * HTTP/1.1",
                            b"GET http://[ HTTP/1.1", b"GET /%zz HTTP/1.1", b"GET /\xff HTTP/1.1", b"GET / HTTP/9.9",
                            b"GET //x/../health HTTP/1.1", b"TRACE / HTTP/1.1", b"\x16\x03\x01\x02\0\x01\0"))  # fmt: skip
        raw = line + b"\r\nhost: fuzz\r\n\r\n"
    elif kind == 7:  # a head that does not end
        raw = good[: good.index(b"\r\n") + 2] + (b"x-a: " + b"y" * 4_000 + b"\r\n") * dice.choice((1, 30))
    else:
        raw, ends = good, "drip"
    return HttpCase(raw=raw, whole=False, ends=ends, method=method, target=target, body=body)


def _chunked(dice: Random, method: str, target: str, body: bytes) -> bytes:
    head = request(method, target, b"").replace(b"content-length: 0", b"transfer-encoding: chunked")
    size = dice.choice((b"%x" % len(body), b"ffffffffffffffff", b"-1", b"", b"g", b"0", b"%x;a=b" % len(body)))
    return (
        head
        + size
        + b"\r\n"
        + body
        + dice.choice((b"\r\n0\r\n\r\n", b"\r\n", b"", b"0\r\n\r\n", b"\r\n0\r\nx: y\r\n\r\n"))
    )
