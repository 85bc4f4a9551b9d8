from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from automoe.errors import DataError, LaunchError
from automoe.launch import run_dir as runs


@pytest.fixture
def started(tmp_path: Path) -> Path:
    runs.start_run(tmp_path)
    return tmp_path


def raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:
        return caught


def test_the_first_error_is_final(started: Path) -> None:
    assert runs.report_error(started, raised(ValueError("first")), 3)
    assert not runs.report_error(started, raised(RuntimeError("connection closed by peer")), 0)
    runs.write_status(started, "done", objective=1.0)
    status = runs.read_status(started)
    assert status["state"] == "failed"
    assert (status["error"]["rank"], status["error"]["message"]) == (3, "first")
    shown = runs.describe_error(status["error"])
    assert shown.startswith("rank 3: ValueError: first\n") and "raise error" in shown


def test_a_failure_while_another_rank_writes_its_status_is_final(
    started: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank fails after another has seen no error, and before that one says that the run is running."""
    replace = runs._replace

    def fail_first(path: Path, content: dict[str, Any]) -> None:
        if content["state"] == "running":
            assert runs.report_error(started, raised(ValueError("first")), 1)
        replace(path, content)

    monkeypatch.setattr(runs, "_replace", fail_first)
    runs.write_status(started, "running", pid=1)
    status = runs.read_status(started)
    assert (status["state"], status["error"]["message"]) == ("failed", "first")


def test_an_error_meant_for_a_person_is_shown_without_a_traceback(started: Path) -> None:
    runs.report_error(started, raised(DataError("a.jsonl line 3: no JSON")), 0)
    assert runs.describe_error(runs.read_status(started)["error"]) == "rank 0: DataError: a.jsonl line 3: no JSON"


def test_a_new_run_forgets_the_old_outcome_and_keeps_its_files(started: Path) -> None:
    runs.report_error(started, raised(ValueError("old")), 1)
    (started / runs.STUCK_FILE).touch()
    (started / "metrics.jsonl").write_text("{}\n")
    runs.start_run(started)
    assert runs.read_status(started)["state"] == "starting"
    runs.write_status(started, "done", objective=2.0)
    assert runs.read_status(started)["objective"] == 2.0
    assert not (started / runs.STUCK_FILE).exists() and (started / "metrics.jsonl").exists()


def test_the_lock_names_its_holder_and_ends_with_it(tmp_path: Path) -> None:
    with runs.locked(tmp_path):
        with pytest.raises(LaunchError, match=f"in use by another run, process {os.getpid()}"):
            with runs.locked(tmp_path):
                raise AssertionError("two runs in one directory")
        # A child that outlives the run must not keep its directory locked.
        command = [sys.executable, "-c", "print('ready', flush=True); input()"]
        pipe = subprocess.PIPE
        child = subprocess.Popen(command, stdin=pipe, stdout=pipe, close_fds=False)
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
    try:
        with runs.locked(tmp_path):
            pass
    finally:
        child.communicate(b"\n")
