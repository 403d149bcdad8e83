"""What `--model` may say, and a model that comes from a hub (a small one of our own, over real HTTP)."""

import hashlib
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton_core.errors import EngineError
from baton_worker.models import MODELS, resolve_model

COMMIT = "c0ffee" + "0" * 34
FILES = {
    "config.json": b"{}",
    "model.safetensors": b"weights",
    "chat_template.jinja": b"{{ messages }}",
    "pytorch_model.bin": b"pickles",
    "consolidated.safetensors": b"the same weights",
}


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the hub's API as its client needs to fetch one repository."""

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        if path.startswith("/api/models/org/tiny/revision/"):
            siblings = [{"rfilename": name, "size": len(content)} for name, content in FILES.items()]
            self.answer(json.dumps({"id": "org/tiny", "sha": COMMIT, "siblings": siblings}).encode())
        elif path.startswith("/api/models/org/tiny/tree/"):
            entries = [
                {"type": "file", "path": name, "size": len(content), "oid": self.etag(content)}
                for name, content in FILES.items()
            ]
            self.answer(json.dumps(entries).encode())
        elif path.startswith("/org/tiny/resolve/") and (name := path.rpartition("/")[2]) in FILES:
            self.answer(FILES[name], {"ETag": f'"{self.etag(FILES[name])}"', "X-Repo-Commit": COMMIT})
        else:
            self.send_error(404)

    def do_HEAD(self) -> None:
        self.do_GET()

    @staticmethod
    def etag(content: bytes) -> str:
        return hashlib.sha1(content).hexdigest()

    def answer(self, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(200)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_hub_id_fetches_what_a_model_needs_and_nothing_else(hub: str) -> None:
    found = resolve_model("org/tiny@main", hub=hub)
    assert found.name == "org/tiny"
    assert {path.name: path.read_bytes() for path in found.path.iterdir()} == {
        name: FILES[name] for name in ("config.json", "model.safetensors", "chat_template.jinja")
    }


def test_a_model_that_the_hub_does_not_have_and_a_hub_out_of_reach_are_told_apart(hub: str) -> None:
    with pytest.raises(EngineError, match=r"'org/absent' cannot be fetched .*404 Not Found"):
        resolve_model("org/absent", hub=hub)
    with pytest.raises(EngineError, match=r"'Qwen/Qwen3-0\.6B' cannot be fetched .*give the path of the directory"):
        resolve_model("qwen3-0.6b", hub="http://127.0.0.1:9")


def test_a_path_may_be_a_file_or_a_directory(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    file = tmp_path / "tiny" / "tiny.Q8_0.gguf"
    file.touch()
    assert resolve_model(str(file)).path == file.resolve() == resolve_model(str(file.parent)).path
    assert resolve_model(str(file)).name == "tiny.Q8_0" and resolve_model(str(file), "mine").name == "mine"
    (tmp_path / "tiny" / "other.gguf").touch()
    with pytest.raises(EngineError, match=r"several \.gguf files: .* other\.gguf, tiny\.Q8_0\.gguf"):
        resolve_model(str(file.parent))
    (tmp_path / "tiny" / "model.safetensors").touch()
    with pytest.raises(EngineError, match=r"has no config\.json"):
        resolve_model(str(file.parent))
    (tmp_path / "tiny" / "config.json").touch()
    assert (
        resolve_model(str(file.parent)).path == file.parent.resolve() and resolve_model(str(file.parent)).name == "tiny"
    )
    with pytest.raises(EngineError, match=r"is no \.gguf file; for safetensors give the directory"):
        resolve_model(str(tmp_path / "tiny" / "model.safetensors"))


def test_every_short_name_is_lower_case_and_none_is_a_hub_id() -> None:
    assert all(name == name.lower() and "/" not in name for name in MODELS)
