"""A focal loss (arXiv 1708.02002): what the model says with certainty already counts less."""

import torch

from automoe.model.loss import LossInputs


def focal(nll_BS: torch.Tensor, inputs: LossInputs, gamma: float = 2.0) -> torch.Tensor:
    unsure_BS = (1 - torch.exp(-nll_BS)) ** gamma
    inputs.report("unsure", (unsure_BS * (inputs.labels >= 0)).sum() / inputs.counts.trained.clamp_min(1))
    return (unsure_BS * nll_BS).sum() / inputs.counts.trained.clamp_min(1)


focal.metrics = ("unsure",)


def plain(nll_BS: torch.Tensor, inputs: LossInputs) -> torch.Tensor:
    return focal(nll_BS, inputs, gamma=0.0)


plain.metrics = focal.metrics
