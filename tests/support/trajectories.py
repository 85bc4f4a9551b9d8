"""Trajectories of a configuration whose mesh may have axes left to derive, and what differs between two of them."""

from __future__ import annotations

from typing import Any

import torch

import automoe.verify.trajectory
from automoe.config.mesh_shape import resolve_mesh
from automoe.config.schema import Config
from automoe.parallel.mesh import Meshes
from automoe.parallel.runner import StepRunner
from automoe.run.samples import Engine
from automoe.training.step import prepare_inputs
from automoe.verify.compare import Comparison, compare_trajectories
from automoe.verify.trajectory import Batches, Trajectory


def run_trajectory(config: Config, batches: Batches, steps: int, **options: Any) -> Trajectory:
    """Train on ``config.mesh`` over the initialised process group, and keep everything.

    With ``train.val_every=1`` other rows are evaluated after each step, and prompts answered.
    """
    shape = resolve_mesh(config.mesh, None)

    def evaluate(runner: StepRunner, meshes: Meshes) -> None:
        cpu = torch.device("cpu")
        for other in (100, 101):
            runner.evaluate(prepare_inputs(batches(config, other, meshes.dp_rank, shape.dp), meshes, config, cpu)[0])
        Engine(config, runner, meshes, cpu).generate([[5, 6, 7], [40, 2]], 2, ())

    if config.train.val_every == 1:
        options["between"] = evaluate
    return automoe.verify.trajectory.run_trajectory(config, shape, batches, steps, **options)


def differences(got: Trajectory, expected: Trajectory, tolerance: float) -> list[Comparison]:
    """Return what differs by more than ``tolerance``, in the order in which a step makes it."""
    return [c for c in compare_trajectories(got, expected) if not c.within(tolerance)]
