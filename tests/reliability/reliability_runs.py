"""One small job on three meshes, and its uninterrupted run that every other must equal to the bit."""

from __future__ import annotations

import functools
import subprocess
import time
from pathlib import Path
from typing import Any

from tests.support.command import MESHES as MESHES
from tests.support.command import PATIENCE_S, TINY, TrainCommand

SIX_STEPS = ("train.steps=6", "checkpoint.every=2")


def job(run_dir: Path, mesh: str, *overrides: str) -> TrainCommand:
    """A run of six steps that saves every second one."""
    cache = {"XDG_CACHE_HOME": str(run_dir.parent / "cache")}
    return TrainCommand(run_dir, (*TINY, *MESHES[mesh], *SIX_STEPS, *overrides), cache)


@functools.cache
def uninterrupted(folder: Path, mesh: str) -> list[dict[str, Any]]:
    """The record of the job without a fault; run once a session."""
    command = job(folder / mesh, mesh)
    code, _, err = command.run()
    assert code == 0, err
    record = command.record()
    assert [entry["step"] for entry in record] == [1, 2, 3, 4, 5, 6]
    assert record[-1]["loss"] < record[0]["loss"] and record[0]["expert_load"] is not None
    return record


def wait_for_hold(command: TrainCommand, process: subprocess.Popen[str], at: str) -> None:
    """Wait until the first rank stands at the point ``at``, e.g. ``forward, step 3``."""
    deadline = time.monotonic() + PATIENCE_S
    while not any(f"at {at}" in log.read_text() for log in (command.run_dir / "logs").glob("rank*.log")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"nobody got to {at}"
        time.sleep(0.05)
