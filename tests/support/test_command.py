"""What two runs are compared by after one of them was killed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.support.command import TrainCommand, kill

RECORD = {"step": 1, "loss": 0.1 + 0.2, "grad_norm": 1e-300, "tokens": 64, "skipped": 0}
CLOCKS = {"tokens_per_second": 5.0, "step_seconds": 0.1, "mfu": 0.5, "peak_memory_bytes": 7, "checkpoint_share": 0.1}


def test_a_record_is_its_numbers_to_the_bit_without_clocks(tmp_path: Path) -> None:
    loads = [[1.0, 2.0], [3.0, 0.0]]
    (tmp_path / "metrics.jsonl").write_text(json.dumps(RECORD | CLOCKS) + '\n{"step": 2, "lo')
    (tmp_path / "expert_load.jsonl").write_text(json.dumps({"step": 1, "counts": loads}) + "\n")
    assert TrainCommand(tmp_path).record() == [RECORD | {"expert_load": loads}]


def test_processes_of_a_run_are_those_of_its_environment_that_live(tmp_path: Path) -> None:
    command = TrainCommand(tmp_path / "run")
    sleeper, other = (
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=TrainCommand(folder).env)
        for folder in (tmp_path / "run", tmp_path)
    )
    try:
        while command.pids() != [sleeper.pid]:  # not yet, between fork and exec
            assert sleeper.poll() is None
        assert kill(sleeper.pid)
        command.wait_until_gone()
        assert sleeper.wait() == -9
    finally:
        other.kill()
        other.wait()


def test_checkpoints_are_listed_with_what_latest_says(tmp_path: Path) -> None:
    command = TrainCommand(tmp_path)
    assert command.checkpoints() == []
    (tmp_path / "checkpoints" / "step-2").mkdir(parents=True)
    (tmp_path / "checkpoints" / "LATEST").write_text("step-2\n")
    assert command.checkpoints() == ["LATEST=step-2", "step-2"]
