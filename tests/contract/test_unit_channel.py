"""The unit's log over real sockets: every entry arrives in order, as it was, and so does every note."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq

from baton_core.errors import EngineError, Reason, Verdict
from baton_core.events import Abort, AgreedPoll, PeerGone, PeerSaid, Submit
from baton_core.messages import MetadataRow, NotYet
from baton_core.plan import SequenceResult, StepResult
from baton_core.request import Request, Sampling, TokenLogprob
from baton_core.unit_log import Done, Idled, LogEntry, Report
from baton_io.rounds_channel import ConductorRounds, UnitRounds
from baton_io.unit_channel import _NOTES, Join, LeaderChannel, MemberChannel, Nudge
from fuzz.lanes import resident_bytes

GATHER_MS = 10_000
GONE = Verdict(reason=Reason.CLIENT_GONE, text="the client left")
LOGPROB = TokenLogprob(token=4, logprob=-0.25, top=((4, -0.25), (9, -1.5)))
POLL = AgreedPoll(
    rid="a",
    attempt=2,
    poll=4,
    writers_stopped=True,
    reason=Reason.DEADLINE,
    rank=1,
    text="late",
    progress=3,
    row=MetadataRow(room=2**63 - 1, attempt=2, first_token=4, logprob=LOGPROB),
    row_index=0,
)
ENTRY = LogEntry(
    position=1,
    now=1_000,
    inputs=(
        Submit(request=Request(rid="a", prompt=(1, 2, 3), sampling=Sampling(seed=2**64 - 1))),
        Abort(rid="b", verdict=GONE),
        PeerSaid(peer="w/0.0", message=NotYet(room=5, attempt=1)),
        PeerGone(peer="w/0.0", verdict=GONE),
    ),
    results=(StepResult(step=7, results=(SequenceResult(rid="a", token=4, logprob=LOGPROB),)),),
    consensus=(POLL,),
    round=3,
)


def gathered(tmp_path: Path) -> tuple[LeaderChannel, MemberChannel]:
    address = f"ipc://{tmp_path}/log"
    leader, member = LeaderChannel(address, 2), MemberChannel(address, 1)
    joining = threading.Thread(target=member.gather, args=(GATHER_MS,))
    joining.start()
    leader.gather(GATHER_MS)
    joining.join()
    return leader, member


def received(socket: "zmq.Socket[bytes]", take: Callable[[], list[object]], count: int) -> list[object]:
    got: list[object] = []
    while len(got) < count:
        assert socket.poll(GATHER_MS), f"only {got}"
        got += take()
    return got


def test_entries_arrive_in_order_and_as_they_were_written(tmp_path: Path) -> None:
    leader, member = gathered(tmp_path)
    later = LogEntry(position=2, now=1_001)
    leader.send(ENTRY)
    leader.send(later)
    assert received(member.socket, lambda: list(member.receive()), 2) == [ENTRY, later]
    member.close()
    leader.close()


def test_notes_arrive_in_order_and_as_they_were_written(tmp_path: Path) -> None:
    leader, member = gathered(tmp_path)
    notes = [
        Nudge(member=1),
        Idled(member=1),
        Done(member=1, step=7, result=StepResult(step=7, results=())),
        Report(stage=1, position=64, polls=(POLL,), digest=2**62 - 1),
    ]
    for note in notes:
        member.note(note)  # type: ignore[arg-type]
    assert received(leader.socket, lambda: list(leader.receive()), len(notes)) == notes
    member.close()
    leader.close()


def test_a_member_that_does_not_come_is_named(tmp_path: Path) -> None:
    leader = LeaderChannel(f"ipc://{tmp_path}/log", 3)
    with pytest.raises(EngineError, match="member 1, 2 of this unit did not come"):
        leader.gather(50)
    leader.close()
    lonely = MemberChannel(f"ipc://{tmp_path}/nobody", 1)
    with pytest.raises(EngineError, match="did not begin its log within 50 ms"):
        lonely.gather(50)
    lonely.close()


def test_a_member_that_is_gone_ends_the_unit(tmp_path: Path) -> None:
    leader, member = gathered(tmp_path)
    member.close()

    def write_on() -> None:
        for position in range(1, 1_000):
            leader.send(LogEntry(position=position, now=0))
            leader.socket.poll(10)

    with pytest.raises(EngineError, match="member 1 of this unit does not take the log"):
        write_on()
    leader.close()


def test_units_begin_rounds_together(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/rounds"
    conductor, other = ConductorRounds(address, 2), UnitRounds(address, 1)
    joining = threading.Thread(target=other.gather, args=(GATHER_MS,))
    joining.start()
    conductor.gather(GATHER_MS)
    joining.join()
    other.want()
    assert received(conductor.socket, lambda: list(conductor.begun()), 1) == [1]
    assert received(other.socket, lambda: list(other.begun()), 1) == [1]
    conductor.want()
    conductor.over(1)
    other.over(1)
    assert received(conductor.socket, lambda: list(conductor.begun()), 1) == [2]
    assert received(other.socket, lambda: list(other.begun()), 1) == [2]
    other.close()
    conductor.close()


def test_what_strangers_say_to_the_log_is_counted_and_no_note(tmp_path: Path) -> None:
    leader, member = gathered(tmp_path)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.connect(f"ipc://{tmp_path}/log")
    messages = ([b""], [b"\0"], [b"a", b"b"], [b"\x05" + b"\x91" * 5_000])
    for message in messages:
        stranger.send_multipart(message)
    while leader.bad_frames < len(messages):
        assert leader.receive() == []
    member.note(Idled(member=1))
    assert received(leader.socket, leader.receive, 1) == [Idled(member=1)]
    context.destroy(linger=0)
    leader.close()
    member.close()


def test_a_stranger_who_is_there_first_takes_no_seat_by_what_is_no_join_and_none_twice(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/log"
    leader = LeaderChannel(address, 3)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.connect(address)
    messages = (
        [b""],
        [b"a", b"b"],
        [_NOTES.encode(Idled(member=1))],
        *([_NOTES.encode(Join(member=n))] for n in (0, 3, -1)),
    )
    for message in messages:
        stranger.send_multipart(message)
    members = [MemberChannel(address, member) for member in (1, 2)]
    joining = [threading.Thread(target=member.gather, args=(GATHER_MS,)) for member in members]
    for thread in joining:
        thread.start()
    leader.gather(GATHER_MS)
    for thread in joining:
        thread.join()
    stranger.send_multipart([_NOTES.encode(Join(member=1))])
    while leader.bad_frames <= len(messages):
        assert leader.receive() == []
    leader.send(ENTRY)
    for member in members:
        assert received(member.socket, lambda member=member: list(member.receive()), 1) == [ENTRY]
    context.destroy(linger=0)
    for end in (*members, leader):
        end.close()


def test_a_stranger_who_takes_every_name_a_member_could_have_is_forgotten_with_its_connection(tmp_path: Path) -> None:
    leader, member = gathered(tmp_path)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    before = resident_bytes(os.getpid())
    for _ in range(100):
        stranger = context.socket(zmq.DEALER)
        stranger.setsockopt(zmq.IDENTITY, b"member 1")
        stranger.connect(f"ipc://{tmp_path}/log")
        heard = leader.bad_frames
        stranger.send(bytes(1024 * 1024))
        while leader.bad_frames == heard:
            assert leader.socket.poll(GATHER_MS), "what it says is kept, and nobody reads it"
            assert leader.receive() == []
        stranger.close(linger=0)
    assert resident_bytes(os.getpid()) - before < 50 * 1024 * 1024
    member.note(Idled(member=1))
    assert received(leader.socket, leader.receive, 1) == [Idled(member=1)]
    context.destroy(linger=0)
    leader.close()
    member.close()


def test_what_strangers_say_to_the_rounds_is_counted_and_begins_none(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/rounds"
    conductor, unit = ConductorRounds(address, 2), UnitRounds(address, 1)
    joining = threading.Thread(target=unit.gather, args=(GATHER_MS,))
    joining.start()
    conductor.gather(GATHER_MS)
    joining.join()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.connect(address)
    messages = ([b"w", b"0"], [b"w"], [b"o", b"x"], [b"o", b"9" * 9_000], [b"", b"", b"", b""])
    for message in messages:
        stranger.send_multipart(message)
    while conductor.bad_frames < len(messages):
        assert conductor.begun() == []
    unit.want()
    assert received(conductor.socket, conductor.begun, 1) == [1]
    context.destroy(linger=0)
    conductor.close()
    unit.close()
