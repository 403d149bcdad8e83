"""Asking router and workers for their metrics, all at once, and keeping as many answers as the window needs."""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from baton_cli.fetch import Unreachable, fetch
from baton_cli.top.series import Scrape, Window, parse
from baton_cli.top.view import Known, View, router_figures, view_of

AT_ONCE = 16
HISTORY = 60
ROLES = ("prefill", "decode")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A worker to ask."""

    url: str
    role: str
    state: str = ""
    breaker: str = "closed"


class Collector:
    """One stack. Remembers the workers that the router named last, so that they are shown while it is away."""

    def __init__(self, url: str, workers: Sequence[str], *, window_s: float, timeout_s: float) -> None:
        self._url = url
        self._extra = tuple(workers)
        self._window_s = window_s
        self._timeout_s = timeout_s
        self._scrapes: dict[str, deque[Scrape]] = {}
        self._roles: dict[str, str] = {}
        self._info: Mapping[str, Any] = {}
        self._history: deque[float] = deque(maxlen=HISTORY)

    def look(self) -> View:
        """Ask everybody once."""
        fault = self._ask_router()
        with ThreadPoolExecutor(max_workers=AT_ONCE) as pool:
            targets = list(pool.map(self._described, self._targets(is_current=not fault)))
            scraped = list(pool.map(lambda one: self._scrape(one.url), targets))
        workers = [
            Known(
                url=target.url,
                role=target.role,
                state=target.state,
                breaker=target.breaker,
                window=self._window(target.url) if is_there else None,
            )
            for target, is_there in zip(targets, scraped, strict=True)
        ]
        router_window = None if fault else self._window(self._url)
        self._remember(workers)
        return view_of(
            clock=time.strftime("%H:%M:%S"),
            router=router_figures(self._url, router_window, fault, self._info),
            router_window=router_window,
            workers=workers,
            history=self._history,
        )

    def _ask_router(self) -> str:
        """Why it cannot be asked; empty where it can."""
        try:
            info = fetch(f"{self._url}/server_info", timeout_seconds=self._timeout_s)
        except Unreachable as error:
            return f"{error}"
        if info.fields.get("role") != "router":
            return f"no router of ours (/server_info answers {info.status}, role {info.fields.get('role')!r})"
        self._info = info.fields
        return "" if self._scrape(self._url) else "it answers nothing at /metrics"

    def _targets(self, is_current: bool) -> list[Target]:
        """Those that the router names; what it said of them counts only while it answers."""
        named = [
            Target(
                url=str(one["url"]),
                role=str(one.get("role", "")),
                state=str(one.get("state", "")) if is_current else "",
                breaker=str(one.get("breaker") or "closed") if is_current else "closed",
            )
            for one in self._info.get("workers") or []
            if one.get("url")
        ]
        known = {one.url for one in named}
        return named + [Target(url=url, role="") for url in self._extra if url not in known]

    def _described(self, target: Target) -> Target:
        """With its role, which a worker that only the command line names says itself."""
        if target.role in ROLES:
            return target
        role = self._roles.get(target.url)
        if role is None:
            try:
                said = fetch(f"{target.url}/server_info", timeout_seconds=self._timeout_s).fields.get("role")
            except Unreachable:
                said = None
            role = said if said in ROLES else ""
            if role:
                self._roles[target.url] = role
        return Target(url=target.url, role=role or "?", state=target.state, breaker=target.breaker)

    def _scrape(self, url: str) -> bool:
        try:
            reply = fetch(f"{url}/metrics", timeout_seconds=self._timeout_s)
        except Unreachable:
            return False
        if reply.status != 200:
            return False
        scrapes = self._scrapes.setdefault(url, deque())
        scrapes.append(parse(reply.text, time.monotonic()))
        # One scrape older than the window is kept: it is where the window begins.
        while len(scrapes) > 2 and scrapes[1].at_s <= scrapes[-1].at_s - self._window_s:
            scrapes.popleft()
        return True

    def _window(self, url: str) -> Window:
        scrapes = self._scrapes[url]
        return Window(scrapes[-1], scrapes[0] if len(scrapes) > 1 else None)

    def _remember(self, workers: Sequence[Known]) -> None:
        """Decode's speed since the last look, for the little bars."""
        total, seconds = 0.0, 0.0
        for one in workers:
            scrapes = self._scrapes.get(one.url, deque())
            if one.role != "decode" or one.window is None or len(scrapes) < 2:
                continue
            latest = Window(scrapes[-1], scrapes[-2])
            total += latest.rate("baton_decode_step_tokens_total") or 0.0
            seconds = max(seconds, latest.seconds)
        if seconds:
            self._history.append(total)
