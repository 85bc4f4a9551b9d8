"""What a cache entry of tokenised text depends on: each part alone makes another entry, and nothing else does."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from automoe.config.data_schema import ChatConfig, DataConfig
from automoe.data import prepare
from automoe.data.chat_template import ChatTemplate
from automoe.data.corpora import find_files, reader_digest
from automoe.data.tokenizer import ByteTokenizer, load_tokenizer
from tests.support.chat import save_tokenizer

LINE = json.dumps({"messages": [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "one"}]}) + "\n"
LARGE = 5_000  # lines of a file whose middle is in neither of the parts that are hashed


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.jsonl").write_text(LINE * LARGE)
    (tmp_path / "text" / "b.jsonl").write_text(LINE)
    save_tokenizer(tmp_path / "tokenizer", "chatml")
    return tmp_path


def entry(folder: Path, chat: ChatConfig | None = None, **data: object) -> str:
    """The name of the entry, from all files read anew."""
    settings = DataConfig(kind="chat", path=str(folder / "text"), chat=chat or ChatConfig())
    settings = replace(settings, **data)
    tokenizer = str(folder / "tokenizer")
    template = ChatTemplate(settings.chat, tokenizer) if settings.is_chat else None
    return prepare._cache_key(settings, find_files(settings), load_tokenizer(tokenizer), template)


def rewrite(path: Path, change: Callable[[bytes], bytes]) -> None:
    """Change a file's content in place, with the time of modification that it had."""
    before = path.stat()
    while path.stat().st_ctime_ns == before.st_ctime_ns:  # until the clock of the file system has moved on
        path.write_bytes(change(path.read_bytes()))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        change = bytes
    assert path.stat().st_mtime_ns == before.st_mtime_ns and path.stat().st_size == before.st_size


def in_json(name: str, **values: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "tokenizer" / name
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return change


def at(where: int) -> Callable[[Path], None]:
    """Another digit in line ``where`` of the large file; its size and time of modification stay."""

    def swap(raw: bytes) -> bytes:
        lines = raw.splitlines(True)
        lines[where] = lines[where].replace(b"1?", b"2?")
        return b"".join(lines)

    return lambda folder: rewrite(folder / "text" / "a.jsonl", swap)


CUT = {"direction": "Right", "max_length": 512, "strategy": "LongestFirst", "stride": 0}
CHANGES: dict[str, Callable[[Path], object]] = {
    "a file's name": lambda folder: (folder / "text" / "a.jsonl").rename(folder / "text" / "c.jsonl"),
    "a file more": lambda folder: shutil.copy2(folder / "text" / "b.jsonl", folder / "text" / "c.jsonl"),
    "a file less": lambda folder: (folder / "text" / "b.jsonl").unlink(),
    "a line more": lambda folder: (folder / "text" / "b.jsonl").write_text(LINE * 2),
    "the first line": at(0),
    "the middle": at(LARGE // 2),
    "the last line": at(LARGE - 1),
    "the time of modification": lambda folder: os.utime(folder / "text" / "b.jsonl", ns=(1, 1)),
    "tokenizer.json": in_json("tokenizer.json", truncation=CUT),
    "the end of text": in_json("tokenizer_config.json", eos_token="<|im_end|>"),
    "special tokens": in_json("tokenizer_config.json", bos_token="<|im_start|>"),
    "the chat template": lambda folder: save_tokenizer(folder / "tokenizer", "opens"),
}
SETTINGS = {
    "max_bytes": 100,
    "kind": "preference",
    "chat.keys": {"messages": "said"},
    "chat.roles": {"human": "user"},
    "chat.format": "sharegpt",
    "chat.turns": "last",
    "chat.template_args": {"system": "x"},
}
FREE = {"val_fraction": 0.5, "on_long": "error", "document_mask": False, "chat.pack": False}


def with_setting(key: str, value: object) -> dict[str, object]:
    first, _, name = key.rpartition(".")
    return {"chat": ChatConfig(**{name: value})} if first else {name: value}


@pytest.mark.parametrize("name", CHANGES)
def test_each_part_of_the_files_and_the_tokenizer(name: str, folder: Path) -> None:
    before = entry(folder)
    assert entry(folder) == before
    CHANGES[name](folder)
    assert entry(folder) != before


def test_each_setting_and_version_that_changes_tokens(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {"plain": entry(folder)}
    seen |= {key: entry(folder, **with_setting(key, value)) for key, value in SETTINGS.items()}
    assert [key for key, value in FREE.items() if entry(folder, **with_setting(key, value)) != seen["plain"]] == []
    lines = {"kind": "jsonl", "text_key": "messages"}
    seen |= {"lines": entry(folder, **lines), "text_key": entry(folder, **lines | {"text_key": "said"})}
    installed = prepare.version
    for package in ("tokenizers", "transformers"):
        monkeypatch.setattr(prepare, "version", lambda name, package=package: installed(name) + "x" * (name == package))
        seen[package] = entry(folder)
    monkeypatch.setattr(prepare, "version", installed)
    monkeypatch.setattr(prepare, "FORMAT", prepare.FORMAT + 1)
    seen["format"] = entry(folder)
    assert len(set(seen.values())) == len(seen)


def test_the_code_of_a_reader_from_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "reader.py"
    digests = []
    for code in ("def read(path, key): yield 1, 'one'\n", "def read(path, key): yield 1, 'two'\n"):
        file.write_text(code)
        space: dict[str, object] = {}
        exec(compile(code, file, "exec"), space)
        source = SimpleNamespace(read=space["read"])
        monkeypatch.setattr("automoe.data.corpora.registered", lambda key, source=source: {"own": source})
        digests.append(reader_digest("own"))
    assert digests[0] != digests[1]


def test_another_middle_is_read_again(folder: Path) -> None:
    """Size and time of modification are what they were: the tokens are the new ones all the same."""
    data = DataConfig(kind="text", path=str(folder / "text" / "a.jsonl"))
    cache = folder / "cache"
    before = bytes(prepare.open_corpus(data, ByteTokenizer(), cache).tokens.astype("uint8"))
    at(LARGE // 2)(folder)
    after = bytes(prepare.open_corpus(data, ByteTokenizer(), cache).tokens.astype("uint8"))
    assert after != before and after[:-1] == (folder / "text" / "a.jsonl").read_bytes()
