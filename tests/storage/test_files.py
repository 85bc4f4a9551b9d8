"""Files of the program's own state: opened only where they are files, and named where the disk is full."""

from __future__ import annotations

import base64
import errno
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from automoe.checkpoint.folder import check_writable, promised_step
from automoe.checkpoint.manifest import read_manifest
from automoe.comm.agreement import Ranks
from automoe.config.frozen import save_config
from automoe.config.schema import Config
from automoe.errors import AutomoeError, CheckpointError, DataError, in_words
from automoe.hf.headers import read_headers
from automoe.launch import run_dir as runs
from automoe.observe.metrics import AppendLog, MetricsLog, read_metrics
from automoe.observe.trackers import IDS_FILE, make_trackers
from automoe.run.reference import _read
from automoe.storage.cache import open_entry
from automoe.storage.files import checksum, explained, named, read_file, replace_durably, replace_file, write_durably
from automoe.storage.foreign import read_bytes
from automoe.storage.guarded import guarded
from automoe.storage.sealed import read_json, replace_json


def reads_a_cache(path: Path) -> object:
    entry = path.with_name("entry")
    entry.mkdir()
    path.rename(entry / "meta.json")
    return open_entry(entry, lambda folder: {})


def in_the_way(name: str) -> Callable[[Path], object]:
    """A run's start in whose directory this name is taken."""

    def start(path: Path) -> object:
        run_dir = path.with_name("run")
        (run_dir / name).parent.mkdir(parents=True)
        path.rename(run_dir / name)
        return runs.start_run(run_dir)

    return start


def ids_of(path: Path) -> object:
    path.rename(path.with_name(IDS_FILE))
    assert make_trackers(Config(), path.parent, resume_step=1).places == {}
    raise OSError(errno.EINVAL, "it is not read, and trackers start anew", str(path))


OPENED: dict[str, Callable[[Path], object]] = {
    "any": read_file,
    "sealed": read_json,
    "checksum": checksum,
    "lines": read_metrics.__globals__["read_jsonl"],
    "record": lambda path: AppendLog(path, 0, print),
    "durably": lambda path: write_durably(path, "x"),
    "reference": lambda path: _read(path, {}, 1),
    "cache": reads_a_cache,
    "latest": lambda path: promised_step(path.rename(path.with_name("LATEST")).parent),
    "manifest": lambda path: read_manifest(path.rename(path.with_name("manifest.json")).parent),
    "configuration": lambda path: runs.read_config(path.rename(path.with_name("config.yaml")).parent),
    "status": in_the_way("status.json"),
    "log": in_the_way("logs/rank3.log"),
    "trackers": ids_of,
}


