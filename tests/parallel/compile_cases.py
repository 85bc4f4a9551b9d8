"""Runs of the compile tests, with what torch.compile did in them; ranks import this too."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from unittest.mock import patch

import torch
import torch._dynamo
from torch._dynamo.utils import counters

from automoe.comm.tokens import StepBatch
from automoe.config.schema import Config
from automoe.parallel import choices
from automoe.parallel.compile import compiled
from automoe.verify.trajectory import Batches, Trajectory
from tests.support.trajectories import run_trajectory


@dataclass
class Compiled:
    """What one rank's run compiled: graphs in all, and breaks in them."""

    graphs: int
    breaks: int


def run_compiled(
    config: Config, batches: Batches, steps: int, backend: str, forced: list[torch.Tensor] | None = None
) -> tuple[Trajectory, Compiled]:
    """``run_trajectory`` from an empty cache; anything compiled again after the first step is an error."""
    torch.compiler.reset()
    counters.clear()

    def settled_after_one_step(config: Config, step: int, dp_rank: int, dp_size: int) -> StepBatch:
        torch._dynamo.config.error_on_recompile = step > 0
        return batches(config, step, dp_rank, dp_size)

    with torch._dynamo.config.patch(error_on_recompile=False), compiled_by(backend):
        run = run_trajectory(config, settled_after_one_step, steps, forced=forced)
    return run, Compiled(counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()))


def compiled_by(backend: str):
    """Compile with another backend than inductor, which takes its time."""
    return patch.object(choices, "compiled", partial(compiled, backend=backend))
