"""Adapters beside a frozen checkpoint: what a step keeps of it, what is saved, and a kill in between."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_runs import MODEL, Run, build_state, config, on_mesh, refusal, run
from safetensors.torch import load_file

from automoe.checkpoint.manifest import check_base
from automoe.checkpoint.reader import StepReader
from automoe.comm.local_shard import local_shard
from automoe.config.batch import plan_batch
from automoe.config.convert import config_to_dict
from automoe.config.mesh_shape import resolve_mesh
from automoe.config.schema import Config, LoraConfig, ModelConfig, MoEConfig
from automoe.errors import CheckpointError
from automoe.export import export_run
from automoe.hf.identity import checkpoint_identity
from automoe.hf.read import load_hf
from automoe.hf.write import to_hf
from automoe.model.init import fill_normal_, initialize
from automoe.model.lora import freeze_and_adapt
from automoe.parallel.parallelize import allocate, build_decoder
from automoe.planner.memory import plan_memory
from automoe.training.step import forward_backward, optimizer_step, prepare_inputs
from automoe.verify.pool import RankError, RankPool
from tests.support.releases import PACKED, needs

UNTIL, SAVES, MESH = 4, (1, 2, 3), dict(dp_shard=2, ep=2)


def random_base(folder: Path, seed: int, model: ModelConfig = MODEL, fp8: bool = False) -> Path:
    part = build_decoder(model, MoEConfig(experts="loop"), torch.float32)
    allocate({0: part}, torch.device("cpu"))
    initialize(part, 0.2, seed)
    return to_hf(part, folder, tokenizer="byte", verify=False, encoding="fp8" if fp8 else "plain").path


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
    assert "6 of experts" in adapter and "9 of shared_experts" in adapter


def test_an_identity_is_compared(text: Path, base: Path) -> None:
    settings, now = tuned(text, base), checkpoint_identity(base)
    saved = {"base": now, "config": config_to_dict(settings)}
    check_base(Path("step-1"), saved, settings, now)
    with pytest.raises(CheckpointError, match="another checkpoint, or a file of it that changed"):
        check_base(Path("step-1"), saved | {"base": "crc32:0"}, settings, now)


def bytes_of_a_step(settings: Config, run_dir: Path) -> tuple[int, int, int, int, bool]:
    """Of weights, gradients before the update, moments and averages on this rank; whether only adapters have a gradient."""
    state, meshes, runner = build_state(settings, run_dir)
    inputs, trained = prepare_inputs(state.loader.next_step(), meshes, settings, torch.device("cpu"))
    stats = forward_backward(state, runner, inputs, settings)

    def size(tensors) -> int:
        return sum(local_shard(tensor).nbytes for tensor in tensors)

    named = [(name, p) for part in state.model_parts.values() for name, p in part.named_parameters()]
    gradients = size(p.grad for _, p in named if p.grad is not None)
    alone = all((p.grad is not None) == (".lora." in name) for name, p in named)
    optimizer_step(state, stats, trained, meshes, settings)
    moments = [s[key] for s in state.optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    averages = size(s["ema"] for s in state.optimizer.state.values())
    return size(p for _, p in named), gradients, size(moments), averages, alone


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("mesh", "kept"),
    [
        pytest.param(dict(dp_shard=1), "weights", id="one"),
        pytest.param(MESH, "weights", id="dp2-ep2"),
        pytest.param(MESH, "nf4", id="nf4", marks=[pytest.mark.faults, needs(PACKED)]),
    ],
)
def test_gradients_and_moments_are_the_adapters_alone(
    ranks: RankPool, text: Path, base: Path, tmp_path: Path, mesh: dict[str, int], kept: str
) -> None:
    settings = replace(tuned(text, base, dtype="bfloat16"), mesh=config(text, **mesh).mesh)
    settings = replace(settings, lora=replace(settings.lora, base=kept))
    shape = resolve_mesh(settings.mesh, None)
    [planned] = plan_memory(settings, shape, plan_batch(settings, shape))
    found = ranks.run(bytes_of_a_step, shape.world_size, settings, tmp_path / "run")
    *found_bytes, alone = found[0]
    assert alone and all(rank[-1] for rank in found)
    # Gradients are as wide as each of the moments; of those the plan counts what is there at its fullest moment.
    assert found_bytes == [planned.weights, planned.moments // 2, planned.moments, planned.averages]
    assert planned.moments == 2 * planned.averages > 0 and planned.gradients <= planned.moments // 2


# Widths that two ranks of tp and of etp cut where blocks of FP8 and NF4 meet, and experts of less than one block.
WIDE = replace(MODEL, hidden_size=24, intermediate_size=256, moe_intermediate_size=256, num_layers=2)
WIDE = replace(WIDE, attention=replace(MODEL.attention, num_heads=4, num_kv_heads=4, v_head_dim=64))
MESHES = {
    "dp2-ep2": dict(dp_shard=2, ep=2),
    "tp2-ep2": dict(tp=2, ep=2),
    "dp2-etp2": dict(dp_shard=2, etp=2),
    "pp2-ep_shard2": dict(pp=2, dp_shard=2, ep_shard=2),
    "cp2-tp2-etp2": dict(cp=2, tp=2, ep_shard=2, etp=2),
}


def export_merged(settings: Config, run_dir: Path) -> bool:
    """A merged export of this mesh, with a B whose numbers do not depend on it."""
    state, _, _ = build_state(settings, run_dir)
    for part in state.model_parts.values():
        for name, parameter in part.named_parameters():
            if ".lora.B" in name:
                fill_normal_(parameter.detach(), name, 0.3, 7)
    return to_hf(state.model_parts, run_dir, dtype="float32", tokenizer="byte").checked


def beside(text: Path, path: Path, base: str, **mesh: int) -> Config:
    made = on_mesh(tuned(text, path), **mesh)
    return replace(made, model=replace(WIDE, hf_path=str(path)), lora=LoraConfig(rank=8, dropout=0.25, base=base))


def check_merged_alike(ranks: RankPool, text: Path, source: Path, kept: str, folder: Path, *names: str) -> None:
    """Merged exports of these meshes hold what that of one rank holds."""
    stored = []
    for name in ("one", *names):
        chosen = beside(text, source, kept, **MESHES.get(name, {}))
        assert all(ranks.run(export_merged, resolve_mesh(chosen.mesh, None).world_size, chosen, folder / f"hf-{name}"))
        files = (folder / f"hf-{name}").glob("*.safetensors")
        stored.append({key: tensor for file in files for key, tensor in load_file(file).items()})
    for other in stored[1:]:
        assert other.keys() == stored[0].keys()
        torch.testing.assert_close(other, stored[0], rtol=1e-6, atol=1e-6)


@needs(PACKED)
def test_a_mesh_merges_adapters_into_a_packed_base_as_one_rank_does(
    ranks: RankPool, text: Path, tmp_path: Path
) -> None:
    check_merged_alike(ranks, text, random_base(tmp_path / "source", 0, WIDE), "nf4", tmp_path, "tp2-ep2")


@needs(PACKED)
@pytest.mark.faults
@pytest.mark.parametrize("kept", ["fp8", "nf4"])
def test_every_mesh_trains_beside_the_same_packed_base(ranks: RankPool, text: Path, tmp_path: Path, kept: str) -> None:
    source = random_base(tmp_path / "source", 0, WIDE, fp8=kept == "fp8")
    settings = partial(beside, text)

    # The same base as plain numbers: what is exported while every B is zero.
    packed = settings(source, kept)
    part = build_decoder(packed.model, packed.moe, torch.float32)
    freeze_and_adapt(part, packed, torch.float32, torch.float32)
    allocate({0: part}, torch.device("cpu"))
    load_hf(part, source)
    plain = to_hf(part, tmp_path / "plain", dtype="float32", tokenizer="byte").path
    expected = run(ranks, settings(plain, "weights"), tmp_path / "expected", 3).losses
    assert expected[0] - expected[2] > 1e-3
    meshes = MESHES if kept == "nf4" else {name: MESHES[name] for name in ("dp2-ep2", "cp2-tp2-etp2")}
    for name, mesh in meshes.items():
        found = run(ranks, settings(source, kept, **mesh), tmp_path / name, 3, (1,) if name == "dp2-ep2" else ())
        assert found.losses == pytest.approx(expected, rel=1e-10), name
        frozen = {key for key, tensor in found.states[0].items() if tensor.dtype == torch.uint8}
        assert len(frozen) == 2 * 4 + 3 + 3 + 2
        assert all(torch.equal(found.states[0][key], found.states[3][key]) for key in frozen)
    check_merged_alike(ranks, text, source, kept, tmp_path, "tp2-ep2", "pp2-ep_shard2", "dp2-etp2")
    # What another mesh saved goes on here, beside the base that is packed again.
    shutil.copytree(tmp_path / "dp2-ep2", tmp_path / "moved")
    shutil.rmtree(tmp_path / "moved" / "checkpoints" / "step-3", ignore_errors=True)
    resumed = run(ranks, settings(source, kept, tp=2, ep=2), tmp_path / "moved", 3)
    assert resumed.resumed_at == 1 and resumed.losses == pytest.approx(expected[1:], rel=1e-10)
    settled = replace(packed, run_dir=str(tmp_path / "moved"), mesh=on_mesh(packed, dp_shard=2, ep=2).mesh)
    (tmp_path / "moved" / "config.yaml").write_text(json.dumps(asdict(settled)))
    merged = export_run(tmp_path / "moved", tmp_path / "merged")
    assert merged.checked and merged.logits_error < 1e-5
