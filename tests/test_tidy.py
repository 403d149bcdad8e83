"""Style as a test: what may import what, what the core must not touch, how long things may be, which names must exist.

Everything is read from the source text; nothing of the project is imported here (a subprocess asks the mains).
"""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SHARED = ("baton_core", "baton_io", "baton_engine", "baton_worker", "baton_cli")
SERVICES = ("baton_router", "baton_bootstrap", "baton_prefill", "baton_decode")
FUNCTION_LINES_MAX = 70
FILE_LINES_MAX = 400
EXCEPTION = "# tidy: "
CORE_MAY_IMPORT = {
    "array",
    "bisect",
    "collections",
    "dataclasses",
    "enum",
    "functools",
    "hashlib",
    "heapq",
    "itertools",
    "json",
    "math",
    "re",
    "struct",
    "typing",
}
"""The standard library minus everything that observes or changes the world."""
MAY_IMPORT_TORCH = ("baton_engine", "baton_prefill", "baton_decode")
RANK_MODULES = {"rank", "side"}
"""Modules of the two engine services that run in a scheduler process; the others run in the app and never load torch."""
MAY_READ_ENVIRONMENT = {"config", "__main__"}


@dataclass(frozen=True)
class Source:
    """One file of the project."""

    path: Path
    package: str
    text: str

    @property
    def name(self) -> str:
        """Path below the repository, for messages."""
        return str(self.path.relative_to(ROOT))

    @property
    def tree(self) -> ast.Module:
        """Its syntax tree."""
        return _parse(self.path, self.text)

    @property
    def modules(self) -> set[str]:
        """Every absolute module it imports anywhere, also inside functions."""
        found: set[str] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module)
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
        return found

    @property
    def tops(self) -> set[str]:
        """The packages it imports from."""
        return {module.partition(".")[0] for module in self.modules}


@cache
def _parse(path: Path, text: str) -> ast.Module:
    return ast.parse(text, str(path))


def _read() -> tuple[Source, ...]:
    folders = [(name, ROOT / "shared" / name) for name in SHARED]
    folders += [(name, ROOT / "services" / name.removeprefix("baton_") / name) for name in SERVICES]
    return tuple(
        Source(path=path, package=package, text=path.read_text())
        for package, folder in folders
        for path in sorted(folder.rglob("*.py"))
    )


SOURCES = _read()
CORE = tuple(source for source in SOURCES if source.package == "baton_core")


def at(source: Source, node: ast.AST, what: str) -> str:
    """A finding, as `file:line what`."""
    return f"{source.name}:{getattr(node, 'lineno', 1)} {what}"


def calls(source: Source, *names: str) -> Iterator[ast.Call]:
    """Calls of plain names or dotted ones."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in names:
            yield node


# -- who may import what


def test_the_core_imports_only_what_cannot_observe_the_world() -> None:
    allowed = CORE_MAY_IMPORT | {"baton_core"}
    assert not [f"{source.name}: {sorted(source.tops - allowed)}" for source in CORE if source.tops - allowed]


def test_imports_point_one_way() -> None:
    wrong = []
    for source in SOURCES:
        below = set(SHARED if source.package in SHARED else (*SHARED, source.package)) - {"baton_cli"}
        if source.package == "baton_core":
            below = {"baton_core"}
        if source.package == "baton_cli":
            below |= {"baton_cli"}
        ours = {top for top in source.tops if top in (*SHARED, *SERVICES)}
        wrong += [f"{source.name} imports {name}" for name in sorted(ours - below)]
    assert not wrong


def test_the_io_layer_knows_neither_engine_nor_worker() -> None:
    above = {"baton_engine", "baton_worker"}
    assert not [source.name for source in SOURCES if source.package == "baton_io" and source.tops & above]


def test_only_the_engine_and_rank_modules_import_torch() -> None:
    wrong = [
        source.name
        for source in SOURCES
        if "torch" in source.tops
        and (
            source.package not in MAY_IMPORT_TORCH
            or (source.package in SERVICES and source.path.stem not in RANK_MODULES)
        )
    ]
    assert not wrong


MAINS = [f"{source.package}.__main__" for source in SOURCES if source.path.name == "__main__.py"]


@pytest.mark.parametrize("module", MAINS)
def test_an_app_process_never_loads_torch(module: str) -> None:
    """Importing a main, and every module of its package that is not a rank's, leaves torch on disk."""
    package = module.partition(".")[0]
    apps = [
        ".".join(source.path.relative_to(ROOT).with_suffix("").parts).partition(f"{package}.")[2]
        for source in SOURCES
        if source.package == package and source.path.stem not in RANK_MODULES | {"__init__"}
    ]
    code = "\n".join(
        [
            "import importlib, sys",
            *(f"importlib.import_module('{package}.{name.removeprefix(package + '.')}')" for name in apps),
            "print(*[name for name in ('torch', 'transformers') if name in sys.modules])",
        ]
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=os.environ)
    assert answer.returncode == 0, answer.stderr[-2_000:]
    assert answer.stdout.strip() == ""


