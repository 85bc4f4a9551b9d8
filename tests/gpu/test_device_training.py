"""Training on the device, through the code that a rank runs: one world of one rank, over NCCL on a GPU."""

from __future__ import annotations

import gc
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from device_models import SMALL, published_slice, relative, rows, same_rows, small

from automoe.checkpoint.store import CheckpointStore
from automoe.config.data_schema import DataConfig
from automoe.config.mesh_shape import resolve_mesh
from automoe.config.schema import CheckpointConfig, ClusterConfig, Config
from automoe.data.loader import Loader
from automoe.model.decoder import Decoder
from automoe.model.init import initialize
from automoe.optim.adamw import build_optimizer
from automoe.parallel.mesh import build_meshes
from automoe.parallel.parallelize import build_decoder, build_parts, materialize
from automoe.parallel.pipeline import build_runner
from automoe.training.context import RunContext
from automoe.training.state import TrainState
from automoe.training.step import prepare_inputs
from automoe.verify.trajectory import whole
from recipes import pretrain
from tests.support.trajectories import run_trajectory

# Per tensor, against float64 with its routing forced. The router sees differences of experts' outputs,
# which is where bfloat16 loses most.
GRADIENT = {"float32": 1e-4, "bfloat16": 1e-1}
LOSS = {"float32": 1e-5, "bfloat16": 1e-2}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("family", SMALL)
@pytest.mark.parametrize("dtype", GRADIENT)
def test_optimizer_steps_follow_float64(device: torch.device, family: str, dtype: str) -> None:
    expected = run_trajectory(small(family, "float64"), rows, 2, record=True)
    got = run_trajectory(small(family, dtype), rows, 2, forced=expected.choices, device=str(device))
    assert torch.equal(got.expert_counts[0], expected.expert_counts[0])
    assert expected.seq_balance_loss[0] > 0 and expected.global_balance_loss[0] > 0
    for ours, theirs in (
        (got.losses, expected.losses),
        (got.grad_norms, expected.grad_norms),
        (got.seq_balance_loss, expected.seq_balance_loss),
        (got.global_balance_loss, expected.global_balance_loss),
    ):
        assert ours[0] == pytest.approx(theirs[0], rel=LOSS[dtype])
        # The second step has taken a step of Adam, which turns rounding on tiny gradients into lr.
        assert ours[1] == pytest.approx(theirs[1], rel=10 * LOSS[dtype])
    assert got.gradients[0].keys() == expected.gradients[0].keys() == got.parameters.keys()
    errors = {name: relative(got.gradients[0][name], g) for name, g in expected.gradients[0].items()}
    assert {name: error for name, error in errors.items() if not error < GRADIENT[dtype]} == {}
    for name, parameter in got.parameters.items():
        assert parameter.dtype == torch.float32 and parameter.isfinite().all(), name
        assert relative(parameter, expected.parameters[name]) < GRADIENT[dtype], name


def live_decoders() -> int:
    """Decoders that something still refers to."""
    gc.collect()
    return sum(issubclass(type(thing), Decoder) for thing in gc.get_objects())


@pytest.mark.one_in(3)
@pytest.mark.parametrize("family", SMALL)
def test_a_slice_of_a_published_model_learns(device: torch.device, family: str) -> None:
    """bfloat16, published head dims and expert widths: the loss on a repeated batch falls; memory is given back."""
    decoders = live_decoders()
    allocated = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    run = run_trajectory(published_slice(family, device), same_rows, 10, keep_tensors=False, device=str(device))
    assert all(map(math.isfinite, run.losses + run.grad_norms))
    assert run.losses[-1] < run.losses[0] - 0.3
    assert run.expert_counts[0].sum() > 0
    assert live_decoders() == decoders
    if device.type == "cuda":
        # cuBLAS keeps its workspaces; the smallest of these models has 0.5 GB of weights alone.
        assert torch.cuda.memory_allocated() - allocated < 256 << 20


