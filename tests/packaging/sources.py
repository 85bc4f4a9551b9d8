"""The files of the package and of the recipes, for the rules that hold them."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path for room in ("automoe", "recipes") for path in (ROOT / room).rglob("*.py"))
# What a batch passes through on its way from the loop to the product of experts and back.
CORE = ("recipes", "training", "model", "moe", "parallel", "optim", "comm", "passes")
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in SOURCES}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())
