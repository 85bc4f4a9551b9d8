from __future__ import annotations

import json

import pytest
from launch_command import Command


def test_a_sweep_skips_impossible_shapes_tabulates_and_resumes(command: Command) -> None:
    sweep = ("-m", "mesh.ep=1,2", "mesh=fsdp", "launch.num_ranks=1", "launch.device=cpu", "train.steps=2,3")
    code, out, err = command.run("recipe_answers", *sweep)
    assert code == 0, err
    jobs = json.loads((command.run_dir / "sweep.json").read_text())
    assert [(job["state"], job["objective"]) for job in jobs] == [
        ("done", 2.0),
        ("done", 3.0),
        ("skipped", None),
        ("skipped", None),
    ]
    assert "mesh.ep=2" in jobs[2]["reason"] and "1*1*1*1 = 1 must equal" in jobs[2]["reason"]
    table = out[out.index("job  state") :]
    assert "done     3.0000" in table and "job 2 skipped: mesh.ep=2" in table
    assert (command.run_dir / "0" / "config.yaml").exists() and (command.run_dir / "1" / "status.json").exists()

    code, out, err = command.run("recipe_answers", *sweep)
    assert code == 0, err
    assert out.count("done in an earlier run of this sweep") == 2
    assert "hello from rank" not in out, "nothing ran again"
    assert "done     3.0000" in out[out.index("job  state") :]


def test_a_sweep_in_which_no_job_can_run_fails(command: Command) -> None:
    code, _, err = command.run(
        "recipe_answers", "-m", "mesh=fsdp", "mesh.ep=2,3", "launch.num_ranks=1", "launch.device=cpu"
    )
    assert code == 2
    assert "error: none of the 2 jobs could run" in err
    jobs = json.loads((command.run_dir / "sweep.json").read_text())
    assert [job["state"] for job in jobs] == ["skipped", "skipped"]


@pytest.mark.exhaustive
def test_a_failing_job_does_not_end_the_sweep(command: Command) -> None:
    sweep = ("-m", "mesh=fsdp", "launch.num_ranks=1,2", "launch.device=cpu")
    code, out, err = command.run("recipe_raises", *sweep)
    assert code == 1
    jobs = json.loads((command.run_dir / "sweep.json").read_text())
    assert [job["state"] for job in jobs] == ["done", "failed"], "rank 1 raises where there is one"
    assert "the seventh seal is broken" in jobs[1]["reason"]


def test_a_key_that_no_job_could_use_is_an_error_before_the_first_job(command: Command) -> None:
    code, out, err = command.run("recipe_answers", "-m", "mesh.epp=1,2")
    assert code == 2
    assert "mesh.epp=1,2: unknown key" in err and "mesh.ep" in err
    assert "job 0" not in out
