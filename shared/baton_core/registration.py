"""What one prefill rank tells a registry: the body of PUT `/route`, parsed once and valid if it exists.

Names are SGLang's, because its workers write these bodies and its readers read our topology. Ours are optional extras:
`instance`, `incarnation`, `fingerprint`, `lease_ms`, `http_host`, `bootstrap_host`, `bootstrap_port`.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

from baton_core.errors import ClientError
from baton_core.limits import Millis
from baton_core.request import Incarnation

IMPLICIT_INSTANCE = "default"
"""Name of the one instance that workers form which do not say `instance` (plain SGLang)."""

FOLLOW = "follow_bootstrap_room"
"""The balance method under which room mod dp_size is the rank, and no room needs registering."""

LEASE_MS_MIN: Millis = 100
LEASE_MS_MAX: Millis = 3_600_000

# Names travel in a header and in a path; hosts end up in URLs and socket addresses.
_NAME = re.compile(r"[A-Za-z0-9._:-]{1,200}")
_HOST = re.compile(r"[A-Za-z0-9._:%-]{1,255}")
_TEXT_CHARS_MAX = 32_768
_DEPTH_MAX = 16

RankKey = tuple[int, int, int, int]
"""(dp, cp, tp, pp) rank inside one instance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where one rank listens."""

    rank_ip: str
    rank_port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How an instance's KV cache is spread over its ranks. Every rank of one life announces the same."""

    attn_tp_size: int
    attn_cp_size: int
    dp_size: int
    pp_size: int
    page_size: int | None
    kv_cache_dtype: str | None
    follow_bootstrap_room: bool = True
    enable_dsa_cache_layer_split: bool = False
    decode_allocation_policy: object = None
    enable_kv_cache_sharding: bool = False
    kv_layout: object = None  # SGLang's own descriptions, passed through; None: absent from the topology
    dsv41_spec_layout: object = None

    @property
    def ranks_total(self) -> int:
        """How many distinct ranks make the instance complete."""
        return self.dp_size * self.unit_ranks

    @property
    def unit_ranks(self) -> int:
        """How many ranks one DP rank has."""
        return self.attn_cp_size * self.attn_tp_size * self.pp_size

    def conflict_with(self, other: "Layout") -> str | None:
        """Every field in which `other` differs, with both values; None where there is none."""
        pairs = [(field.name, getattr(self, field.name), getattr(other, field.name)) for field in fields(self)]
        differences = [f"{name} is {ours!r} here, {theirs!r} sent" for name, ours, theirs in pairs if ours != theirs]
        return "; ".join(differences) or None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRegistration:
    """One rank of one life of one prefill worker."""

    layout: Layout
    dp_rank: int
    cp_rank: int
    tp_rank: int
    pp_rank: int
    endpoint: Endpoint
    prefill_http_port: int | None = None
    http_host: str | None = None
    instance: str = IMPLICIT_INSTANCE
    incarnation: Incarnation | None = None
    fingerprint: str = ""
    lease_ms: Millis | None = None
    bootstrap_host: str | None = None  # the worker's own registry
    bootstrap_port: int | None = None

    @property
    def key(self) -> RankKey:
        """Which rank of the instance this is."""
        return (self.dp_rank, self.cp_rank, self.tp_rank, self.pp_rank)


def parse_registration(body: object) -> RankRegistration:
    """Read the body of PUT `/route`. Raises ClientError naming the field that is wrong."""
    fields_of = _Fields(body)
    by_system = fields_of.integer("system_dp_size", least=1) > 1
    attn_dp_size, attn_dp_rank = fields_of.rank_of("attn_dp")
    system_dp_size, system_dp_rank = fields_of.rank_of("system_dp")
    tp_size, tp_rank = fields_of.rank_of("attn_tp")
    cp_size, cp_rank = fields_of.rank_of("attn_cp")
    pp_size, pp_rank = fields_of.rank_of("pp")
    incarnation = fields_of.name("incarnation")
    return RankRegistration(
        layout=Layout(
            attn_tp_size=tp_size,
            attn_cp_size=cp_size,
            dp_size=system_dp_size if by_system else attn_dp_size,
            pp_size=pp_size,
            page_size=fields_of.nullable_integer("page_size", least=1),
            kv_cache_dtype=fields_of.nullable_text("kv_cache_dtype"),
            follow_bootstrap_room=(fields_of.text("load_balance_method") or FOLLOW) == FOLLOW,
            enable_dsa_cache_layer_split=fields_of.flag("enable_dsa_cache_layer_split"),
            decode_allocation_policy=fields_of.anything("decode_allocation_policy"),
            enable_kv_cache_sharding=fields_of.flag("enable_kv_cache_sharding"),
            kv_layout=fields_of.anything("kv_layout"),
            dsv41_spec_layout=fields_of.anything("dsv41_spec_layout"),
        ),
        dp_rank=system_dp_rank if by_system else attn_dp_rank,
        cp_rank=cp_rank,
        tp_rank=tp_rank,
        pp_rank=pp_rank,
        endpoint=Endpoint(rank_ip=fields_of.host("rank_ip"), rank_port=fields_of.port("rank_port")),
        prefill_http_port=fields_of.optional_port("prefill_http_port"),
        http_host=fields_of.optional_host("http_host"),
        # A worker that names its life but not itself is known by that life.
        instance=fields_of.name("instance") or incarnation or IMPLICIT_INSTANCE,
        incarnation=incarnation,
        fingerprint=fields_of.text("fingerprint") or "",
        lease_ms=fields_of.optional_integer("lease_ms", least=LEASE_MS_MIN, most=LEASE_MS_MAX),
        bootstrap_host=fields_of.optional_host("bootstrap_host"),
        bootstrap_port=fields_of.optional_port("bootstrap_port"),
    )


