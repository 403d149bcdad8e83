"""What is counted of transfers, and how an app shows it: by way, over all ranks of a unit, at zero before the first."""

from baton_core.agreement import KVPoll
from baton_core.errors import Reason
from baton_core.kv_layout import UnitLayout, plan
from baton_engine.transfer.attempts import AttemptTable, Outgoing
from baton_engine.transfer.tally import Tally
from baton_io.ipc import Snapshot
from baton_worker.config import Role
from baton_worker.metrics import WorkerMetrics

LAYOUT = UnitLayout(layers=1, kv_heads=1, head_dim=4, element_bytes=2, page_tokens=4)


def one_flow(table: AttemptTable, room: int) -> Outgoing:
    """An attempt that owes two pages and the row to one reader."""
    one = Outgoing(room=room, attempt=1, prompt_tokens=8, pages_total=2)
    one.pushed_all = True
    one.add_flow("d/0.0", plan(LAYOUT, 0, LAYOUT, 0), carries_row=True)
    table.open(one)
    return one


def test_every_key_is_there_before_anything_moved() -> None:
    counters, samples = AttemptTable(lambda: None).tally()
    assert (
        counters["transfer_bytes_total{way=tcp}"] == counters["transfer_failures_total{reason=peer_lost,way=none}"] == 0
    )
    assert samples["transfer_seconds{way=shm}"] == samples["transfer_bytes_per_second{way=shm}"] == []


def test_bytes_count_as_they_land_and_a_share_when_its_row_has() -> None:
    table = AttemptTable(lambda: None)
    one = one_flow(table, 1)
    (flow,) = one.flows.values()
    assert table.enter(flow, "stream", way="tcp")
    table.moved(flow, flow.owed_bytes // 2)
    table.moved(flow, flow.owed_bytes)
    table.leave(flow)
    counters, samples = table.tally()
    assert counters["transfer_bytes_total{way=tcp}"] == flow.owed_bytes > 0
    assert samples["transfer_seconds{way=tcp}"] == [], "the row is missing"
    table.moved(flow, flow.owed_bytes, row=True)
    table.moved(flow, flow.owed_bytes, row=True)  # said twice, counted once
    counters, samples = table.tally()
    assert one.status is KVPoll.Success and counters["transfer_bytes_total{way=tcp}"] == flow.owed_bytes
    (seconds,), (speed,) = samples["transfer_seconds{way=tcp}"], samples["transfer_bytes_per_second{way=tcp}"]
    assert seconds > 0 and abs(speed * seconds - flow.owed_bytes) < 1e-6
    assert table.tally()[1]["transfer_seconds{way=tcp}"] == [], "samples are handed over once"


def test_failures_count_once_by_reason_and_way() -> None:
    table = AttemptTable(lambda: None)
    early, late = one_flow(table, 1), one_flow(table, 2)
    table.fail(early, Reason.PEER_LOST, "gone")
    table.fail(early, Reason.TRANSFER_FAILED, "too late to be the reason")
    (flow,) = late.flows.values()
    assert table.enter(flow, "stream", way="shm")
    table.fail(late, Reason.TRANSFER_FAILED, "cut")
    counters, _ = table.tally()
    failures = {key: value for key, value in counters.items() if "failures" in key and value}
    assert failures == {
        "transfer_failures_total{reason=peer_lost,way=none}": 1,
        "transfer_failures_total{reason=transfer_failed,way=shm}": 1,
    }


def test_an_app_adds_up_what_the_ranks_of_a_unit_moved_and_nothing_else() -> None:
    metrics = WorkerMetrics(Role.DECODE)
    tally = Tally()
    tally.moved("tcp", 100)
    tally.finished("tcp", 100, 0.5)
    for rank in (0, 1):
        told = Snapshot(
            rank=rank,
            progress=1,
            counters=tally.counters() | {"steps_total": 7},
            samples=tally.samples() | {"step_seconds": [0.1]},
        )
        (metrics.apply if rank == 0 else metrics.apply_member)(0, told)
    text = metrics.render().decode()
    assert 'baton_decode_transfer_bytes_total{dp_rank="0",way="tcp"} 200.0' in text
    assert 'baton_decode_steps_total{dp_rank="0"} 7.0' in text
    assert 'baton_decode_step_seconds_count{dp_rank="0"} 1' in text
    assert 'baton_decode_transfer_seconds_count{dp_rank="0",way="shm"} 0' in text
    assert 'baton_decode_requests_total{route="generate",status="502"} 0' in text
