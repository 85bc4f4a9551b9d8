"""A sweep's table and picture, from what its jobs recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from synthetic_run import write_run

from automoe.observe.metrics import rank_balance
from automoe.observe.plots import draw_sweep
from automoe.observe.summary import print_sweep

KEYS = "pp=2 dp_shard=2 ep=4 lr=0.003 micro_batch_size=2 capacity_factor=1.25"


SIDE = {"tokens_per_second": 12345.6, "mfu": 0.123, "memory": 3 * 2.0**29, "balance": 1.1}


def record(name: str, state: str = "done", **facts: Any) -> dict[str, Any]:
    return {"name": name, "job": 0, "label": KEYS, "start": "", "state": state, "objective": None} | facts


def test_jobs_that_ran_are_drawn_and_the_others_do_no_harm(tmp_path: Path) -> None:
    jobs = []
    for job in range(8):
        state = "skipped" if job == 1 else "failed" if job == 2 else "done"
        if state != "skipped":
            write_run(tmp_path / f"job{job}", 25 if state == "failed" else 60)
        both = {side: SIDE | {"tokens_per_second": 5000.0 + job} for side in ("measured", "predicted")}
        facts = both if job > 4 else {}  # as sweeps before there were predictions left it
        jobs.append(record(f"job{job}", state, tokens_per_second=None if job == 2 else 5000.0 + job, **facts))
    with Image.open(draw_sweep(tmp_path, jobs)) as picture:
        width, height = picture.size
    assert width >= 1000 and height >= 400


def test_a_sweep_without_a_step_says_so(tmp_path: Path) -> None:
    path = draw_sweep(tmp_path, [record("ep3", "skipped")])
    assert path.stat().st_size > 1000


@pytest.mark.parametrize("columns", [80, 140])
def test_the_table_fits_the_terminal(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    facts = {"objective": 2.34567, "tokens_per_second": 12345.6, "seconds": 101.26, "default": "pp2 x dp_shard2"}
    print_sweep([record("a", **facts, moe="pp2 x ep2"), record("b", "skipped", reason="mesh.ep=3: [1] must divide 4")])
    said = capsys.readouterr().out
    table, _, reason = said.partition(f"{KEYS} skipped: ")
    assert reason.strip() == "mesh.ep=3: [1] must divide 4"
    assert max(map(len, table.splitlines())) <= columns
    for text in ("tokens/s", "2.3457", "12,346", "101.3", "capacity_factor=1.25"):
        assert text in table
    assert ("pp2 x dp_shard2" in table) == (columns > 100), "meshes are in sweep.json where there is no room"


def test_the_busiest_rank_is_that_of_the_ep_group() -> None:
    counts = np.array(
        [[[4.0, 2.0, 1.0, 1.0], [2.0, 2.0, 2.0, 2.0]]]
    )  # [N, L, E]: a layer that leans, one that does not
    assert rank_balance(counts, 1, 4) == 1.0
    assert rank_balance(counts, 2, 4) == pytest.approx((6 / 4 + 1) / 2)
    assert rank_balance(counts, 4, 4) == pytest.approx((4 / 2 + 1) / 2)
    assert rank_balance(np.zeros((0, 0, 0)), 2, 4) is None
