"""Runs whose saves have no room, or whose steps come to nothing, from the command to the files they leave."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
from reliability_runs import job, uninterrupted, wait_for_hold

from automoe.launch.run_dir import read_status
from tests.support.command import read_until

pytestmark = pytest.mark.faults
UNLIMITED = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)


def test_training_goes_on_and_the_old_checkpoint_stays(straight: Path, tmp_path: Path) -> None:
    """In steps 4 and 5 the kernel lets no file of the ranks grow, logs and records included, whoever runs this test."""
    full, free = tmp_path / "full", tmp_path / "free"
    command = job(tmp_path / "run", "cp2-ep2")
    fault = f"hold:at=forward:step=4:until={full};hold:at=step_begin:step=6:until={free}"
    process = command.start(fault=fault)
    wait_for_hold(command, process, "forward, step 4")
    ranks = command.rank_pids()
    assert len(ranks) == 2
    for pid in ranks:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
    full.touch()
    out = read_until(process, " 5/6 ")
    assert "the checkpoint of step 4 was not saved: File too large" in " ".join(out.split())
    assert command.checkpoints() == ["LATEST=step-2", "step-2"]
    assert [entry["step"] for entry in command.record()] == [1, 2, 3]
    for pid in ranks:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, UNLIMITED)
    free.touch()
    _, err = process.communicate()
    assert process.returncode == 0, err
    assert command.record() == uninterrupted(straight, "cp2-ep2")
    assert command.checkpoints() == ["LATEST=step-6", "step-2", "step-6"]


def test_a_run_whose_steps_were_all_skipped_has_failed(tmp_path: Path) -> None:
    """Its weights are finite, and so is its validation, but no gradient is."""
    wild = ("model.initializer_range=1e30", "train.steps=2", "train.val_every=2", "checkpoint.export_hf=true")
    command = job(tmp_path / "run", "cp2-ep2", *wild)
    code, _, err = command.run()
    assert code == 1 and "2 steps were skipped, and none was taken, the last step 2" in err
    status = read_status(command.run_dir)
    assert (status["state"], status["error"]["type"]) == ("failed", "AutomoeError")
    assert command.checkpoints() == [] and not (command.run_dir / "hf").exists()
