"""The picture of a sweep, drawn from what its jobs recorded."""

from __future__ import annotations

from pathlib import Path

from PIL import Image
from synthetic_run import write_run

from automoe.observe.plots import draw_sweep


def test_jobs_that_ran_are_drawn_and_the_others_do_no_harm(tmp_path: Path) -> None:
    jobs = []
    for job, (steps, state) in enumerate([(60, "done"), (0, "skipped"), (25, "failed"), (60, "done")]):
        if state != "skipped":
            write_run(tmp_path / str(job), steps)
        jobs.append({"job": job, "state": state, "overrides": [f"mesh.ep={2**job}", "mesh.pp=1"]})
    with Image.open(draw_sweep(tmp_path, jobs)) as picture:
        width, height = picture.size
    assert width >= 1000 and height >= 400


def test_a_sweep_without_a_step_says_so(tmp_path: Path) -> None:
    path = draw_sweep(tmp_path, [{"job": 0, "state": "skipped", "overrides": ["mesh.ep=3"]}])
    assert path.stat().st_size > 1000