def registration_body(rank: RankRegistration) -> dict[str, object]:
    """The inverse of `parse_registration`: what a worker sends. Optional keys that are unset are left out."""
    layout = rank.layout
    body: dict[str, object] = {
        "attn_tp_size": layout.attn_tp_size,
        "attn_tp_rank": rank.tp_rank,
        "attn_cp_size": layout.attn_cp_size,
        "attn_cp_rank": rank.cp_rank,
        # Registries keep only the product of the rule (`dp_size`), so plain DP may be sent as attention DP.
        "attn_dp_size": layout.dp_size,
        "attn_dp_rank": rank.dp_rank,
        "pp_size": layout.pp_size,
        "pp_rank": rank.pp_rank,
        "system_dp_size": 1,
        "system_dp_rank": 0,
        "rank_ip": rank.endpoint.rank_ip,
        "rank_port": rank.endpoint.rank_port,
        "page_size": layout.page_size,
        "kv_cache_dtype": layout.kv_cache_dtype,
        "load_balance_method": FOLLOW if layout.follow_bootstrap_room else "round_robin",
        "enable_dsa_cache_layer_split": layout.enable_dsa_cache_layer_split,
        "enable_kv_cache_sharding": layout.enable_kv_cache_sharding,
    }
    optional = {
        "decode_allocation_policy": layout.decode_allocation_policy,
        "kv_layout": layout.kv_layout,
        "dsv41_spec_layout": layout.dsv41_spec_layout,
        "prefill_http_port": rank.prefill_http_port,
        "http_host": rank.http_host,
        "instance": rank.instance,
        "incarnation": rank.incarnation,
        "fingerprint": rank.fingerprint or None,
        "lease_ms": rank.lease_ms,
        "bootstrap_host": rank.bootstrap_host,
        "bootstrap_port": rank.bootstrap_port,
    }
    return body | {key: value for key, value in optional.items() if value is not None}


def topology_body(layout: Layout, prefill_http_port: int | None) -> dict[str, object]:
    """The answer to GET `/route` with four −1: exactly SGLang's keys, because its reader fails on any other."""
    body: dict[str, object] = {
        "attn_tp_size": layout.attn_tp_size,
        "attn_cp_size": layout.attn_cp_size,
        "dp_size": layout.dp_size,
        "pp_size": layout.pp_size,
        "page_size": layout.page_size,
        "kv_cache_dtype": layout.kv_cache_dtype,
        "follow_bootstrap_room": layout.follow_bootstrap_room,
        "enable_dsa_cache_layer_split": layout.enable_dsa_cache_layer_split,
        "decode_allocation_policy": layout.decode_allocation_policy,
        "enable_kv_cache_sharding": layout.enable_kv_cache_sharding,
        "prefill_http_port": prefill_http_port,
        "target_tp_rank": None,
        "target_tp_ranks": None,
        "target_cp_ranks": None,
        "target_pp_ranks": None,
        "required_dst_info_num": None,
        "required_prefill_response_num": None,
    }
    for key in ("kv_layout", "dsv41_spec_layout"):
        if getattr(layout, key) is not None:
            body[key] = getattr(layout, key)
    return body


