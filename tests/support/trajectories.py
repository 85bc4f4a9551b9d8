"""Trajectories of a configuration whose mesh may have axes left to derive, and what differs between two of them."""

from __future__ import annotations

from typing import Any

import automoe.verify.trajectory
from automoe.config.mesh_shape import resolve_mesh
from automoe.config.schema import Config
from automoe.verify.compare import Comparison, compare_trajectories
from automoe.verify.trajectory import Batches, Trajectory


def run_trajectory(config: Config, batches: Batches, steps: int, **options: Any) -> Trajectory:
    """Train on ``config.mesh`` over the initialised process group, and keep everything."""
    shape = resolve_mesh(config.mesh, None)
    return automoe.verify.trajectory.run_trajectory(config, shape, batches, steps, **options)


def differences(got: Trajectory, expected: Trajectory, tolerance: float) -> list[Comparison]:
    """Return what differs by more than ``tolerance``, in the order in which a step makes it."""
    return [c for c in compare_trajectories(got, expected) if not c.within(tolerance)]
