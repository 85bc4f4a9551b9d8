"""The benchmark of starts: another commit's files beside these, and a run that fails is no number."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENV = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "benchmarks")))}
USES = """
import sys
from pathlib import Path
from starts import HERE, checkout, timed

with checkout("HEAD") as (commit, root):
    assert len(commit) == 40 and (root / "benchmarks" / "provenance.py").exists()
assert not root.exists()
timed(HERE.parent, ("mesh.ep=3",), Path(sys.argv[1]))
"""


@pytest.mark.exhaustive
def test_one_case_is_measured_and_written(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "benchmarks" / "starts.py", "--case", "two ranks, no report", "--rounds", "1"]
    subprocess.run([*command, "--out", tmp_path / "out.json"], check=True, env=ENV)
    found = json.loads((tmp_path / "out.json").read_text())["results"]["two ranks, no report"]["now"]
    # All processes of the run, and not the launching one alone.
    assert found["cpu_seconds"] > 2 and len(found["rounds"]) == 1


def test_the_files_of_another_commit_are_there_for_a_while_and_a_failed_run_is_no_number(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", USES, tmp_path], env=ENV, capture_output=True, text=True)
    assert done.returncode == 1
    assert "left with 2, not 0. Nothing was written." in done.stderr and "error: mesh.ep=3" in done.stderr