def parse_topology(body: object) -> Layout:
    """Read a topology answer, ours or SGLang's; unknown keys are ignored. Raises ClientError naming the field."""
    fields_of = _Fields(body)
    return Layout(
        attn_tp_size=fields_of.integer("attn_tp_size", least=1),
        attn_cp_size=fields_of.integer("attn_cp_size", least=1),
        dp_size=fields_of.integer("dp_size", least=1),
        pp_size=fields_of.integer("pp_size", least=1),
        page_size=fields_of.optional_integer("page_size", least=1),
        kv_cache_dtype=fields_of.text("kv_cache_dtype"),
        follow_bootstrap_room=fields_of.flag("follow_bootstrap_room"),
        enable_dsa_cache_layer_split=fields_of.flag("enable_dsa_cache_layer_split"),
        decode_allocation_policy=fields_of.anything("decode_allocation_policy"),
        enable_kv_cache_sharding=fields_of.flag("enable_kv_cache_sharding"),
        kv_layout=fields_of.anything("kv_layout"),
        dsv41_spec_layout=fields_of.anything("dsv41_spec_layout"),
    )


def parse_endpoint(body: object) -> Endpoint:
    """Read `{"rank_ip", "rank_port"}`. Raises ClientError naming the field."""
    fields_of = _Fields(body)
    return Endpoint(rank_ip=fields_of.host("rank_ip"), rank_port=fields_of.port("rank_port"))


def synthetic_incarnation(endpoints: Iterable[Endpoint]) -> Incarnation:
    """Name of a life that has none of its own: ranks draw random ports, so a restart changes their addresses."""
    text = " ".join(f"{endpoint.rank_ip}|{endpoint.rank_port}" for endpoint in endpoints)
    return "addr-" + hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


class _Fields:
    """Typed access to an untrusted JSON object. Every method raises ClientError naming the field."""

    def __init__(self, body: object) -> None:
        if not isinstance(body, Mapping):
            raise ClientError(f"the body must be a JSON object, not {type(body).__name__}")
        self._body = body

    def anything(self, name: str) -> object:
        value: object = self._body.get(name)
        # It is answered inside other objects: what could just be read could not always be written.
        if _is_deeper(value, _DEPTH_MAX):
            raise ClientError(f"{name} is nested deeper than {_DEPTH_MAX} levels")
        return value

    def integer(self, name: str, *, least: int, most: int = 2**31 - 1) -> int:
        value = self._required(name)
        if isinstance(value, str) and re.fullmatch(r"[0-9]{1,10}", value):
            value = int(value)  # SGLang's registry takes numbers in text, too
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise ClientError(f"{name} must be an integer between {least} and {most}, not {_short(value)}")
        return value

    def optional_integer(self, name: str, *, least: int, most: int = 2**31 - 1) -> int | None:
        return None if self._body.get(name) is None else self.integer(name, least=least, most=most)

    def nullable_integer(self, name: str, *, least: int) -> int | None:
        return None if self._required(name) is None else self.integer(name, least=least)

    def rank_of(self, axis: str) -> tuple[int, int]:
        size = self.integer(f"{axis}_size", least=1)
        return size, self.integer(f"{axis}_rank", least=0, most=size - 1)

    def port(self, name: str) -> int:
        return self.integer(name, least=1, most=65_535)

    def optional_port(self, name: str) -> int | None:
        return self.optional_integer(name, least=1, most=65_535)

    def text(self, name: str) -> str | None:
        value = self._body.get(name)
        if value is not None and not (isinstance(value, str) and len(value) <= _TEXT_CHARS_MAX):
            raise ClientError(f"{name} must be a text of at most {_TEXT_CHARS_MAX} characters, not {_short(value)}")
        return value

    def nullable_text(self, name: str) -> str | None:
        self._required(name)
        return self.text(name)

    def flag(self, name: str) -> bool:
        value = self._body.get(name)
        if value is not None and not isinstance(value, bool):
            raise ClientError(f"{name} must be true or false, not {_short(value)}")
        return bool(value)

    def host(self, name: str) -> str:
        value = self._required(name)
        if not isinstance(value, str) or not _HOST.fullmatch(value):
            raise ClientError(f"{name} must be a host name or an IP address, not {_short(value)}")
        return value

    def optional_host(self, name: str) -> str | None:
        return None if self._body.get(name) is None else self.host(name)

    def name(self, name: str) -> str | None:
        value = self._body.get(name)
        if value is not None and not (isinstance(value, str) and _NAME.fullmatch(value)):
            raise ClientError(f"{name} must be 1 to 200 of letters, digits and ._:- , not {_short(value)}")
        return value

    def _required(self, name: str) -> object:
        if name not in self._body:
            raise ClientError(f"{name} is missing")
        value: object = self._body[name]
        return value


def _is_deeper(value: object, levels: int) -> bool:
    """Whether objects and lists stand inside each other more than `levels` deep."""
    if not isinstance(value, Mapping | list):
        return False
    inside = value.values() if isinstance(value, Mapping) else value
    return levels == 0 or any(_is_deeper(one, levels - 1) for one in inside)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
