"""The table of docs/survived.md: a row for every fault, and only tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROWS = 59


def rows() -> dict[int, str]:
    """Number -> last column."""
    lines = (ROOT / "docs" / "survived.md").read_text().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if re.match(r"\| \d", line)]
    assert all(len(row) == 4 for row in cells)
    return {int(row[0]): row[3] for row in cells}


def test_every_fault_has_a_row_and_every_row_a_test_or_the_word_open() -> None:
    table = rows()
    assert list(table) == list(range(1, ROWS + 1))
    for number, tests in table.items():
        assert tests == "open" or re.fullmatch(r"`[^`]+::[^`]+`(, `[^`]+::[^`]+`)*", tests), number


def test_every_test_that_is_named_exists() -> None:
    missing = []
    for path, name in re.findall(r"`([^`]+)::([^`]+)`", " ".join(rows().values())):
        tree = ast.parse((ROOT / path).read_text()) if (ROOT / path).exists() else ast.Module([], [])
        if name not in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}:
            missing.append(f"{path}::{name}")
    assert missing == []
