"""The gradient norm of real training steps, against torchtitan's on the same parameters."""

from __future__ import annotations

import pytest
import torch
from mesh_cases import Case, batches
from mesh_mappings import INTERLEAVED
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from automoe.config.mesh_shape import resolve_mesh
from automoe.config.schema import Config
from automoe.optim.grad_norm import global_grad_norm
from automoe.parallel.mesh import build_meshes
from automoe.parallel.parallelize import build_parts, materialize
from automoe.parallel.pipeline import build_runner
from automoe.training.step import prepare_inputs
from automoe.verify.pool import RankPool
from tests.support.titan_norm import titan_grad_norm

# All with ep: without it torchtitan stacks the norms of both meshes, which DTensor refuses.
CASES = [
    Case("qwen3", dict(dp_shard=2, ep=2), rows=4),
    Case("deepseek", dict(dp_shard=4, ep=2), rows=2),
    Case("mixtral", dict(dp_replicate=2, dp_shard=2, ep=4), rows=2),
    Case("qwen3", dict(pp=2, dp_shard=2, ep=2), rows=2),
    Case("qwen3", dict(cp=2, ep=2), rows=4),
    Case("deepseek", dict(pp=2, dp_shard=2, cp=2, ep=4), rows=1, parallel=INTERLEAVED),
    Case("qwen3", dict(tp=2, ep=2), rows=4),
    Case("mixtral", dict(dp_shard=4, ep=2, etp=2), rows=1),
    Case("deepseek", dict(dp_shard=2, tp=2, ep=2, etp=2), rows=2),
    Case("qwen3", dict(dp_replicate=2, tp=2, ep=2, ep_replicate=2), rows=2),
]


def as_torchtitan_holds_it(parameter: nn.Parameter, tp: DeviceMesh | None) -> torch.Tensor:
    """torchtitan keeps what is not cut over tp as DTensors that are replicated over it; here they have no tp axis."""
    if tp is None or {"tp", "ep", "etp", "ep_shard"} & set(parameter.device_mesh.mesh_dim_names):
        return parameter
    mesh = DeviceMesh._concatenate([parameter.device_mesh, tp])
    placements = [*parameter.placements, Replicate()]

    def held(tensor: DTensor) -> DTensor:
        return DTensor.from_local(tensor.to_local(), mesh, placements, run_check=False)

    copy = held(parameter.data)
    copy.grad = held(parameter.grad)
    return copy


def both_norms(config: Config) -> tuple[float, float]:
    cpu, shape = torch.device("cpu"), resolve_mesh(config.mesh, None)
    meshes = build_meshes(shape, cpu)
    parts = build_parts(config, meshes)
    materialize(parts, config, cpu)
    inputs, _ = prepare_inputs(batches(config, 0, meshes.dp_rank, shape.dp), meshes, config, cpu)
    build_runner(parts, meshes, config, cpu).train(inputs)
    parameters = [parameter for part in parts.values() for parameter in part.parameters()]
    ours = global_grad_norm(parameters, meshes.group("pp"))
    theirs = [as_torchtitan_holds_it(parameter, meshes.submesh("tp")) for parameter in parameters]
    return ours.item(), titan_grad_norm(theirs, meshes.submesh("pp")).item()


@pytest.mark.one_in(10)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_torchtitan_finds_the_same_norm(ranks: RankPool, reference, case: Case) -> None:
    expected = reference(case).grad_norms[0]
    for ours, titans in ranks.run(both_norms, case.world_size, case.config):
        assert ours == pytest.approx(expected, rel=1e-10)
        assert titans == pytest.approx(expected, rel=1e-10)
