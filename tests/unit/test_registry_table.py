"""The registry's table: readiness, conflicts, superseding, leases, rooms, bounds. Pure: time is an argument."""

from dataclasses import replace

import pytest

from baton_core.errors import ClientError
from baton_core.limits import RegistryLimits
from baton_core.registration import (
    Endpoint,
    Layout,
    RankRegistration,
    parse_registration,
    parse_topology,
    registration_body,
    topology_body,
)
from baton_core.registry import Accepted, Instance, NeedsProbe, Refused, RegistryTable

LAYOUT = Layout(attn_tp_size=2, attn_cp_size=1, dp_size=1, pp_size=1, page_size=16, kv_cache_dtype="float32")

SGLANG_BODY: dict[str, object] = {
    "attn_tp_size": 2,
    "attn_tp_rank": 0,
    "attn_cp_size": 1,
    "attn_cp_rank": 0,
    "attn_dp_size": 1,
    "attn_dp_rank": 0,
    "pp_size": 1,
    "pp_rank": 0,
    "system_dp_size": 1,
    "system_dp_rank": 0,
    "rank_ip": "127.0.0.1",
    "rank_port": 20_000,
    "page_size": 16,
    "kv_cache_dtype": "float32",
}


def rank(tp_rank: int = 0, *, name: str = "p0", life: str | None = "life1", port: int = 30_000) -> RankRegistration:
    """One rank of a worker with two tensor ranks, leased for 10 s."""
    return RankRegistration(
        layout=LAYOUT,
        dp_rank=0,
        cp_rank=0,
        tp_rank=tp_rank,
        pp_rank=0,
        endpoint=Endpoint(rank_ip="127.0.0.1", rank_port=20_000 + tp_rank),
        prefill_http_port=port,
        http_host="127.0.0.1",
        instance=name,
        incarnation=life,
        lease_ms=10_000,
    )


def sgl(**changes: object) -> RankRegistration:
    """What a plain SGLang rank sends, parsed."""
    return parse_registration(SGLANG_BODY | changes)


def table_with(*ranks: RankRegistration, limits: RegistryLimits | None = None) -> RegistryTable:
    table = RegistryTable("registry-life", limits)
    for one in ranks:
        assert isinstance(table.register(one, now=0), Accepted)
    return table


def only(table: RegistryTable, now: int = 0) -> Instance:
    instance = table.select(None, now)
    assert isinstance(instance, Instance)
    return instance


# -- readiness


def test_an_instance_is_ready_when_every_distinct_rank_is_there() -> None:
    table = table_with(rank(0))
    assert not only(table).ready
    table.register(rank(1), now=1)
    assert only(table).ready and table.ranks_total == 2


def test_a_rank_that_registers_again_is_not_counted_twice() -> None:
    table = table_with(rank(0), rank(0), rank(0))
    assert not only(table).ready and table.ranks_total == 1


def test_a_later_registration_of_a_rank_replaces_its_address() -> None:
    table = table_with(rank(0))
    version = table.version
    table.register(replace(rank(0), endpoint=Endpoint(rank_ip="10.0.0.9", rank_port=9)), now=1)
    assert only(table).endpoints[(0, 0, 0, 0)] == Endpoint(rank_ip="10.0.0.9", rank_port=9)
    assert table.version > version


def test_all_axes_count_towards_readiness() -> None:
    layout = replace(LAYOUT, dp_size=2, pp_size=2, attn_cp_size=2)
    table = RegistryTable("r")
    for number in range(16):
        assert not (instance := table.select(None, 0)) or not only(table).ready, instance
        dp, pp, cp, tp = number >> 3, number >> 2 & 1, number >> 1 & 1, number & 1
        table.register(replace(rank(tp), layout=layout, dp_rank=dp, pp_rank=pp, cp_rank=cp), now=0)
    assert only(table).ready


# -- plain SGLang workers


def test_plain_sglang_workers_form_one_instance_that_never_expires() -> None:
    table = table_with(sgl(attn_tp_rank=0), sgl(attn_tp_rank=1, rank_port=20_001))
    instance = only(table, now=10**9)
    assert instance.ready and instance.name == "default" and instance.expires_at is None


def test_the_life_of_a_plain_worker_changes_with_its_rank_addresses() -> None:
    table = table_with(sgl())
    before = only(table).life
    table.register(sgl(), now=1)
    assert only(table).life == before
    table.register(sgl(rank_port=20_777), now=2)
    assert only(table).life != before


def test_dp_size_is_the_attention_size_unless_the_system_size_says_otherwise() -> None:
    attention = sgl(attn_dp_size=4, attn_dp_rank=3)
    plain = sgl(system_dp_size=2, system_dp_rank=1)
    assert (attention.layout.dp_size, attention.dp_rank) == (4, 3)
    assert (plain.layout.dp_size, plain.dp_rank) == (2, 1)


def test_a_registration_survives_the_wire() -> None:
    sent = replace(rank(1), fingerprint="fp", bootstrap_host="10.0.0.1", bootstrap_port=8998)
    assert parse_registration(registration_body(sent)) == sent


