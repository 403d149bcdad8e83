"""Control links over real sockets: what is said arrives once and in order, and what is lost is noticed."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest
import zmq

from baton_core.events import RankEndpoint
from baton_core.limits import Limits
from baton_core.messages import Accepted, NotYet, PageOrder
from baton_io.links import Links, Lost, News, Said

LIMITS = Limits(heartbeat_ms=50, link_silent_ms=600, link_resend_ms=40)
WAIT_S = 5.0


def now_ms() -> int:
    return time.monotonic_ns() // 1_000_000


class Ends:
    """A prefill and a decode end in one process, turned by hand."""

    def __init__(self) -> None:
        self.prefill = Links("P1", LIMITS)
        self.port = self.prefill.listen("127.0.0.1")
        self.decode = Links("D1", LIMITS)
        self.heard: dict[str, list[News]] = {"P": [], "D": []}

    def dial(self, peer: str = "P1") -> None:
        self.decode.dial(peer, RankEndpoint(host="127.0.0.1", port=self.port), now_ms())

    def turn(self, *, prefill: bool = True) -> None:
        """One turn of both loops, woken by traffic or the next deadline."""
        poller = zmq.Poller()
        for socket in [*self.prefill.sockets, *self.decode.sockets]:
            poller.register(socket, zmq.POLLIN)
        poller.poll(10)
        for name, links in (("P", self.prefill), ("D", self.decode)):
            if name == "D" or prefill:
                self.heard[name] += links.receive(now_ms()) + links.tick(now_ms())

    def until(self, holds: Callable[[], bool], what: str, *, prefill: bool = True) -> None:
        deadline = time.monotonic() + WAIT_S
        while not holds():
            assert time.monotonic() < deadline, f"not within {WAIT_S} s: {what}; heard {self.heard}"
            self.turn(prefill=prefill)


@pytest.fixture
def ends() -> Iterator[Ends]:
    both = Ends()
    yield both
    both.decode.close()
    both.prefill.close()


def accepted(room: int) -> Accepted:
    return Accepted(room=room, attempt=1, dp_rank=0, layout="")


def test_messages_arrive_once_and_in_order_both_ways(ends: Ends) -> None:
    ends.dial()
    for room in range(1, 101):
        ends.decode.send("P1", NotYet(room=room, attempt=1), now_ms())
    ends.until(lambda: len(ends.heard["P"]) >= 100, "prefill hears everything")
    for room in range(1, 101):
        ends.prefill.send("D1", accepted(room), now_ms())
    ends.until(lambda: len(ends.heard["D"]) >= 100, "decode hears everything")
    assert ends.heard["P"] == [Said(peer="D1", payload=NotYet(room=room, attempt=1)) for room in range(1, 101)]
    assert ends.heard["D"] == [Said(peer="P1", payload=accepted(room)) for room in range(1, 101)]


def test_a_page_order_travels_the_same_road(ends: Ends) -> None:
    order = PageOrder(
        room=3, attempt=1, incarnation="D1", pages=(1, 2), row=0, backend="tcp", address="a:1", layout="{}"
    )
    ends.dial()
    ends.decode.send("P1", order, now_ms())
    ends.until(lambda: ends.heard["P"] == [Said(peer="D1", payload=order)], "the order arrives")


def test_dialling_a_worker_that_was_restarted_at_its_old_address_is_noticed_at_once(ends: Ends) -> None:
    ends.dial("P0")
    began = now_ms()
    ends.decode.send("P0", accepted(1), began)
    ends.until(lambda: bool(ends.heard["D"]), "decode learns that P0 is gone")
    lost = ends.heard["D"][0]
    assert isinstance(lost, Lost)
    assert lost.peer == "P0"
    assert "P0 does not live here" in lost.text
    assert now_ms() - began < LIMITS.link_silent_ms
    assert ends.decode.peers == ()


def test_a_silent_peer_is_lost_after_the_limit_and_can_be_dialled_again(ends: Ends) -> None:
    ends.dial()
    ends.decode.send("P1", accepted(1), now_ms())
    ends.until(lambda: bool(ends.heard["P"]), "they talk")
    ends.until(lambda: bool(ends.heard["D"]), "decode notices the silence", prefill=False)
    assert isinstance(ends.heard["D"][0], Lost)
    assert "nothing heard" in ends.heard["D"][0].text
    ends.dial()
    ends.decode.send("P1", accepted(2), now_ms())
    ends.until(lambda: Said(peer="D1", payload=accepted(2)) in ends.heard["P"], "the new conversation works")
    lost = [one for one in ends.heard["P"] if isinstance(one, Lost)]
    assert len(lost) == 1, "prefill hears exactly once that the old conversation ended"


def test_a_peer_that_dies_without_a_word_is_lost_soon_after_its_connection_breaks() -> None:
    """A killed process says no goodbye; its kernel closes the connection, and that is enough."""
    patient = Limits(link_silent_ms=60_000, link_suspect_ms=200)
    victim = subprocess.Popen([sys.executable, "-c", VICTIM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert victim.stdout is not None
    port = int(victim.stdout.readline())
    links = Links("D1", patient)
    links.dial("P1", RankEndpoint(host="127.0.0.1", port=port), now_ms())
    links.send("P1", accepted(1), now_ms())
    assert victim.stdout.readline() == "heard\n"
    links.receive(now_ms())
    victim.kill()
    killed_at = now_ms()
    news: list[News] = []
    while not news:
        assert now_ms() - killed_at < 2_000, "the break was not noticed"
        zmq.select(links.sockets, [], [], 0.02)
        news += links.receive(now_ms()) + links.tick(now_ms())
    assert isinstance(news[0], Lost)
    assert "connection broke" in news[0].text
    links.close()
    victim.wait()


VICTIM = """
import time, zmq
from baton_core.limits import Limits
from baton_io.links import Links
links = Links("P1", Limits())
print(links.listen("127.0.0.1"), flush=True)
while not links.receive(time.monotonic_ns() // 1_000_000):
    zmq.select(links.sockets, [], [], 1)
print("heard", flush=True)
zmq.select([], [], [], 60)
"""


def test_a_connection_that_breaks_and_heals_loses_nothing(ends: Ends) -> None:
    ends.dial()
    ends.decode.send("P1", accepted(1), now_ms())
    ends.until(lambda: bool(ends.heard["P"]), "they talk")
    for frame in ends.decode._board.suspect("P1", now_ms()):
        ends.decode._transmit(frame)
    ends.decode.send("P1", accepted(2), now_ms())
    ends.until(lambda: len(ends.heard["P"]) == 2, "they go on talking")
    assert ends.decode.peers == ("P1",)
    assert ends.heard["D"] == []


def test_saying_goodbye_ends_the_conversation_at_the_peer(ends: Ends) -> None:
    ends.dial()
    ends.decode.send("P1", accepted(1), now_ms())
    ends.until(lambda: bool(ends.heard["P"]), "they talk")
    ends.decode.close()
    ends.decode = Links("D2", LIMITS)
    ends.until(lambda: any(isinstance(one, Lost) for one in ends.heard["P"]), "prefill hears the goodbye")
    assert ends.prefill.peers == ()


def test_noise_on_the_port_is_counted_and_harms_nobody(ends: Ends) -> None:
    context = zmq.Context()
    stranger: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    stranger.connect(f"tcp://127.0.0.1:{ends.port}")
    for noise in (b"", b"\x01", b"\x01\xff\xff", b"\xfe hello", b"\x01" + b"\x90" * 100):
        stranger.send_multipart([noise])
    ends.dial()
    ends.decode.send("P1", accepted(1), now_ms())
    ends.until(lambda: ends.prefill.bad_frames == 5, "the noise is counted")
    ends.until(lambda: Said(peer="D1", payload=accepted(1)) in ends.heard["P"], "a good peer is heard beside it")
    stranger.close(linger=0)
    context.term()


def test_hanging_up_while_the_connection_breaks_never_blocks() -> None:
    """Once, closing a monitor under a breaking connection stood still for ever, now and then: a worker was killed for it."""
    done = subprocess.run([sys.executable, "-c", PARTINGS], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "parted 900 times\n", done.stderr


PARTINGS = """
import threading, time, zmq
from baton_core.events import RankEndpoint
from baton_core.limits import Limits
from baton_core.messages import NotYet
from baton_io.links import Links

now = lambda: time.monotonic_ns() // 1_000_000
decode = Links("D1", Limits())
for turn in range(300):
    peers = [Links(f"P{turn}.{number}", Limits()) for number in range(3)]
    for peer, links in enumerate(peers):
        name = f"P{turn}.{peer}"
        decode.dial(name, RankEndpoint(host="127.0.0.1", port=links.listen("127.0.0.1")), now())
        decode.send(name, NotYet(room=1, attempt=1), now())
    heard = 0
    while heard < 3:
        zmq.select([socket for links in peers for socket in links.sockets], [], [], 1)
        heard += sum(len(links.receive(now())) for links in peers)
    leaving = [threading.Thread(target=links.close) for links in peers]
    for one in leaving:
        one.start()
    while decode.peers:  # the farewell is heard while the connection breaks
        zmq.select(decode.sockets, [], [], 1)
        decode.receive(now())
    for one in leaving:
        one.join()
print("parted 900 times")
"""
