"""Asks for a real completion and shows that prefill computed its prompt: what `helm test` runs, also under Compose.

BATON_SMOKE_URL is the router. BATON_SMOKE_PREFILL lists prefill workers, comma-separated, whose handoffs are counted (none:
not checked). BATON_SMOKE_KEY is the API key; BATON_SMOKE_PROMPT and BATON_SMOKE_TIMEOUT_S are optional too.
Exit 0: an answer came, through a handoff.
"""

import json
import os
import re
import sys
import time
import urllib.error
import urllib.request

URL = os.environ["BATON_SMOKE_URL"].rstrip("/")
WORKERS = [url for url in os.environ.get("BATON_SMOKE_PREFILL", "").split(",") if url]
KEY = os.environ.get("BATON_SMOKE_KEY", "")
PROMPT = os.environ.get("BATON_SMOKE_PROMPT", "What is the capital of France? Answer briefly.")
TIMEOUT_S = float(os.environ.get("BATON_SMOKE_TIMEOUT_S", "120"))


def handoffs() -> float:
    """Prompts handed over so far, by all prefill workers that answer."""
    total = 0.0
    for url in WORKERS:
        try:
            text = urllib.request.urlopen(url + "/metrics", timeout=5).read().decode()
        except OSError as error:
            sys.stdout.write(f"{url}: {error}\n")  # a worker that autoscaling may start later
            continue
        # One line a DP rank; labels come in any order.
        for labels, value in re.findall(r"^baton_prefill_handoffs_total\{(.*)\} (\S+)$", text, re.MULTILINE):
            if 'outcome="done"' in labels:
                total += float(value)
    return total


def complete() -> str:
    """The answer's text; SystemExit with the router's words when there is none."""
    body = {"model": "default", "max_tokens": 16, "temperature": 0, "messages": [{"role": "user", "content": PROMPT}]}
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {KEY}"} if KEY else {})
    request = urllib.request.Request(URL + "/v1/chat/completions", json.dumps(body).encode(), headers)
    try:
        answer = json.load(urllib.request.urlopen(request, timeout=TIMEOUT_S))
    except urllib.error.HTTPError as error:
        sys.exit(f"the router answered {error.code}: {error.read().decode()}")
    text = answer["choices"][0]["message"]["content"]
    sys.stdout.write(f"{PROMPT}\n{text}\n{answer['usage']}\n")
    return str(text)


def main() -> None:
    """Count, ask, count again."""
    before = handoffs()
    if not complete().strip():
        sys.exit("the answer is empty")
    # Workers publish their numbers once a second.
    for _ in range(20):
        if not WORKERS or handoffs() > before:
            sys.stdout.write("ok\n")
            return
        time.sleep(0.5)
    sys.exit("an answer came, but no prefill worker handed anything over")


if __name__ == "__main__":
    main()
