"""A stack that runs, seen from outside: registry, router, workers, whether they fit each other, and a real completion."""

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

from baton_cli.doctor.findings import Finding, fail, ok, warn
from baton_cli.fetch import Reply, Unreachable, fetch
from baton_cli.fleet import ANSWER_TOKENS_MAX, chat_body
from baton_core.fingerprint import mismatches
from baton_core.kv_layout import LayoutMismatch, UnitLayout, require_translatable

SKEW_SECONDS = 3.0
ANSWER_CHARS = 60
PROBES_AT_ONCE = 16
OPERATIONS = "docs/operations.md says more under"


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """What a worker says about itself; `info` is empty where it does not answer, and `fault` says why."""

    url: str
    role: str  # as router or registry call it, or it itself
    info: dict[str, Any]
    fault: str = ""
    unready: str = ""
    skew_s: float | None = None

    @property
    def fingerprint(self) -> str:
        """Canonical text of what shapes its KV; empty where it does not say."""
        return str(self.info.get("fingerprint") or "")

    @property
    def layout(self) -> UnitLayout | None:
        """How a unit's KV is spread, or None where it does not say."""
        text = self.info.get("layout")
        try:
            return UnitLayout.from_text(text) if isinstance(text, str) else None
        except ValueError:
            return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """How to ask."""

    timeout_seconds: float
    completion_seconds: float
    key: str | None = None

    def get(self, url: str) -> Reply:
        """Raises Unreachable."""
        return fetch(url, timeout_seconds=self.timeout_seconds, key=self.key)


# -- registry


def ask_registry(url: str, visit: Visit) -> tuple[list[Finding], list[dict[str, Any]]]:
    """What a registry says, and the instances it knows."""
    try:
        reply = visit.get(f"{url}/v1/instances")
    except Unreachable as error:
        return [fail("registry", f"{url}: {error}", f"is it started, and is {url} right from this machine?")], []
    instances = reply.fields.get("instances")
    if reply.status != 200 or not isinstance(instances, list):
        text = f"{url} answers {reply.status} at /v1/instances: no registry of Baton"
        return [fail("registry", text, "give the address of baton-bootstrap, or a prefill worker's bootstrap port")], []
    found = [one for one in instances if isinstance(one, dict)]
    findings = skew_findings("registry", skew_s(reply)) + [
        fail(
            "registry",
            f"instance {one.get('instance')} has {one.get('ranks_registered')} of {one.get('ranks_total')} ranks registered",
            "look at that prefill worker's log; a rank that is missing makes every look-up of it fail",
        )
        for one in found
        if not one.get("ready")
    ]
    if not found:
        advice = "start prefill workers with --registry, or wait until they are ready"
        return [*findings, warn("registry", f"{url} answers, and no prefill worker is registered", advice)], found
    ready = sum(bool(one.get("ready")) for one in found)
    text = f"{url}: {ready} of {len(found)} prefill workers complete, answered in {reply.seconds * 1000:.0f} ms"
    return [ok("registry", text), *findings], found


# -- router


def ask_router(url: str, visit: Visit) -> tuple[list[Finding], dict[str, Any]]:
    """What a router says, and its `/server_info`; empty where it is none."""
    try:
        health, ready, info = (visit.get(f"{url}{path}") for path in ("/health", "/ready", "/server_info"))
    except Unreachable as error:
        advice = f"is it started (baton up, docker compose ps), and is {url} right from this machine?"
        return [fail("router", f"{url}: {error}", advice)], {}
    if info.status != 200 or info.fields.get("role") != "router":
        role = info.fields.get("role") or f"something that answers {info.status} at /server_info"
        return [fail("router", f"{url} is no router of ours but {role}", "give the router's address with --url")], {}
    findings = skew_findings("router", skew_s(info))
    if health.status != 200:
        findings.append(fail("router", f"{url}/health answers {health.status}: {health.text.strip()}", "restart it"))
    if ready.status == 200:
        findings.append(ok("router", f"{url} has a usable pair, answered in {ready.seconds * 1000:.0f} ms"))
    else:
        reasons = "; ".join(map(str, ready.fields.get("reasons") or [])) or f"/ready answers {ready.status}"
        findings.append(fail("router", f"{url} has no usable pair: {reasons}", f"{OPERATIONS} BatonNoUsablePair"))
    for worker in _workers_of(info.fields):
        if worker.get("breaker") not in (None, "closed"):
            text = f"its breaker for {worker.get('url')} is {worker['breaker']}: requests failed there by its own fault"
            findings.append(warn("router", text, "look at that worker's log; the breaker closes with the next success"))
    return findings, info.fields


