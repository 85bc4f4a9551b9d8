"""State of a training run at one step. ``automoe.checkpoint.saved_state`` saves and restores it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from automoe.model.causal_lm import CausalLM


@dataclass
class TrainState:
    """Model parts, optimizer, loader and counters of this rank.

    Attributes:
        model_parts: this rank's pipeline stages, {stage number: part}; parameters have the names
            that they have in the whole model.
        loader: an ``automoe.data.loader.Loader``. None if batches come from elsewhere; their
            position is then the caller's to save.
        step: optimizer steps done (skipped ones included).
        tokens: tokens with a label trained so far, over all ranks.
        skipped: number of consecutive skipped steps.
        recent_losses: losses of the last steps that were not skipped, oldest first, by which
            ``spike_threshold`` judges the next loss.
    """

    model_parts: dict[int, CausalLM]
    optimizer: torch.optim.Optimizer
    loader: Any = None
    step: int = 0
    tokens: int = 0
    skipped: int = 0
    recent_losses: list[float] = field(default_factory=list)

    def parameters(self) -> list[torch.nn.Parameter]:
        """Return this rank's parameters in a fixed order."""
        return [parameter for part in self.model_parts.values() for parameter in part.parameters()]
