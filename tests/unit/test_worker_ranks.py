"""A worker's ranks before any process runs: which layouts are refused, what each rank is told, which unit takes what."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from baton_core.errors import ClientError, EngineError
from baton_core.limits import Limits
from baton_core.ranks import Parallel, Place
from baton_core.request import FAKE_HOST, Bootstrap
from baton_io.config import ConfigError, from_json, resolve, to_json
from baton_io.ipc import LoadProgress, RankReady, Snapshot
from baton_worker.config import DecodeConfig, PrefillConfig, RankConfig, Role, parse_address
from baton_worker.metrics import WorkerMetrics, with_dp_rank
from baton_worker.placement import Placement
from baton_worker.rank_link import ToRank
from baton_worker.rank_plan import RankPlan, nodes_of, split_cores
from baton_worker.rank_process import Heard
from baton_worker.supervisor import Progress
from baton_worker.units import Units, merged_ready, merged_snapshot

NODES = {"nnodes": 2, "dist_init_addr": "10.0.0.1:29500"}


def plan(config: DecodeConfig | PrefillConfig, cores_available: int = 8) -> RankPlan:
    return RankPlan(
        config=config,
        role=Role.DECODE,
        incarnation="ab12",
        model_path="/models/m",
        model_name="m",
        run_dir="/tmp/run",
        cores_available=cores_available,
    )


def configs(config: DecodeConfig | PrefillConfig, hosts: Sequence[str] = ()) -> list[RankConfig]:
    return [plan(config).rank_config(rank, hosts) for rank in config.local_ranks]


# -- options


def test_the_defaults_are_one_rank_and_the_roles_own_balance_method() -> None:
    assert DecodeConfig().parallel == PrefillConfig().parallel == Parallel()
    assert DecodeConfig().load_balance_method == "round_robin"
    assert PrefillConfig().load_balance_method == "follow_bootstrap_room"


def test_sizes_flags_and_the_force_switch_are_ordinary_options() -> None:
    argv = ["--tp", "2", "--dp", "2", "--dp-attention", "--cp", "2", "--load-balance-method", "least_load"]
    config = resolve(PrefillConfig, "prefill", argv, {"BATON_FORCE_QUERY_PREFILL_DP_RANK": "1"})
    assert config.parallel == Parallel(tp=2, dp=2, cp=2, dp_attention=True)
    assert (config.load_balance_method, config.force_query_prefill_dp_rank) == ("least_load", True)
    assert resolve(DecodeConfig, "decode", [], {"BATON_DECODE_TP": "3"}).parallel == Parallel(tp=3)


def test_dp_attention_with_one_unit_is_plain() -> None:
    assert DecodeConfig(dp_attention=True, tp=2).parallel == Parallel(tp=2)
    assert DecodeConfig(dp_attention=True, pp=2).parallel == Parallel(pp=2)


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--tp", "0"], "tp must be at least 1, not 0; tp comes from flag --tp"),
        (["--cp", "2"], "cp is prefill's, give it --tp"),
        (["--pp", "2", "--dp", "2", "--dp-attention"], "units that step together cannot be pipelines"),
        (["--nnodes", "2", "--tp", "2"], "needs dist_init_addr"),
        (["--nnodes", "2", "--tp", "3", "--dist-init-addr", "h:1"], "does not divide the 3 ranks"),
        (["--nnodes", "2", "--tp", "2", "--dist-init-addr", "h"], "must be host:port, not 'h'"),
        (["--node-rank", "1"], "node_rank must be below nnodes (1), not 1"),
        (["--nnodes", "2", "--tp", "2", "--dist-init-addr", "h:1", "--control", "shm"], "a unit spans hosts"),
        (["--load-balance-method", "best"], "must be one of follow_bootstrap_room, round_robin, least_load"),
        (["--tp", "5000"], "is over 4096 ranks"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_with_the_reason(argv: list[str], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(DecodeConfig, "decode", argv, {})
    assert told in str(caught.value)


def test_units_that_fill_their_hosts_may_agree_by_shared_memory() -> None:
    config = DecodeConfig(tp=2, dp=2, nnodes=2, dist_init_addr="h:1", control="shm")
    assert config.local_ranks == range(2)


@pytest.mark.parametrize(
    ("text", "address"), [("10.0.0.5:29500", ("10.0.0.5", 29500)), ("[fe80::1]:1", ("fe80::1", 1)), ("h:2", ("h", 2))]
)
def test_an_address_has_a_host_and_a_port(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize("text", ["", "h", ":5", "h:0", "h:x", "h:99999", "h:1/x", "u@h:1"])
def test_a_text_that_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="host:port"):
        parse_address(text)


# -- what a rank is told


def test_each_rank_of_one_node_gets_its_place_its_links_and_its_units_log() -> None:
    told = configs(DecodeConfig(tp=2, dp=2, control="shm"))
    assert [(one.rank, one.local_rank, one.ipc_address) for one in told] == [
        (rank, rank, f"ipc:///tmp/run/rank{rank}.ipc") for rank in range(4)
    ]
    assert [one.log_address for one in told] == [
        *["ipc:///tmp/run/unit0.log"] * 2,
        *["ipc:///tmp/run/unit1.log"] * 2,
    ]
    assert {(one.rendezvous, one.control, one.dp_size) for one in told} == {("file:///tmp/run/rendezvous", "shm", 2)}


def test_ranks_that_share_a_node_have_a_device_each() -> None:
    assert [one.device for one in configs(DecodeConfig(tp=2, device="cuda"))] == ["cuda:0", "cuda:1"]
    assert [one.device for one in configs(DecodeConfig(device="cuda"))] == ["cuda"]
    assert [one.device for one in configs(DecodeConfig(tp=4, device="cuda", node_rank=1, **NODES), ("a", "b"))] == [  # type: ignore[arg-type]
        "cuda:0",
        "cuda:1",
    ]
    assert [one.device for one in configs(DecodeConfig(tp=2))] == ["cpu", "cpu"]


def test_what_a_rank_is_told_survives_the_way_to_it() -> None:
    (told,) = configs(DecodeConfig())
    assert from_json(RankConfig, to_json(told)) == told


def test_on_several_nodes_groups_meet_at_node_0_and_a_unit_that_spans_them_logs_over_tcp() -> None:
    hosts = ("10.0.0.1", "fe80::2")
    spanning = configs(DecodeConfig(tp=4, node_rank=1, **NODES), hosts)  # type: ignore[arg-type]
    assert [(one.rank, one.local_rank) for one in spanning] == [(2, 0), (3, 1)]
    assert {one.rendezvous for one in spanning} == {"tcp://10.0.0.1:29500"}
    assert {one.log_address for one in spanning} == {"tcp://10.0.0.1:29502"}
    inside = configs(DecodeConfig(tp=2, dp=2, node_rank=1, **NODES), hosts)  # type: ignore[arg-type]
    assert {one.log_address for one in inside} == {"ipc:///tmp/run/unit1.log"}
    # Unit 1 of three begins on node 0 and ends on node 1.
    straddling = configs(DecodeConfig(tp=2, dp=3, node_rank=1, **NODES), hosts)  # type: ignore[arg-type]
    assert [one.log_address for one in straddling] == [
        "tcp://10.0.0.1:29503",
        "ipc:///tmp/run/unit2.log",
        "ipc:///tmp/run/unit2.log",
    ]


def test_the_log_of_a_unit_is_where_its_leader_is() -> None:
    hosts = ("n0", "n1", "fe80::3", "n3")
    (told,) = configs(DecodeConfig(tp=2, dp=2, nnodes=4, node_rank=3, dist_init_addr="n0:100"), hosts)
    assert nodes_of(Parallel(tp=2, dp=2), 1, 4) == [2, 3]
    assert told.log_address == "tcp://[fe80::3]:103"


@pytest.mark.parametrize(
    ("cores", "ranks", "expected"),
    [
        ((), 2, [(), ()]),
        ((0, 1, 2, 3), 2, [(0, 1), (2, 3)]),
        ((4, 6, 7), 2, [(4,), (6, 7)]),
        ((0, 1), 4, [(0,), (0,), (1,), (1,)]),
        ((5,), 3, [(5,), (5,), (5,)]),
    ],
)
def test_cores_are_shared_out_and_nobody_goes_without(
    cores: tuple[int, ...], ranks: int, expected: list[tuple[int, ...]]
) -> None:
    assert split_cores(cores, ranks) == expected


def test_threads_follow_the_cores_and_several_ranks_without_any_share_what_there_is() -> None:
    def threads(config: DecodeConfig) -> list[tuple[int, tuple[int, ...]]]:
        return [(one.threads, one.cores) for one in configs(config)]

    assert threads(DecodeConfig()) == [(0, ())], "one rank: as it always was"
    assert threads(DecodeConfig(tp=2)) == [(4, ())] * 2
    assert threads(DecodeConfig(tp=16)) == [(1, ())] * 16
    assert threads(DecodeConfig(tp=2, cores="0-3")) == [(0, (0, 1)), (0, (2, 3))]
    assert threads(DecodeConfig(tp=2, threads=3)) == [(3, ())] * 2


def test_forced_or_not_following_means_that_nobody_may_guess_the_rank() -> None:
    def follows(**options: object) -> bool:
        return configs(PrefillConfig(dp=2, **options))[0].follow_bootstrap_room  # type: ignore[arg-type]

    assert follows()
    assert not follows(force_query_prefill_dp_rank=True)
    assert not follows(load_balance_method="round_robin")


# -- which unit


def room(number: int, host: str = "127.0.0.1") -> Bootstrap:
    return Bootstrap(host=host, port=1, room=number)


def test_a_named_unit_wins_and_one_that_does_not_exist_is_refused_naming_both() -> None:
    placement = Placement("follow_bootstrap_room", 2, lambda _: 0)
    assert placement.choose(room(4), 1) == 1
    for wrong in (2, -1):
        with pytest.raises(ClientError, match=f"routed_dp_rank {wrong} is out of range: this worker has dp_size 2"):
            placement.choose(room(4), wrong)


def test_follow_takes_the_room_and_requests_without_one_in_turn() -> None:
    placement = Placement("follow_bootstrap_room", 3, lambda _: 0)
    assert [placement.choose(room(number)) for number in (5, 6, 2**63 - 1)] == [2, 0, (2**63 - 1) % 3]
    assert [placement.choose(bootstrap) for bootstrap in (None, room(0, FAKE_HOST), None, None)] == [0, 1, 2, 0]


def test_round_robin_goes_round_whatever_the_room() -> None:
    placement = Placement("round_robin", 2, lambda _: 0)
    assert [placement.choose(room(7)) for _ in range(4)] == [0, 1, 0, 1]


def test_least_load_takes_the_idlest_and_equals_in_turn() -> None:
    live = [1, 0, 0]
    placement = Placement("least_load", 3, lambda dp_rank: live[dp_rank])
    assert [placement.choose(None) for _ in range(3)] == [1, 1, 2]
    live[:] = [3, 4, 5]
    assert placement.choose(None) == 0


# -- units


class Deaf:
    """A rank that takes nothing and says nothing: units only look at what was heard of it."""

    bad_frames = 1
    pid = None

    def __init__(self, place: Place) -> None:
        self.place = place
        self.heard = Heard(Progress(1_000, lambda: 0))
        self.killed = 0

    async def start(self, hosts: Sequence[str]) -> None: ...

    def send(self, message: ToRank) -> None: ...

    async def watch(self) -> str:
        return "never"

    def kill(self) -> None:
        self.killed += 1

    async def close(self) -> None: ...


def units(parallel: Parallel) -> Units:
    return Units(parallel, [Deaf(parallel.place(rank)) for rank in range(parallel.ranks)])


def ready(rank: int, **changes: object) -> RankReady:
    one = RankReady(
        rank=rank,
        pid=100 + rank,
        rank_host="h",
        rank_port=5_000 + rank,
        fingerprint="fp",
        layout="kv",
        kv_pages=64 - rank,
        page_tokens=16,
        kv_bytes=1_000,
        context_tokens=512 - rank,
        kv_dtype="float32",
        load_seconds=1.0 + rank,
    )
    return replace(one, **changes)  # type: ignore[arg-type]


async def test_a_worker_is_ready_when_its_last_rank_is_and_has_what_the_least_of_them_has() -> None:
    fleet = units(Parallel(tp=2, dp=2))
    for rank in (3, 0, 2):
        fleet.ranks[rank].heard.take(ready(rank))
        assert fleet.ready is None and not fleet.progressing
    fleet.ranks[1].heard.take(ready(1))
    assert fleet.ready is not None and fleet.progressing
    assert [one.rank for one in fleet.ready] == [0, 1, 2, 3]
    merged = merged_ready(fleet.ready)
    assert (merged.kv_pages, merged.context_tokens, merged.kv_bytes, merged.load_seconds) == (61, 509, 4_000, 4.0)


def test_ranks_that_are_not_alike_make_no_worker() -> None:
    with pytest.raises(EngineError, match="fingerprint is 'fp' on rank 0, 'other' on rank 1"):
        merged_ready([ready(0), ready(1, fingerprint="other")])
    with pytest.raises(EngineError, match="layout is 'kv' on rank 0, 'another' on rank 1"):
        merged_ready([ready(0), ready(1, layout="another")])


async def test_loading_is_as_far_as_the_slowest_rank() -> None:
    fleet = units(Parallel(tp=2))
    assert fleet.loading() is None
    fleet.ranks[0].heard.take(LoadProgress(rank=0, what="weights", done=9, total=10))
    fleet.ranks[1].heard.take(LoadProgress(rank=1, what="weights", done=2, total=10))
    slowest = fleet.loading()
    assert slowest is not None and (slowest.what, slowest.done, slowest.total) == ("weights (rank 1 of 2)", 2, 10)
    fleet.ranks[1].heard.take(ready(1))
    assert (loading := fleet.loading()) is not None and loading.rank == 0


async def test_a_lost_unit_takes_its_ranks_with_it_and_no_others() -> None:
    fleet = units(Parallel(tp=2, dp=2))
    fleet[1].lose("rank 3 died")
    assert [rank.killed for rank in fleet.ranks if isinstance(rank, Deaf)] == [0, 0, 1, 1]
    assert [unit.dp_rank for unit in fleet.live] == [0]
    assert fleet.why_unready() == ["rank 3 died"]
    assert fleet.bad_frames == 4


async def test_a_rank_that_says_nothing_is_missed() -> None:
    fleet = units(Parallel(tp=2))
    with pytest.raises(TimeoutError):
        await fleet.fresh_snapshots(10)
    asking = asyncio.create_task(fleet.fresh_snapshots(5_000))
    await asyncio.sleep(0)
    for rank in (1, 0):
        fleet.ranks[rank].heard.take(Snapshot(rank=rank, progress=1, gauges={"live": rank}))
    assert [one.rank for one in await asking] == [0, 1]


def test_the_numbers_of_units_add_up() -> None:
    one = Snapshot(rank=0, progress=7, gauges={"live": 1.0}, counters={"steps_total": 2.0}, samples={"a": [1.0]})
    two = Snapshot(rank=2, progress=5, gauges={"live": 2.0, "x": 1.0}, samples={"a": [2.0]})
    merged = merged_snapshot([one, two])
    assert (merged.progress, merged.gauges, merged.counters) == (5, {"live": 3.0, "x": 1.0}, {"steps_total": 2.0})
    assert merged.samples == {"a": [1.0, 2.0]}
    assert merged_snapshot([one]) is one


@pytest.mark.parametrize(
    ("key", "labelled"),
    [
        ("pages", "pages{dp_rank=1}"),
        ("queue_requests{queue=waiting}", "queue_requests{queue=waiting,dp_rank=1}"),
        ("agreement_seconds{dp_rank=4}", "agreement_seconds{dp_rank=4}"),
        ("admission_rejections_total{reason=draining}", "admission_rejections_total{reason=draining}"),
    ],
)
def test_what_a_scheduler_says_is_labelled_with_its_unit(key: str, labelled: str) -> None:
    assert with_dp_rank(key, 1) == labelled


def test_metrics_show_each_unit_and_count_rejections_of_all() -> None:
    metrics = WorkerMetrics(Role.PREFILL)
    metrics.count("admission_rejections_total{reason=draining}")
    for dp_rank in (0, 1):
        counters = {"admission_rejections_total{reason=draining}": 2.0, "steps_total": 3.0}
        samples = {"control_tick_lag_seconds": [0.002]}
        metrics.apply(
            dp_rank, Snapshot(rank=2 * dp_rank, progress=1, gauges={"pages": 8}, counters=counters, samples=samples)
        )
    text = metrics.render().decode()
    for line in (
        'baton_prefill_pages{dp_rank="0"} 8.0',
        'baton_prefill_pages{dp_rank="1"} 8.0',
        'baton_prefill_steps_total{dp_rank="1"} 3.0',
        'baton_prefill_admission_rejections_total{reason="draining"} 5.0',
        'baton_prefill_control_tick_lag_seconds_count{dp_rank="1"} 1.0',
    ):
        assert line in text


def test_a_stalled_rank_is_named() -> None:
    now = [0]
    progress = Progress(Limits().loop_stall_ms, lambda: now[0])
    assert not progress.lively
    progress.ready()
    assert progress.lively
    now[0] = 14_999
    assert progress.lively and progress.age_ms == 14_999
    progress.turned(1)
    now[0] += 15_000
    assert not progress.lively
    progress.turned(1)
    assert not progress.lively, "the same number of turns is no progress"


def test_while_its_watcher_stood_still_no_time_passes_for_a_rank() -> None:
    """A container that is frozen stands still as a whole."""
    now = [0]
    progress = Progress(Limits().loop_stall_ms, lambda: now[0])
    progress.ready()
    now[0] = 60_000
    assert not progress.lively
    progress.excuse(55_000)
    assert progress.lively and progress.age_ms == 5_000
    progress.turned(1)
    progress.excuse(3_000)
    assert progress.age_ms == 0, "it cannot have been seen in the future"
    now[0] += 15_000
    progress.excuse(-1)
    assert not progress.lively
