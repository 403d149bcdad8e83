"""The CPU stack in a real Docker engine: images are built, the stack gets healthy, answers, and goes.

Takes minutes and an engine, so it runs only when asked: `BATON_TEST_DOCKER=1 pytest -m slow tests/deploy/test_stack.py`.
Where no image registry is reached, make the base first: tests/deploy/base_image.sh. DOCKER_HOST may name another engine.
"""

import json
import subprocess
import sys
import urllib.request

from deploy.live import BASE, PROJECT, Images, Stack, docker, image_bytes, needs_docker
from deploy.tools import ROOT

FRONTEND_ABOVE_BASE_BYTES_MAX = 120_000_000

pytestmark = needs_docker


def test_the_front_end_stays_small(images: Images) -> None:
    base = image_bytes(BASE)
    assert image_bytes(images.frontend) - base < FRONTEND_ABOVE_BASE_BYTES_MAX
    for image in (images.frontend, images.engine):
        print(f"{image}: {(image_bytes(image) - base) / 1e6:.0f} MB above its base")


def test_a_completion_comes_through_the_published_port(stack: Stack) -> None:
    body = {
        "model": "m",
        "temperature": 0,
        "max_tokens": 16,
        "messages": [{"role": "user", "content": "What is the capital of France? Answer briefly."}],
    }
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{stack.url}/v1/chat/completions", json.dumps(body).encode(), headers)
    answer = json.load(urllib.request.urlopen(request, timeout=120))
    assert "Paris" in answer["choices"][0]["message"]["content"]


def test_what_helm_test_runs_works_against_this_stack(stack: Stack) -> None:
    script = (ROOT / "helm/baton/files/smoke.py").read_text()
    out = docker(
        *("run", "--rm", "--network", f"{PROJECT}_kv", "--entrypoint", "/opt/baton/bin/python"),
        *("-e", "BATON_SMOKE_URL=http://router:8000", "-e", "BATON_SMOKE_PREFILL=http://prefill:8100"),
        *(stack.images.frontend, "-c", script),
    )
    assert out.endswith("ok")
    environ = {"BATON_SMOKE_URL": stack.url}
    local = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environ, check=False)
    assert local.returncode == 0, local.stderr


def test_the_doctor_finds_nothing_wrong_with_this_stack(stack: Stack) -> None:
    said = docker(
        *("exec", stack.container("router"), "python", "-m", "baton_cli", "doctor"),
        *("--url", "http://127.0.0.1:8000", "--registry", "http://bootstrap:8990"),
    )
    assert "2 of 1 × 2 pairs fit each other" in said and "do not say" not in said
    assert "capital" in said or "completion" in said


def test_pages_travelled_through_shared_memory(stack: Stack) -> None:
    logs = docker("logs", stack.container("prefill"))
    chosen = [json.loads(line) for line in logs.splitlines() if "transfer.chosen" in line]
    assert {one["backend"] for one in chosen} == {"shm"}, logs


def test_no_process_is_root_or_can_write_its_image(stack: Stack) -> None:
    for service in ("router", "bootstrap", "prefill", "decode"):
        code = "import os; print(os.getuid()); open('/opt/baton/x', 'w')"
        argv = ["docker", "exec", stack.container(service), "python", "-c", code]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        assert done.stdout.strip() == "10001" and "Read-only file system" in done.stderr
