"""Who writes which tensor of a checkpoint: torch's plan, made once for as long as every rank has
the same tensors.

Rank 0 gathers every rank's plan, drops what several would write, checks that each tensor is
covered, and sends each rank its part: at 1,024 ranks 28 s of every save in which the others wait
(``benchmarks/results/checkpoint_plan.json``).
"""

from __future__ import annotations

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from automoe.interop.torch_private import cache_plans_under


class CachedPlanner(DefaultSavePlanner):
    """Torch's planner, with a cache for ``key`` alone: a rank whose part is as it was sends no
    plan, nor gets one.

    Torch caches by the name of the class, which stores of other groups of ranks would share.
    """

    def __init__(self, key: str) -> None:
        super().__init__(enable_plan_caching=True)
        cache_plans_under(self, key)
