"""``run_trajectory`` of a configuration whose mesh may have axes left to derive."""

from __future__ import annotations

from typing import Any

import automoe.verify.trajectory
from automoe.config.mesh_shape import resolve_mesh
from automoe.config.schema import Config
from automoe.verify.trajectory import Batches, Trajectory


def run_trajectory(config: Config, batches: Batches, steps: int, **options: Any) -> Trajectory:
    """Train on ``config.mesh`` over the initialised process group, and keep everything."""
    shape = resolve_mesh(config.mesh, None)
    return automoe.verify.trajectory.run_trajectory(config, shape, batches, steps, **options)
