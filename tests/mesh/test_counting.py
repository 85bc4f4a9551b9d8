"""A pass that does not train is counted nowhere, on any runner: validation, samples, a reference, a plugin's call."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from mesh_cases import SEQ_LEN, Case, batches
from mesh_mappings import CLIP, FULL, MERGED

from automoe.comm.tokens import MicroBatch
from automoe.config.mesh_shape import resolve_mesh
from automoe.config.schema import Config
from automoe.model.causal_lm import CausalLM
from automoe.parallel.mesh import build_meshes
from automoe.parallel.parallelize import build_parts, materialize
from automoe.parallel.pipeline import build_runner
from automoe.run.reference import _Collector
from automoe.run.samples import Engine
from automoe.training.step import prepare_inputs
from automoe.verify.pool import RankPool
from tests.support.class_models import save_class, tier_config

FP8 = dict(fp8="delayed")
CASES = {
    "one": Case("deepseek-sparse", rows=2, optim=CLIP, train=FP8),
    "recomputed": Case("deepseek-sparse", rows=2, optim=CLIP, train=FP8, parallel=FULL),
    "modules": Case("glm-sparse", rows=2, optim=CLIP),
    "merged": Case("deepseek", dict(dp_shard=2, ep=2), rows=2, optim=CLIP, parallel=MERGED),
    "stages": Case("deepseek-sparse", dict(pp=2), rows=2, optim=CLIP, train=FP8),
    "stages, modules": Case("deepseek-mtp", dict(pp=2), rows=2, optim=CLIP),
}


def counters(parts: dict[int, CausalLM]) -> dict[str, torch.Tensor]:
    """Every number that a pass may change: all buffers, and the largest logits."""
    found = {}
    for stage, part in parts.items():
        found |= {f"{stage}.{name}": buffer for name, buffer in part.named_buffers()}
        for name, module in part.named_modules():
            if getattr(getattr(module, "core_attention", None), "largest", None) is not None:
                found[f"{stage}.{name}.largest"] = module.core_attention.largest
    return {name: tensor.clone() for name, tensor in found.items()}


def changed_by(config: Config) -> dict[str, list[str]]:
    """The counters that passes of a training step change, and those that all other passes change."""
    cpu = torch.device("cpu")
    shape = resolve_mesh(config.mesh, None)
    meshes = build_meshes(shape, cpu)
    parts = build_parts(config, meshes)
    materialize(parts, config, cpu)
    runner = build_runner(parts, meshes, config, cpu)

    def inputs(step: int) -> MicroBatch:
        return prepare_inputs(batches(config, step, meshes.dp_rank, shape.dp), meshes, config, cpu)[0]

    def differing(before: dict[str, torch.Tensor]) -> list[str]:
        return [name for name, now in counters(parts).items() if name not in before or not now.equal(before[name])]

    before = counters(parts)
    runner.train(inputs(0))
    of_training = differing(before)
    reported = runner.take_reported()
    before = counters(parts)
    runner.evaluate(inputs(7))
    Engine(config, runner, meshes, cpu).generate([[3, 4], [5]], 2, ())
    if not config.model.num_mtp_layers:
        runner.set_loss(_Collector())
        runner.evaluate(inputs(8) | {"pairs": torch.zeros(len(inputs(8).tokens), SEQ_LEN // 2, dtype=torch.int64)})
        runner.set_loss(None)
    if shape.pp == 1 and shape.dp == 1:
        parts[0](batch=inputs(9)).sum()  # as a plugin may, in training mode and with gradients
    others = differing(before)
    runner.train(inputs(0))
    for name, value in runner.take_reported().items():
        assert value.equal(reported[name]), name
    return {"training": of_training, "others": others}


def check(found: dict[str, list[str]], *kinds: str) -> None:
    for kind in kinds:
        assert any(name.endswith(kind) for name in found["training"]), kind
    assert found["others"] == []


COVERED = ("one", "stages, modules")  # by "recomputed", and by "stages" and "modules"


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.exhaustive if name in COVERED else ()) for name in CASES]
)
def test_only_passes_of_a_step_count(ranks: RankPool, name: str) -> None:
    case = CASES[name]
    kinds = ["load.totals", "self_attn.largest"]
    kinds += ["indexer.loss_sum"] if "sparse" in case.family else []
    kinds += ["scaling.seen"] if case.train else []
    for found in ranks.run(changed_by, case.world_size, case.config):
        check(found, *kinds)


def test_only_passes_of_a_step_count_in_a_class_of_transformers(ranks: RankPool, tmp_path: Path) -> None:
    save_class("mixtral", tmp_path)
    config = replace(Case("mixtral", rows=2).config, model=tier_config(tmp_path))
    [found] = ranks.run(changed_by, 1, config)
    check(found, "load.totals")
