"""The status page on the admin port: which workers there are, what waits, how fast it goes, what failed last.

One HTML document that loads nothing else and runs no script; it asks to be loaded again every few seconds. Everything that
comes from outside (addresses, ids, words of workers) is escaped.
"""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html import escape
from typing import Any

from baton_router.recent import FailureNote, Rates

REFRESH_S = 5
EACH_ITS_OWN = "each prefill worker's own"
STYLE = """
:root{color-scheme:light dark;--ink:#1c2330;--soft:#667085;--line:#d9dee7;--card:#fff;--page:#f4f6f9;
--good:#17803d;--warn:#b25e09;--bad:#c0262d}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ef;--soft:#98a2b3;--line:#333b49;--card:#1b212c;--page:#12161d;
--good:#4cc27a;--warn:#f0a04b;--bad:#f97066}}
*{box-sizing:border-box}
body{margin:0;padding:24px;background:var(--page);color:var(--ink);font:15px/1.45 system-ui,sans-serif}
main{max-width:1180px;margin:auto}
header{display:flex;flex-wrap:wrap;align-items:baseline;gap:8px 16px;margin-bottom:16px}
h1{font-size:22px;margin:0}h2{font-size:16px;margin:24px 0 8px}
.soft{color:var(--soft)}.good{color:var(--good)}.warn{color:var(--warn)}.bad{color:var(--bad)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px}
.tile,.card{background:var(--card);border:1px solid var(--line);border-radius:8px}
.tile{padding:12px 14px}.tile b{display:block;font-size:24px;font-weight:600;font-variant-numeric:tabular-nums}
.card{overflow-x:auto}
table{border-collapse:collapse;width:100%}
th,td{text-align:left;padding:8px 12px;border-bottom:1px solid var(--line);vertical-align:top}
tr:last-child td{border-bottom:0}
th{font-size:12px;font-weight:600;color:var(--soft);white-space:nowrap}
td.number,th.number{text-align:right;font-variant-numeric:tabular-nums}
td.url,td.ranks{white-space:nowrap}td.text{min-width:260px}
.workers th:nth-child(1){width:28%}.workers th:nth-child(2){width:20%}.workers th:nth-child(3){width:10%}
.workers th:nth-child(4){width:22%}.workers th:nth-child(6){width:10%}
.empty{padding:12px}
"""
STATE_CLASS = {"ready": "good", "draining": "warn", "unready": "bad"}
BREAKER_CLASS = {"closed": "good", "half_open": "warn", "open": "bad"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """What the page shows."""

    missing: str | None  # why nobody can be served
    workers: tuple[dict[str, Any], ...]  # as in GET /workers
    in_flight: int
    waiting: int
    waiting_max: int
    rates: Rates
    failures: tuple[FailureNote, ...]  # the latest first
    registry: str | None
    policies: tuple[str, str]


def render(status: Status) -> str:
    """The whole document."""
    verdict, kind = ("serving", "good") if status.missing is None else (f"not serving: {status.missing}", "bad")
    body = [
        f'<header><h1>Baton router</h1><span class="{kind}"><b>{escape(verdict)}</b></span>',
        f'<span class="soft">{_day(time.time())}, reloads every {REFRESH_S} s</span></header>',
        '<div class="tiles">',
        *_tiles(status),
        "</div>",
        *_workers(status, "prefill"),
        *_workers(status, "decode"),
        *_failures(status.failures),
        f'<p class="soft">Registry: {escape(status.registry or EACH_ITS_OWN)}. Policies: '
        f"{escape(status.policies[0])} for prefill, {escape(status.policies[1])} for decode. More figures: /metrics on "
        "the router&#39;s own port; drain, add and remove workers: /workers here.</p>",
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Baton router</title>'
        f'<meta http-equiv="refresh" content="{REFRESH_S}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<style>{STYLE}</style></head><body><main>{''.join(body)}</main></body></html>"
    )


def _tiles(status: Status) -> Iterator[str]:
    rates = status.rates
    yield _tile(f"{rates.requests_per_s:.1f}", "requests a second")
    yield _tile(f"{rates.failures_per_s:.2f}", "failures a second", "bad" if rates.failures_per_s else "")
    yield _tile(str(status.in_flight), "requests under way")
    yield _tile(str(status.waiting), f"waiting (of {status.waiting_max})", "warn" if status.waiting else "")
    for share in (0.5, 0.95):
        ttft_s = rates.ttft_s.get(share)
        yield _tile("–" if ttft_s is None else f"{ttft_s * 1000:.0f} ms", f"first token, p{share * 100:.0f}")


def _tile(value: str, label: str, kind: str = "") -> str:
    return f'<div class="tile"><b class="{kind}">{escape(value)}</b><span class="soft">{escape(label)}</span></div>'


def _workers(status: Status, role: str) -> Iterator[str]:
    own = [worker for worker in status.workers if worker["role"] == role]
    ready = sum(worker["state"] == "ready" for worker in own)
    yield f'<h2>{role.capitalize()} workers <span class="soft">{ready} of {len(own)} ready</span></h2><div class="card">'
    if not own:
        yield '<div class="empty soft">None is known.</div></div>'
        return
    heads = ("Worker", "State", "Breaker", "Model", "Ranks")
    yield f"<table class='workers'><tr>{_cells('th', heads)}<th class='number'>Under way</th></tr>"
    for worker in own:
        yield "".join(_worker(worker))
    yield "</table></div>"


def _worker(worker: dict[str, Any]) -> Iterator[str]:
    reason = f'<br><span class="soft">{escape(worker["reason"])}</span>' if worker["reason"] else ""
    yield f'<tr><td class="url">{escape(worker["url"])}</td>'
    yield f"<td>{_word(worker['state'], STATE_CLASS)}{reason}</td>"
    yield f"<td>{_word(worker['breaker'], BREAKER_CLASS)}</td>"
    yield f"<td>{escape(worker['model'] or '–')}</td><td class='ranks'>"
    ranks = worker.get("ranks", ())
    for rank in ranks:
        yield f"{rank['dp_rank']}: {rank['in_flight']} under way, {_word(rank['breaker'], BREAKER_CLASS)}<br>"
    yield "" if ranks else f"{worker['dp_size']}"
    yield f'</td><td class="number">{worker["in_flight"]}</td></tr>'


def _failures(failures: tuple[FailureNote, ...]) -> Iterator[str]:
    yield '<h2>Last failures</h2><div class="card">'
    if not failures:
        yield '<div class="empty soft">None since this router started.</div></div>'
        return
    yield f"<table><tr>{_cells('th', ('When', 'Status', 'Request', 'Worker', 'What'))}</tr>"
    for one in failures:
        request = f"{escape(one.rid)}<br><span class='soft'>{escape(one.route)}</span>"
        yield f'<tr><td>{_day(one.at_s)}</td><td class="bad">{one.status}</td><td class="url">{request}</td>'
        yield f'<td class="url">{escape(one.worker or "–")}</td><td class="text">{escape(one.text)}</td></tr>'
    yield "</table></div>"


def _cells(tag: str, texts: Iterable[str]) -> str:
    return "".join(f"<{tag}>{escape(text)}</{tag}>" for text in texts)


def _word(word: str, classes: dict[str, str]) -> str:
    return f'<span class="{classes.get(word, "warn")}">{escape(word.replace("_", " "))}</span>'


def _day(at_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at_s))