def test_every_service_has_a_main() -> None:
    assert {f"{name}.__main__" for name in (*SERVICES, "baton_cli")} <= set(MAINS)


# -- the core is deterministic


def _is_set(node: ast.expr) -> bool:
    if isinstance(node, ast.Set | ast.SetComp):
        return True
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("set", "frozenset")


def test_the_core_never_iterates_over_a_set() -> None:
    wrong = []
    for source in CORE:
        for node in ast.walk(source.tree):
            walked = [node.iter] if isinstance(node, ast.For | ast.comprehension) else []
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("list", "tuple"):
                walked = node.args
            wrong += [at(source, one, "iterates over a set") for one in walked if _is_set(one)]
    assert not wrong


def test_the_core_never_asks_for_hash_or_identity() -> None:
    assert not [at(source, call, ast.unparse(call)) for source in CORE for call in calls(source, "hash", "id")]


def test_the_core_never_prints_opens_or_evaluates() -> None:
    names = ("print", "open", "input", "eval", "exec", "__import__")
    assert not [at(source, call, ast.unparse(call)) for source in CORE for call in calls(source, *names)]


def _assigned(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return node.targets
    return [node.target] if isinstance(node, ast.AugAssign | ast.AnnAssign) else []


def test_only_move_assigns_a_phase() -> None:
    places = []
    for source in SOURCES:
        for function in ast.walk(source.tree):
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            for node in ast.walk(function):
                targets = _assigned(node)
                if any(isinstance(target, ast.Attribute) and target.attr == "phase" for target in targets):
                    places.append(f"{source.name}:{function.name}")
    assert places == ["shared/baton_core/machine.py:move"]


# -- shape of files and functions


def _excepted(source: Source, line: int) -> bool:
    """Whether the line, or the one above it, gives a reason for an exception."""
    lines = source.text.splitlines()
    return any(EXCEPTION in one for one in lines[max(0, line - 2) : line])


def test_functions_fit_on_a_screen() -> None:
    wrong = []
    for source in SOURCES:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                if length > FUNCTION_LINES_MAX and not _excepted(source, node.lineno):
                    wrong.append(at(source, node, f"{node.name} has {length} lines"))
    assert not wrong


def test_files_stay_small() -> None:
    sizes = [(source, source.text.count("\n")) for source in SOURCES]
    long = [f"{source.name} has {lines} lines" for source, lines in sizes if lines > FILE_LINES_MAX]
    excepted = [source.name for source in SOURCES if source.text.startswith(EXCEPTION)]
    assert not [one for one in long if one.split(" ")[0] not in excepted]


def test_everything_public_says_what_it_is_for() -> None:
    wrong = [f"{source.name}: the module" for source in SOURCES if source.text and not ast.get_docstring(source.tree)]
    for source in SOURCES:
        wrong += [at(source, node, node.name) for node in _public(source.tree.body) if not ast.get_docstring(node)]
    assert not wrong


def _public(
    body: list[ast.stmt], in_class: bool = False
) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    """Public functions and classes, and the public methods of public classes that are longer than one statement."""
    for node in body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        if not (in_class and len(node.body) == 1):
            yield node
        if isinstance(node, ast.ClassDef):
            yield from _public(node.body, in_class=True)


# -- what nobody does


def test_the_environment_is_read_by_configuration_and_mains_only() -> None:
    wrong = []
    for source in SOURCES:
        if source.path.stem in MAY_READ_ENVIRONMENT:
            continue
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.getenv", "os.environb"):
                if not _excepted(source, node.lineno):
                    wrong.append(at(source, node, ast.unparse(node)))
    assert not wrong


def test_no_exception_is_swallowed_unnamed() -> None:
    wrong = []
    for source in SOURCES:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ExceptHandler) and node.type is None:
                wrong.append(at(source, node, "bare except"))
    assert not wrong


