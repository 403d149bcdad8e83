"""The health check inside the images, which have no curl: exit 0 when a URL answers 200, else say why and exit 1.

`python -m baton_probe http://127.0.0.1:8100/ready` asks; with POST as a second argument it posts (`/drain`), and with a
number of seconds as a third it then waits: what a preStop hook does.
"""

import http.client
import sys
import time
from urllib.parse import urlsplit

TIMEOUT_S = 2.5


def main(arguments: list[str]) -> int:
    """Ask, print what came back, and wait if told to."""
    url = arguments[0]
    method = arguments[1] if len(arguments) > 1 else "GET"
    pause_s = float(arguments[2]) if len(arguments) > 2 else 0.0
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "127.0.0.1", parts.port or 80, timeout=TIMEOUT_S)
    try:
        connection.request(method, parts.path or "/")
        answer = connection.getresponse()
        status, text = answer.status, answer.read(4_096).decode("utf-8", "replace")
    except (OSError, http.client.HTTPException) as error:
        status, text = 0, str(error)
    finally:
        connection.close()
    sys.stdout.write(f"{method} {url}: {status or 'no answer'} {text.strip()}\n")
    time.sleep(pause_s)
    return 0 if status == 200 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
