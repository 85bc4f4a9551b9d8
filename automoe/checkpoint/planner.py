"""Save planner of torch that reuses its plan while every rank's tensors stay the same.

To plan a save, rank 0 gathers every rank's plan, drops duplicate writes, checks that each tensor is
covered, and sends each rank its part. At 1,024 ranks this takes 11 s of every save, while the other
ranks wait (``benchmarks/results/checkpoint_plan.json``).
"""

from __future__ import annotations

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from automoe.interop.torch_private import cache_plans_under


class CachedPlanner(DefaultSavePlanner):
    """Save planner of torch that keeps plans from one save to the next, under its own ``key``.

    A rank whose tensors are unchanged neither sends nor receives a plan. ``key`` identifies the
    checkpoint store. It replaces torch's key, the class name, which several checkpoint stores in a
    process would share.
    """

    def __init__(self, key: str) -> None:
        super().__init__(enable_plan_caching=True)
        cache_plans_under(self, key)