def test_a_topology_survives_the_wire_and_unknown_keys_are_tolerated() -> None:
    layout = replace(LAYOUT, kv_layout={"kind": "mla"}, follow_bootstrap_room=False)
    assert parse_topology(topology_body(layout, 30_000) | {"a_key_of_tomorrow": 1}) == layout


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"attn_tp_size": 0}, "attn_tp_size"),
        ({"attn_tp_rank": 2}, "attn_tp_rank"),
        ({"pp_rank": "x"}, "pp_rank"),
        ({"rank_port": 70_000}, "rank_port"),
        ({"rank_ip": "a b"}, "rank_ip"),
        ({"page_size": True}, "page_size"),
        ({"kv_cache_dtype": 5}, "kv_cache_dtype"),
        ({"lease_ms": 1}, "lease_ms"),
        ({"instance": "a\r\nb"}, "instance"),
        ({"incarnation": ""}, "incarnation"),
    ],
)
def test_a_wrong_field_is_named(changes: dict[str, object], named: str) -> None:
    with pytest.raises(ClientError, match=named):
        sgl(**changes)


@pytest.mark.parametrize("missing", sorted(SGLANG_BODY))
def test_a_missing_field_is_named(missing: str) -> None:
    with pytest.raises(ClientError, match=f"{missing} is missing"):
        parse_registration({key: value for key, value in SGLANG_BODY.items() if key != missing})


# -- conflicts and superseding


def test_a_conflicting_layout_of_one_life_is_refused_naming_both_values() -> None:
    table = table_with(rank(0))
    refused = table.register(replace(rank(1), layout=replace(LAYOUT, page_size=64)), now=1)
    assert isinstance(refused, Refused) and refused.status == 400
    assert "page_size is 16 here, 64 sent" in refused.text
    assert not only(table).ready


def test_a_conflicting_fingerprint_of_one_life_is_refused() -> None:
    table = table_with(replace(rank(0), fingerprint="a"))
    refused = table.register(replace(rank(1), fingerprint="b"), now=1)
    assert isinstance(refused, Refused) and "fingerprint is 'a' here, 'b' sent" in refused.text


def test_a_new_life_under_the_same_name_asks_whether_the_old_one_still_answers() -> None:
    table = table_with(rank(0, life="life1", port=30_000))
    question = table.register(rank(0, life="life2", port=31_000), now=1)
    assert question == NeedsProbe(instance="p0", incarnation="life1", host="127.0.0.1", port=30_000)
    assert only(table).incarnation == "life1", "nothing changes before the answer"
    assert "p0 (incarnation life1) still answers at 127.0.0.1:30000" in question.still_alive.text


def test_a_new_life_at_the_same_address_asks_although_its_name_differs() -> None:
    table = table_with(rank(0, name="pod-a", life="life1"))
    question = table.register(rank(0, name="pod-b", life="life2"), now=1)
    assert isinstance(question, NeedsProbe) and question.instance == "pod-a"


def test_a_dropped_life_makes_way_for_the_new_one() -> None:
    table = table_with(rank(0, life="life1"), rank(1, life="life1"))
    assert table.drop("p0", "life1")
    assert isinstance(table.register(rank(0, life="life2"), now=1), Accepted)
    assert only(table).incarnation == "life2" and not only(table).ready and table.ranks_total == 1


def test_a_drop_that_comes_late_spares_the_new_life() -> None:
    table = table_with(rank(0, life="life2"))
    assert not table.drop("p0", "life1")
    assert only(table).incarnation == "life2"


def test_a_holder_that_cannot_be_asked_is_superseded_at_once() -> None:
    table = table_with(replace(rank(0, life="life1"), prefill_http_port=None))
    assert isinstance(table.register(rank(0, life="life2"), now=1), Accepted)
    assert only(table).incarnation == "life2"


def test_the_same_host_with_a_longer_port_number_is_another_address() -> None:
    table = table_with(rank(0, name="a", port=80))
    assert isinstance(table.register(rank(0, name="b", port=8_000), now=1), Accepted)


# -- leases


def test_a_lease_that_is_not_renewed_runs_out() -> None:
    table = table_with(rank(0))
    assert table.select(None, now=9_999) is not None
    assert table.select(None, now=10_000) is None and table.ranks_total == 0


def test_a_renewed_lease_counts_from_its_renewal() -> None:
    table = table_with(rank(0))
    assert isinstance(table.renew("p0", "life1", now=9_000), Instance)
    assert table.select(None, now=18_999) is not None
    assert table.select(None, now=19_000) is None


def test_an_unknown_life_cannot_renew() -> None:
    table = table_with(rank(0))
    for name, life in (("p0", "life9"), ("p9", "life1")):
        refused = table.renew(name, life, now=1)
        assert isinstance(refused, Refused) and refused.status == 404


