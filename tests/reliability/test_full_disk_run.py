"""A disk that has no room for one save of a run, from the command to the files it leaves."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
from reliability_runs import job, uninterrupted, wait_for_hold

pytestmark = pytest.mark.faults
UNLIMITED = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)


def test_training_goes_on_and_the_old_checkpoint_stays(straight: Path, tmp_path: Path) -> None:
    """The kernel refuses ranks files of more than 20 kB while they save step 4, whoever runs this test."""
    full, free = tmp_path / "full", tmp_path / "free"
    command = job(tmp_path / "run", "cp2-ep2")
    fault = f"hold:at=forward:step=4:until={full};hold:at=forward:step=5:until={free}"
    process = command.start(fault=fault)
    wait_for_hold(command, process, "forward, step 4")
    ranks = command.rank_pids()
    assert len(ranks) == 2
    for pid in ranks:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    full.touch()
    wait_for_hold(command, process, "forward, step 5")
    assert command.checkpoints() == ["LATEST=step-2", "step-2"]
    for pid in ranks:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, UNLIMITED)
    free.touch()
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert "the checkpoint of step 4 was not saved: File too large" in " ".join(out.split())
    assert command.record() == uninterrupted(straight, "cp2-ep2")
    assert command.checkpoints() == ["LATEST=step-6", "step-2", "step-6"]