@pytest.mark.parametrize("family", SMALL)
def test_initialisation_is_the_cpus(device: torch.device, family: str) -> None:
    """By name and index, whatever computes it; the device's logarithm may differ in the last bit."""
    config = small(family, "float32")
    plain = build_decoder(config.model, config.moe, torch.float32)
    plain.to_empty(device="cpu")
    initialize(plain, config.model.initializer_range, config.train.seed)
    parts = build_parts(config, build_meshes(resolve_mesh(config.mesh, None), device))
    materialize(parts, config, device)
    expected = dict(plain.named_parameters())
    for name, parameter in parts[0].named_parameters():
        assert parameter.device.type == device.type
        torch.testing.assert_close(whole(parameter), expected[name].detach(), rtol=1e-6, atol=1e-9, msg=name)


def training(tmp_path: Path, device: torch.device) -> Config:
    """A short run of the recipe over a text of its own."""
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"{n} squared is {n * n}." for n in range(2000)))
    config = small("deepseek_v3", "bfloat16")
    return replace(
        config,
        run_dir=str(tmp_path / "run"),
        train=replace(config.train, steps=4, val_every=2, val_batches=1),
        data=DataConfig(kind="text", path=str(text)),
        checkpoint=CheckpointConfig(every=2, export_hf=False),
        launch=replace(config.launch, device=device.type),
        cluster=ClusterConfig(peak_flops=989.5e12),
    )


@pytest.mark.one_in(2)
@pytest.mark.parametrize("background", [False, True], ids=["save", "async"])
def test_checkpoint_comes_back_to_the_bit(device: torch.device, tmp_path: Path, background: bool) -> None:
    config = training(tmp_path, device)
    config.checkpoint.async_save = background
    meshes = build_meshes(resolve_mesh(config.mesh, None), device)
    parts = build_parts(config, meshes)
    materialize(parts, config, device)
    state = TrainState(parts, build_optimizer(parts.values(), config.optim), Loader(config, 0, 1))
    inputs, _ = prepare_inputs(state.loader.next_step(), meshes, config, device)
    build_runner(parts, meshes, config, device).train(inputs)
    state.optimizer.step()
    state.step = 1
    store = CheckpointStore(config, meshes.shape, tmp_path)
    saved = {name: whole(tensor) for name, tensor in state.tensors().items()}
    assert (store.save(state) is None) == background
    with torch.no_grad():
        for tensor in state.tensors().values():
            tensor.fill_(0.5)
    state.step = 0
    store.poll(wait=True)

    assert store.load_latest(state)
    assert (state.step, state.loader.consumed_rows) == (1, config.train.global_batch_size)
    loaded = state.tensors()
    assert loaded.keys() == saved.keys()
    assert [name for name, tensor in saved.items() if not torch.equal(whole(loaded[name]), tensor)] == []
    assert all(tensor.device.type == device.type for tensor in loaded.values())


def test_the_recipe_trains_and_resumes(device: torch.device, tmp_path: Path) -> None:
    config = training(tmp_path, device)
    run_dir = Path(config.run_dir)
    run_dir.mkdir()

    def train() -> list[dict[str, float]]:
        context = RunContext(rank=0, world_size=1, local_rank=0, device=device, run_dir=run_dir)
        objective = pretrain.main(config, resolve_mesh(config.mesh, None), context)
        records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        assert objective == records[-1]["val_loss"]
        return records

    straight = train()
    assert [record["step"] for record in straight] == [1, 2, 3, 4]
    assert straight[-1]["loss"] < straight[0]["loss"]
    assert all(record["mfu"] > 0 and record["peak_memory_bytes"] > 0 for record in straight)
    shutil.rmtree(run_dir / "checkpoints" / "step-4")
    resumed = train()
    assert [record["step"] for record in resumed] == [1, 2, 3, 4]
    for key in ("loss", "grad_norm"):
        got, expected = ([record[key] for record in records] for records in (resumed, straight))
        # Sums over a token's experts are atomic on a GPU, in no fixed order.
        assert got == (expected if device.type == "cpu" else pytest.approx(expected, rel=1e-2))
