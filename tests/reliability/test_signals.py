"""Asked to stop in the middle of a step and of a save: what is begun is finished, and the next run goes on from it."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from reliability_runs import job, uninterrupted, wait_for_hold

from automoe.launch.run_dir import read_status
from tests.support.command import kill

pytestmark = pytest.mark.faults
MESH = "cp2-ep2"


def test_sigterm_in_a_step_and_again_in_the_save_that_follows(straight: Path, tmp_path: Path) -> None:
    """Sent to every process of the run at once, as a scheduler does: nobody may end ranks that save."""
    in_step, in_save = tmp_path / "in_step", tmp_path / "in_save"
    fault = f"hold:at=forward:step=3:until={in_step};hold:rank=1:at=shard_written:step=3:until={in_save}"
    command = job(tmp_path / "run", MESH)
    process = command.start(fault=fault)
    for point, go_on in (("forward, step 3", in_step), ("shard_written, step 3", in_save)):
        wait_for_hold(command, process, point)
        for pid in command.pids():
            kill(pid, signal.SIGTERM)
        go_on.touch()
    _, err = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM, err
    assert "SIGTERM: the ranks finish their step and save" in err and "error" not in err
    assert read_status(command.run_dir)["state"] == "preempted"
    assert command.checkpoints() == ["LATEST=step-3", "step-2", "step-3"], err
    assert command.pids() == []
    code, out, err = command.run()
    assert code == 0 and "after step 3" in out, err
    assert command.record() == uninterrupted(straight, MESH)


def test_ctrl_c_in_the_parent_saves_and_leaves_no_rank_behind(straight: Path, tmp_path: Path) -> None:
    go_on = tmp_path / "go_on"
    command = job(tmp_path / "run", MESH)
    process = command.start(fault=f"hold:at=forward:step=5:until={go_on}")
    wait_for_hold(command, process, "forward, step 5")
    process.send_signal(signal.SIGINT)
    go_on.touch()
    _, err = process.communicate()
    assert process.returncode == 128 + signal.SIGINT, err
    assert read_status(command.run_dir)["state"] == "preempted"
    assert command.checkpoints() == ["LATEST=step-5", "step-4", "step-5"], err
    assert command.pids() == []
    assert command.record() == uninterrupted(straight, MESH)[:5]
