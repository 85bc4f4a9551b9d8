"""Adapters beside a frozen checkpoint: what a step keeps of it, what is saved, and a kill in between."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_runs import MODEL, Run, build_state, config, refusal, run

from automoe.checkpoint.reader import StepReader
from automoe.config.mesh_shape import resolve_mesh
from automoe.config.schema import Config, LoraConfig, MoEConfig
from automoe.cost.activations import plan_batch
from automoe.cost.memory import plan_memory
from automoe.export import export_run
from automoe.hf.read import load_hf
from automoe.hf.write import to_hf
from automoe.local_shard import local_shard
from automoe.model.init import initialize
from automoe.parallel.parallelize import allocate, build_decoder
from automoe.training.step import forward_backward, optimizer_step, prepare_inputs
from automoe.verify.pool import RankError, RankPool

UNTIL, SAVES, MESH = 4, (1, 2, 3), dict(dp_shard=2, ep=2)


def random_base(folder: Path, seed: int) -> Path:
    model = build_decoder(MODEL, MoEConfig(experts="loop"), torch.float32)
    allocate({0: model}, torch.device("cpu"))
    initialize(model, 0.2, seed)
    return to_hf(model, folder, tokenizer="byte", verify=False).path


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_base(tmp_path_factory.mktemp("base") / "base", 0)


def tuned(text: Path, base: Path, **other: Any) -> Config:
    plain = config(text, **other, **MESH)
    return replace(plain, model=replace(plain.model, hf_path=str(base)), lora=LoraConfig(rank=8, dropout=0.25))


@pytest.fixture(scope="module")
def straight(ranks: RankPool, text: Path, base: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(ranks, tuned(text, base), tmp_path_factory.mktemp("straight") / "run", UNTIL)


@pytest.mark.faults
def test_a_killed_run_goes_on_to_the_bit_and_the_base_stays(
    ranks: RankPool, text: Path, base: Path, tmp_path: Path, straight: Run
) -> None:
    run_dir, settings = tmp_path / "run", tuned(text, base)
    with pytest.raises(RankError, match="exit code -9"):
        run(ranks, settings, run_dir, UNTIL, SAVES, "kill:rank=1:at=shard_write:step=2")
    resumed = run(ranks, settings, run_dir, UNTIL, SAVES)
    assert resumed.resumed_at == 1 and resumed.losses == straight.losses[1:]
    final, expected = resumed.states[UNTIL], straight.states[UNTIL]
    assert [name for name in expected if not torch.equal(final[name], expected[name])] == []

    # Every weight of the base is what it was, and is not in the checkpoint; every adapter has moved, and is.
    model = build_decoder(MODEL, MoEConfig(experts="loop"), torch.float64)
    model.to_empty(device="cpu")
    load_hf(model, base)
    frozen = {f"model.{name}": parameter for name, parameter in model.named_parameters()}
    assert all(torch.equal(final[name], parameter) for name, parameter in frozen.items())
    adapters = [name for name in final if name.startswith("model.") and ".lora." in name]
    assert [name for name in final if name.startswith("optimizer.ema.") and ".lora." not in name] == []
    assert adapters and all(not torch.equal(final[name], straight.states[0][name]) for name in adapters)
    biases = [name for name in final if name.endswith("expert_bias")]
    assert biases and not any(final[name].any() for name in biases)
    saved = StepReader(run_dir / "checkpoints" / "step-3").read_metadata().state_dict_metadata.keys()
    assert not saved & frozen.keys() and saved >= set(adapters)

    other = random_base(tmp_path / "other", 1)
    said = ranks.run(refusal, 2, tuned(text, other), run_dir)
    assert all("another checkpoint" in text and "base" in text for text in said)
    said = ranks.run(refusal, 2, replace(settings, lora=LoraConfig(rank=16, dropout=0.25)), run_dir)
    assert all("lora.rank" in text for text in said)

    (run_dir / "config.yaml").write_text(json.dumps(asdict(replace(settings, run_dir=str(run_dir)))))
    merged = export_run(run_dir, tmp_path / "merged")
    assert merged.checked and merged.logits_error < 1e-5
    adapter = export_run(run_dir, tmp_path / "adapter", adapter="fused")
    assert adapter.groups["experts"] == 6 and adapter.groups["shared_experts"] == 9


def bytes_of_a_step(settings: Config, run_dir: Path) -> tuple[int, int, int, int, bool]:
    """Of weights, gradients before the update, moments and averages on this rank; whether only adapters have a gradient."""
    state, meshes, runner = build_state(settings, run_dir)
    inputs, trained = prepare_inputs(state.loader.next_step(), meshes, settings, torch.device("cpu"))
    stats = forward_backward(state, runner, inputs, settings)

    def size(tensors) -> int:
        return sum(local_shard(tensor).nbytes for tensor in tensors)

    named = [(name, p) for part in state.parts.values() for name, p in part.named_parameters()]
    gradients = size(p.grad for _, p in named if p.grad is not None)
    alone = all((p.grad is not None) == (".lora." in name) for name, p in named)
    optimizer_step(state, stats, trained, meshes, settings)
    moments = [s[key] for s in state.optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    averages = size(s["ema"] for s in state.optimizer.state.values())
    return size(p for _, p in named), gradients, size(moments), averages, alone


@pytest.mark.parametrize("mesh", [dict(dp_shard=1), MESH], ids=["one", "dp2-ep2"])
def test_gradients_and_moments_are_the_adapters_alone(
    ranks: RankPool, text: Path, base: Path, tmp_path: Path, mesh: dict[str, int]
) -> None:
    settings = replace(tuned(text, base, dtype="bfloat16"), mesh=config(text, **mesh).mesh)
    shape = resolve_mesh(settings.mesh, None)
    [planned] = plan_memory(settings, shape, plan_batch(settings, shape))
    found = ranks.run(bytes_of_a_step, shape.world_size, settings, tmp_path / "run")
    *found_bytes, alone = found[0]
    assert alone and all(rank[-1] for rank in found)
    assert found_bytes == [planned.weights, planned.gradients, planned.moments, planned.averages]
    assert planned.moments == 2 * planned.gradients == 2 * planned.averages > 0
