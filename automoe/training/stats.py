"""Statistics of a step in one all-reduce: loss, balance losses, tokens per expert.

Letters of dimensions: ``automoe.model``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from automoe.config.schema import Config
from automoe.model.causal_lm import CausalLM
from automoe.model.indexer import KeyChooser
from automoe.moe.balance import LOSSES, LoadCounter, update_expert_bias

Name = TypeVar("Name")  # name of a value


@dataclass
class StepStats:
    """Statistics of one step, equal on every rank.

    Attributes:
        loss: mean cross-entropy over the global batch's trained tokens, in nats; if another loss is
            trained (``train.loss``), the mean of that.
        balance_losses: balance losses and z-loss by name (``automoe.moe.balance.LOSSES``), summed
            over layers, coefficients included.
        expert_counts: [L, E] float64 on the CPU, tokens of the global batch routed to each expert,
            before any is dropped; L MoE layers.
        dropped_share: for each of L layers the share of choices over their expert's capacity.
        device_counts: [L, 2, E] float64 on the model's device: ``expert_counts``, and the counts
            that plain top-k of the scores would give.
        metrics: values that the loss reports, by name, and ``indexer_loss``, summed over layers;
            ``routes_differ``: share of the choices repeated from an inference engine that routers
            would not make.
        replayed: [L, 2] choices repeated from an inference engine, and how many of them the routers
            would not make.
    """

    loss: float
    balance_losses: dict[str, float]
    expert_counts: Tensor
    dropped_share: list[float]
    device_counts: Tensor
    metrics: dict[str, float] = field(default_factory=dict)
    replayed: Tensor = field(default_factory=lambda: torch.zeros(0, 2, dtype=torch.float64))


def gather_stats(
    loss_share: Tensor,
    model_parts: Iterable[CausalLM],
    config: Config,
    reported: Mapping[str, Tensor],
) -> StepStats:
    """Return the step's statistics, summed over all ranks; zero every layer's counters. Collective.

    Each rank fills in its own stages' layers, so one sum serves dp, cp and pp at once.

    Args:
        loss_share: this rank's share of the loss; the loss is the sum over ranks.
        reported: this rank's shares of the values that the loss reports; the names are the same on
            every rank.
    """
    model = config.model
    model_parts = list(model_parts)
    if model.attention.index_topk:
        modules = (m for part in model_parts for m in part.modules())
        shares = (m.loss_sum for m in modules if isinstance(m, KeyChooser))
        reported = {**reported, "indexer_loss": sum(shares, loss_share.new_zeros(()))}
    num_layers = model.num_moe_layers
    device = loss_share.device
    # from the configuration, since a dense model has no router to ask
    size = LoadCounter.size(model.num_scored_experts)
    end = num_layers * size
    sums = torch.zeros(end + 1 + len(reported), dtype=torch.float64, device=device)
    for place, share in enumerate((loss_share, *reported.values()), start=end):
        sums[place] = share
    table = sums[:end].view(num_layers, size)
    for part in model_parts:
        for _, layer in part.moe_layers():
            table[layer.router.moe_index] += layer.router.load.totals
        part.zero_counters()
    dist.all_reduce(sums)
    device_counts = LoadCounter.views(table).experts
    sums = sums.cpu()  # the host waits for the step's forward and backward here
    loads = LoadCounter.views(sums[:end].view(num_layers, size))
    chosen = loads.experts[:, 0]
    metrics = dict(zip(reported, sums[end + 1 :].tolist(), strict=True))
    repeated, differing = loads.replayed.sum(0).tolist()
    if repeated:
        metrics["routes_differ"] = differing / repeated
    return StepStats(
        loss=float(sums[end]),
        balance_losses=dict(zip(LOSSES, loads.losses.sum(0).tolist(), strict=True)),
        expert_counts=chosen,
        dropped_share=(loads.dropped / chosen.sum(1).clamp_min(1)).tolist(),
        device_counts=device_counts,
        metrics=metrics,
        replayed=loads.replayed,
    )


def update_balance_state(
    stats: StepStats, model_parts: Iterable[CausalLM], bias_update_rate: float
) -> None:
    """Update expert biases and load fractions from the loads of a step whose update was done.

    Biases move towards equal load; those of a frozen router stay. Load fractions, which the next
    step's global balance loss reads, become each expert's share of the choices that plain top-k of
    the scores (without bias and groups) would make.

    Args:
        stats: result of the step's ``gather_stats``.
        bias_update_rate: amount that is added to or subtracted from a bias.
    """
    for part in model_parts:
        for _, layer in part.moe_layers():
            router = layer.router
            counts, plain = stats.device_counts[router.moe_index]
            if router.expert_bias is not None and router.weight.requires_grad:
                # zero experts, the last ones, have no target
                bias_E = router.expert_bias[: part.config.num_experts]
                update_expert_bias(bias_E, counts, bias_update_rate)
            router.load_fractions.copy_(plain / plain.sum().clamp_min(1))


def sum_over_ranks(*values: float | Tensor, device: torch.device) -> list[float]:
    """Return the sum of each value (a number or scalar tensor) over all ranks, in float64. Collective.

    The all-reduce runs on ``device``; the host waits for it.
    """
    sums = torch.stack(
        [torch.as_tensor(value, dtype=torch.float64, device=device) for value in values]
    )
    dist.all_reduce(sums)
    return sums.tolist()


def max_over_ranks(values: Mapping[Name, float]) -> dict[Name, float]:
    """Return the maximum of each named value over all ranks, by one all-reduce on the CPU. Collective.

    Args:
        values: the same names in the same order on every rank.
    """
    maxima = torch.tensor(list(values.values()), dtype=torch.float64)
    dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
    return dict(zip(values, maxima.tolist(), strict=True))
