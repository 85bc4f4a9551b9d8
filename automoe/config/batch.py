"""Batch arithmetic: rows (sequences), tokens and micro-batches of a step on a mesh. No torch."""

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
    """Sizes of one optimizer step, from ``plan_batch``; a row is a sequence of tokens.

    Expert rows are (token, expert) pairs; their numbers are means over ranks or experts. With
    ``moe.pad_to_capacity`` padding counts as well.

    Attributes:
        tokens_per_step: tokens of all ranks.
        rows_per_rank: rows of one data-parallel rank in a step.
        num_micro_batches: micro-batches of a step on each data-parallel rank.
        tokens_per_micro_batch: tokens of a micro-batch on one rank, after sharding by cp and tp.
        expert_rows_per_rank: pairs that the experts of one rank compute in a micro-batch.
        rows_per_expert: pairs that one expert computes in a micro-batch.
    """

    tokens_per_step: int  # over all ranks
    rows_per_rank: int  # of one data-parallel rank, per step
    num_micro_batches: int  # per step and data-parallel rank
    tokens_per_micro_batch: int  # per rank: its rows, sharded over cp and tp
    # (token, expert) pairs that one rank's experts compute, per micro-batch
    expert_rows_per_rank: float
    rows_per_expert: float  # the same pairs, for one expert


def rows_of_step(train: TrainConfig, consumed_rows: int) -> int:
    """Return the number of rows (sequences) of the step that begins after ``consumed_rows`` rows.

    With ``train.rampup_batch_size=[start, increment, ramp_rows]`` the batch grows from ``start``
    rows by ``increment`` at a time, in equal intervals over the first ``ramp_rows`` rows, as in
    Megatron-Core.
    """
    rows = train.global_batch_size
    if train.rampup_batch_size is not None:
        start, increment, over = train.rampup_batch_size
        grown = consumed_rows * ((rows - start) // increment) // over
        rows = min(rows, start + increment * grown)
    return rows


def rows_of_run(train: TrainConfig) -> int:
    """Return the number of rows (sequences) that all ``train.steps`` steps train on together."""
    ramp = list(islice(_ramp(train), train.steps))
    return sum(ramp) + (train.steps - len(ramp)) * train.global_batch_size


def steps_for(train: TrainConfig, rows: float) -> int:
    """Return the fewest steps, at least one, that train on ``rows`` rows (sequences) or more.

    The batch ramp-up is taken into account: its steps have fewer rows.
    """
    left, steps = max(1, ceil(rows)), 0
    for batch in _ramp(train):
        if left <= 0:
            break
        left, steps = left - batch, steps + 1
    return steps + max(0, ceil(left / train.global_batch_size))


def _ramp(train: TrainConfig) -> Iterator[int]:
    """Yield the number of rows of each step of the batch ramp-up, all below the full batch size."""
    taken = 0
    while (rows := rows_of_step(train, taken)) < train.global_batch_size:
        yield rows
        taken += rows


def plan_batch(config: Config, mesh: MeshShape) -> BatchPlan:
    """Return the sizes of a step of a validated ``config`` on ``mesh``."""
    train = config.train
    model = config.model
    tokens = train.micro_batch_size * train.seq_len // (mesh.cp * mesh.tp)
    # Tokens stay within an ep group, so its mean per rank does not depend on ep.
    chosen = tokens * model.num_experts_per_token
    expert_rows = chosen * model.num_experts * mesh.etp // model.num_scored_experts
    if config.moe.pad_to_capacity:
        capacity = ceil(config.moe.capacity_factor * chosen / model.num_scored_experts)
        expert_rows = min(capacity, tokens) * model.num_experts * mesh.etp
    return BatchPlan(
        tokens_per_step=train.global_batch_size * train.seq_len,
        rows_per_rank=train.global_batch_size // mesh.dp,
        num_micro_batches=train.global_batch_size // (mesh.dp * train.micro_batch_size),
        tokens_per_micro_batch=tokens,
        expert_rows_per_rank=expert_rows,
        rows_per_expert=expert_rows * mesh.ep / model.num_experts,
    )


def least_micro_batches(config: Config, shape: MeshShape) -> int:
    """Return the fewest micro-batches per step and data-parallel rank that ``config`` can run with.

    For a pipeline these are pp (2 pp for DualPipeV), except for GPipe and LoopedBFS; else 1, or 2
    with ``parallel.overlap_all_to_all``.
    """
    schedule = config.parallel.schedule
    if shape.pp == 1 or schedule in ALL_FORWARDS_FIRST:
        return 1 + config.parallel.overlap_all_to_all
    return shape.pp * (1 + (schedule == "DualPipeV"))


def more_micro_batches(config: Config, shape: MeshShape) -> str:
    """Return settings, for an error message, that give the pipeline schedule enough micro-batches.

    For example ``train.global_batch_size=32, or train.micro_batch_size=1``.
    """
    train, ranks = config.train, shape.dp * least_micro_batches(config, shape)
    smaller, left = divmod(train.global_batch_size, ranks)
    named = f"train.global_batch_size={ranks * train.micro_batch_size}"
    return named if left else f"{named}, or train.micro_batch_size={smaller}"
