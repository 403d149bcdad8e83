"""What people type to look at a stack, against a real one: `baton doctor`, `baton top`, and the page of its metrics."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from integration.stack import REQUEST_S, Stack

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One of each."""
    running = Stack.up(tmp_path_factory.mktemp("looks"))
    yield running
    running.down()


def baton(*argv: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "baton_cli", *argv], capture_output=True, text=True, timeout=REQUEST_S, check=False
    )


def test_the_doctor_finds_a_stack_of_baton_up_healthy(stack: Stack) -> None:
    done = baton("doctor", "--state", str(stack.directory), "--json")
    said = json.loads(done.stdout)
    bad = [finding for section in said["sections"] for finding in section["findings"] if finding["level"] == "fail"]
    assert bad == [] and done.returncode == 0
    names = [finding["name"] for section in said["sections"] for finding in section["findings"]]
    assert {"router", "registry", "prefill", "decode", "pairs", "completion"} <= set(names)


def test_the_doctor_reads_a_plan_and_the_model_as_the_engine_does() -> None:
    done = baton("doctor", "--state", "/nonexistent", "--port", "8399", "--json")
    findings = {one["name"]: one for section in json.loads(done.stdout)["sections"] for one in section["findings"]}
    assert "tp may be 1, 3, 9" in findings["architecture"]["text"], findings["architecture"]
    assert "need about" in findings["memory"]["text"]


def test_top_shows_both_workers_and_what_went_through_them(stack: Stack) -> None:
    body = {"prompt": "Hello", "max_tokens": 8, "stream": True}
    with httpx.stream("POST", f"{stack.url}/v1/completions", json=body, timeout=REQUEST_S) as answer:
        assert answer.status_code == 200 and b"DONE" in answer.read()
    done = baton("top", "--once", "--state", str(stack.directory), "--columns", "200")
    assert done.returncode == 0, done.stderr
    rows = {
        line.split()[0]: line for line in done.stdout.splitlines() if line.startswith(("prefill 127", "decode  127"))
    }
    assert set(rows) == {"prefill", "decode"} and all(" ready " in row for row in rows.values())
    assert "transferring" in done.stdout and "router" in done.stdout


def test_every_process_exports_what_the_page_says(stack: Stack) -> None:
    urls = [entry["url"] for entry in stack.state]
    script = ROOT / "deploy/prometheus/metrics_reference.py"
    done = subprocess.run(
        [sys.executable, str(script), "--check", *urls], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" metrics\n") == len(urls) == 4
