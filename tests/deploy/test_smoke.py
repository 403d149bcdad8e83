"""What `helm test` runs, against metrics that a real prefill worker exported."""

import http.server
import os
import subprocess
import sys
import threading

from deploy.tools import ROOT

SMOKE = ROOT / "helm/baton/files/smoke.py"
SCRAPE = ROOT / "tests/deploy/scrape/prefill.prom"


class Door(http.server.BaseHTTPRequestHandler):
    """Router and prefill worker in one: each answer is one more handoff, where `hands_over`."""

    hands_over = True
    handoffs = 0

    def do_GET(self) -> None:
        """The scrape, with the handoffs of now."""
        old = 'baton_prefill_handoffs_total{dp_rank="0",outcome="done"} 9.0'
        text = SCRAPE.read_text()
        assert old in text
        self._say(text.replace(old, old.replace("9.0", f"{9.0 + Door.handoffs}")).encode())

    def do_POST(self) -> None:
        """An answer."""
        self.rfile.read(int(self.headers["content-length"]))
        Door.handoffs += Door.hands_over
        self._say(b'{"choices": [{"message": {"content": "Paris."}}], "usage": {}}')

    def _say(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def test_an_answer_counts_only_if_prefill_handed_it_over() -> None:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Door)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    environ = dict(os.environ) | {"BATON_SMOKE_URL": url, "BATON_SMOKE_PREFILL": url}

    def smoke() -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, str(SMOKE)], capture_output=True, text=True, check=False, env=environ, timeout=60
        )
        return done.returncode, done.stdout + done.stderr

    try:
        assert smoke() == (0, "What is the capital of France? Answer briefly.\nParis.\n{}\nok\n")
        Door.hands_over = False
        status, text = smoke()
        assert status == 1 and "no prefill worker handed anything over" in text
    finally:
        server.shutdown()
        server.server_close()
