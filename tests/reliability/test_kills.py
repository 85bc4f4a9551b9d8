"""SIGKILL at every point of a save, of a resume and of a step: the joined record is that of the run left alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from reliability_runs import MESHES, job, uninterrupted

from automoe.launch.run_dir import read_status
from tests.support.chat import a_row_each
from tests.support.command import TORCHRUN

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


def test_a_run_of_epochs_is_as_long_when_it_is_killed_and_under_torchrun(tmp_path: Path) -> None:
    own = (*a_row_each(tmp_path / "chats.jsonl", 20), "train.epochs=2", "train.steps=300", "train.seq_len=64")
    straight, killed, outer = (job(tmp_path / name, "cp2-ep2", *own) for name in ("straight", "killed", "outer"))
    assert straight.run()[0] == 0
    expected = straight.record()
    assert [entry["step"] for entry in expected] == [1, 2, 3, 4, 5]  # of 8 rows; the third begins the second epoch
    for fault in ("kill:rank=1:at=forward:step=2", "kill:rank=0:at=forward:step=4"):
        code, out, err = killed.run(fault=fault)
        assert code == 1 and "killed by SIGKILL" in err, (out, err)
    for code, out, err in (killed.run(), outer.run(before=TORCHRUN)):
        assert code == 0, (out, err)
    assert killed.record() == outer.record() == expected
    assert killed.checkpoints() == outer.checkpoints() == ["LATEST=step-5", "step-4", "step-5"]
    code, out, err = killed.run()
    assert code == 0 and "train.epochs=4 continues" in out, err


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
