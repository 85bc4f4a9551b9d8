"""Muon on meshes: the published formula on whole matrices, and each matrix orthogonalised by one rank."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from unittest.mock import patch

import pytest
import torch
from mesh_cases import STEPS, Case, batches
from mesh_mappings import INTERLEAVED

from automoe.config.schema import Config, OptimConfig
from automoe.model.params import find_spec, model_params
from automoe.optim import muon
from automoe.verify.pool import RankPool
from automoe.verify.trajectory import Trajectory, merge_trajectories
from tests.support.trajectories import run_trajectory

LR, MOMENTUM, DECAY = 0.03, 0.9, 0.2

CASES = [
    Case("deepseek", dict(dp_shard=4, ep=2), rows=1),
    Case("deepseek", dict(dp_replicate=2, tp=2, ep=2, etp=2), rows=2),
    Case("qwen3", dict(pp=2, dp_shard=2, ep=2), rows=2, parallel=INTERLEAVED),
    Case("gpt-oss", dict(cp=2, tp=2, ep=2), rows=2),
]


def published(matrix: torch.Tensor, gradients: list[torch.Tensor]) -> torch.Tensor:
    """The weights after one step for each of ``gradients``: arXiv 2502.16982, section 2, line by line."""
    momentum = torch.zeros_like(matrix)
    for gradient in gradients:
        momentum = MOMENTUM * momentum + gradient
        x = gradient + MOMENTUM * momentum  # Nesterov
        x = x / (torch.linalg.matrix_norm(x) + 1e-7)
        for _ in range(5):
            gram = x @ x.T
            x = 3.4445 * x - 4.7750 * gram @ x + 2.0315 * gram @ gram @ x
        matrix = matrix - LR * (0.2 * max(matrix.shape) ** 0.5 * x + DECAY * matrix)
    return matrix


def config_of(case: Case) -> Config:
    optim = OptimConfig(algorithm="muon", lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
    return replace(case.config, optim=optim, train=replace(case.config.train, grad_clip=0.0))


def counted(config: Config, steps: int, per_round: int) -> tuple[Trajectory, int]:
    """A rank's trajectory, and the number of matrices that it orthogonalised."""
    sizes = []

    def count(matrices: torch.Tensor) -> torch.Tensor:
        sizes.append(prod(matrices.shape[:-2]))
        return orthogonalize(matrices)

    orthogonalize = muon.orthogonalize
    with patch.object(muon, "orthogonalize", count), patch.object(muon, "MUON_ROUND", per_round):
        return run_trajectory(config, batches, steps), sum(sizes)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", CASES, ids=str)
def test_updates_are_those_of_the_published_formula_on_whole_matrices(ranks: RankPool, case: Case) -> None:
    config = config_of(case)
    first = merge_trajectories(ranks.run(run_trajectory, case.world_size, config, batches, 0)).parameters
    # Small rounds: several exchanges a step.
    found, counts = zip(*ranks.run(counted, case.world_size, config, STEPS, 200), strict=True)
    run = merge_trajectories(list(found))
    matrices = 0
    for name, before in first.items():
        spec = find_spec(name)
        assert spec is not None
        if not spec.orthogonalized:
            continue
        pairs = zip(
            before.flatten(0, -3) if before.dim() > 2 else [before],
            run.parameters[name].reshape(-1, *before.shape[-2:]),
            strict=True,
        )
        gradients = [step[name].reshape(-1, *before.shape[-2:]) for step in run.gradients]
        for i, (start, got) in enumerate(pairs):
            expected = published(start, [gradient[i] for gradient in gradients])
            assert (got - expected).norm() <= 1e-10 * expected.norm(), (name, i)
            matrices += 1
    assert sum(counts) == STEPS * matrices, "a matrix has one owner"
    if case.mesh.get("pp", 1) == 1:
        assert min(counts) > 0, "no rank is idle"
    updated = {param.name for param in model_params(config.model) if param.spec.orthogonalized}
    assert {name for name in first if find_spec(name).orthogonalized} == updated
    assert not any("embed" in name or "lm_head" in name or "norm" in name for name in updated)
