"""Expert backends called with their weights as single arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from automoe.moe.expert_weights import ExpertWeights


def flat(backend: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return ``backend`` as a function of x, gather_idx, offsets, probs and two to four weights."""

    def call(*args: Any, **options: Any) -> torch.Tensor:
        return backend(*args[:4], ExpertWeights(*args[4:]), **options)

    return call
