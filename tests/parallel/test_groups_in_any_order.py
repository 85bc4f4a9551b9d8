"""Groups of ranks that some stages ask for earlier than others."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from automoe.config.mesh_shape import resolve_mesh
from automoe.config.schema import MeshConfig
from automoe.parallel.mesh import build_meshes
from automoe.verify.pool import RankPool


def sums() -> tuple[float, float]:
    """Of this rank's number over its stage and over the pipeline, the groups made in an order of the stage's."""
    shape = resolve_mesh(MeshConfig(pp=2, dp_shard=2, tp=2), 8)
    meshes = build_meshes(shape, torch.device("cpu"), timedelta(seconds=20))
    first = meshes.coordinate("pp") == 0
    stage = meshes.stage_group() if first else None
    members = meshes.pipeline_members([0, 1])
    stage = stage or meshes.stage_group()
    totals = []
    for group in (stage, members):
        number = torch.tensor(float(dist.get_rank()))
        dist.all_reduce(number, group=group)
        totals.append(number.item())
    return totals[0], totals[1]


def test_a_stages_group_may_be_asked_for_later_by_another_stage(ranks: RankPool) -> None:
    stages = [6.0] * 4 + [22.0] * 4
    assert ranks.run(sums, 8) == list(zip(stages, [4.0, 6.0, 8.0, 10.0] * 2, strict=True))
