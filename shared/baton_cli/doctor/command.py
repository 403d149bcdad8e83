"""`baton doctor`: which checks are made, and in which order."""

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from baton_cli import state
from baton_cli.doctor import links, machine, planned, running, software
from baton_cli.doctor.arguments import COMPLETION_SECONDS
from baton_cli.doctor.findings import (
    Finding,
    Level,
    Section,
    as_json,
    count,
    fail,
    show_section,
    summary,
)
from baton_cli.errors import UsageError
from baton_cli.fetch import base_url
from baton_cli.layout import UpOptions, parse_setting
from baton_cli.show import GREEN, RED, YELLOW, Screen, restart_line
from baton_cli.state import Entry


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """A stack that runs, as far as somebody named its parts. `gone`: processes of `baton up` that have ended."""

    url: str | None
    registry: str | None
    workers: tuple[str, ...]
    gone: tuple[Finding, ...] = ()


def doctor(arguments: argparse.Namespace, environ: Mapping[str, str], screen: Screen) -> int:
    """The exit code. Raises CliError."""
    sections = []
    for section in _sections(arguments, environ):
        sections.append(section)
        if not arguments.json:
            show_section(screen, section)
    counts = count(finding for section in sections for finding in section.findings)
    if arguments.json:
        screen.line(json.dumps(as_json(sections), indent=2, ensure_ascii=False))
    else:
        screen.line(summary(counts), RED if counts[Level.FAIL] else YELLOW if counts[Level.WARN] else GREEN)
    return 1 if counts[Level.FAIL] or (arguments.strict and counts[Level.WARN]) else 0


def _sections(arguments: argparse.Namespace, environ: Mapping[str, str]) -> Iterator[Section]:
    """One after the other, so that what is known is shown while the rest is looked at."""
    if not arguments.timeout_seconds > 0:
        raise UsageError(f"--timeout-seconds must be above 0, not {arguments.timeout_seconds:g}")
    visit = running.Visit(
        timeout_seconds=arguments.timeout_seconds,
        completion_seconds=COMPLETION_SECONDS,
        key=None if arguments.key_file is None else read_key(arguments.key_file),
    )
    stack = _running_stack(arguments)
    yield from _planned(arguments, environ) if stack is None else _running(stack, visit, arguments.no_completion)


def read_key(path: Path) -> str:
    """The key in a file; a file, because arguments are seen by every user of a machine. Raises UsageError."""
    try:
        key = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--key-file {path}: {error}") from error
    if not key or len(key.split()) > 1:
        raise UsageError(f"--key-file {path}: it must hold one key and nothing else")
    return key


# -- what there is to look at


def _running_stack(arguments: argparse.Namespace) -> Stack | None:
    """What was named, else what `baton up` left in the state; None: nothing runs."""
    registry = None if arguments.registry is None else base_url("--registry", arguments.registry)
    workers = tuple(base_url("--worker", url) for url in arguments.workers)
    if arguments.url is not None:
        return Stack(url=base_url("--url", arguments.url), registry=registry, workers=workers)
    if registry is not None or workers:
        return Stack(url=None, registry=registry, workers=workers)
    entries = state.read(arguments.state) or []
    if not any(entry.running.alive for entry in entries):
        return None
    urls = {entry.spec.role: entry.spec.url for entry in entries if entry.spec.role in ("router", "bootstrap")}
    return Stack(
        url=urls.get("router"),
        registry=urls.get("bootstrap"),
        workers=(),
        gone=tuple(_gone(entry, arguments.state) for entry in entries if not entry.running.alive),
    )


def _gone(entry: Entry, directory: Path) -> Finding:
    advice = f"{restart_line(directory, entry.running)}\nits log: {entry.spec.log}"
    return fail(entry.spec.role, f"{entry.spec.name} (pid {entry.pid}) has ended", advice)


def _running(stack: Stack, visit: running.Visit, no_completion: bool) -> Iterator[Section]:
    packages = software.judge_packages(software.requirements(), software.installed, engine_needed=False)
    local = machine.judge(machine.look(), machine.Demand())
    yield Section(title="This machine", findings=(*packages, *local))
    found = list(stack.gone)
    router: dict[str, object] = {}
    if stack.url is not None:
        asked, router = running.ask_router(stack.url, visit)
        found += asked
    registry = stack.registry or _registry_of(router)
    instances: list[dict[str, object]] = []
    if registry is not None:
        asked, instances = running.ask_registry(registry, visit)
        found += asked
    yield Section(title="Router and registry", findings=tuple(found))
    workers = running.ask_workers(running.named_workers(router, instances, stack.workers), visit)
    judged = running.judge_workers(workers) + running.judge_registration(workers, instances, registry)
    reachable = [] if registry is None else links.link_findings(registry, instances, visit)
    yield Section(title="Workers", findings=(*judged, *reachable, *running.judge_fit(workers)))
    if stack.url is not None and router and not no_completion:
        yield Section(title="A real request", findings=(running.complete(stack.url, visit),))


def _registry_of(router: Mapping[str, object]) -> str | None:
    said = router.get("registry")
    return base_url("registry", said) if isinstance(said, str) and said else None


def _planned(arguments: argparse.Namespace, environ: Mapping[str, str]) -> Iterator[Section]:
    options = UpOptions(
        prefill=arguments.prefill,
        decode=arguments.decode,
        colocated=arguments.colocated,
        model=arguments.model,
        dtype=arguments.dtype,
        transfer=arguments.transfer,
        port=arguments.port,
        settings=tuple(parse_setting(text) for text in arguments.settings),
    )
    stack = planned.planned(options, environ)
    located = planned.locate_model(stack, environ)
    path = None if located is None else located.path
    torch = software.probe_torch(path, [planned.wanted_of(config) for config in stack.configs])
    packages = software.judge_packages(software.requirements(), software.installed, engine_needed=True)
    torch_finding = software.judge_torch(torch, is_needed=True, wants_cuda=stack.wants_cuda)
    needs = torch.needs if isinstance(torch, software.TorchFacts) else []
    local = machine.judge(machine.look(), planned.demand(stack, needs))
    yield Section(
        title="This machine",
        findings=(
            *packages,
            torch_finding,
            *local,
            *planned.folder_findings(stack, arguments.state),
            software.docker_finding(),
        ),
    )
    yield Section(
        title="The stack that `baton up` would start", findings=tuple(planned.findings(stack, located, torch))
    )
