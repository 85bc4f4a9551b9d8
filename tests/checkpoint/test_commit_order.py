"""What is on the disk at each moment of a save: every byte flushed before a name makes it a checkpoint.

A kill of the process does not show a missing flush, since the kernel keeps what was written; only a machine that loses
power does. So the calls themselves are recorded, of all ranks in one file, and judged.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import xxhash
from checkpoint_runs import build_state, config, open_store

from automoe.checkpoint.manifest import damage
from automoe.config.schema import Config
from automoe.verify.pool import RankPool

Event = tuple[str, str, str]  # what was done, to which path, and its content's digest or its new path


def content(path: Path) -> str:
    """A digest of a file, or of the names in a directory."""
    if path.is_dir():
        return ",".join(sorted(os.listdir(path)))
    return hashlib.sha256(path.read_bytes()).hexdigest()


@contextmanager
def recorded(log: Path) -> Iterator[None]:
    """Every flush, rename and deletion of this process becomes a line of ``log``, in the order of their ends."""

    def note(*event: str) -> None:
        with open(log, "a") as file:  # short lines: appended whole, whichever rank is faster
            file.write(json.dumps(event) + "\n")

    def fsync(descriptor: int, original: Any = os.fsync) -> None:
        original(descriptor)
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        note("flush", str(path), content(path))

    def moving(original: Any) -> Any:
        def move(source: Any, target: Any, **options: Any) -> None:
            before = {str(path): content(path) for path in Path(source).glob("*")} if os.path.isdir(source) else {}
            before[str(source)] = content(Path(source))
            original(source, target, **options)
            note("move", str(source), str(target))
            note("moved content", json.dumps(before), "")

        return move

    def rmtree(path: Any, *args: Any, original: Any = shutil.rmtree, **options: Any) -> None:
        note("delete", str(path), "")
        original(path, *args, **options)

    with (
        mock.patch.object(os, "fsync", fsync),
        mock.patch.object(os, "rename", moving(os.rename)),
        mock.patch.object(os, "replace", moving(os.replace)),
        mock.patch.object(shutil, "rmtree", rmtree),
    ):
        yield


def save_twice(settings: Config, run_dir: Path, log: Path) -> None:
    """Steps 1 and 2, of which one is kept."""
    state, _, _ = build_state(settings, run_dir)
    store = open_store(settings, run_dir)
    with recorded(log):
        for step in (1, 2):
            state.step = step
            store.save(state)
            store.poll(wait=True)


@pytest.fixture(scope="module", params=[False, True], ids=["in the loop", "in the background"])
def events(ranks: RankPool, text: Path, tmp_path_factory: pytest.TempPathFactory, request) -> tuple[Path, list[Event]]:
    """The folder of checkpoints, and what two ranks did to it."""
    folder = tmp_path_factory.mktemp("order")
    settings = config(text, keep=1, async_save=request.param, dp_shard=2)
    ranks.run(save_twice, 2, settings, folder / "run", folder / "log")
    done = [tuple(json.loads(line)) for line in (folder / "log").read_text().splitlines()]
    return folder / "run" / "checkpoints", done


def place(events: list[Event], kind: str, path: Path, other: str | None = None, after: int = 0) -> int:
    """Index of the first such event at or behind ``after``; fails if there is none."""
    for i in range(after, len(events)):
        if events[i][:2] == (kind, str(path)) and other in (None, events[i][2]):
            return i
    raise AssertionError(f"no {kind} of {path} behind {events[max(after - 1, 0)]}")


@pytest.mark.one_in(4)
@pytest.mark.parametrize("step", [1, 2])
def test_everything_is_flushed_as_it_is_before_a_name_commits_it(events: tuple[Path, list[Event]], step: int) -> None:
    folder, done = events
    temporary, final = folder / f".tmp-step-{step}", folder / f"step-{step}"
    commit = place(done, "move", temporary, str(final))
    committed = json.loads(done[commit + 1][1])  # path -> content, at the moment of the rename
    files = [path for path in committed if path != str(temporary)]
    assert len(files) >= 4, "shards of two ranks, their index and the manifest"
    flushed = {path: digest for kind, path, digest in done[:commit] if kind == "flush"}
    # A file may have been flushed under another name in the same directory: what counts is the content.
    contents = {digest for path, digest in flushed.items() if Path(path).parent == temporary}
    for path in files:
        assert committed[path] in contents, f"{path} is not on the disk as it is"
    assert flushed.get(str(temporary)) == committed[str(temporary)], "the directory's names are not on the disk"


@pytest.mark.parametrize("step", [1, 2])
def test_each_name_is_on_the_disk_before_the_next_says_something_of_it(
    events: tuple[Path, list[Event]], step: int
) -> None:
    """Rename, flush of the folder, LATEST's text flushed, LATEST in place, flush of the folder; then deletions."""
    folder, done = events
    commit = place(done, "move", folder / f".tmp-step-{step}", str(folder / f"step-{step}"))
    names = place(done, "flush", folder, after=commit)
    assert f"step-{step}" in done[names][2].split(",")
    latest = next(i for i in range(commit, len(done)) if done[i][0] == "move" and done[i][2] == str(folder / "LATEST"))
    digest = hashlib.sha256(f"step-{step}\n".encode()).hexdigest()
    written = place(done, "flush", Path(done[latest][1]), digest)
    assert commit < names < latest and written < latest
    there = place(done, "flush", folder, after=latest)
    assert "LATEST" in done[there][2].split(",")
    between = [event for event in done[commit + 2 : there] if event[0] in ("move", "delete")]
    assert between == [done[latest]], "nothing else is moved or deleted meanwhile"


