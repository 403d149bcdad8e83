"""The router's page for people, in a real browser, before a stack that serves.

As test_stack.py: `BATON_TEST_DOCKER=1 pytest -m slow tests/deploy/test_stack_page.py`. The picture is kept where the
environment's BATON_TEST_SCREENSHOT says.
"""

import json
import os
import struct
import urllib.error
import urllib.request
from collections.abc import Iterator
from html import unescape
from pathlib import Path

import pytest

from deploy.live import PROJECT, Stack, docker, eventually, needs_docker
from deploy.tools import chromium, run

pytestmark = needs_docker

PORT, WIDTH, HEIGHT = 18_797, 1280, 900
ANSWERED = 3
READY_S = 30.0
ASK = """
import sys, urllib.error, urllib.request as u
body = b'{"text": "Hello", "stream": true, "sampling_params": {"max_new_tokens": 4}}'
headers = {"content-type": "application/json", "x-baton-budget-ms": sys.argv[1]}
try:
    print(u.urlopen(u.Request("http://127.0.0.1:8000/generate", body, headers)).read())
except urllib.error.HTTPError as error:
    print(error.code)
"""


@pytest.fixture(scope="module")
def page(stack: Stack) -> Iterator[str]:
    """URL of the page of one more router before the same workers; it is published, as no stack of ours does it.

    It has served some requests, and failed one that would not wait.
    """
    name = f"{PROJECT}-page"
    settings = {
        "PREFILL": "http://prefill:8100",
        "DECODE": "http://decode:8200,http://decode-2:8200",
        "ADMIN_HOST": "0.0.0.0",
        "ADMIN_PORT": "8001",
    }
    variables = [part for key, value in settings.items() for part in ("--env", f"BATON_ROUTER_{key}={value}")]
    docker(
        *("run", "--detach", "--rm", "--name", name, "--network", f"{PROJECT}_edge"),
        *("--publish", f"127.0.0.1:{PORT}:8001", *variables, stack.images.frontend),
    )
    try:
        docker("network", "connect", f"{PROJECT}_kv", name)
        eventually(lambda: states(f"http://127.0.0.1:{PORT}") == ["ready"] * 3, "it has all workers", READY_S)
        for _ in range(ANSWERED):
            assert "[DONE]" in docker("exec", name, "python", "-c", ASK, "60000")
        assert docker("exec", name, "python", "-c", ASK, "1") == "504"
        yield f"http://127.0.0.1:{PORT}/"
    finally:
        docker("rm", "--force", name)


def states(url: str) -> list[str]:
    """Of the workers; nothing while nobody answers."""
    try:
        told = json.load(urllib.request.urlopen(f"{url}/workers", timeout=5))
    except (urllib.error.URLError, ConnectionError):
        return []
    return [one["state"] for one in told["workers"]]


def browse(*options: str) -> str:
    """What the browser prints."""
    done = run(chromium(), "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", *options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_browser_shows_who_serves_and_fits_it_on_a_screen(page: str, tmp_path: Path) -> None:
    document = browse("--dump-dom", page)
    assert "&amp;#" not in document, "escaped twice"
    shown = unescape(document)
    for words in (
        "serving",
        "http://prefill:8100",
        "http://decode:8200",
        "http://decode-2:8200",
        "2 of 2 ready",
        "504",
        "budget of 1 ms",
    ):
        assert words in shown
    picture = Path(os.environ.get("BATON_TEST_SCREENSHOT", tmp_path / "page.png"))
    browse(f"--window-size={WIDTH},{HEIGHT}", f"--screenshot={picture}", page)
    head = picture.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n" and struct.unpack(">II", head[16:24]) == (WIDTH, HEIGHT)
    assert picture.stat().st_size > 20_000, "an empty page is smaller"
