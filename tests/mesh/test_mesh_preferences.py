"""Pairs of answers give the same reference, losses, rewards and updates on every mesh."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from mesh_cases import Case

from automoe.checkpoint.store import CheckpointStore
from automoe.config.data_schema import DataConfig
from automoe.config.mesh_shape import resolve_mesh
from automoe.config.schema import Config, OptimConfig, TrainConfig
from automoe.data.loader import Loader
from automoe.data.prepare import prepare_data
from automoe.optim.adamw import build_optimizer
from automoe.parallel.mesh import build_meshes
from automoe.parallel.parallelize import build_parts, materialize
from automoe.parallel.pipeline import build_runner
from automoe.run.reference import open_reference
from automoe.training.context import RunContext
from automoe.training.preference import PreferenceLoss
from automoe.training.state import TrainState
from automoe.training.step import forward_backward, optimizer_step, prepare_inputs
from automoe.training.validate import validate
from automoe.verify.pool import RankPool
from automoe.verify.trajectory import named_parameters, whole
from tests.support.preference import write_pairs
from tests.support.releases import HALVES, needs

CPU, TOLERANCE = torch.device("cpu"), 1e-10
Numbers = tuple[torch.Tensor, list[dict[str, float]], dict[str, torch.Tensor]]


def train(config: Config, kind: str) -> Numbers:
    """On one rank: the reference, the records of three steps and a validation, and this stage's parameters after them."""
    shape = resolve_mesh(config.mesh, None)
    meshes = build_meshes(shape, CPU)
    parts = build_parts(config, meshes)
    materialize(parts, config, CPU)
    runner = build_runner(parts, meshes, config, CPU)
    rank = torch.distributed.get_rank()
    loader = Loader(config, meshes.dp_rank, shape.dp, pairs=True)
    context = RunContext(rank, shape.world_size, rank, CPU, Path(config.run_dir))
    store = CheckpointStore(config, shape, context.run_dir)
    reference = open_reference(config, runner, loader, meshes, context, store)
    assert reference is not None
    runner.set_loss(PreferenceLoss(0.5, kind))
    state = TrainState(parts, build_optimizer(list(parts.values()), config.optim, 0), loader)
    records = []
    for _ in range(3):
        batch = loader.next_step()
        inputs, trained = prepare_inputs(batch, meshes, config, CPU)
        stats = forward_backward(state, runner, inputs | reference.inputs(batch), config)
        norm = optimizer_step(state, stats, trained, meshes, config).grad_norm
        records.append({"loss": stats.loss, "norm": norm} | stats.metrics)
    records.append(dict(validate(config, runner, loader, meshes, CPU, extra_inputs=reference.inputs)))
    return reference.log_probs, records, {name: whole(p) for name, p in named_parameters(parts).items()}


def numbers(ranks: RankPool, folder: Path, kind: str, schedule: str = "", **mesh: int) -> Numbers:
    pipeline = dict(schedule=schedule, stages_per_rank=2) if schedule else {}
    case = Case("qwen3", mesh=mesh, rows=2 if mesh else 8, parallel=pipeline)
    config = replace(
        case.config,
        run_dir=str(folder / f"{kind}{mesh}{schedule}"),
        recipe="dpo",
        model=replace(case.config.model, vocab_size=264),
        train=TrainConfig(seq_len=128, global_batch_size=8, micro_batch_size=case.rows, dtype="float64", val_every=1),
        optim=OptimConfig(lr=1e-2, warmup_steps=0, schedule="constant"),
        data=DataConfig(kind="preference", path=str(folder / "pairs.jsonl"), on_long="error", val_fraction=0.2),
    )
    config.data.chat.template = "plain"
    Path(config.run_dir).mkdir()
    with mock.patch.dict(os.environ, XDG_CACHE_HOME=str(folder / "cache")):
        prepare_data(config)
        found = ranks.run(cached_train, case.world_size, config, kind, str(folder / "cache"))
    for _, _, parameters in found[1:]:
        found[0][2].update(parameters)
    return found[0]


def cached_train(config: Config, kind: str, cache: str) -> Numbers:
    with mock.patch.dict(os.environ, XDG_CACHE_HOME=cache):
        return train(config, kind)


@pytest.fixture(scope="module")
def alone(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Numbers]]:
    """A folder with pairs, and what one rank makes of them, all rows of a step at once."""
    folder = tmp_path_factory.mktemp("preferences")
    write_pairs(folder / "pairs.jsonl", 40)
    return folder, {kind: numbers(ranks, folder, kind) for kind in ("sigmoid", "ipo")}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("kind", "mesh"),
    [
        ("sigmoid", {"pp": 2, "cp": 2}),
        ("ipo", {"dp_shard": 2, "ep": 2}),
        ("sigmoid", {"tp": 2}),
        pytest.param("sigmoid", {"pp": 2, "schedule": "DualPipeV"}, marks=needs(HALVES)),
        pytest.param("ipo", {"pp": 2, "dp_shard": 2, "ep": 2, "schedule": "ZBVZeroBubble"}, marks=needs(HALVES)),
        *(pytest.param("ipo", mesh, marks=pytest.mark.exhaustive) for mesh in ({"pp": 2}, {"cp": 2}, {"tp": 2})),
    ],
    ids=str,
)
def test_pairs_train_alike_on_every_mesh(
    ranks: RankPool, alone: tuple[Path, dict[str, Numbers]], mesh: dict[str, Any], kind: str
) -> None:
    folder, expected = alone
    log_probs, records, parameters = numbers(ranks, folder, kind, **mesh)
    torch.testing.assert_close(log_probs, expected[kind][0], rtol=TOLERANCE, atol=0)
    assert len(records) == 4 and records[1]["rewards/margins"] != 0 and "val_rewards/accuracies" in records[3]
    for got, same in zip(records, expected[kind][1], strict=True):
        assert got == pytest.approx(same, rel=TOLERANCE, abs=TOLERANCE)
    assert parameters.keys() == expected[kind][2].keys()
    for name, value in parameters.items():
        torch.testing.assert_close(value, expected[kind][2][name], rtol=1e-8, atol=TOLERANCE, msg=name)
