"""A process of a stack as commands see it from outside: fixed answers over real HTTP on a port of the loopback."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answers = dict[str, Any]
"""Path → (status, body), or the body alone with 200; a text is sent as it is, everything else as JSON."""


@contextmanager
def serving(answers: Answers) -> Iterator[str]:
    """The URL of a server that gives these answers; `answers` may be changed while it runs. Unknown paths are 404."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = answers.get(self.path, (404, "no such path"))
            status, body = found if isinstance(found, tuple) else (200, found)
            content = body.encode() if isinstance(body, str) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            wanted = answers.get("key")
            if wanted is not None and self.headers["authorization"] != f"Bearer {wanted}":
                self.send_response(401)
                self.send_header("content-length", "0")
                self.end_headers()
                return
            self.do_GET()

        def log_message(self, *_: object) -> None:
            """Nothing: the test's output is not the place."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