@pytest.mark.parametrize("what", ["state", "settings", "lines", "headers"])
def test_a_read_that_fails_is_tried_again_and_names_its_file(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The system names no file where reading fails, only where opening does."""
    monkeypatch.setattr("automoe.errors._WAITS_S", (0.0, 0.0, 0.0))
    path = tmp_path / ("model.safetensors" if what == "headers" else "some.json")
    path.write_bytes(b"\2\0\0\0\0\0\0\0{}" if what == "headers" else b"")
    read = {
        "state": lambda: read_file(path),
        "settings": lambda: read_bytes(tmp_path, path.name),
        "lines": lambda: AppendLog(path, 0, print),
        "headers": lambda: read_headers(tmp_path),
    }[what]
    open_stream, left = os.fdopen, [1]

    def fails(handle: int, *options: Any, **others: Any) -> Any:
        if not left:
            return open_stream(handle, *options, **others)
        left.pop()
        os.close(handle)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("os.fdopen", fails)
    read()
    assert capsys.readouterr().out == f"warning: {path}: Input/output error; trying again in 0.0 s\n"
    left.extend([1] * 4)
    with pytest.raises((OSError, CheckpointError)) as refused:
        read()
    assert str(path) in str(refused.value) and "Input/output error" in str(refused.value)


@pytest.mark.parametrize("kind", ["a FIFO", "a device"])
@pytest.mark.parametrize("what", OPENED)
def test_what_is_no_file_is_refused_at_once(what: str, kind: str, tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    if kind == "a FIFO":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises((OSError, AutomoeError)) as refused:
        OPENED[what](path)
    said = str(in_words(refused.value))
    assert f"{kind}, where a file belongs" in said or "it is not read" in said
    assert isinstance(in_words(refused.value), AutomoeError)


def test_a_fifo_is_written_over_where_a_file_is_replaced(tmp_path: Path) -> None:
    for write in (replace_file, replace_durably):
        os.mkfifo(tmp_path / "status.json")
        write(tmp_path / "status.json", "new")
        assert (tmp_path / "status.json").read_text() == "new"
        (tmp_path / "status.json").unlink()
    for name in ("metrics.jsonl", "expert_load.jsonl"):
        os.mkfifo(tmp_path / name)
        with pytest.raises(AutomoeError, match=f"{name} cannot be opened: it is a FIFO, where a file belongs"):
            MetricsLog(tmp_path, 0)
        (tmp_path / name).unlink()


def test_a_run_that_finds_its_disk_full_keeps_its_folder(tmp_path: Path) -> None:
    """A restart under another run_dir, or without saves, would lose the checkpoints that are there."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(CheckpointError) as full:
            check_writable(Ranks(), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    said = str(full.value)
    assert said.startswith(f"{tmp_path} cannot be written: File too large") and said.endswith(". Make room there")
    for number, remedy in ((errno.ENOSPC, "Make room there"), (errno.EDQUOT, "Make room there"), (errno.EROFS, "Move")):
        with pytest.raises(CheckpointError, match=rf"{os.strerror(number)}\. {remedy}$"), explained(tmp_path, "Move"):
            raise OSError(number, os.strerror(number), str(tmp_path))


def test_a_full_disk_is_told_with_the_path_and_the_bytes(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    for number in (errno.ENOSPC, errno.EDQUOT):
        with pytest.raises(OSError) as full, named(path, 12_345):
            raise OSError(number, os.strerror(number))
        said = str(in_words(full.value))
        assert said.startswith(f"{path}: {os.strerror(number)} (12,345 bytes to write, ")
        assert " bytes and " in said and said.endswith(" files free). Make room there")
    with pytest.raises(OSError) as broken, named(path, 1):
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    assert str(in_words(broken.value)) == f"{path}: Input/output error. Check that disk, or that file"
    other = KeyError("x")
    assert in_words(other) is other


def test_records_that_have_no_room_at_the_end_are_no_success(tmp_path: Path) -> None:
    log = AppendLog(tmp_path / "metrics.jsonl", None, [].append)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        log.append({"step": 1, "loss": 2.0})
        with pytest.raises(OSError) as lost:
            log.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "metrics.jsonl: File too large (" in str(in_words(lost.value))


def test_a_status_is_written_over_where_there_is_no_more_room(tmp_path: Path) -> None:
    runs.start_run(tmp_path)
    save_config(Config(), tmp_path)
    report = runs.error_report(ValueError("the seventh seal"), 1) | {"traceback": ["line"] * 9}

    def full(path: Path, content: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "replace_json", full)
        runs.write_status(tmp_path, "failed", error=report)
        status = runs.read_status(tmp_path)
        assert status["state"] == "failed" and status["error"]["message"] == "the seventh seal"
        with pytest.raises(OSError, match="No space left"):
            runs.write_status(tmp_path, "failed", error=report | {"message": "x" * 100_000})
        assert runs.read_status(tmp_path) == status, "too long for the room that it has"


def test_the_cache_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "entry").mkdir()
    os.mkfifo(tmp_path / "entry" / "meta.json")
    with pytest.raises(DataError, match=r"meta\.json: cannot be read \(it is a FIFO, where a file belongs\)"):
        open_entry(tmp_path / "entry", lambda folder: {})


def test_a_reference_of_an_earlier_version_belongs_to_the_same_data(tmp_path: Path) -> None:
    """Facts that it did not name are no difference, and a reordered source of a later one is."""
    table = base64.b64encode(np.zeros((1, 2)).tobytes()).decode()
    now = {"data": {"a: files": 1, "data.sources": ["a", "b"]}, "weights": "crc32:0"}
    path = tmp_path / "reference.json"
    for saved, same in (({"a: files": 1}, True), ({"a: files": 1, "data.sources": ["b", "a"]}, False), ({}, False)):
        replace_json(path, {"belongs": now | {"data": saved}, "log_probs": table})
        found = _read(path, now, 1)
        assert isinstance(found, np.ndarray) if same else found == "it belongs to other data"


def test_without_proc_the_memory_of_a_child_is_not_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS and in sandboxes: the work is done all the same."""

    def absent(path: Path) -> str:
        raise FileNotFoundError(2, "No such file or directory", str(path))

    before = resource.getrlimit(resource.RLIMIT_DATA)
    assert guarded("work", lambda: resource.getrlimit(resource.RLIMIT_DATA)) != before
    monkeypatch.setattr(Path, "read_text", absent)
    assert guarded("work", lambda: resource.getrlimit(resource.RLIMIT_DATA)) == before