def _workers_of(info: dict[str, Any]) -> list[dict[str, Any]]:
    workers = info.get("workers")
    return [one for one in workers if isinstance(one, dict)] if isinstance(workers, list) else []


def named_workers(router: dict[str, Any], instances: Iterable[dict[str, Any]], more: Iterable[str]) -> dict[str, str]:
    """URL → role (empty: unknown) of every worker that anybody names."""
    named = dict.fromkeys(more, "")
    for one in instances:
        if one.get("http_host") and one.get("http_port"):
            host = str(one["http_host"])
            named[f"http://[{host}]:{one['http_port']}" if ":" in host else f"http://{host}:{one['http_port']}"] = (
                "prefill"
            )
    return named | {str(one.get("url")): str(one.get("role", "")) for one in _workers_of(router)}


# -- workers


def ask_workers(named: dict[str, str], visit: Visit) -> list[Worker]:
    """All at once."""
    with ThreadPoolExecutor(max_workers=PROBES_AT_ONCE) as pool:
        return list(pool.map(lambda url: _ask_worker(url, named[url], visit), named))


def _ask_worker(url: str, role: str, visit: Visit) -> Worker:
    try:
        info, ready = visit.get(f"{url}/server_info"), visit.get(f"{url}/ready")
    except Unreachable as error:
        return Worker(url=url, role=role, info={}, fault=str(error))
    if info.status != 200 or not info.fields:
        return Worker(url=url, role=role, info={}, fault=f"/server_info answers {info.status}")
    reasons = "; ".join(map(str, ready.fields.get("reasons") or [])) or f"/ready answers {ready.status}"
    return Worker(
        url=url,
        role=role or str(info.fields.get("role", "")),
        info=info.fields,
        unready="" if ready.status == 200 else reasons,
        skew_s=skew_s(info),
    )


def judge_workers(workers: Sequence[Worker]) -> list[Finding]:
    """Each for itself."""
    findings = []
    for worker in workers:
        name = worker.role or "worker"
        if worker.fault:
            advice = "is it running, and can this machine reach it? Its log says more"
            findings.append(fail(name, f"{worker.url}: {worker.fault}", advice))
        elif worker.info.get("role") not in (None, worker.role):
            text = f"{worker.url} is a {worker.info['role']} worker, and is listed as {worker.role}"
            findings.append(fail(name, text, "mend the router's list (--prefill, --decode, the workers file)"))
        elif worker.unready:
            findings.append(fail(name, f"{worker.url} is not ready: {worker.unready}", f"curl -s {worker.url}/ready"))
        else:
            findings.append(ok(name, f"{worker.url} is ready: {_described(worker.info)}"))
        findings += skew_findings(worker.url, worker.skew_s)
    return findings


def _described(info: dict[str, Any]) -> str:
    sizes = [f"{name} {info[f'{name}_size']}" for name in ("tp", "pp", "dp", "cp") if info.get(f"{name}_size", 1) != 1]
    words = [info.get("model"), info.get("dtype"), info.get("device"), *sizes]
    if info.get("page_tokens") and info.get("kv_pages"):
        words.append(f"{info['kv_pages']:,} pages of {info['page_tokens']} tokens")
    return ", ".join(str(word) for word in words if word)


def judge_fit(workers: Sequence[Worker]) -> list[Finding]:
    """Whether prefill and decode workers mean the same by their pages; a mismatch names both values."""
    answering = [worker for worker in workers if worker.info]
    prefills = [worker for worker in answering if worker.role == "prefill"]
    decodes = [worker for worker in answering if worker.role == "decode"]
    findings = _versions(answering)
    if not prefills or not decodes:
        return findings
    unlike: dict[tuple[str, ...], list[tuple[str, str]]] = {}
    for prefill in prefills:
        for decode in decodes:
            differences = differences_of(prefill, decode)
            if differences:
                unlike.setdefault(differences, []).append((prefill.url, decode.url))
    for differences, pairs in unlike.items():
        first = f"{pairs[0][0]} → {pairs[0][1]}"
        more = f" and {len(pairs) - 1} more pairs" if len(pairs) > 1 else ""
        advice = f"give both the same model file, dtype and version; {OPERATIONS} BatonLayoutMismatch"
        findings.append(fail("pairs", f"{first}{more} cannot hand over: {'; '.join(differences)}", advice))
    fitting = len(prefills) * len(decodes) - sum(map(len, unlike.values()))
    if fitting:
        unsaid = sum(not worker.fingerprint for worker in (*prefills, *decodes))
        note = f" ({unsaid} workers do not say: their handshake will)" if unsaid else ""
        pairs_text = f"{fitting} of {len(prefills)} × {len(decodes)} pairs fit each other"
        findings.append(ok("pairs", f"{pairs_text}{note}"))
    return findings


