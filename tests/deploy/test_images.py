"""Rules of the images, read from their Dockerfiles; the images themselves are built by test_stack.py."""

import http.server
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "deploy/docker"
DOCKERFILES = sorted(DOCKER.glob("*.Dockerfile"))


def instructions(path: Path) -> list[tuple[str, str]]:
    """(INSTRUCTION, rest) in order, continued lines joined, comments dropped."""
    text = "\n".join(line for line in path.read_text().splitlines() if not line.lstrip().startswith("#"))
    joined = re.sub(r"\\\n\s*", " ", text)
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1].strip()) for line in joined.splitlines() if line.strip()]


def final_stage(path: Path) -> list[tuple[str, str]]:
    """The instructions after the last FROM."""
    steps = instructions(path)
    last = max(index for index, (word, _) in enumerate(steps) if word == "FROM")
    return steps[last:]


def test_there_are_two_images() -> None:
    assert [path.name for path in DOCKERFILES] == ["engine.Dockerfile", "frontend.Dockerfile"]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_runs_as_a_number_stops_by_sigterm_and_knows_its_health(path: Path) -> None:
    final = dict(final_stage(path))
    uid = final["USER"].split(":")[0]
    assert uid.isdigit() and int(uid) >= 1000
    assert final["STOPSIGNAL"] == "SIGTERM"
    assert final["ENTRYPOINT"].startswith("[") and final["CMD"].startswith("[")
    assert "baton_probe" in final["HEALTHCHECK"] and "CMD [" in final["HEALTHCHECK"] and "curl" not in path.read_text()
    labels = " ".join(rest for word, rest in final_stage(path) if word == "LABEL")
    assert all(f"org.opencontainers.image.{one}" in labels for one in ("title", "version", "revision", "licenses"))


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_a_change_of_code_installs_nothing_anew(path: Path) -> None:
    steps = instructions(path)
    copies = [(index, rest) for index, (word, rest) in enumerate(steps) if word == "COPY"]
    source = next(index for index, rest in copies if re.search(r"\b(shared|services)\b", rest))
    dependencies = next(index for index, (word, rest) in enumerate(steps) if word == "RUN" and "-r /build/" in rest)
    assert dependencies < source
    # In the image itself: one layer of dependencies, below one of code.
    layers = [rest for word, rest in final_stage(path) if word == "COPY"]
    assert layers == ["--from=dependencies /opt/baton /opt/baton", "--from=code /opt/baton-code /opt/baton-code"]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_index_settings_are_arguments_and_stay_out_of_the_image(path: Path) -> None:
    text = path.read_text()
    assert "ARG BASE=python:3.11-slim-bookworm" in text and "FROM ${BASE}" in text
    assert all(f"ARG {name}\n" in text for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"))
    code = " ".join(rest for _, rest in instructions(path))
    assert not re.search(r"https?://(?!127\.0\.0\.1)", code), "a host is written down"
    assert not any(rest.startswith("PIP_") for word, rest in final_stage(path) if word in ("ARG", "ENV"))


def test_both_images_carry_the_same_code_the_same_way() -> None:
    stages = [path.read_text().split("AS code\n")[1].split("# -- the image")[0] for path in DOCKERFILES]
    assert stages[0] == stages[1]


def test_the_build_context_holds_only_what_images_need() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    kept = {rule[1:] for rule in rules if rule.startswith("!")}
    assert kept == {"pyproject.toml", "README.md", "LICENSE", "shared", "services", "deploy", "deploy/docker"}


def test_requirements_of_the_front_end_have_no_torch() -> None:
    def wanted(*extras: str) -> set[str]:
        argv = [sys.executable, str(DOCKER / "requirements.py"), str(ROOT / "pyproject.toml"), *extras]
        lines = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.splitlines()
        return {re.split(r"[>=<;\[ ]", line)[0] for line in lines}

    frontend, engine = wanted("router", "bootstrap"), wanted("engine", "router", "bootstrap")
    assert {"aiohttp", "uvicorn"} <= frontend < engine
    assert not frontend & {"torch", "numpy", "tokenizers", "pyzmq"} and "torch" in engine


class _Answers(http.server.BaseHTTPRequestHandler):
    asked: list[str]

    def do_GET(self) -> None:
        """503 at /ready, 200 elsewhere."""
        self.asked.append(f"{self.command} {self.path}")
        self.send_response(503 if self.path == "/ready" else 200)
        self.end_headers()
        self.wfile.write(b"words")

    def do_POST(self) -> None:
        """As GET."""
        self.do_GET()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def test_the_probe_says_what_the_process_says() -> None:
    _Answers.asked = []
    server = http.server.HTTPServer(("127.0.0.1", 0), _Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"

    def probe(*arguments: str) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, str(DOCKER / "probe.py"), *arguments], capture_output=True, text=True, check=False
        )
        return done.returncode, done.stdout

    assert probe(f"{url}/health") == (0, f"GET {url}/health: 200 words\n")
    assert probe(f"{url}/ready") == (1, f"GET {url}/ready: 503 words\n")
    assert probe(f"{url}/drain", "POST", "0.1") == (0, f"POST {url}/drain: 200 words\n")
    server.shutdown()
    server.server_close()
    status, text = probe(f"{url}/health")
    assert status == 1 and "no answer" in text
    assert _Answers.asked == ["GET /health", "GET /ready", "POST /drain"]
