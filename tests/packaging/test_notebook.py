"""The notebook: every cell runs, in order, in a process of its own, as in Jupyter but without it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "notebooks" / "first_proof.ipynb"


def cells() -> list[str]:
    return ["".join(c["source"]) for c in json.loads(NOTEBOOK.read_text())["cells"] if c["cell_type"] == "code"]


def test_the_stored_outputs_are_those_of_the_cells_and_no_cell_failed() -> None:
    stored = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert len(stored) == 4 and NOTEBOOK.stat().st_size < 200_000
    for number, cell in enumerate(stored, 1):
        assert cell["execution_count"] == number and cell["outputs"], "execute it once more before it is committed"
        assert not [out for out in cell["outputs"] if out["output_type"] == "error"]
        assert str(ROOT) not in json.dumps(cell["outputs"])


@pytest.mark.faults
def test_every_cell_runs(tmp_path: Path) -> None:
    """`make notebook` runs it alone, and continuous integration that."""
    program = "exec_cells = __import__('json').load(open('cells.json'))\nscope = {'__name__': '__main__'}\n"
    program += "for cell in exec_cells:\n    exec(compile(cell, '<cell>', 'exec'), scope)\n"
    (tmp_path / "cells.json").write_text(json.dumps(cells()))
    env = os.environ | {"PYTHONPATH": str(ROOT), "MPLBACKEND": "Agg", "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "0 different" in done.stdout and "the first: step 0 gradient of embed_tokens" in done.stdout
