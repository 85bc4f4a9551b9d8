"""A few optimizer steps on one mesh with all results kept, as input to mesh comparisons."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from automoe.comm.tokens import StepBatch
from automoe.config.mesh_shape import MeshShape
from automoe.config.plugins import load_plugins
from automoe.config.schema import Config
from automoe.interop.torch_private import full_tensor
from automoe.model.causal_lm import CausalLM
from automoe.moe.balance import LOSSES
from automoe.moe.router import recorded_choices
from automoe.optim.adamw import build_optimizer
from automoe.parallel.mesh import Meshes, build_meshes
from automoe.parallel.parallelize import build_parts, materialize
from automoe.parallel.pipeline import build_runner
from automoe.parallel.runner import StepRunner
from automoe.run.routing import record_routing, replayed_routing
from automoe.training.state import TrainState
from automoe.training.step import StepOptions, forward_backward, optimizer_step, prepare_inputs

Batches = Callable[[Config, int, int, int], StepBatch]  # (config, step, dp_rank, dp_size)


# These fields of a step's ``StepStats`` keep their names in a ``Trajectory``.
BALANCE = (*LOSSES, "dropped_share", "expert_counts")


def _steps() -> Any:
    return field(default_factory=list)


@dataclass
class Trajectory:
    """Results of one rank's steps; ``merge_trajectories`` joins the pipeline stages of a world.

    Lists have one entry per step. Tensors are full (gathered over the mesh) and on the CPU;
    gradients are unclipped.

    Attributes:
        losses, seq_balance_loss, global_balance_loss, micro_batch_balance_loss, z_loss: losses of a
            step.
        dropped_share: share of dropped (token, expert) pairs in each MoE layer.
        metrics: further values that losses report.
        grad_norms, gradients: gradient norm of a step, and gradients by parameter.
        expert_counts: [L, E] tokens per expert of each MoE layer.
        parameters, biases: by name, parameters and routers' expert biases after the last step.
        choices: [rows, tokens, L, 2, K] ids of the experts chosen for each token, and of the K with
            the highest scores (without bias and groups), if routing is recorded.
    """

    losses: list[float] = _steps()
    seq_balance_loss: list[float] = _steps()
    global_balance_loss: list[float] = _steps()
    micro_batch_balance_loss: list[float] = _steps()
    z_loss: list[float] = _steps()
    dropped_share: list[list[float]] = _steps()  # [L] per step
    metrics: list[list[float]] = _steps()  # values that losses report
    grad_norms: list[float] = _steps()
    expert_counts: list[Tensor] = _steps()
    gradients: list[dict[str, Tensor]] = _steps()  # one dict per step
    parameters: dict[str, Tensor] = field(default_factory=dict)  # after the last step
    biases: dict[str, Tensor] = field(default_factory=dict)
    choices: list[Tensor] = _steps()  # recorded routing, one per step


def whole(tensor: Tensor) -> Tensor:
    """Return the full tensor on the CPU. Collective if ``tensor`` is a DTensor."""
    return full_tensor(tensor).detach().cpu().clone()


def named_parameters(parts: dict[int, CausalLM]) -> dict[str, nn.Parameter]:
    """Return the parameters of this rank's pipeline stages by their name in the whole model.

    Args:
        parts: module of each stage, by number of the stage.
    """
    return {
        name: parameter for part in parts.values() for name, parameter in part.named_parameters()
    }


def run_trajectory(
    config: Config,
    shape: MeshShape,
    batches: Batches,
    steps: int,
    *,
    record: bool = False,
    forced: list[Tensor] | None = None,
    keep_tensors: bool = True,
    device: str = "cpu",
    order: Tensor | None = None,
    between: Callable[[StepRunner, Meshes], object] = lambda runner, meshes: None,
    options: StepOptions | None = None,
) -> Trajectory:
    """Train ``steps`` steps on the mesh ``shape``, and return all results of this rank.

    The process group must be initialised. The learning rate is constant.

    Args:
        batches: function of (config, step, data-parallel rank, number of such ranks) that returns
            the rank's rows of a step.
        record: keep every step's routing (one rank and one stage only).
        forced: ``Trajectory.choices`` of a run with ``record``, whose routing is repeated; None:
            routers choose, or repeat ``moe.replay_routing``.
        keep_tensors: gather gradients and parameters too.
        order: [rows] permutation of this data-parallel rank's rows, applied before they are cut
            into micro-batches; None keeps their order.
        between: function of the step's runner and the meshes, called after every step.
        options: options of every step; None: those of pretraining.
    """
    load_plugins(config.plugins)  # a rank of the pool has read no command line
    on = torch.device(device)
    meshes = build_meshes(shape, on)
    parts = build_parts(config, meshes)
    materialize(parts, config, on)
    runner = build_runner(parts, meshes, config, on)
    # The learning rate is constant: the first step of a warm-up would hardly change the weights.
    optim = replace(config.optim, schedule="constant", warmup_steps=0, phases=[])
    config = replace(config, optim=optim)
    optimizer = build_optimizer(
        list(parts.values()), config.optim, config.train.seed, meshes.stage_group()
    )
    state = TrainState(parts, optimizer)
    seen = Trajectory()
    leads_its_stage = not any(map(meshes.coordinate, ("dp_replicate", "dp_shard", "cp", "tp")))
    for step in range(steps):
        batch = batches(config, step, meshes.dp_rank, shape.dp)
        forced_ids = (
            forced[step].chunk(shape.dp)[meshes.dp_rank]
            if forced
            else replayed_routing(config, batch, step)
        )
        inputs, trained = prepare_inputs(batch, meshes, config, on, forced_ids)
        if order is not None:
            rows = {
                name: value[order]
                for name, value in vars(inputs).items()
                if isinstance(value, Tensor)
            }
            inputs = replace(inputs, **rows)
        recording = recorded_choices(parts[0]) if record else nullcontext()
        with record_routing(config, parts, step), recording as recorded:
            stats = forward_backward(state, runner, inputs, config)
        if recorded is not None:
            choices = recorded()
            seen.choices.append(choices if order is None else choices[order.argsort()])
        if keep_tensors:
            gradients = {
                name: whole(p.grad)
                for name, p in named_parameters(parts).items()
                if p.grad is not None
            }
            seen.gradients.append(gradients if leads_its_stage else {})
        update = optimizer_step(
            state, stats, trained, meshes, config, options=options or StepOptions()
        )
        seen.losses.append(stats.loss)
        seen.grad_norms.append(update.grad_norm)
        seen.metrics.append([*stats.metrics.values()])
        facts = vars(stats) | stats.balance_losses
        for name in BALANCE:
            getattr(seen, name).append(facts[name])
        between(runner, meshes)
    if keep_tensors:
        parameters = {name: whole(p) for name, p in named_parameters(parts).items()}
        buffers = (named for part in parts.values() for named in part.named_buffers())
        biases = {name: whole(b) for name, b in buffers if name.endswith("expert_bias")}
        if leads_its_stage:
            seen.parameters = parameters
            seen.biases = biases
    return seen


def merge_trajectories(ranks: list[Trajectory]) -> Trajectory:
    """Put gradients, parameters and expert biases of all other stages into rank 0's dicts; sum nothing.

    Args:
        ranks: trajectories of ranks in order; each has only tensors of its own pipeline stages.

    Returns:
        Rank 0's trajectory, which is changed in place.
    """
    merged = ranks[0]
    for other in ranks[1:]:
        for mine, theirs in zip(merged.gradients, other.gradients, strict=True):
            mine.update(theirs)
        merged.parameters.update(other.parameters)
        merged.biases.update(other.biases)
    return merged


def micro_batch_order(num_rows: int, dp: int, micro_batch_size: int) -> Tensor:
    """Return a permutation of a global batch's rows [num_rows]: micro-batch by micro-batch, rank by rank.

    The first micro-batch of each of ``dp`` ranks comes first, then the second of each, and so on.
    One rank with this order and micro-batches of ``dp * micro_batch_size`` rows thus has the same
    rows in each micro-batch as the mesh.
    """
    return torch.arange(num_rows).view(dp, -1, micro_batch_size).transpose(0, 1).flatten()
