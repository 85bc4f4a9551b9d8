"""The checkpoint benchmark: the shape of what it writes, and what it refuses. Times are never judged here."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
RATES = {"raw_write", "plain_save", "save", "plain_load", "load", "memory_copy"}


@pytest.mark.exhaustive
def test_quick_run_writes_every_number(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    script = str(ROOT / "benchmarks" / "checkpoint.py")
    done = subprocess.run(
        [sys.executable, script, "--quick", "--out", str(out)], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(out.read_text())
    assert report["quick"] and report["ranks"] == 2 and len(report["commit"].rstrip("+")) == 40
    result = report["results"]
    assert result["state_bytes"] == sum(result["state_bytes_a_rank"]) > 1e6
    assert set(result["rates"]) == RATES
    for rate in result["rates"].values():
        assert rate["gb_per_s"] == pytest.approx(result["state_bytes"] / 1e9 / rate["seconds"])
    assert all(seconds > 0 for seconds in result["blocked"].values())
    saves = {"hash", "raw_write", "plain_save", "save", "async_save"}
    assert set(result["cpu_seconds"]) == saves | {"plain_load", "load"}
    assert set(result["async_of_plain_dcp"]) == {"thread", "process"}


@pytest.fixture
def checkpoint(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return import_module("checkpoint")


def test_memory_past_the_promise_is_no_result(checkpoint: Any) -> None:
    memory = {"save": 40 << 20, "async_begin_first": 130 << 20, "async_rest": 40 << 20}
    result = {
        "largest_tensor_bytes": 10 << 20,
        "state_bytes_a_rank": [100 << 20, 90 << 20],
        "memory_above_state_bytes": memory,
    }
    checkpoint.check_memory(result)
    for name in memory:
        with pytest.raises(SystemExit, match=f"{name} took .* MB above the state"):
            checkpoint.check_memory(result | {"memory_above_state_bytes": memory | {name: memory[name] + (9 << 20)}})
