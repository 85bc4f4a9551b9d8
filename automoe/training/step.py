"""The two halves of a training step, in order.

    forward and backward, statistics                          ``forward_backward``
    norm, skip or not, 8-bit scales, clip, update, balance    ``optimizer_step``

Between the two, gradients are summed over ranks and not yet clipped. Letters of dimensions:
``automoe.model``; here B sequences of this data-parallel rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from automoe.comm.tokens import MicroBatch, StepBatch, TokenCounts, count_shifted, num_documents
from automoe.config.schema import Config, TrainConfig
from automoe.model.lora import set_dropout_step
from automoe.model.mtp import shift_rows
from automoe.model.rows import head_tail_index
from automoe.optim.ema import update_averages
from automoe.optim.grad_norm import clip_, global_grad_norm
from automoe.optim.qk_clip import clip_logits, take_largest_logits
from automoe.optim.schedule import (
    bias_update_rate,
    learning_rate,
    mtp_loss_weight,
    set_learning_rate,
)
from automoe.parallel.fp8 import update_scales, weights_quantized_once
from automoe.parallel.mesh import Meshes
from automoe.parallel.runner import StepRunner
from automoe.parallel.shared_gradients import counted_parameters
from automoe.passes.trace import phase
from automoe.training.state import TrainState
from automoe.training.stats import StepStats, gather_stats, max_over_ranks, update_balance_state

# standard deviation of a normal distribution, in median absolute deviations
_NORMAL = 1.4826
_LEAST_SPREAD = 1e-3  # times the median: after nearly equal losses, not every change is a spike


@dataclass(frozen=True)
class Update:
    """Result of ``optimizer_step``.

    Attributes:
        lr: learning rate of this step.
        grad_norm: gradient norm of the whole model, before clipping.
        skipped: True, on every rank, if weights, optimizer and expert biases were left unchanged;
            the counters of steps and tokens advance all the same.
        skip_reason: reason for skipping that this rank saw, or None.
        fp8_clipped_share: share of this stage's delayed fp8 scales that values of this step
            exceeded.
        over_ranks: maximum over all ranks of each number in the argument ``report`` of
            ``optimizer_step``, and with QK-clip of ``max_attention_logit``.
    """

    lr: float
    grad_norm: float
    skipped: bool
    skip_reason: str | None
    fp8_clipped_share: float
    over_ranks: Mapping[str, float]


@dataclass(frozen=True)
class StepOptions:
    """Options of a step; the defaults are pretraining's, other values are for reinforcement learning.

    Attributes:
        loss_inputs: [B, R, ...] by name, per-token inputs of the loss, for the R positions of the B
            whole sequences of this data-parallel rank.
        auxiliary_losses: False to leave modules for multi-token prediction out of the step, and
            expert biases and load fractions as they are.
        balance_replayed: True to update expert biases and load fractions also in a step that
            repeated an inference engine's routing.
        skip_zero_gradient: skip the update if the gradient is exactly zero; else momentum and
            weight decay would move the weights.
        lr: learning rate; None: that of ``optim.schedule``.
    """

    loss_inputs: Mapping[str, Tensor] = field(default_factory=dict)
    auxiliary_losses: bool = True
    balance_replayed: bool = False
    skip_zero_gradient: bool = False
    lr: float | None = None


def prepare_inputs(
    batch: StepBatch,
    meshes: Meshes,
    config: Config,
    device: torch.device,
    forced_ids: Tensor | None = None,
    options: StepOptions = StepOptions(),
) -> tuple[MicroBatch, int]:
    """Return this rank's sequences of a step, on ``device``, and how many labels the global batch has.

    The sequences are those of all micro-batches, with labels, positions and counts. Collective.
    The loader made the labels before sequences are cut over cp here, so the label of a chunk's last
    position is kept. Counts are known before the first forward.

    Args:
        batch: full sequences of this data-parallel rank, on the CPU.
        forced_ids: [B, R, L, n, K] for R positions, K expert ids that L MoE layers use instead of
            their routers' choices (-1: the router chooses); n = 1: chosen ids, n = 2: also the
            top-K of the scores without bias and groups. None: routers choose.
        options: further inputs of the loss, and whether multi-token prediction runs.
    """
    num_rows, seq_len = batch.tokens.shape
    # Counts are summed over gloo: reading them from the device would wait for the previous step.
    documents = num_documents(batch.labels, batch.doc_ids)
    counts = torch.tensor(
        [int((batch.labels >= 0).sum()), int((batch.doc_ids >= 0).sum()), int(documents)]
    )
    shifted: dict[str, Any] = {}
    if options.auxiliary_losses and (depths := config.model.num_mtp_layers):
        both = shift_rows(batch.tokens, batch.labels, batch.doc_ids, depths)
        counts = torch.cat((counts, count_shifted(*both).flatten()))
        shifted = {"mtp_tokens": both[0], "mtp_labels": both[1]}
    for axis in ("dp_shard", "dp_replicate"):
        if (group := meshes.group(axis)) is not None:
            dist.all_reduce(counts, group=group)
    index = torch.arange(seq_len)
    row_ids = torch.arange(batch.first_row, batch.first_row + num_rows)
    whole = MicroBatch(
        batch.tokens,
        batch.labels,
        batch.positions,
        index=index.expand(num_rows, -1),
        doc_ids=batch.doc_ids if config.data.document_mask else None,
        row_ids=row_ids.unsqueeze(1).expand(-1, seq_len),
        not_padding=batch.doc_ids >= 0,
        forced_ids=forced_ids,
        **shifted,
    )
    if meshes.shape.cp > 1:
        index = head_tail_index(seq_len, meshes.shape.cp, meshes.coordinate("cp"))
    local: dict[str, Any] = {
        name: copy_to_device(x[:, index], device)
        for name, x in vars(whole).items()
        if isinstance(x, Tensor)
    }
    local["given"] = {
        name: copy_to_device(x[:, index], device) for name, x in options.loss_inputs.items()
    }
    sent = copy_to_device(counts, device)
    sums = TokenCounts(sent[0], sent[1], sent[2], sent[3:].view(-1, 2))
    inputs = replace(whole, counts=sums, **local)
    return inputs, int(counts[0])


def forward_backward(
    state: TrainState, runner: StepRunner, inputs: MicroBatch, config: Config
) -> StepStats:
    """Run forward and backward of a step's micro-batches; return their statistics. Collective.

    Gradients are added to the existing gradients of parameters; ``optimizer_step`` clears them.

    Args:
        state: the model parts, and the number of steps done, on which some weights of losses
            depend.
        inputs: this rank's sequences of all micro-batches, from ``prepare_inputs``.
    """
    model_parts = state.model_parts.values()
    if config.lora.dropout:
        set_dropout_step(model_parts, state.step)
    for part in model_parts:
        part.mtp_loss_weight = mtp_loss_weight(config, state.step)
    with phase("forward_backward", state.step + 1), weights_quantized_once(model_parts, config):
        loss_share = runner.train(inputs)
    return gather_stats(loss_share, model_parts, config, runner.take_reported())


def optimizer_step(
    state: TrainState,
    stats: StepStats,
    num_label_tokens: int,
    meshes: Meshes,
    config: Config,
    report: Mapping[str, float] = MappingProxyType({}),
    options: StepOptions = StepOptions(),
) -> Update:
    """Clip gradients, update the weights, clear gradients and advance ``state``'s counters. Collective.

    The update includes 8-bit scales, averages of weights, QK-clip, expert biases and load
    fractions. If one rank has a reason to skip the update (``reason_to_skip``), all skip it.

    Args:
        stats: result of the step's ``forward_backward``.
        num_label_tokens: tokens of the global batch that have a label, from ``prepare_inputs``.
        report: named numbers of this rank, whose maxima over ranks are in the result.
        options: whether a zero gradient skips the update, and whether expert biases move.

    Returns:
        Learning rate, gradient norm, whether and why the update was skipped, share of 8-bit scales
        that were exceeded, maxima of ``report``.
    """
    model_parts = list(state.model_parts.values())
    train = config.train
    with phase("optimizer_step", state.step + 1):
        lr = options.lr
        if lr is None:
            lr = learning_rate(config.optim, state.step, train.steps)
        # One norm over both meshes and all stages, equal on every rank.
        with phase("grad_norm", state.step + 1):
            norm = global_grad_norm(
                counted_parameters(model_parts), meshes.group("pp"), meshes.default.device_type
            )
            grad_norm = float(norm)
        reason = reason_to_skip(
            stats.loss, grad_norm, state.recent_losses, train, options.skip_zero_gradient
        )
        logits = None
        if config.optim.qk_clip:
            logits = take_largest_logits(model_parts, meshes.stage_group(), norm.device)
            report = {**report, "max_attention_logit": logits.largest()}
        # Ranks agree in one reduction; the host has waited for the device already.
        over_ranks = max_over_ranks({**report, "": reason is not None})  # no report has this name
        skipped = bool(over_ranks.pop(""))
        # Scales come before the update: the host would have to wait for the update otherwise.
        clipped_share = update_scales(model_parts, meshes, stepped=not skipped)
        if not skipped:
            clip_(state.parameters(), grad_norm, train.grad_clip)
            set_learning_rate(state.optimizer, lr)
            state.optimizer.step()
            if logits is not None:
                clip_logits(logits, config.optim.qk_clip)
            if config.optim.ema_decay:
                update_averages(state.optimizer, config.optim.ema_decay)
            # The load of an inference engine's routes, if repeated, says nothing about this router.
            replayed = bool(stats.replayed.any()) and not options.balance_replayed
            if options.auxiliary_losses and not replayed:
                update_balance_state(stats, model_parts, bias_update_rate(config, state.step))
            remember_loss(stats.loss, state.recent_losses, train)
        # A skipped step counts too.
        state.optimizer.zero_grad()
        state.step += 1
        state.tokens += num_label_tokens
        state.skipped = state.skipped + 1 if skipped else 0
    return Update(lr, grad_norm, skipped, reason, clipped_share, over_ranks)


def spike_threshold(recent: Sequence[float], train: TrainConfig) -> float:
    """Return the loss, in nats, above which a step is a spike.

    ``median + train.spike_factor * max(1.4826 * MAD, 0.001 * |median|)`` over ``recent``. Single
    outliers do not move a median and a median absolute deviation (MAD), as they would move a mean
    and a standard deviation. Infinite without ``train.spike_factor``, and while ``recent`` has
    fewer than ``train.spike_window`` losses.

    Args:
        recent: losses of the last steps that were taken, oldest first.
    """
    if not train.spike_factor or len(recent) < train.spike_window:
        return math.inf
    middle = median(recent)
    deviation = _NORMAL * median(abs(loss - middle) for loss in recent)
    return middle + train.spike_factor * max(deviation, _LEAST_SPREAD * abs(middle))


def reason_to_skip(
    loss: float,
    norm: float,
    recent: Sequence[float],
    train: TrainConfig,
    skip_zero_gradient: bool = False,
) -> str | None:
    """Return why a step of this loss and gradient norm is skipped, as text; None to take the step.

    Reasons, in this order: loss or norm is not finite; the loss is above ``spike_threshold(recent,
    train)``, that is ``train.spike_factor`` deviations above the median of ``recent``; with
    ``skip_zero_gradient``, the norm is exactly zero.

    Args:
        loss: mean loss of the step, in nats.
        recent: losses of the last steps that were taken, oldest first.
    """
    if not (math.isfinite(loss) and math.isfinite(norm)):
        return f"loss {loss}, gradient norm {norm}"
    threshold = spike_threshold(recent, train)
    if loss > threshold:
        return (
            f"loss {loss:.4f} is a spike: above {threshold:.4f}, train.spike_factor={train.spike_factor:g} "
            f"deviations over the median of the last {len(recent)}"
        )
    return "the gradient is zero" if skip_zero_gradient and norm == 0 else None


def remember_loss(loss: float, recent: list[float], train: TrainConfig) -> None:
    """Append the loss of a taken step to ``recent``, and keep the last ``train.spike_window`` losses.

    Without ``train.spike_factor`` nothing is appended.
    """
    if train.spike_factor:
        recent.append(loss)
        del recent[: -train.spike_window]


def copy_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to ``device``; for a GPU, pin it and return before the copy is done."""
    tensor = tensor.contiguous()
    if device.type != "cpu" and torch.cuda.is_available():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
