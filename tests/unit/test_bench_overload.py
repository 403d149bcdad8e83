"""`baton bench overload`: what it asks for and how it counts; the load itself runs in the real thing."""

from collections.abc import Sequence

import pytest

from baton_cli.__main__ import build_parser
from baton_cli.bench import overload
from baton_cli.bench.command import _overload
from baton_cli.bench.overload import OverloadBench, Patient, _point
from baton_cli.bench.sample import Sample
from baton_cli.bench.stats import Bounds, summarise
from baton_cli.errors import UsageError


def parsed(*arguments: str) -> OverloadBench:
    return _overload(build_parser().parse_args(["bench", "overload", *arguments]))


def test_the_router_is_told_to_refuse_before_the_bound_of_the_first_token_is_lost() -> None:
    settings = parsed("--goodput", "ttft_ms=2000").wanted.settings
    assert [(one.role, one.key, one.value) for one in settings] == [("router", "first_token_ms", "1500")]
    own = parsed("--set", "router.first-token-ms=0").wanted.settings
    assert [(one.key, one.value) for one in own] == [("first_token_ms", "0")]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--shares", "0.5,-1"), "--shares must be"),
        (("--shares", "half"), "--shares half"),
        (("--shares", ""), "--shares must be"),
        (("--seconds", "0"), "--seconds must be"),
        (("--goodput", "tpot_ms=50"), "must bound ttft_ms"),
    ],
)
def test_what_cannot_be_measured_is_said_at_once(arguments: tuple[str, ...], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parsed(*arguments)


def test_a_refused_request_is_not_good_and_not_a_failure_of_another_kind() -> None:
    good = Sample(prompt_tokens=8, sent_s=0.0, ended_s=1.0, event_times_s=(0.5, 1.0), output_tokens=2)
    slow = Sample(prompt_tokens=8, sent_s=0.0, ended_s=9.0, event_times_s=(8.0, 9.0), output_tokens=2)
    refused = Sample(prompt_tokens=8, sent_s=0.0, ended_s=0.0, failure="HTTP 503")
    summary = summarise([good, slow, refused, refused], client_cpu_share=0.0, bounds=Bounds(ttft_ms=1_000))
    point = _point(2.0, 8.0, summary)
    assert (point.good_per_s, point.refused, summary.completed) == (2.0, 2, 2)


async def test_clients_of_the_closed_loop_come_again_until_they_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overload, "AGAIN_SECONDS", 0.0)
    answers = ["HTTP 503", "HTTP 503", None, "HTTP 500"]

    class Full:
        async def complete(self, prompt: Sequence[int], output_tokens: int, origin_s: float) -> Sample:
            return Sample(prompt_tokens=len(prompt), sent_s=0.0, ended_s=1.0, failure=answers.pop(0))

    client = Patient(Full())
    assert (await client.complete([1], 1, 0.0)).failure is None
    assert (await client.complete([1], 1, 0.0)).failure == "HTTP 500", "what is not a refusal is not asked again"
