"""The router's page for people: it shows who serves, what waits and what failed, and trusts no text from outside."""

from baton_router.exchange import Exchange
from baton_router.failures import FailureKind, leg_failure
from baton_router.recent import Rates, Recent
from baton_router.status_page import Status, render
from contract.fake_workers import world
from contract.test_router_admin import admin_of
from ports import free_port

HOSTILE = "<script>alert('x')</script>"


class Nowhere:
    """A client that reads nothing."""

    async def begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """See Answering."""

    async def write(self, chunk: bytes) -> None:
        """See Answering."""

    async def end(self, chunk: bytes) -> None:
        """See Answering."""


def failed(rid: str, text: str) -> Exchange:
    exchange = Exchange(route="/generate", rid=rid, client=Nowhere())
    exchange.failure, exchange.status = leg_failure(FailureKind.LOST, text, "http://10.0.0.7:8200"), 502
    return exchange


async def test_the_page_shows_workers_and_the_last_failure() -> None:
    port = free_port()
    async with world(admin_port=port) as w, w.client.post() as answer:
        await answer.read()
        async with admin_of(w, port).session.get(f"http://127.0.0.1:{port}/") as response:
            text = await response.text()
            assert response.status == 200 and response.content_type == "text/html"
            assert "default-src 'none'" in response.headers["content-security-policy"]
        assert all(worker.url in text for worker in (*w.prefill, *w.decode)) and "serving" in text
        assert "&amp;#" not in text, "escaped twice"
        assert "None since this router started" in text and "http-equiv" in text and "<script" not in text


def test_what_comes_from_outside_is_escaped() -> None:
    recent = Recent(clock=lambda: 1.0)
    recent.finished(failed(HOSTILE, HOSTILE), None)
    worker = {
        "url": HOSTILE,
        "role": "decode",
        "state": "unready",
        "reason": HOSTILE,
        "breaker": "open",
        "model": HOSTILE,
    }
    text = render(
        Status(
            missing=HOSTILE,
            workers=(worker | {"dp_size": 1, "in_flight": 0},),
            in_flight=0,
            waiting=0,
            waiting_max=1,
            rates=recent.rates(),
            failures=tuple(recent.failures),
            registry=HOSTILE,
            policies=("round_robin", "random"),
        )
    )
    assert "<script" not in text and text.count("&lt;script&gt;") >= 6


def test_rates_are_those_of_the_last_minute_and_failures_the_last_twenty() -> None:
    now_s = 0.0
    recent = Recent(clock=lambda: now_s)
    for number in range(30):
        now_s = float(number)
        recent.finished(failed(f"r{number}", "lost"), None)
        recent.finished(Exchange(route="/generate", rid="ok", client=Nowhere()), 0.25)
    now_s = 60.0
    assert recent.rates() == Rates(requests_per_s=58 / 60, failures_per_s=29 / 60, ttft_s={0.5: 0.25, 0.95: 0.25})
    assert [one.rid for one in recent.failures] == [f"r{number}" for number in range(10, 30)]
    now_s = 200.0
    assert recent.rates().requests_per_s == 0
