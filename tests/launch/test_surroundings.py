"""Processes whose surroundings are odd: a server that is stopped, signals that are ignored, no home, no room for more."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from launch_command import PATIENCE_S, ROOT, TWO_RANKS, Command

from automoe.launch.run_dir import read_status

NOBODY = 54321  # a user that no file knows


def ended(command: Command, *overrides: str, **options: object) -> tuple[int, str]:
    words = [sys.executable, "-P", *command.arguments(*overrides)]
    pipe = subprocess.PIPE
    env = {"env": command.env} | options
    done = subprocess.run(words, stdout=pipe, stderr=pipe, text=True, timeout=PATIENCE_S, **env)
    assert "Traceback" not in done.stderr and "leaked" not in done.stderr, done.stderr
    return done.returncode, done.stdout + done.stderr


def test_a_stopped_server_and_an_ignored_signal_keep_no_run_from_its_end(command: Command) -> None:
    """Both at once: the parent ignores that children end, and each rank stops the server before it leaves."""
    ignore = {"preexec_fn": lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN)}
    code, said = ended(command, "recipe=recipe_stops_its_server", *TWO_RANKS, **ignore)
    assert code == 0, said
    status = read_status(command.run_dir)
    assert (status["state"], status["objective"]) == ("done", 1.5)
    command.wait_until_gone()


def as_nobody(folder: Path, processes: int | None) -> list[str]:
    """The start of a command as another user, who reads what this one reads and may have so many processes."""
    limit = [] if processes is None else [f"--nproc={processes}"]
    folder.chmod(0o777)
    caps = ["--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search"]
    user = ["setpriv", "--reuid", str(NOBODY), "--regid", str(NOBODY), "--clear-groups", *caps]
    return [*user, "prlimit", *limit] if limit else user


@pytest.mark.faults
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="another user's process needs root")
@pytest.mark.parametrize("processes", [None, 1, 2, 3, 4, 6])
def test_no_home_and_no_room_for_processes_are_said(
    command: Command, tmp_path_factory: pytest.TempPathFactory, processes: int | None
) -> None:
    tmp_path = command.run_dir.parent
    # access(2) asks as the other user, without capabilities; pytest's own folders are closed to it.
    for folder in tmp_path.parents[: len(tmp_path.relative_to(tempfile.gettempdir()).parts) - 1]:
        folder.chmod(0o755)
    env = {key: value for key, value in command.env.items() if key not in ("HOME", "XDG_CACHE_HOME")}
    if processes is not None:
        env |= {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    words = [
        *as_nobody(tmp_path, processes),
        sys.executable,
        "-P",
        *command.arguments("recipe=recipe_answers", *TWO_RANKS),
    ]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode in (1, 2) and "error: " in done.stderr, done.stdout + done.stderr
    assert "Traceback" not in done.stderr and "leaked" not in done.stderr, done.stderr
    if processes is None:
        assert "this user has no home directory. Set HOME, or XDG_CACHE_HOME" in done.stderr
    else:
        assert "no further process or thread can be started" in done.stderr
        assert f"this user may have {processes} (ulimit -u)" in done.stderr


@pytest.mark.parametrize("module", ["automoe.train", "automoe.plan"])
def test_a_working_directory_that_is_gone(module: str, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    script = f"import os, sys; os.rmdir(os.getcwd()); os.execv(sys.executable, [sys.executable, '-m', {module!r}])"
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-P", "-c", script], cwd=gone, env=env, capture_output=True, text=True)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert "error: the working directory is gone. Change to one that exists" in done.stderr