def test_an_old_step_goes_after_the_new_one_is_named_and_never_under_its_own_name(
    events: tuple[Path, list[Event]],
) -> None:
    folder, done = events
    named = max(i for i, event in enumerate(done) if event[0] == "move" and event[2] == str(folder / "LATEST"))
    there = place(done, "flush", folder, after=named)
    gone = [i for i, event in enumerate(done) if event[0] == "move" and event[1] == str(folder / "step-1")]
    deleted = [i for i, event in enumerate(done) if event[0] == "delete" and "step-1" in event[1] and i > there]
    assert len(gone) == 1 and there < gone[0] < deleted[0]
    assert done[deleted[0]][1] == done[gone[0]][2] != str(folder / "step-1")
    assert sorted(path.name for path in folder.iterdir()) == ["LATEST", "step-2"]


def test_the_manifest_lists_every_file_with_its_size_and_hash(events: tuple[Path, list[Event]]) -> None:
    folder, _ = events
    step = folder / "step-2"
    listed = json.loads((step / "manifest.json").read_text())["files"]
    files = [path for path in step.iterdir() if path.name != "manifest.json"]
    assert sorted(listed) == sorted(path.name for path in files) and len(files) >= 3
    for path in files:
        raw = path.read_bytes()
        assert listed[path.name] == {"bytes": len(raw), "xxh128": xxhash.xxh3_128(raw).hexdigest()}


def test_every_change_of_a_file_is_damage_and_of_its_size_even_unread(
    events: tuple[Path, list[Event]], tmp_path: Path
) -> None:
    changes = {
        "shorter": lambda raw: raw[:-1],
        "longer": lambda raw: raw + b"\0",
        "empty": lambda raw: b"",
        "other": lambda raw: raw[:-1] + bytes([raw[-1] ^ 1]),
        "edited": lambda raw: raw.replace(b'"seed": 0', b'"seed": 1'),  # the manifest, which stays readable
    }
    step = shutil.copytree(events[0] / "step-2", tmp_path / "step-2")
    assert damage(step) is None and damage(step, content=False) is None
    for path in sorted(step.iterdir()):
        raw = path.read_bytes()
        for kind, change in changes.items():
            if change(raw) == raw:
                assert kind == "edited" and path.name != "manifest.json"
                continue
            path.write_bytes(change(raw))
            assert damage(step) is not None, (path.name, kind)
            listed = path.name != "manifest.json"
            assert not listed or (damage(step, content=False) is None) == (kind == "other"), (path.name, kind)
        path.unlink()
        assert damage(step) is not None and damage(step, content=False) is not None
        path.write_bytes(raw)
    assert damage(step) is None
