"""SIGKILL at every point of a save, of a resume and of a step: the joined record is that of the run left alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from reliability_runs import MESHES, job, uninterrupted

from automoe.launch.run_dir import read_status

pytestmark = pytest.mark.faults

# In one run directory, one after the other: the fault, and the committed steps and LATEST that it leaves.
# Nothing is committed before the fourth, so the first three restarts begin at the beginning.
KILLS = [
    ("kill:rank=1:at=shard_write:step=2", []),
    ("kill:rank=0:at=shard_written:step=2", []),
    ("kill:at=manifest_written:step=2", []),
    ("kill:at=renamed:step=2", ["step-2"]),
    ("kill:rank=1:at=resuming:step=2", ["LATEST=step-2", "step-2"]),
    ("kill:rank=0:at=forward:step=4", ["LATEST=step-2", "step-2"]),
    ("kill:rank=1:at=shard_write:step=4 checkpoint.async_save=true", ["LATEST=step-2", "step-2"]),
    ("kill:rank=0:at=recorded:step=4", ["LATEST=step-2", "step-2"]),
    ("kill:rank=0:at=latest_written:step=4", ["LATEST=step-4", "step-2", "step-4"]),
    ("kill:at=resumed:step=4", ["LATEST=step-4", "step-2", "step-4"]),
]


@pytest.mark.parametrize("mesh", MESHES)
def test_the_joined_record_is_that_of_the_uninterrupted_run(straight: Path, tmp_path: Path, mesh: str) -> None:
    expected = uninterrupted(straight, mesh)
    command = job(tmp_path / "run", mesh)
    for kill, left in KILLS:
        fault, *overrides = kill.split()
        code, out, err = command.run(*overrides, fault=fault)
        assert code == 1 and "killed by SIGKILL" in err, (kill, out, err)
        assert command.pids() == [], kill
        committed = [name for name in command.checkpoints() if not name.startswith(".")]
        assert [name for name in committed if name.startswith(("step", "LATEST"))] == left, kill
        record = command.record()
        assert record == expected[: len(record)], kill
    code, out, err = command.run()
    assert code == 0, err
    assert "after step 4" in out and "warning" not in out
    assert command.record() == expected
    assert command.checkpoints() == ["LATEST=step-6", "step-4", "step-6"]
    assert read_status(command.run_dir)["state"] == "done"


def test_a_run_restarts_itself_as_often_as_it_may(straight: Path, tmp_path: Path) -> None:
    once = tmp_path / "once"
    fault = f"kill:rank=1:at=forward:step=4:once={once}a;raise:rank=0:at=step_end:step=5:once={once}b"
    # Started over at first, as asked, and not once more at every restart.
    command = job(tmp_path / "run", "cp2-ep2", "launch.max_restarts=2", "checkpoint.resume=never")
    code, out, err = command.run(fault=fault)
    assert code == 0, err
    assert out.count("after step 2") == 1 and out.count("after step 4") == 1
    assert "attempt 1 failed after step 3: rank 1: LaunchError: killed by SIGKILL" in err
    assert "attempt 2 failed after step 4: rank 0: InjectedFault" in err
    assert "restart 2 of at most 2" in err
    assert command.record() == uninterrupted(straight, "cp2-ep2")
    status = read_status(command.run_dir)
    assert status["state"] == "done"
    assert [failure["step"] for failure in status["failed_attempts"]] == [3, 4]
    assert (command.run_dir / "logs" / "attempt-2" / "rank0.log").exists()
