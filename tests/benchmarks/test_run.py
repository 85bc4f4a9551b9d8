"""The runner of the benchmarks: its questions have scripts and results, and its table is the one of its stored result."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from automoe.config.shipped import load_file
from tests.support import grpo_vllm

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return load_file(ROOT / "benchmarks" / "run.py")


def test_the_table_is_that_of_the_stored_result(runner: ModuleType) -> None:
    report = json.loads(runner.RESULT.read_text())
    assert runner.PAGE.read_text() == runner.page(report), "run: python benchmarks/run.py --table"
    first = next(iter(report))
    spoiled = report | {first: report[first] | {"date": "2001-01-01"}}
    assert runner.PAGE.read_text() != runner.page(spoiled)
    assert all(name in runner.page(report) for name in runner.SHORT)


def test_every_stored_result_is_of_a_question_that_is_asked_or_closed_in_the_notes(runner: ModuleType) -> None:
    stored = {path.stem.rstrip("_0123456789") for path in runner.RESULT.parent.glob("*.json")}
    others = {"short", "main_job", "published_runs"}  # of run, starts --job and fit_time
    others |= {"cpu_step_epyc", "cpu_step_small", "soak_cp", "soak_training"}  # other runs of what is there
    others |= {"pipeline_schedules", "local_ranks"}  # of plan_correlation --schedules and --ranks
    others |= {"gpu_first"}  # of automoe doctor --gpu
    others |= {"class_experts"}  # of class_tier --experts
    others |= {"grpo_vllm"}  # of tests/support/grpo_vllm.py
    others |= {"grpo_vllm_weights"}  # of grpo_step --vllm
    others |= {"grpo_kills", "grpo_kills_vllm"}  # of tests/rl/test_grpo_kills.py, by the command that it holds
    others |= {"drawn_meshes"}  # of tests/mesh, by the command that it holds
    others |= {"mesh_bits"}  # of tests/support/mesh_bits.py
    others |= {"waiting"}  # of hf_load's index and of `make test`, which runs no benchmark
    assert stored <= {*runner.QUESTIONS, *runner.CLOSED, *others}
    notes = (ROOT / "benchmarks" / "NOTES.md").read_text()
    assert [name for name in runner.CLOSED if f"results/{name}.json" not in notes] == []


def test_every_question_has_a_script_and_they_are_few(runner: ModuleType) -> None:
    scripts = {path.stem for path in (ROOT / "benchmarks").glob("*.py")}
    assert set(runner.SHORT) <= set(runner.QUESTIONS) <= scripts and len(scripts) <= 24


def test_a_benchmark_is_started_by_its_name_with_its_arguments() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "run.py"), "trajectories", "compare"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "trajectories.py: error" in done.stderr and "file" in done.stderr
    listed = subprocess.run(command[:2], capture_output=True, text=True, check=True).stdout
    assert "soak" in listed and listed.count("?") == 18


def test_the_table_of_classes_is_that_of_the_stored_result(runner: ModuleType) -> None:
    classes = load_file(ROOT / "benchmarks" / "class_tier.py")
    report = json.loads(classes.RESULT.read_text())
    assert classes.page(report) == classes.PAGE.read_text(), "run: python benchmarks/run.py class_tier --table"
    rows = report["classes"]
    assert not any(map(classes.wrong, rows.values()))
    assert sum("one" in row for row in rows.values()) >= 50
    assert classes.wrong({"one": 1e-9, "four": 0.0}) and classes.wrong({"failed": "timeout"})
    assert classes.wrong({"one": float("nan"), "four": 0.0})


@pytest.mark.exhaustive
def test_a_class_that_the_table_lacks_or_has_in_another_tier_is_named(
    runner: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `make smoke-latest` asks the newest transformers."""
    classes = load_file(ROOT / "benchmarks" / "class_tier.py")
    monkeypatch.setattr(
        classes,
        "moe_classes",
        lambda: {"olmoe": True, "dbrx": True, "gemma4_text": True, "muse_spark": True, "new": False},
    )
    rows = json.loads(classes.RESULT.read_text())["classes"]
    assert classes.outdated({"classes": rows | {"new": {"refused": classes.NOT_CAUSAL}}}) == []
    changed = {"dbrx": {"tier": "class"}, "gemma4_text": {"refused": "another part"}}
    found = classes.outdated({"classes": rows | changed})
    assert [line.partition(":")[0] for line in found] == ["dbrx", "gemma4_text", "new"]
    assert "the table has no such class" in found[2]
    sayings = [*rows.values(), {"tier": "class"}]
    assert all("one" in row or "refused" in row for row in sayings[:-1]) and classes.wrong({"tier": "class"})


def test_the_page_of_convergence_says_what_its_runs_show(runner: ModuleType) -> None:
    made = load_file(ROOT / "benchmarks" / "convergence.py")
    report = json.loads(made.RESULT.read_text())
    assert made.page(report) == made.PAGE.read_text(), "run: python benchmarks/run.py convergence --draw"
    assert list(report["runs"]) == [made.name_of(*one) for one in made.RUNS]
    for one in made.RUNS:
        run = report["runs"][made.name_of(*one)]
        assert run["command"].endswith(" ".join(made.words_of(*one)))
        assert len(run["loss"]) == (made.EXACT_STEPS if "float64" in one[0] else made.STEPS)
    for arm in ("AdamW, float64", "Muon, float64"):
        first, *others = (made.get(report, arm, mesh, 0) for mesh in made.MESHES)
        assert max(made.relative(first, other) for other in others) < 1e-10
    by = {name: found[2:] for name, found in made.differences(report).items()}  # of validation losses, and of the last
    assert all(mesh < seed for mesh, seed in zip(by["AdamW: the mesh"], by["AdamW: the seed"], strict=True))
    assert all(mesh < seed for mesh, seed in zip(by["Muon: the mesh"], by["Muon: the seed"], strict=True))
    assert all(one < seed for one, seed in zip(by[f"AdamW: {made.TRAINER}"], by["AdamW: the seed"], strict=True))
    for where, seed, steps in ((made.OTHER, 0, 9), *((made.TRAINER, *one) for one in ((0, 9), (1, 3), (2, 9)))):
        first, other = (made.get(report, "AdamW", place, seed)["loss"][:steps] for place in (made.ONE, where))
        assert max(abs(a - b) for a, b in zip(first, other, strict=True)) < 1e-6
    ends = [[float(made.last(made.get(report, "AdamW", place, seed))) for seed in range(3)] for place in
            (made.ONE, made.TRAINER)]  # fmt: skip
    assert abs(sum(ends[0]) - sum(ends[1])) / 3 < 0.01
    spoiled = json.loads(json.dumps(report))
    list(spoiled["runs"].values())[0]["validation"][str(made.STEPS)] += 0.01
    assert made.page(spoiled) != made.PAGE.read_text()


def test_the_loops_with_vllm_show_what_the_page_says() -> None:
    report = json.loads(grpo_vllm.RESULT.read_text())
    assert list(report["runs"]) == list(grpo_vllm.LOOPS)
    for name, run in report["runs"].items():
        curves = {field: run[field] for field in grpo_vllm.FIELDS}
        assert " ".join(grpo_vllm.words_of(name)) in run["command"] and grpo_vllm.faults_of(name, curves) == []
        for field in grpo_vllm.BOUNDS[name.split(", ")[1]]:
            assert grpo_vllm.faults_of(name, curves | {field: [*curves[field][:-1], 1.0]})
        assert grpo_vllm.faults_of(name, curves | {"reward": curves["reward"][::-1]})
