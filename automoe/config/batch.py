"""Batch arithmetic: rows, tokens and micro-batches of a step on a mesh. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from math import ceil

from automoe.config.mesh_shape import MeshShape
from automoe.config.pipeline import ALL_FORWARDS_FIRST
from automoe.config.schema import Config, TrainConfig


@dataclass(frozen=True)
class BatchPlan:
    """Rows, tokens and micro-batches of one optimizer step.

    Rows are sequences. Expert counts are means, which perfectly balanced routing would give.
    """

    rows_per_step: int  # over all ranks
    tokens_per_step: int  # over all ranks
    rows_per_rank: int  # of one data-parallel rank, per step
    num_micro_batches: int  # per step and data-parallel rank
    tokens_per_micro_batch: int  # per rank: its rows, sharded over cp and tp
    # (token, expert) pairs that one rank's experts compute, per micro-batch
    expert_rows_per_rank: float
    rows_per_expert: float  # the same pairs, for one expert


def rows_of_step(train: TrainConfig, consumed_rows: int) -> int:
    """Return the global batch, in rows, of the step that begins after ``consumed_rows`` rows.

    ``train.rampup_batch_size`` has the numbers of Megatron-Core's ``--rampup-batch-size``, and
    means the same.
    """
    rows = train.global_batch_size
    if train.rampup_batch_size is not None:
        start, increment, over = train.rampup_batch_size
        grown = consumed_rows * ((rows - start) // increment) // over
        rows = min(rows, start + increment * grown)
    return rows


def rows_of_run(train: TrainConfig) -> int:
    """Return the rows of all ``train.steps`` steps."""
    ramp = list(islice(_ramp(train), train.steps))
    return sum(ramp) + (train.steps - len(ramp)) * train.global_batch_size


def steps_for(train: TrainConfig, rows: float) -> int:
    """Return the steps, at least one, whose global batches hold ``rows`` rows."""
    left, steps = max(1, ceil(rows)), 0
    for batch in _ramp(train):
        if left <= 0:
            break
        left, steps = left - batch, steps + 1
    return steps + max(0, ceil(left / train.global_batch_size))


def _ramp(train: TrainConfig) -> Iterator[int]:
    """Yield the batches, in rows, of the steps before the first whole one."""
    taken = 0
    while (rows := rows_of_step(train, taken)) < train.global_batch_size:
        yield rows
        taken += rows


def plan_batch(config: Config, mesh: MeshShape) -> BatchPlan:
    """Return rows, tokens and micro-batches of a validated ``config`` on ``mesh``."""
    train = config.train
    model = config.model
    tokens = train.micro_batch_size * train.seq_len // (mesh.cp * mesh.tp)
    # Tokens stay within an ep group, so its mean per rank does not depend on ep.
    expert_rows = tokens * model.num_experts_per_token * mesh.etp
    if config.moe.pad_to_capacity:
        capacity = min(
            ceil(config.moe.capacity_factor * expert_rows / (mesh.etp * model.num_experts)), tokens
        )
        expert_rows = capacity * model.num_experts * mesh.etp
    return BatchPlan(
        rows_per_step=train.global_batch_size,
        tokens_per_step=train.global_batch_size * train.seq_len,
        rows_per_rank=train.global_batch_size // mesh.dp,
        num_micro_batches=train.global_batch_size // (mesh.dp * train.micro_batch_size),
        tokens_per_micro_batch=tokens,
        expert_rows_per_rank=expert_rows,
        rows_per_expert=expert_rows * mesh.ep / model.num_experts,
    )


def least_micro_batches(config: Config, shape: MeshShape) -> int:
    """Return the fewest micro-batches that a step of a data-parallel rank may have."""
    schedule = config.parallel.schedule
    if shape.pp == 1 or schedule in ALL_FORWARDS_FIRST:
        return 1 + config.parallel.overlap_all_to_all
    return shape.pp * (1 + (schedule == "DualPipeV"))


def more_micro_batches(config: Config, shape: MeshShape) -> str:
    """Return the settings with which a step has as many micro-batches as it must have."""
    train, ranks = config.train, shape.dp * least_micro_batches(config, shape)
    smaller, left = divmod(train.global_batch_size, ranks)
    named = f"train.global_batch_size={ranks * train.micro_batch_size}"
    return named if left else f"{named}, or train.micro_batch_size={smaller}"
