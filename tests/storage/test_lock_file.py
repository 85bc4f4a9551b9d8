"""Locks: who has one is named, a wait for it ends, and a file system without any is said."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from automoe.errors import DataError
from automoe.storage import lock_file
from automoe.storage.cache import open_entry
from automoe.storage.lock_file import take_lock

HOLDS = "import sys; from pathlib import Path; from automoe.storage.lock_file import take_lock\n"
HOLDS += "take_lock(Path(sys.argv[1])); print('held', flush=True); input()"


@pytest.fixture
def holder(tmp_path: Path) -> subprocess.Popen[bytes]:
    """An idle process that holds ``entry.lock``."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", HOLDS, str(tmp_path / "entry.lock")]
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe)
    assert process.stdout is not None and process.stdout.readline() == b"held\n"
    yield process
    process.kill()
    process.communicate()


def fill(folder: Path) -> dict[str, int]:
    (folder / "tokens.bin").write_bytes(b"x")
    return {"tokens": 1}


def test_an_idle_process_that_holds_the_cache_is_named_and_given_up(
    holder: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lock_file, "_IDLE_S", 0.3)
    monkeypatch.setattr(lock_file, "_LOOK_EVERY_S", 0.05)
    with pytest.raises(DataError) as given_up:
        open_entry(tmp_path / "entry", fill)
    assert f"process {holder.pid} holds {tmp_path / 'entry.lock'} and does nothing: end that process" in str(
        given_up.value
    )
    assert "XDG_CACHE_HOME" in str(given_up.value)
    assert f"waiting for process {holder.pid}, which holds {tmp_path / 'entry.lock'}" in capfd.readouterr().err


def test_what_a_killed_writer_of_this_machine_left_is_removed(tmp_path: Path) -> None:
    for left in (f"entry.{socket.gethostname()}.x7", "entry.another-machine.x7", "entry2.x7"):
        (tmp_path / left).mkdir()
        (tmp_path / left / "tokens.bin").write_bytes(b"half")
    assert open_entry(tmp_path / "entry", fill) == {"tokens": 1}
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"entry", "entry.lock", "entry.another-machine.x7", "entry2.x7"}


def test_a_process_that_writes_is_waited_for(
    holder: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock_file, "_IDLE_S", 1.0)
    monkeypatch.setattr(lock_file, "_LOOK_EVERY_S", 0.05)
    written = tmp_path / "entry.abc" / "new" / "tokens.bin"
    written.parent.mkdir(parents=True)

    def write() -> None:
        for size in range(8):
            written.write_bytes(bytes(size))
            time.sleep(0.25)
        holder.kill()

    writes = threading.Thread(target=write)
    writes.start()
    assert open_entry(tmp_path / "entry", fill) == {"tokens": 1}
    writes.join()


def test_a_lock_with_another_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("...")
    os.link(tmp_path / "thesis.tex", tmp_path / ".lock")
    with pytest.raises(OSError, match="is a link") as refused:
        take_lock(tmp_path / ".lock")
    assert refused.value.filename == str(tmp_path / ".lock") and (tmp_path / "thesis.tex").read_text() == "..."


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two starts of this machine keep clear of one another by a file in its temporary folder, and it is said."""
    here = tmp_path / "tmp"
    here.mkdir()
    monkeypatch.setattr(lock_file.tempfile, "gettempdir", lambda: str(here))

    def flock(handle: int, how: int, original=fcntl.flock) -> None:
        if not os.readlink(f"/proc/self/fd/{handle}").startswith(f"{here}/"):
            raise OSError(number, os.strerror(number))
        original(handle, how)

    monkeypatch.setattr(lock_file.fcntl, "flock", flock)
    opened = os.listdir("/proc/self/fd")
    first = take_lock(tmp_path / ".lock")
    assert f"{tmp_path / '.lock'}: its file system has no locks ({os.strerror(number)})" in capsys.readouterr().err
    with pytest.raises(BlockingIOError) as held:
        take_lock(tmp_path / ".lock")
    assert held.value.strerror == str(os.getpid()) and capsys.readouterr().err == "", "said once"
    other = take_lock(tmp_path / "other.lock")
    os.close(first)
    os.close(take_lock(tmp_path / ".lock"))
    os.close(other)
    assert os.listdir("/proc/self/fd") == opened


def test_a_lock_whose_file_was_removed_protects_nothing(tmp_path: Path) -> None:
    first = take_lock(tmp_path / ".lock")
    (tmp_path / ".lock").unlink()
    second = take_lock(tmp_path / ".lock")
    assert (tmp_path / ".lock").read_text() == f"{os.getpid()}\n"
    os.close(first)
    os.close(second)
