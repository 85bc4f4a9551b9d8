"""Models, meshes and mistakes of the recompute tests; ranks import this too."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch

import automoe.moe.balance
import automoe.moe.router
import automoe.passes.activation_checkpoint
from automoe.comm.tokens import IGNORE, StepBatch
from automoe.config.mesh_shape import resolve_mesh
from automoe.config.schema import Config, MeshConfig, ModelConfig, MoEConfig, ParallelConfig, TrainConfig
from automoe.passes.discard_outputs import _Recompute
from automoe.passes.recompute import is_recomputing, recompute_contexts
from automoe.verify.trajectory import Batches, Trajectory
from tests.support.toys import VOCAB
from tests.support.trajectories import run_trajectory

STEPS, ROWS, SEQ_LEN = 3, 8, 16


def make_config(
    model: ModelConfig,
    mesh: dict[str, int] | None = None,
    rows: int = ROWS,
    moe: dict[str, object] | None = None,
    **parallel: object,
) -> Config:
    """Three balance losses on; ``rows`` of a micro-batch out of 8 a step."""
    return Config(
        mesh=MeshConfig(**({"dp_shard": 1} | (mesh or {}))),
        model=model,
        moe=MoEConfig(
            experts="loop",
            seq_balance_coef=0.02,
            global_balance_coef=0.03,
            z_loss_coef=0.01,
            bias_update_rate=0.02,
            **(moe or {}),
        ),
        parallel=ParallelConfig(**parallel),
        train=TrainConfig(seq_len=SEQ_LEN, global_batch_size=ROWS, micro_batch_size=rows, dtype="float64"),
    )


def world_size(config: Config) -> int:
    return resolve_mesh(config.mesh, None).world_size


def batches(config: Config, step: int, dp_rank: int, dp_size: int) -> StepBatch:
    """Two documents a row at a random border, and padding in one row."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCAB, (ROWS, SEQ_LEN + 1), generator=generator)
    border = torch.randint(2, SEQ_LEN - 2, (ROWS, 1), generator=generator)
    index = torch.arange(SEQ_LEN).expand(ROWS, SEQ_LEN)
    doc_ids = (index >= border).long()
    positions = torch.where(doc_ids == 1, index - border, index)
    labels = tokens[:, 1:].clone()
    doc_ids[2, -3:], labels[2, -4:] = -1, IGNORE
    mine = slice(dp_rank * ROWS // dp_size, (dp_rank + 1) * ROWS // dp_size)
    return StepBatch(tokens[mine, :-1], labels[mine], positions[mine], doc_ids[mine], 0, 0)


Fault = Callable[[], AbstractContextManager[Any]]


def run_with_fault(config: Config, batches: Batches, steps: int, fault: Fault) -> Trajectory:
    """``run_trajectory`` with a mistake put in."""
    with fault():
        return run_trajectory(config, batches, steps)


def counted_again():
    """A recomputed router that counts its tokens as if they were new."""
    return patch.object(automoe.moe.balance, "is_counted", lambda: True)


def routed_otherwise():
    """A recomputed router that sends tokens elsewhere, as one might whose scores have moved by a rounding."""
    original = automoe.moe.router.save_for_recompute

    def save_for_recompute(fn, *args):
        result = original(fn, *args)
        if not is_recomputing() or not isinstance(result, tuple):
            return result
        return tuple(None if ids is None else (ids + 1) % 8 for ids in result)

    return patch.object(automoe.moe.router, "save_for_recompute", save_for_recompute)


def made_otherwise_again():
    """Discarded outputs that are a little larger when they are recomputed."""
    original = _Recompute.outputs

    def outputs(self):
        made_before = self.recomputed is not None
        made = original(self)
        return made if made_before else tuple(tensor.mul_(1 + 1e-6) for tensor in made)

    return patch.object(_Recompute, "outputs", outputs)


def results_shared_by_all_micro_batches():
    """One memory for all calls of a region: what a cache on a module comes to."""
    shared = recompute_contexts()
    return patch.object(automoe.passes.activation_checkpoint, "recompute_contexts", lambda: shared)
