"""The GPU step benchmark, as far as a CPU goes: its gate, and the shape of what it writes. Times are not judged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from types import ModuleType

import pytest
import torch

from automoe.config.mesh_shape import resolve_mesh, stays_unsharded
from automoe.model.params import count_params

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


@pytest.mark.parametrize("title", ["small DeepSeek-V3", "small Qwen3-MoE"])
@pytest.mark.exhaustive
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
                # Weights and two moments in bfloat16, and a little in float32 here and there.
                assert 6 <= facts["state_bytes"] / model["parameters"] < 6.2, name
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
    assert "tokens/s" in done.stdout and " GiB planned of " in done.stdout


@pytest.mark.exhaustive
def test_a_contender_that_differs_is_not_timed(tmp_path: Path) -> None:
    quick = ("--quick", "--model", "small DeepSeek-V3")
    out = tmp_path / "result.json"
    done = run_script(out, *quick, "--spoil", "torchtitan layer")
    assert done.returncode == 1
    assert "small DeepSeek-V3: torchtitan layer: the first step's loss differs" in done.stderr
    for contenders in json.loads(out.read_text())["models"]["small DeepSeek-V3"]["routings"].values():
        assert contenders.keys() == HERE_TOO - {"torchtitan layer"}
    assert "tokens/s" in done.stdout


@pytest.fixture
def train_step(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return import_module("train_step")


def test_out_of_memory_fails_ours_alone_for_the_plan_said_that_they_fit(train_step: ModuleType) -> None:
    contenders = {
        name: train_step.not_timed(name, torch.OutOfMemoryError("of GPU memory"))
        for name in import_module("step_trainers").CONTENDERS
    }
    assert contenders["automoe triton"] == {"absent": "OutOfMemoryError: of GPU memory", "failed": True}
    assert {name for name, facts in contenders.items() if facts["failed"]} == {"automoe triton", "automoe grouped_mm"}
    timed = {"transformers grouped_mm": {"loss_difference": 0.0}}
    ours = train_step.failures({"models": {"a": {"contenders": contenders | timed}}})
    assert len(ours) == 2 and "a: automoe grouped_mm: OutOfMemoryError: of GPU memory" in ours


def test_a_model_of_which_no_contender_is_left_fails(
    train_step: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Though each was absent for a reason of its own."""
    trainers = import_module("step_trainers")

    def absent(*_given: object) -> None:
        raise trainers.Absent("it is not here")

    for name in trainers.CONTENDERS:
        monkeypatch.setitem(trainers.CONTENDERS, name, absent)
    arguments = ["--quick", "--model", "small Qwen3-MoE", "--out", str(tmp_path / "result.json")]
    monkeypatch.setattr(sys, "argv", ["train_step.py", *arguments])
    with pytest.raises(SystemExit) as stopped:  # a text is printed, and the exit status 1
        train_step.main()
    assert stopped.value.code == "small Qwen3-MoE: nothing was timed, no contender is left"


def test_every_router_starts_from_the_same_weights(train_step: ModuleType) -> None:
    """Ours is float32 and theirs are bfloat16."""
    trainers, case = import_module("step_trainers"), train_step.quick_cases()["small Qwen3-MoE"]
    config, _ = case.slice_for(0)
    found = {}
    with train_step.one_rank("cpu") as device:
        meshes = train_step.build_meshes(resolve_mesh(config.mesh, 1), device)
        for name in HERE_TOO:
            part = trainers.CONTENDERS[name](config, meshes, device).part
            found[name] = {
                layer: weight.full_tensor().detach()
                for path, weight in part.named_parameters()
                for layer, _, router in [path.partition("layers.")[2].partition(".mlp.")]
                if router in ("router.weight", "layer.router.gate.weight", "gate.weight")
            }
    ours = found.pop("automoe grouped_mm")
    assert len(ours) == config.model.num_layers and len(found) == 2
    for name, theirs in found.items():
        assert theirs.keys() == ours.keys()
        for layer, weight in theirs.items():
            assert weight.dtype == torch.bfloat16 and ours[layer].dtype == torch.float32, name
            assert torch.equal(weight.float(), ours[layer]), name


def test_needed_bytes_hold_the_peak_of_the_loss_of_transformers(train_step: ModuleType) -> None:
    from transformers.loss.loss_utils import ForCausalLMLoss

    num_tokens, vocab = 64, 8192
    x, weight = torch.randn(num_tokens, 8).bfloat16().requires_grad_(), torch.randn(vocab, 8).bfloat16()
    labels = torch.randint(vocab, (num_tokens,))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiled:
        beside = dict(shift_labels=labels, num_items_in_batch=torch.tensor(num_tokens))
        ForCausalLMLoss(x @ weight.T, labels, vocab, **beside).backward()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    a_logit = import_module("step_trainers").TRANSFORMERS_LOGIT
    assert max(live) / (num_tokens * vocab) == pytest.approx(a_logit, rel=0.01)


@pytest.mark.exhaustive
@pytest.mark.parametrize("memory", [80 * 2**30, 139.8 * 2**30])
def test_a_slice_is_the_largest_that_fits(train_step: ModuleType, memory: float) -> None:
    for title, case in train_step.cases().items():
        config, planned = case.slice_for(memory)
        model, rows = config.model, config.train.global_batch_size
        assert planned <= 0.9 * memory, title
        assert case.least <= model.num_layers <= case.layers and case.least_rows <= rows <= case.rows, title
        if rows < case.rows:
            larger = case.config(model.num_layers, model.num_experts, rows + 1)
        else:
            larger = case.config(model.num_layers + 1, model.num_experts, case.least_rows)
        assert import_module("step_trainers").needed_bytes(larger) > 0.9 * memory, title


def test_an_h200_holds_one_dense_and_three_moe_layers_of_deepseek_v3(train_step: ModuleType) -> None:
    """With 64 experts; weights, gradients and moments in 8 bytes a parameter, without FSDP's copies."""
    config, planned = train_step.cases()["DeepSeek-V3 slice"].slice_for(139.8 * 2**30)
    model = config.model
    assert (model.num_layers, model.first_k_dense, model.num_experts, config.train.seq_len) == (4, 1, 64, 4096)
    assert stays_unsharded(config, resolve_mesh(config.mesh, 1))
    assert 8 * count_params(model).total < planned


@pytest.mark.exhaustive
def test_without_a_gpu_the_full_run_says_what_it_needs(tmp_path: Path) -> None:
    done = run_script(tmp_path / "result.json")
    assert done.returncode == 1 and "needs a CUDA device" in done.stderr
