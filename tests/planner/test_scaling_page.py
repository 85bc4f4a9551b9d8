"""``docs/scaling.md`` follows from the code: figures of its tables, and the formulas that only it uses."""

from __future__ import annotations

from math import sqrt
from pathlib import Path

import pytest

from automoe.config.shipped import load_file

DOCS = Path(__file__).parents[2] / "docs"
scaling = load_file(DOCS / "draw_scaling.py")


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", list(scaling.TABLES), ids=str)
def test_tables_are_what_the_code_says(name: str) -> None:
    text = (DOCS / "scaling.md").read_text().split(f"<!-- {name}: ")[1].split("-->\n")[1].split("<!--")[0]
    assert scaling.TABLES[name]() == text, "run: make docs-images"


def test_the_best_interval_loses_least() -> None:
    cost, mtbf = 10.0, 20_000.0
    best = scaling.daly(cost, mtbf)
    assert best == pytest.approx(sqrt(2 * cost * mtbf), rel=0.03)
    least = scaling.lost(best, cost, mtbf)
    assert all(scaling.lost(best * factor, cost, mtbf) > least for factor in (0.7, 1.4))
    # Without failures a checkpoint is all that is lost.
    assert scaling.lost(1000.0, 10.0, 1e12) == pytest.approx(10 / 1010, rel=1e-3)
    assert scaling.MTBF_HOURS_OF_A_GPU == pytest.approx(50_700, rel=0.002)
