"""Form of the scripts in ``findings/``: they install packages, so that no test runs them."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

FINDINGS = Path(__file__).parents[2] / "findings"
SCRIPTS = sorted(FINDINGS.glob("*.sh"))
FIELDS = ["guess", "behaviour", "versions", r"seen \(\d{4}-\d\d-\d\d\)", "consequence", "automoe"]


def test_the_table_names_every_script_once() -> None:
    assert len(SCRIPTS) >= 8
    table = re.findall(r"^\| \[(\w+)\]\((\w+)\.sh\) \|", (FINDINGS / "README.md").read_text(), re.M)
    assert table == [(script.stem, script.stem) for script in SCRIPTS]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_script_has_its_form(script: Path) -> None:
    text = script.read_text()
    assert os.access(script, os.X_OK)
    assert subprocess.run(["bash", "-n", script], capture_output=True, text=True).stderr == ""
    head, _, body = text.partition("set -euo pipefail\n")
    assert re.match(r"#!/usr/bin/env bash\n# [^\n]+\.\n#\n", head)
    found = re.findall(r"^# ([^:\n ]+(?: \(.*?\))?):", head, re.M)
    assert len(found) == len(FIELDS) and all(map(re.fullmatch, FIELDS, found)), found
    assert "trap 'rm -rf \"$folder\"' EXIT" in body
    installed = next(line for line in body.splitlines() if "pip install" in line).split("--quiet ")[1].split()
    assert all(re.fullmatch(r"'[\w-]+==[\w.]+'", package) for package in installed)
    program = body.partition("<<'PY'\n")[2].partition("\nPY\n")[0]
    compile(program, script.name, "exec")
    assert re.search(r"^ *assert ", program, re.M) and "import automoe" not in program


def test_tests_that_scripts_name_exist() -> None:
    root = FINDINGS.parent
    for script in SCRIPTS:
        head = script.read_text().partition("set -euo")[0]
        for path, name in re.findall(r"(tests/[\w/]+\.py)(?:::(\w+))?", head):
            assert f"def {name}" in (root / path).read_text(), f"{script.name} names {path}::{name}"
