"""On which prefill DP rank a room lives, and that both sides think so (S3)."""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from baton_core.decode.resolve import _resolve_prefill_dp_rank
from baton_core.effects import Effect, RegisterRank
from baton_core.errors import ClientError, Reason, Verdict
from baton_core.events import LookupFailed, Resolved
from baton_core.messages import Hello, Rejected
from baton_core.prefill.core import PrefillCore
from baton_core.prefill.rules import FORCE_QUERY, Misplaced, misplaced
from baton_core.registration import FOLLOW, Layout
from baton_core.request import FAKE_HOST, Bootstrap, Room
from unit.cores import INFOS, ROOM, Bench, D, decode, ends, hello, prefill, probe, request, told

TOPOLOGY = Layout(attn_tp_size=1, attn_cp_size=1, dp_size=2, pp_size=1, page_size=2, kv_cache_dtype="auto")
METHODS = (FOLLOW, "round_robin")


def bootstrap(room: Room = ROOM, named: int | None = None, host: str = "10.0.0.1") -> Bootstrap:
    return Bootstrap(host=host, port=1, room=room, prefill_dp_rank=named)


def rank(dp_rank: int, dp_size: int = 2, **fields: Any) -> Bench[PrefillCore]:
    """The core of one unit of a prefill worker with several."""
    return prefill(dp_rank=dp_rank, dp_size=dp_size, **fields)


def registered(effects: list[Effect]) -> list[tuple[Room, int]]:
    return [(one.room, one.dp_rank) for one in effects if isinstance(one, RegisterRank)]


# -- decode: which rank, without asking


def test_the_rank_that_the_request_names_comes_first_even_while_the_topology_is_unknown() -> None:
    assert _resolve_prefill_dp_rank(bootstrap(named=1), None) == 1
    assert _resolve_prefill_dp_rank(bootstrap(named=1), TOPOLOGY, force_query=True) == 1
    assert _resolve_prefill_dp_rank(bootstrap(named=0), replace(TOPOLOGY, dp_size=1)) == 0


@pytest.mark.parametrize("named", [2, -1])
def test_a_rank_that_does_not_exist_is_the_clients_fault(named: int) -> None:
    with pytest.raises(ClientError, match=f"disagg_prefill_dp_rank is {named}, .* has 2 DP ranks"):
        _resolve_prefill_dp_rank(bootstrap(named=named), TOPOLOGY)


def test_an_unknown_topology_decides_nothing() -> None:
    assert _resolve_prefill_dp_rank(bootstrap(), None) is None


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("follow", [False, True])
def test_the_only_rank_needs_neither_room_nor_registry(follow: bool, force: bool) -> None:
    single = replace(TOPOLOGY, dp_size=1, follow_bootstrap_room=follow)
    assert _resolve_prefill_dp_rank(bootstrap(), single, force_query=force) == 0


def test_under_follow_the_room_says_the_rank_unless_a_query_is_forced() -> None:
    assert [_resolve_prefill_dp_rank(bootstrap(room), TOPOLOGY) for room in (4, 5, 6)] == [0, 1, 0]
    assert _resolve_prefill_dp_rank(bootstrap(), TOPOLOGY, force_query=True) is None
    assert _resolve_prefill_dp_rank(bootstrap(), replace(TOPOLOGY, follow_bootstrap_room=False)) is None


# -- prefill: what fails at once, and what is registered


def test_under_follow_a_room_on_its_own_rank_needs_no_registration() -> None:
    bench = rank(1)
    assert registered(bench.submit(request(room=5))) == []
    assert bench.phase() == "bootstrapping"


def test_under_follow_a_room_on_another_rank_fails_at_once_naming_ranks_room_and_switch() -> None:
    bench = rank(0)
    effects = bench.submit(request(room=5))
    assert ends(effects) == [("r", Reason.DP_CONFLICT)]
    (emit,) = [one for one in effects if type(one).__name__ == "Emit"]
    text = emit.finish.verdict.text  # type: ignore[union-attr]
    for word in ("room 5", "prefill DP rank 0", "implies DP rank 1", FORCE_QUERY):
        assert word in text
    assert bench.live == []


def test_decode_that_waits_on_the_conflicting_rank_hears_it_at_once_and_so_does_decode_that_comes_later() -> None:
    early, late = rank(0), rank(0)
    early.say(hello(5, dp_rank=0), D)
    for message in (*told(early.submit(request(room=5))), *_after(late)):
        assert isinstance(message, Rejected)
        assert message.reason is Reason.DP_CONFLICT


def _after(bench: Bench[PrefillCore]) -> list[object]:
    bench.submit(request(room=5))
    return list(told(bench.say(hello(5, dp_rank=0), D)))


