"""How often a real step waits for the GPU; without one, ``tests/parallel/test_host_syncs.py`` proves what it can."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from device_models import rows, small

from automoe.config.mesh_shape import resolve_mesh
from automoe.optim.adamw import build_optimizer
from automoe.parallel.mesh import build_meshes
from automoe.parallel.parallelize import build_parts, materialize
from automoe.parallel.pipeline import build_runner
from automoe.training.state import TrainState
from automoe.training.step import forward_backward, optimizer_step, prepare_inputs
from tests.support.gpu import one_rank
from tests.support.host_syncs import host_syncs


@pytest.mark.gpu
@pytest.mark.parametrize("experts", ["grouped_mm", "triton"])
def test_a_step_waits_for_its_statistics_and_its_norm(experts: str) -> None:
    config = small("deepseek_v3", "bfloat16")
    config = replace(config, moe=replace(config.moe, experts=experts))
    with one_rank("cuda") as device:
        meshes = build_meshes(resolve_mesh(config.mesh, 1), device)
        parts = build_parts(config, meshes)
        materialize(parts, config, device)
        runner = build_runner(parts, meshes, config, device)
        state = TrainState(parts, build_optimizer([parts[0]], config.optim))
        batch = rows(config, 0, 0, 1)

        def step() -> None:
            inputs, trained = prepare_inputs(batch, meshes, config, device)
            stats = forward_backward(state, runner, inputs, config)
            optimizer_step(state, stats, trained, meshes, config)

        step()  # the first one makes state
        torch.cuda.synchronize()
        found = host_syncs(step, device)
    assert found is not None and sum(found.values()) == 2, found
