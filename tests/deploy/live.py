"""The CPU stack in a real Docker engine: its images, its containers, and what they say from inside.

Two decode workers and a Prometheus run beside the four services of docker-compose.yml.
"""

import json
import os
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from deploy.tools import ROOT, compose

FILES = ("-f", "docker-compose.yml", "-f", "deploy/compose/cpu.yaml")
PROFILES = ("--profile", "prometheus", "--profile", "second-decode")
PROJECT = "baton-test"
BASE = "python:3.11-slim-bookworm"
ROUTER_PORT, PROMETHEUS_PORT = 18_795, 18_796
PORTS = {"router": 8000, "bootstrap": 8990, "prefill": 8100, "decode": 8200, "decode-2": 8200}
HEALTHY_S = 400
TORCH = os.environ.get("BATON_TORCH", "torch==2.13.0+cpu")

FLOAT32_ON_CORES = (
    ("BATON_DTYPE", "float32"),
    ("BATON_PREFILL_CORES", "1"),
    ("BATON_DECODE_CORES", "0"),
    ("BATON_DECODE_2_CORES", "1"),
)
"""Exact, and quick on any CPU; decode workers that share cores would stand still at each other's barriers."""

needs_docker = [
    pytest.mark.slow,
    pytest.mark.skipif(os.environ.get("BATON_TEST_DOCKER") != "1", reason="needs Docker; say BATON_TEST_DOCKER=1"),
]


def docker(*argv: str) -> str:
    """What a docker command prints, on either stream."""
    argv = ("docker", *argv)
    done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout
    return done.stdout.strip()


@dataclass(frozen=True, slots=True)
class Images:
    """Tags of what the stack runs."""

    frontend: str
    engine: str
    prometheus: str
    redis: str


def build_images() -> Images:
    """All of them, built as CI would: from this tree, with the host's network and its index settings."""
    indexes = [
        part
        for key, value in os.environ.items()
        if key.startswith("PIP_")
        for part in ("--build-arg", f"{key}={value}")
    ]
    recipes = {
        "frontend": ("deploy/docker/frontend.Dockerfile", *indexes),
        "engine": ("deploy/docker/engine.Dockerfile", "--build-arg", f"TORCH={TORCH}", *indexes),
        "prometheus": ("tests/deploy/prometheus.Dockerfile",),
        "redis": ("tests/deploy/redis.Dockerfile",),
    }
    tags = {name: f"baton/{name}:0.1.0-test" for name in recipes}
    for name, (file, *arguments) in recipes.items():
        docker("build", "--network=host", "--quiet", "-f", file, *arguments, "-t", tags[name], ".")
    return Images(**tags)


def image_bytes(image: str) -> int:
    """Size of an image."""
    return int(docker("image", "inspect", "--format", "{{.Size}}", image).splitlines()[-1])


def eventually(holds: Callable[[], object], what: str, within_s: float) -> None:
    """Ask until it holds."""
    until = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < until, f"not within {within_s} s: {what}"
        time.sleep(0.2)


@dataclass(frozen=True, slots=True)
class Stack:
    """A stack that is up."""

    images: Images
    files: tuple[str, ...] = FILES
    more: tuple[tuple[str, str], ...] = FLOAT32_ON_CORES  # environment for Compose

    url = f"http://127.0.0.1:{ROUTER_PORT}"
    prometheus_url = f"http://127.0.0.1:{PROMETHEUS_PORT}"

    def compose(self, *argv: str) -> str:
        """What docker-compose prints on its standard output."""
        env = dict(os.environ) | {
            "BATON_FRONTEND_IMAGE": self.images.frontend,
            "BATON_ENGINE_IMAGE": self.images.engine,
            "BATON_PROMETHEUS_IMAGE": self.images.prometheus,
            "BATON_REDIS_IMAGE": self.images.redis,
            "BATON_DECODE_URLS": "http://decode:8200,http://decode-2:8200",
            "BATON_PUBLISH": f"127.0.0.1:{ROUTER_PORT}",
            "BATON_PROMETHEUS_PUBLISH": f"127.0.0.1:{PROMETHEUS_PORT}",
        }
        whole = [compose(), "--project-name", PROJECT, "--env-file", "/dev/null", *self.files, *PROFILES, *argv]
        done = subprocess.run(whole, capture_output=True, text=True, check=False, cwd=ROOT, env=env | dict(self.more))
        assert done.returncode == 0, done.stderr
        return done.stdout

    def up(self, *argv: str) -> None:
        """Start what is not there, or not as it should be, and wait until all are healthy."""
        self.compose("up", "--detach", "--wait", "--no-build", "--wait-timeout", str(HEALTHY_S), *argv)

    def container(self, service: str, replica: int = 1) -> str:
        """Its name."""
        return f"{PROJECT}-{service}-{replica}"

    def inside(self, service: str, path: str, *, method: str = "GET", replica: int = 1) -> str:
        """The body that a service answers to itself; the KV network is closed to everybody else."""
        code = (
            "import urllib.request as u;"
            f"print(u.urlopen(u.Request('http://127.0.0.1:{PORTS[service]}{path}', method='{method}')).read().decode())"
        )
        return docker("exec", self.container(service, replica), "python", "-c", code)

    def router(self) -> dict[str, dict[str, Any]]:
        """What the router says about its workers, by host name."""
        info = json.load(urllib.request.urlopen(f"{self.url}/server_info", timeout=10))
        return {str(one["url"]).split("//")[1].split(":")[0]: one for one in info["workers"]}

    def scraped(self) -> dict[str, str]:
        """The health of each target of Prometheus, by URL."""
        found = json.load(urllib.request.urlopen(f"{self.prometheus_url}/api/v1/targets", timeout=10))
        return {one["scrapeUrl"]: one["health"] for one in found["data"]["activeTargets"]}

    def finished(self) -> dict[str, dict[str, Any]]:
        """What the router has logged about each request that is over, by its id."""
        lines = docker("logs", self.container("router")).splitlines()
        logged = [json.loads(line) for line in lines if "router.finished" in line]
        return {one["rid"]: one for one in logged}

    def gauges(self, service: str) -> dict[str, Any]:
        """What a worker's scheduler counts now."""
        found: dict[str, Any] = json.loads(self.inside(service, "/debug/snapshot"))["snapshot"]["gauges"]
        return found

    def is_serving(self, service: str) -> bool:
        """Whether the router would use this worker now."""
        worker = self.router()[service]
        return worker["state"] == "ready" and worker["breaker"] == "closed"


@contextmanager
def running(stack: Stack) -> Iterator[Stack]:
    """Up until healthy; taken down afterwards, volumes included, unless BATON_TEST_KEEP=1 leaves it to the next run."""
    try:
        stack.up()
        yield stack
    finally:
        if os.environ.get("BATON_TEST_KEEP") != "1":
            stack.compose("down", "--volumes", "--timeout", "20")