def test_nothing_is_pickled() -> None:
    pickles = {"pickle", "cPickle", "dill", "shelve", "marshal"}
    assert not [source.name for source in SOURCES if source.tops & pickles]


def test_nobody_sleeps_but_the_command_line_that_watches_processes() -> None:
    names = ("time.sleep", "sleep")
    wrong = [
        at(source, call, ast.unparse(call))
        for source in SOURCES
        if source.package != "baton_cli"
        for call in calls(source, *names)
        if not _excepted(source, call.lineno)
    ]
    assert not wrong


def test_shared_memory_is_never_multiprocessings() -> None:
    assert not [source.name for source in SOURCES if any("shared_memory" in module for module in source.modules)]


def test_nothing_is_left_to_do() -> None:
    left = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
    wrong = [
        f"{source.name}:{number} {line.strip()}"
        for source in SOURCES
        for number, line in enumerate(source.text.splitlines(), 1)
        if left.search(line)
    ]
    assert not wrong


# -- names that people who know the originals look for (requirements, first table)

REQUIRED = {
    "shared/baton_core/agreement.py": (
        "KVPoll",
        "poll_and_all_reduce",
        "poll_and_all_reduce_with_staging",
        "poll_and_all_reduce_pp",
        "poll_and_all_reduce_attn_cp_tp_group",
        "_apply_metadata_gate",
        "_is_fake_transfer",
        "_poll_with_metadata_gate",
    ),
    "shared/baton_core/prefill/": (
        "PrefillBootstrapQueue",
        "PrefillBootstrapQueue.add",
        "PrefillBootstrapQueue.pop_bootstrapped",
        "PrefillInflightQueue",
        "process_bootstrapped_queue",
    ),
    "shared/baton_core/decode/": (
        "DecodePreallocQueue",
        "DecodePreallocQueue.add",
        "DecodePreallocQueue._update_handshake_waiters",
        "DecodePreallocQueue._abort_handshake",
        "DecodePreallocQueue.pop_preallocated",
        "process_prealloc_queue",
        "_resolve_prefill_dp_rank",
        "DecodeTransferQueue",
        "DecodeTransferQueue._commit_transfer_to_req",
    ),
    "shared/baton_core/": ("is_unadmitted_reject", "retire_unadmitted_request", "capacity_verdict"),
    "shared/baton_core/machine.py": (
        "Handoff.conclude_state",
        "Handoff.bootstrap_infos",
        "Handoff.kv_receiver",
    ),
    "shared/baton_io/peers.py": ("_setup_bootstrap_infos",),
}
"""Where a name must be defined; every one is also used by code that is no test, views of the machine excepted."""


def _defined(place: str) -> set[str]:
    found: set[str] = set()
    for source in SOURCES:
        if not source.name.startswith(place):
            continue
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef):
                found |= {
                    f"{node.name}.{one.name}"
                    for one in node.body
                    if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)
                }
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found.add(node.name)
    return found


@cache
def _used() -> set[str]:
    """Every name or attribute that some non-test code mentions other than to define or import it."""
    found: set[str] = set()
    for source in SOURCES:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                found.add(node.attr)
    return found


@pytest.mark.parametrize("place", REQUIRED)
def test_the_names_of_the_originals_exist_where_people_look_for_them(place: str) -> None:
    assert set(REQUIRED[place]) <= _defined(place)


@pytest.mark.parametrize(
    "name", [name for place, names in REQUIRED.items() for name in names if "machine" not in place]
)
def test_the_names_of_the_originals_are_used_by_code_that_is_no_test(name: str) -> None:
    assert name.rpartition(".")[2] in _used()
