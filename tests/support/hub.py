"""A server on loopback with the few answers of the Hub that a download needs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.support.chat import save_tokenizer
from tests.support.hf_models import save_small_hf

NAME = "lab/tiny"
NOT_NEEDED = (
    "pytorch_model.bin",
    "modeling_tiny.py",
    "original/model.safetensors",
    "original/params.json",
    "README.md",
)


class Hub(ThreadingHTTPServer):
    """The few answers of the Hub that a download needs, for one model in several commits."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.commits: dict[str, Path] = {}
        self.asked: list[str] = []
        self.tokens: set[str] = set()
        self.fault: Callable[[BaseHTTPRequestHandler], bool] = lambda asked: False

    def handle_error(self, *asked: object) -> None:
        """Say nothing of a client that has left: what is printed here would be taken for the command's."""

    @property
    def main(self) -> str:
        return list(self.commits)[-1]

    def publish(self, folder: Path) -> str:
        commit = hashlib.sha1(str(folder).encode()).hexdigest()
        self.commits[commit] = folder
        return commit


class _Answers(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.server.asked.append(f"{self.command} {self.path}")
        self.server.tokens.add(self.headers.get("authorization", ""))
        if self.server.fault(self):
            return
        path, _, query = self.path.lstrip("/").partition("?")
        path = path.replace("datasets/", "models/" if path.startswith("api") else "", 1)
        words = path.split("/")
        if path.startswith(f"api/models/{NAME}"):
            self._api(words[4:], query)
        elif path.startswith(f"{NAME}/resolve/") and (file := self._folder(words[3]) / "/".join(words[4:])).is_file():
            self._answer(file.read_bytes(), {"ETag": f'"{_digest(file)}"', "X-Repo-Commit": self._commit(words[3])})
        else:
            self._answer(b"{}", {"X-Error-Code": "RepoNotFound" if NAME not in path else "EntryNotFound"}, 404)

    def _api(self, words: list[str], query: str) -> None:
        revision = words[1] if len(words) > 1 else "main"
        folder = self._folder(revision)
        files = sorted(file for file in folder.rglob("*") if file.is_file())
        entries = [(str(file.relative_to(folder)), file.stat().st_size, _digest(file)) for file in files]
        if words[:1] == ["tree"]:
            content = [{"type": "file", "path": name, "size": size, "oid": oid} for name, size, oid in entries]
        else:
            sizes = "blobs" in query
            siblings = [{"rfilename": name} | ({"size": size} if sizes else {}) for name, size, _ in entries]
            content = {"id": NAME, "sha": self._commit(revision), "siblings": siblings}
        self._answer(json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _commit(self, revision: str) -> str:
        return revision if revision in self.server.commits else self.server.main

    def _folder(self, revision: str) -> Path:
        return self.server.commits[self._commit(revision)]

    def _answer(self, body: bytes, headers: dict[str, str], status: int = 200) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


def _digest(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


def published(folder: Path, seed: int) -> Path:
    """A model as repositories have it: with a tokenizer, and with much that nobody needs."""
    save_small_hf("qwen3_moe", folder, seed=seed, other_sizes={"vocab_size": 296}, max_shard_size="100KB")
    save_tokenizer(folder, None)
    for name in NOT_NEEDED:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("{}")
    return folder