def test_a_request_that_carries_the_rank_it_was_sent_to_is_served_there() -> None:
    bench = rank(0)
    bench.submit(request(bootstrap=bootstrap(5, named=0)))
    assert bench.phase() == "bootstrapping"


@pytest.mark.parametrize("method", METHODS)
def test_a_request_that_carries_another_rank_fails_naming_both(method: str) -> None:
    bench = rank(0, load_balance_method=method)
    found = misplaced(bootstrap(4, named=1), dp_rank=0, dp_size=2, registers=bench.core.rules.registers)
    assert found is not None and found.looked_for_on == 1
    assert "DP rank 1" in found.verdict.text and "DP rank 0" in found.verdict.text
    assert ends(bench.submit(request(bootstrap=bootstrap(4, named=1)))) == [("r", Reason.DP_CONFLICT)]


@pytest.mark.parametrize("named", [2, -1])
def test_a_rank_that_does_not_exist_is_a_400_on_prefill_too(named: int) -> None:
    assert ends(rank(0).submit(request(bootstrap=bootstrap(4, named=named)))) == [("r", Reason.INVALID_REQUEST)]
    assert misplaced(bootstrap(4, named=named), dp_rank=0, dp_size=2, registers=False) == Misplaced(
        verdict=Verdict(
            reason=Reason.INVALID_REQUEST,
            text=f"disagg_prefill_dp_rank is {named}, but this prefill worker has 2 DP ranks (dp_size)",
        ),
        looked_for_on=None,
    )


def test_a_probe_may_run_anywhere() -> None:
    assert rank(1).submit(probe())
    assert misplaced(bootstrap(0, named=7, host=FAKE_HOST), dp_rank=1, dp_size=2, registers=False) is None


@pytest.mark.parametrize("room", [4, 5])
@pytest.mark.parametrize(("method", "force"), [("round_robin", False), ("least_load", True), (FOLLOW, True)])
def test_whoever_does_not_follow_and_whoever_is_forced_registers_every_room(
    method: str, force: bool, room: Room
) -> None:
    bench = rank(1, load_balance_method=method, force_query_dp_rank=force)
    assert registered(bench.submit(request(room=room))) == [(room, 1)]
    assert registered(bench.submit(probe())) == []


def test_a_refused_room_is_registered_too_unless_decode_has_been_told_or_knows() -> None:
    no = Verdict(reason=Reason.INVALID_REQUEST, text="temperature")
    bench = rank(1, load_balance_method="round_robin")
    assert registered(bench.submit(request(room=4, rejected=no))) == [(4, 1)]
    (message,) = told(bench.say(hello(4, dp_rank=1), D))
    assert isinstance(message, Rejected) and message.reason is Reason.INVALID_REQUEST
    bench.say(hello(6, dp_rank=1), D)
    assert registered(bench.submit(request(room=6, rejected=no))) == []
    bench.submit(request("first", 8))
    assert registered(bench.submit(request("twin", 8, rejected=no))) == []


@pytest.mark.parametrize("method", METHODS)
def test_a_worker_with_one_dp_rank_registers_nothing(method: str) -> None:
    bench = prefill(load_balance_method=method, force_query_dp_rank=True)
    assert registered(bench.submit(request())) == []


# -- both sides together


@dataclass
class Roads:
    """A prefill worker of two units, a registry, and a decode worker that looks rooms up; each forced or not."""

    force_prefill: bool
    force_decode: bool
    method: str = FOLLOW
    rooms: dict[Room, int] = field(default_factory=dict)  # what the registry knows

    def __post_init__(self) -> None:
        fields = {"load_balance_method": self.method, "force_query_dp_rank": self.force_prefill}
        self.units = [rank(number, **fields) for number in range(2)]
        self.decode = decode()

    def send(self, room: Room, routed: int) -> None:
        """Both legs, as the two apps send them in."""
        self._send_prefill(room, routed)
        self.decode.submit(request("d", room))
        self._look_up(room)

    def _send_prefill(self, room: Room, routed: int) -> None:
        one, unit = request("p", room), self.units[routed]
        found = misplaced(bootstrap(room), dp_rank=routed, dp_size=2, registers=unit.core.rules.registers)
        if found is not None and found.looked_for_on is not None:  # the refusal is filed where decode looks for it
            one, unit = replace(one, rejected=found.verdict), self.units[found.looked_for_on]
        self.answers = ends(effects := unit.submit(one))
        self.rooms |= dict(registered(effects))

    def _topology(self) -> Layout:
        return replace(TOPOLOGY, follow_bootstrap_room=not self.units[0].core.rules.registers)

    def _look_up(self, room: Room) -> None:
        dp_rank = _resolve_prefill_dp_rank(bootstrap(room), self._topology(), force_query=self.force_decode)
        if dp_rank is None:
            dp_rank = self.rooms.get(room)
        if dp_rank is None:  # within lookup_ms: decode's app names the registry and the room
            unknown = Verdict(reason=Reason.LOOKUP_FAILED, text=f"no DP rank of room {room}")
            self.answers += ends(self.decode.step(LookupFailed(rid="d", verdict=unknown)))
            return
        infos = replace(INFOS, dp_rank=dp_rank)
        (greeting,) = told(self.decode.step(Resolved(rid="d", infos=infos)))
        assert isinstance(greeting, Hello)
        for message in told(self.units[dp_rank].say(greeting, D)):
            self.answers += ends(self.decode.say(message, infos.leader))

    @property
    def joined(self) -> bool:
        """Whether the two legs have found each other."""
        return self.decode.live == ["d"] and self.decode.phase("d") == "transferring"


