"""The CPU stack in a real Docker engine: images are built, the stack gets healthy, answers, and goes.

Takes minutes and an engine, so it runs only when asked: `BATON_TEST_DOCKER=1 pytest -m slow tests/deploy/test_stack.py`.
Where no image registry is reached, make the base first: tests/deploy/base_image.sh. DOCKER_HOST may name another engine.
"""

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator

import pytest

from deploy.tools import ROOT, compose

FILES = ("-f", "docker-compose.yml", "-f", "deploy/compose/cpu.yaml")
PORT = 18_795
PROJECT = "baton-test"
INDEX_SETTINGS = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_TRUSTED_HOST")
FRONTEND_ABOVE_BASE_BYTES_MAX = 120_000_000

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.environ.get("BATON_TEST_DOCKER") != "1", reason="needs Docker; say BATON_TEST_DOCKER=1"),
]


def docker(*argv: str) -> str:
    """What a docker command prints, on either stream."""
    argv = ("docker", *argv)
    done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout
    return done.stdout.strip()


def size(image: str) -> int:
    """Bytes of an image."""
    return int(docker("image", "inspect", "--format", "{{.Size}}", image).splitlines()[-1])


@pytest.fixture(scope="module")
def images() -> tuple[str, str]:
    """Both images, built as CI would: from this tree, with the host's network."""
    built = []
    for name, arguments in (("frontend", ()), ("engine", ("--build-arg", "TORCH=torch==2.13.0+cpu"))):
        tag = f"baton/{name}:0.1.0-test"
        indexes = [
            part
            for key, value in os.environ.items()
            if key.startswith("PIP_")
            for part in ("--build-arg", f"{key}={value}")
        ]
        file = f"deploy/docker/{name}.Dockerfile"
        docker("build", "--network=host", "--quiet", "-f", file, *arguments, *indexes, "-t", tag, ".")
        built.append(tag)
    return built[0], built[1]


@pytest.fixture(scope="module")
def stack(images: tuple[str, str]) -> Iterator[str]:
    """The URL of a healthy CPU stack; taken down afterwards, volumes included."""
    env = dict(os.environ) | {
        "BATON_FRONTEND_IMAGE": images[0],
        "BATON_ENGINE_IMAGE": images[1],
        "BATON_PUBLISH": f"127.0.0.1:{PORT}",
    }

    def run_compose(*argv: str) -> None:
        whole = [compose(), "--project-name", PROJECT, *FILES, *argv]
        done = subprocess.run(whole, capture_output=True, text=True, check=False, cwd=ROOT, env=env)
        assert done.returncode == 0, done.stderr

    try:
        run_compose("up", "--detach", "--wait", "--no-build", "--wait-timeout", "400")
        yield f"http://127.0.0.1:{PORT}"
    finally:
        run_compose("down", "--volumes")


def test_the_front_end_stays_small(images: tuple[str, str]) -> None:
    base = size("python:3.11-slim-bookworm")
    assert size(images[0]) - base < FRONTEND_ABOVE_BASE_BYTES_MAX
    print({image: f"{(size(image) - base) / 1e6:.0f} MB above its base" for image in images})


def test_a_completion_comes_through_the_published_port(stack: str) -> None:
    body = {
        "model": "m",
        "temperature": 0,
        "max_tokens": 16,
        "messages": [{"role": "user", "content": "What is the capital of France? Answer briefly."}],
    }
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{stack}/v1/chat/completions", json.dumps(body).encode(), headers)
    answer = json.load(urllib.request.urlopen(request, timeout=120))
    assert "Paris" in answer["choices"][0]["message"]["content"]


def test_what_helm_test_runs_works_against_this_stack(stack: str, images: tuple[str, str]) -> None:
    script = (ROOT / "helm/baton/files/smoke.py").read_text()
    out = docker(
        *("run", "--rm", "--network", f"{PROJECT}_kv", "--entrypoint", "/opt/baton/bin/python"),
        *(
            "-e",
            "BATON_SMOKE_URL=http://router:8000",
            "-e",
            "BATON_SMOKE_PREFILL=http://prefill:8100",
            images[0],
            "-c",
            script,
        ),
    )
    assert out.endswith("ok")
    local = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env={"BATON_SMOKE_URL": stack}, check=False
    )
    assert local.returncode == 0, local.stderr


def test_pages_travelled_through_shared_memory(stack: str) -> None:
    logs = docker("logs", f"{PROJECT}-prefill-1")
    chosen = [json.loads(line) for line in logs.splitlines() if "transfer.chosen" in line]
    assert [one["backend"] for one in chosen] == ["shm"], logs


def test_no_process_is_root_or_can_write_its_image(stack: str) -> None:
    for service in ("router", "bootstrap", "prefill", "decode"):
        name = f"{PROJECT}-{service}-1"
        code = "import os; print(os.getuid()); open('/opt/baton/x', 'w')"
        done = subprocess.run(
            ["docker", "exec", name, "python", "-c", code], capture_output=True, text=True, check=False
        )
        assert done.stdout.strip() == "10001" and "Read-only file system" in done.stderr
