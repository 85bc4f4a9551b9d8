"""``make bench``: its table in docs/performance.md is the one of its stored result, and leaves no CPU benchmark out."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_the_table_is_that_of_the_stored_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    short = import_module("short")
    report = json.loads(short.RESULT.read_text())
    assert short.PAGE.read_text() == short.page(report), "run: python benchmarks/short.py --table"
    first = next(iter(report))
    spoiled = report | {first: report[first] | {"date": "2001-01-01"}}
    assert short.PAGE.read_text() != short.page(spoiled)
    stored = {path.stem.rstrip("_0123456789") for path in short.RESULT.parent.glob("*.json")}
    named = {*short.SHORT, *short.LONG_ONLY, "short", "published_runs", "hf_sharing"}
    named |= {"cpu_step_epyc", "cpu_step_small", "soak_cp", "soak_training"}  # other runs of what is there
    assert all(name in short.page(report) for name in short.SHORT)
    assert stored <= named, "neither has a short form nor is said to have none"
    sys.modules.pop("short")
