"""One reference run per model and session."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from mesh_cases import Case, run_case

from automoe.verify.pool import RankPool
from automoe.verify.trajectory import Trajectory

Reference = Callable[[Case], Trajectory]


@pytest.fixture(scope="session")
def reference(ranks: RankPool) -> Reference:
    """``reference(case)``: its three float64 steps on one rank with the whole batch at once."""
    runs: dict[str, Trajectory] = {}

    def get(case: Case) -> Trajectory:
        key = str(case.reference)
        if key not in runs:
            runs[key] = run_case(ranks, case.reference)
        return runs[key]

    return get