def differences_of(prefill: Worker, decode: Worker) -> tuple[str, ...]:
    """Why pages of one are no pages of the other, each difference with both values; empty where they fit."""
    found: tuple[str, ...] = ()
    if prefill.fingerprint and decode.fingerprint:
        found = mismatches(prefill.fingerprint, decode.fingerprint)
    if prefill.layout is not None and decode.layout is not None:
        try:
            require_translatable(prefill.layout, decode.layout)
        except LayoutMismatch as error:
            found += (str(error),)
    return found


def _versions(workers: Sequence[Worker]) -> list[Finding]:
    by_version: dict[str, list[str]] = {}
    for worker in workers:
        if worker.info.get("version"):
            by_version.setdefault(str(worker.info["version"]), []).append(worker.url)
    if len(by_version) < 2:
        return []
    text = "; ".join(f"{version}: {', '.join(urls[:3])}" for version, urls in sorted(by_version.items()))
    return [
        warn("versions", f"workers run different ones ({text})", "finish the upgrade: docs/operations.md, Upgrading")
    ]


def judge_registration(
    workers: Sequence[Worker], instances: Sequence[dict[str, Any]], registry: str | None
) -> list[Finding]:
    """Whether every prefill worker that takes requests can be looked up, as the life that it is."""
    if registry is None:
        return []
    lives = {str(one.get("incarnation")): one for one in instances}
    names = {str(one.get("instance")): one for one in instances}
    findings = []
    for worker in workers:
        life, name = worker.info.get("incarnation"), worker.info.get("instance")
        if worker.role != "prefill" or not life or str(life) in lives:
            continue
        if str(name) in names:
            text = f"{registry} knows {worker.url} as life {names[str(name)].get('incarnation')}, and it is {life}"
        else:
            text = f"{worker.url} ({life}) is not registered at {registry}: decode workers cannot look it up"
        findings.append(fail("registration", text, f"start it with --registry {registry}; its log says what failed"))
    return findings


# -- clock


def skew_s(reply: Reply) -> float | None:
    """How far the clock there is ahead of ours, to a second; None where it does not say."""
    try:
        there = parsedate_to_datetime(reply.headers["date"]).timestamp()
    except (KeyError, ValueError, TypeError):
        return None
    return there - (time.time() - reply.seconds / 2)


def skew_findings(where: str, seconds: float | None) -> list[Finding]:
    """A clock that is off; dates have whole seconds, so a little is no sign."""
    if seconds is None or abs(seconds) < SKEW_SECONDS:
        return []
    text = f"that of {where} is {abs(seconds):.0f} s {'ahead of' if seconds > 0 else 'behind'} this machine's"
    return [warn("clock", f"{text}: logs and traces will not line up", "synchronise both (chrony, systemd-timesyncd)")]


# -- a completion


def complete(url: str, visit: Visit) -> Finding:
    """Ask for a short answer through the whole stack."""
    try:
        models = visit.get(f"{url}/v1/models")
        names = [one.get("id") for one in models.fields.get("data") or []]
        body = chat_body(str(names[0]) if names else "default") | {"max_tokens": ANSWER_TOKENS_MAX, "temperature": 0}
        target = f"{url}/v1/chat/completions"
        reply = fetch(target, timeout_seconds=visit.completion_seconds, body=body, key=visit.key)
    except Unreachable as error:
        return fail(
            "completion", f"none came: {error}", "look at the logs of router, prefill and decode, in that order"
        )
    if reply.status == 401:
        return fail("completion", "the router wants an API key", "put one into a file and give --key-file FILE")
    try:
        text = " ".join(str(reply.json["choices"][0]["message"]["content"]).split())
    except (TypeError, KeyError, IndexError):
        said = reply.text.strip()[:400]
        return fail("completion", f"the router answered {reply.status}: {said}", "the reason names the part to look at")
    shown = text if len(text) <= ANSWER_CHARS else text[: ANSWER_CHARS - 1] + "…"
    return ok("completion", f"through router, prefill and decode in {reply.seconds:.2f} s: {shown!r}")
