"""What Prometheus sees of a real stack: clean metrics, data behind every query, and no label that a client invented.

As test_stack.py: `BATON_TEST_DOCKER=1 pytest -m slow tests/deploy/test_stack_observed.py`.
"""

import asyncio
import json
import re
import subprocess

import httpx

from deploy import queries
from deploy.live import PORTS, Stack, eventually, needs_docker
from deploy.load import HOSTILE, hostile, mixed
from deploy.tools import promtool, run

pytestmark = needs_docker

SERIES_GROWTH_MAX = 50
SCRAPED_S = 60
RULES_S = 120
"""Rules are evaluated every 15 s, and rates want two scrapes."""


def scrape(stack: Stack, service: str) -> str:
    """What `/metrics` of a service says."""
    return stack.inside(service, "/metrics") + "\n"


def series(text: str) -> set[str]:
    """The series of a scrape, without their values."""
    return {line.rpartition(" ")[0] for line in text.splitlines() if line and not line.startswith("#")}


def test_prometheus_finds_every_process(stack: Stack) -> None:
    def all_up() -> bool:
        health = stack.scraped()
        return set(health.values()) == {"up"} and len(health) == len(PORTS)

    eventually(all_up, "all targets are up", SCRAPED_S)


def test_every_panel_and_every_recording_rule_has_data_after_a_mixed_load(stack: Stack) -> None:
    statuses = asyncio.run(mixed(stack.url, rounds=4))
    assert set(statuses) == {200}

    def nothing_empty() -> bool:
        return not queries.without_data(stack.prometheus_url)

    try:
        eventually(nothing_empty, "every query has data", RULES_S)
    except AssertionError:
        assert queries.without_data(stack.prometheus_url) == []


def test_names_that_clients_invent_become_no_labels(stack: Stack) -> None:
    asyncio.run(hostile(stack.url, requests=30))  # whatever is counted by kind is there now
    before = {service: series(scrape(stack, service)) for service in PORTS}
    asyncio.run(hostile(stack.url, requests=300))
    for service, old in before.items():
        new = series(scrape(stack, service)) - old
        assert len(new) < SERIES_GROWTH_MAX, new
        text = scrape(stack, service)
        assert "evil" not in text and "nowhere" not in text and "ODD" not in text, service
        assert not any(word in text for word in HOSTILE), service


def test_promtool_has_nothing_to_say_about_what_the_stack_exports(stack: Stack) -> None:
    for service in PORTS:
        # vLLM's names have a colon, which promtool advises against; a gateway asks for just these.
        text = re.sub(r"(?m)^.*\bvllm:.*\n", "", scrape(stack, service))
        done = run(promtool(), "check", "metrics", stdin=text)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), f"{service}: {done.stdout}{done.stderr}"


def test_a_request_is_in_the_logs_of_all_that_had_a_part_under_one_id(stack: Stack) -> None:
    rid = "find-me-in-the-logs"
    body = {"text": "x", "rid": rid, "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}
    answer = httpx.post(f"{stack.url}/generate", json=body, headers={"x-request-id": rid}, timeout=120)
    assert answer.status_code == 200

    def logged(service: str) -> bool:
        argv = ["docker", "logs", stack.container(service)]
        lines = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False).stdout
        return any(rid in line and json.loads(line) for line in lines.splitlines())

    for services in (("router",), ("prefill",), ("decode", "decode-2")):
        eventually(lambda named=services: any(map(logged, named)), f"{services} logged {rid}", 10)  # type: ignore[misc]
