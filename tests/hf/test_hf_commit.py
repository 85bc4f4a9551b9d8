"""An export gets its name in one step: killed at any moment, or two of them at once, the older one or the new one is there."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from automoe.comm.agreement import Ranks
from automoe.errors import CheckpointError
from automoe.hf import folder as hf_folder
from automoe.hf.folder import new_folder
from automoe.storage import folder

ALONE = Ranks(alone=True)
EXPORT_FOREVER = """
import sys
from pathlib import Path
from automoe.comm.agreement import Ranks
from automoe.hf.folder import new_folder

for number in range(100_000):
    with new_folder(Path(sys.argv[1]), True, Ranks(alone=True)) as working:
        (working / "config.json").write_text(str(number))
    print(number, flush=True)
"""


def export(path: Path, text: str, overwrite: bool = True) -> None:
    with new_folder(path, overwrite, ALONE) as working:
        (working / "config.json").write_text(text)


def left(path: Path) -> list[str]:
    return sorted(os.listdir(path.parent))


def test_two_names_change_places_in_one_step(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    assert folder.exchange(tmp_path / "one", tmp_path / "other"), "tests run on a file system that knows it"
    assert os.listdir(tmp_path / "one") == ["other"] and os.listdir(tmp_path / "other") == ["one"]
    with pytest.raises(FileNotFoundError):
        folder.exchange(tmp_path / "one", tmp_path / "nowhere")


@pytest.mark.faults
def test_the_target_is_there_at_every_moment_and_after_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "out"
    export(path, "first")
    exports = subprocess.Popen([sys.executable, "-c", EXPORT_FOREVER, str(path)], stdout=subprocess.PIPE)
    assert exports.stdout is not None
    exports.stdout.readline()
    end, seen = time.monotonic() + 0.5, set()
    while time.monotonic() < end:
        seen.add((path / "config.json").read_text())
    exports.send_signal(signal.SIGKILL)
    exports.communicate()
    assert len(seen) > 3 and "" not in seen
    assert (path / "config.json").read_text().isdigit()
    export(path, "last")
    assert (path / "config.json").read_text() == "last" and left(path) == ["out"]


class Killed(BaseException):
    pass


@pytest.mark.parametrize("overwrite", [True, False])
def test_killed_between_two_renames_where_no_exchange_is_known(
    overwrite: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out"
    export(path, "older")
    with monkeypatch.context() as patch:
        patch.setattr(folder, "exchange", lambda one, other: False)
        export(path, "old")
        assert (path / "config.json").read_text() == "old" and left(path) == ["out"]
        rename = os.rename

        def killed_after(source: Path, target: Path) -> None:
            rename(source, target)
            raise Killed

        patch.setattr(os, "rename", killed_after)
        for module in (folder, hf_folder):  # nothing runs after a kill
            patch.setattr(module, "remove_folder", lambda path: None)
        with pytest.raises(Killed):
            export(path, "new")
    assert not path.exists()
    if overwrite:
        export(path, "newest")
        assert (path / "config.json").read_text() == "newest"
    else:
        with pytest.raises(CheckpointError, match="exists"):
            export(path, "newest", overwrite=False)
        assert (path / "config.json").read_text() == "old"
    assert ".out.old" not in left(path)


def test_an_exchange_that_fails_leaves_the_older_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, rename = tmp_path / "out", os.rename
    export(path, "old")

    def refuse(source: Path, target: Path) -> None:
        if source.name == ".out.tmp":
            raise OSError(28, "No space left on device", str(target))
        rename(source, target)

    monkeypatch.setattr(folder, "exchange", lambda one, other: False)
    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(CheckpointError, match="No space left"):
        export(path, "new")
    assert (path / "config.json").read_text() == "old" and left(path) == ["out"]


def test_a_second_export_to_the_same_name_is_refused_and_takes_nothing_away(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with new_folder(path, True, ALONE) as working:
        (working / "config.json").write_text("first")
        with pytest.raises(CheckpointError, match="out is being written by another export"):
            export(path, "second")
        assert (working / "config.json").read_text() == "first"
    assert (path / "config.json").read_text() == "first" and left(path) == ["out"]


def test_what_a_killed_proof_of_a_quantized_export_left_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "out[1]"
    copy = tmp_path / ".out[1].tmp" / ".float32.x3k"
    copy.mkdir(parents=True)
    (copy / "model.safetensors").write_text("float32")
    export(path, "new")
    assert left(path) == ["out[1]"] and not (path / copy.name).exists()


def test_a_target_that_came_meanwhile_stays(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with pytest.raises(CheckpointError, match="exists"), new_folder(path, False, ALONE):
        path.mkdir()
        (path / "config.json").write_text("theirs")
    assert (path / "config.json").read_text() == "theirs" and left(path) == ["out"]


def test_a_link_in_place_of_the_lock_or_the_working_folder_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.tex").write_text("...")
    path = tmp_path / "out"
    (tmp_path / ".out.tmp").symlink_to(tmp_path / "precious")
    export(path, "new")
    (tmp_path / ".out.lock").symlink_to(tmp_path / "precious" / "thesis.tex")
    with pytest.raises(CheckpointError, match=r"\.out\.lock: a lock file that is a link is not followed"):
        export(path, "newer")
    assert (tmp_path / "precious" / "thesis.tex").read_text() == "..."


def test_a_disk_that_fails_after_the_exchange_undoes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What renames is not tried again: the second exchange would put the older export back."""
    path = tmp_path / "out"
    path.mkdir()
    (path / "config.json").write_text("old")
    failed: list[Path] = []

    def flush(flushed: Path) -> None:
        if flushed == tmp_path and not failed:
            failed.append(flushed)
            raise OSError(errno.ESTALE, "Stale file handle", str(flushed))

    monkeypatch.setattr("automoe.storage.folder.flush", flush)
    with pytest.raises(CheckpointError, match="Stale file handle"), new_folder(path, True, Ranks(alone=True)) as folder:
        (folder / "config.json").write_text("new")
    assert failed and (path / "config.json").read_text() == "new"