EVERYWHERE = [(False, False), (True, False), (True, True)]


@pytest.mark.parametrize(("force_prefill", "force_decode"), EVERYWHERE)
def test_a_room_on_its_own_rank_is_found_whoever_is_forced(force_prefill: bool, force_decode: bool) -> None:
    roads = Roads(force_prefill, force_decode)
    roads.send(room=5, routed=1)
    assert roads.joined
    assert roads.rooms == ({5: 1} if force_prefill else {}), "the fast path registers nothing and asks nobody"


@pytest.mark.parametrize("force_decode", [False, True])
def test_a_conflicting_route_works_where_prefill_is_forced_and_decode_needs_no_switch(force_decode: bool) -> None:
    roads = Roads(force_prefill=True, force_decode=force_decode)
    roads.send(room=5, routed=0)
    assert roads.joined
    assert roads.answers == []


def test_a_conflicting_route_without_a_switch_fails_both_legs_at_once_for_the_same_reason() -> None:
    roads = Roads(force_prefill=False, force_decode=False)
    roads.send(room=5, routed=0)
    assert roads.answers == [("p", Reason.DP_CONFLICT), ("d", Reason.DP_CONFLICT)]
    assert [unit.live for unit in roads.units] == [[], []]


@pytest.mark.parametrize("routed", [0, 1])
def test_a_switch_on_decode_only_fails_within_the_look_up_and_nobody_hangs(routed: int) -> None:
    roads = Roads(force_prefill=False, force_decode=True)
    roads.send(room=5, routed=routed)
    assert ("d", Reason.LOOKUP_FAILED) in roads.answers
    assert roads.decode.live == []
    if routed == 1:  # where nothing conflicts, prefill waits for its other leg, and no longer
        roads.answers = ends(roads.units[1].after(10_000))
        assert roads.answers == [("p", Reason.OTHER_LEG_MISSING)]
    else:
        assert roads.answers[0] == ("p", Reason.DP_CONFLICT)


@pytest.mark.parametrize("routed", [0, 1])
def test_a_worker_that_balances_otherwise_registers_and_decode_asks(routed: int) -> None:
    roads = Roads(force_prefill=False, force_decode=False, method="round_robin")
    roads.send(room=5, routed=routed)
    assert roads.joined
    assert roads.rooms == {5: routed}


class Original(Roads):
    """What S3 mends: a forced prefill registers on conflict only and goes on publishing follow_bootstrap_room."""

    def _topology(self) -> Layout:
        return TOPOLOGY

    def _send_prefill(self, room: Room, routed: int) -> None:
        self.answers = ends(effects := self.units[routed].submit(request("p", room)))
        if room % 2 != routed:
            self.rooms |= dict(registered(effects))


@pytest.mark.parametrize(
    ("force_prefill", "force_decode", "routed", "why"),
    [
        (True, False, 0, "decode infers the rank and waits on the wrong one"),
        (True, True, 1, "decode asks, and what follows the room was never registered"),
        (False, False, 0, "prefill fails, and decode waits on a rank that never heard of the room"),
    ],
)
def test_the_original_leaves_a_leg_waiting(force_prefill: bool, force_decode: bool, routed: int, why: str) -> None:
    roads = Original(force_prefill, force_decode)
    roads.send(room=5, routed=routed)
    assert not roads.joined, why
    waiting = [*roads.decode.live, *(rid for unit in roads.units for rid in unit.live)]
    assert waiting, why


def test_a_hello_that_reached_the_wrong_rank_is_refused_naming_both() -> None:
    bench = rank(0, force_query_dp_rank=True)
    bench.submit(request(room=5))
    (message,) = told(bench.say(hello(5, dp_rank=1), D))
    assert isinstance(message, Rejected)
    assert message.reason is Reason.DP_CONFLICT
    assert "rank 0" in message.text and "rank 1" in message.text
