"""The GPU step benchmark, as far as a CPU goes: its gate, and the shape of what it writes. Times are not judged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "train_step.py"
HERE_TOO = {"automoe grouped_mm", "torchtitan layer", "transformers grouped_mm"}


def run_script(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), "--out", str(out), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    "title",
    ["small DeepSeek-V3", pytest.param("small Qwen3-MoE", marks=pytest.mark.exhaustive)],
)
def test_quick_run_compares_every_contender_and_says_where_its_time_goes(tmp_path: Path, title: str) -> None:
    out = tmp_path / "result.json"
    done = run_script(out, "--quick", "--model", title)
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    assert len(report["commit"].rstrip("+")) == 40 and report["environment"]["torch"]
    assert report["models"].keys() == {title}
    for title, model in report["models"].items():
        assert "CUDA" in model["contenders"]["automoe triton"]["absent"]
        for name in HERE_TOO:
            facts = model["contenders"][name]
            assert facts["loss_difference"] <= report["loss_tolerance"]
            assert (facts["worst_gradient_difference"] > 0) == (name != "automoe grouped_mm")
        assert model["routings"].keys() == {"balanced", "natural"}
        for contenders in model["routings"].values():
            assert contenders.keys() == HERE_TOO
            for name, facts in contenders.items():
                assert facts["tokens_per_second"] > 0 and len(facts["step_seconds_all"]) == 1
                assert facts["mfu"] < facts["mfu_full_attention"]
                parts = facts["parts"]
                spent = {part: sum(parts[way][part] for way in parts) for part in parts["forward"]}
                absent = {part for part, seconds in spent.items() if seconds == 0}
                assert absent == ({"shared experts", "dense ffn"} if "Qwen3" in title else set()), name
                for part in ("attention", "experts", "router", "norms"):
                    assert parts["forward"][part] > 0 and parts["backward"][part] > 0, (name, part)
                assert spent["other"] < 0.5 * sum(spent.values()), name
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert "tokens/s" in done.stdout


@pytest.mark.exhaustive
def test_a_contender_that_differs_is_not_timed(tmp_path: Path) -> None:
    quick = ("--quick", "--model", "small DeepSeek-V3")
    done = run_script(tmp_path / "result.json", *quick, "--spoil", "torchtitan layer")
    assert done.returncode == 1 and not (tmp_path / "result.json").exists()
    assert "torchtitan layer: the first step's loss differs" in done.stderr


@pytest.mark.parametrize("memory", [80 * 2**30, 141 * 2**30])
def test_a_slice_is_the_largest_that_fits(monkeypatch: pytest.MonkeyPatch, memory: float) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    train_step = import_module("train_step")
    for title, case in train_step.cases().items():
        config, planned = case.slice_for(memory)
        layers = config.model.num_layers
        assert planned <= 0.9 * memory and case.least <= layers < case.model.num_layers, title
        same_experts = replace(case.model, num_experts=config.model.num_experts)
        one_more = replace(case, model=same_experts, layers=layers + 1, least=layers + 1)
        assert one_more.slice_for(0)[1] > 0.9 * memory, title


@pytest.mark.exhaustive
def test_without_a_gpu_the_full_run_says_what_it_needs(tmp_path: Path) -> None:
    done = run_script(tmp_path / "result.json")
    assert done.returncode == 1 and "needs a CUDA device" in done.stderr