def test_a_worker_that_deregisters_is_gone_and_its_address_is_free() -> None:
    table = table_with(rank(0))
    assert isinstance(table.deregister("p0", "life9", now=1), Refused), "another life must not be removed"
    assert isinstance(table.deregister("p0", "life1", now=1), Instance)
    assert isinstance(table.register(rank(0, name="p1", life="life2"), now=2), Accepted)


def test_leases_of_different_lengths_run_out_each_at_its_time() -> None:
    short = replace(rank(0, name="short", port=1), lease_ms=1_000)
    table = table_with(rank(0, name="long", port=2), short, sgl(rank_ip="10.0.0.1"))
    assert [instance.name for instance in table.instances(now=5_000)] == ["long", "default"]
    assert [instance.name for instance in table.instances(now=20_000)] == ["default"]


# -- selection


def test_several_instances_need_a_name() -> None:
    table = table_with(rank(0, name="p0", port=1), rank(0, name="p1", port=2))
    refused = table.select(None, now=0)
    assert isinstance(refused, Refused) and refused.status == 400 and "p0, p1" in refused.text
    chosen = table.select("p1", now=0)
    assert isinstance(chosen, Instance) and chosen.name == "p1"
    unknown = table.select("p2", now=0)
    assert isinstance(unknown, Refused) and unknown.status == 404


def test_an_empty_registry_has_nobody_to_select() -> None:
    assert RegistryTable("r").select(None, now=0) is None


# -- rooms


def test_a_room_is_forgotten_after_its_time_unless_it_is_registered_again() -> None:
    table = RegistryTable("r")
    table.put_room(7, 0, None, now=0)
    table.put_room(8, 1, None, now=0)
    table.put_room(7, 0, None, now=60_000)
    assert table.dp_ranks([7, 8, 9], None, now=119_999) == {7: 0, 8: 1}
    assert table.dp_ranks([7, 8], None, now=120_000) == {7: 0}
    assert table.dp_ranks([7, 8], None, now=180_000) == {} and table.rooms_total == 0


def test_a_room_belongs_to_the_instance_that_registered_it() -> None:
    table = table_with(rank(0, name="p0", port=1), rank(0, name="p1", port=2))
    table.put_room(7, 0, "p0", now=0)
    table.put_room(9, 0, None, now=0)
    assert table.dp_ranks([7, 9], "p0", now=1) == {7: 0, 9: 0}
    assert table.dp_ranks([7, 9], "p1", now=1) == {9: 0}
    assert isinstance(table.dp_ranks([7], None, now=1), Refused)


def test_a_room_may_be_registered_before_the_worker() -> None:
    table = RegistryTable("r")
    assert table.put_room(7, 3, "p0", now=0) is None
    assert table.dp_ranks([7], "p0", now=0) == {7: 3}


def test_a_rank_that_the_worker_does_not_have_is_refused() -> None:
    table = table_with(rank(0))
    refused = table.put_room(7, 1, "p0", now=0)
    assert refused is not None and refused.status == 400 and "dp_rank" in refused.text
    below = table.put_room(7, -1, None, now=0)
    assert below is not None and below.status == 400


# -- bounds


def test_rooms_are_bounded_and_a_known_room_may_still_be_renewed() -> None:
    table = RegistryTable("r", RegistryLimits(rooms_max=2))
    assert table.put_room(1, 0, None, now=0) is None
    assert table.put_room(2, 0, None, now=0) is None
    refused = table.put_room(3, 0, None, now=0)
    assert refused is not None and refused.status == 503 and "rooms_max" in refused.text
    assert table.put_room(1, 0, None, now=1) is None


def test_ranks_are_bounded_over_all_instances() -> None:
    table = table_with(rank(0, port=1), rank(1, port=1), limits=RegistryLimits(ranks_max=2))
    refused = table.register(rank(0, name="p1", port=2), now=1)
    assert isinstance(refused, Refused) and refused.status == 503 and "ranks_max" in refused.text
    assert [instance.name for instance in table.instances(now=1)] == ["p0"]


def test_a_layout_that_never_fits_is_refused_at_once() -> None:
    table = RegistryTable("r", RegistryLimits(ranks_max=10))
    refused = table.register(replace(rank(0), layout=replace(LAYOUT, dp_size=6)), now=0)
    assert isinstance(refused, Refused) and refused.status == 400 and "12 ranks" in refused.text


def test_limits_must_be_positive() -> None:
    with pytest.raises(ValueError, match="rooms_max"):
        RegistryLimits(rooms_max=0)


def test_a_million_rooms_expire_without_a_stall() -> None:
    table = RegistryTable("r")
    for room in range(1, 50_001):
        table.put_room(room, 0, None, now=0)
    table.expire(now=120_000)
    assert table.rooms_total == 0


def test_a_room_is_taken_back_only_from_the_rank_where_it_runs() -> None:
    table = RegistryTable("registry-1")
    table.put_room(7, 1, "p0", now=0)
    table.close_room(7, 0, "p0")
    table.close_room(7, 1, "p1")
    table.close_room(8, 1, "p0")
    assert table.rooms_total == 1
    table.close_room(7, 1, "p0")
    assert table.rooms_total == 0
