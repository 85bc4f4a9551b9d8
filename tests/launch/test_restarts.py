"""``launch.max_restarts``: which failures get another attempt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from launch_command import TWO_RANKS, Command

from automoe.launch.local import last_step, refusal
from automoe.launch.run_dir import read_status

KILLED = {"rank": 1, "type": "LaunchError", "message": "killed by SIGKILL", "for_user": True, "traceback": []}
BUG = KILLED | {"type": "ValueError", "for_user": False}


def failure(step: int | None, error: dict[str, Any]) -> dict[str, Any]:
    return {"step": step, "error": error}


def reach_step(run_dir: Path, step: int) -> None:
    lines = [json.dumps({"step": number}) + "\n" for number in range(1, step + 1)]
    (run_dir / "metrics.jsonl").write_text("".join(lines) + '{"step": 99')  # a kill cut the last one


def test_attempts_follow_while_each_gets_further(tmp_path: Path) -> None:
    failures = []
    for step, error in ((3, KILLED), (5, BUG)):
        reach_step(tmp_path, step)
        failures.append(failure(last_step(tmp_path), error))
        assert refusal(failures, limit=2) is None
    assert refusal([*failures, failure(7, KILLED)], limit=2) == "launch.max_restarts=2 is used up"
    assert [one["step"] for one in failures] == [3, 5], "the step that a kill cut off does not count"


@pytest.mark.parametrize("step", [4, 5])
def test_an_attempt_that_gets_no_further_is_the_last(step: int) -> None:
    first = failure(5, BUG)
    assert refusal([first], limit=9) is None
    why_not = refusal([first, failure(step, BUG)], limit=9)
    assert why_not is not None and f"no further than step {step}, and an earlier one to step 5" in why_not


def test_a_run_without_a_record_of_steps_has_its_number_of_attempts(tmp_path: Path) -> None:
    assert last_step(tmp_path) is None
    failures = [failure(None, BUG)] * 3
    assert [refusal(failures[:count], limit=2) is None for count in (1, 2, 3)] == [True, True, False]


@pytest.mark.parametrize("kind", ["DataError", "CheckpointError", "AutomoeError"])
def test_what_a_person_must_mend_is_not_tried_again(kind: str) -> None:
    assert refusal([failure(None, KILLED | {"type": kind})], limit=3) is not None


@pytest.mark.faults
def test_a_bug_that_strikes_in_the_same_step_ends_the_run(command: Command) -> None:
    code, _, err = command.run("recipe_fails_at_step_2", *TWO_RANKS, "launch.max_restarts=5")
    assert code == 1
    assert "attempt 1 failed after step 2: rank" in err and "restart 1 of at most 5" in err
    assert "no further attempt: the last attempt got no further than step 2" in err
    status = read_status(command.run_dir)
    assert status["state"] == "failed" and "seventh seal" in status["error"]["message"]
    assert [failure["step"] for failure in status["failed_attempts"]] == [2, 2]
    kept = command.run_dir / "logs" / "attempt-1"
    assert "seventh seal" in (kept / "rank1.log").read_text() + (kept / "rank0.log").read_text()
    assert json.loads((kept / "first_error.json").read_text())["type"] == "ValueError"
    assert command.pids() == []
