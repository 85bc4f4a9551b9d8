"""A configuration on a mesh as the search and the remedies compare them: its time, its memory, what runs again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from automoe.config.batch import plan_batch
from automoe.config.mesh_shape import MeshShape
from automoe.config.recompute import FULL, recompute_rows
from automoe.config.schema import Config
from automoe.planner.activations import UNEVEN, at_load
from automoe.planner.memory import RankMemory, plan_memory
from automoe.planner.reserve import needed
from automoe.planner.time import StepTime, step_time

# Modules that may run again in the backward pass, from the one that costs least time for the memory it frees.
LADDER = ("layernorm", "mla_up_proj", "shared_experts", "mlp", "moe", "core_attn")
RECOMPUTE_KEYS = {"parallel.recompute", "parallel.recompute_layers"}


@dataclass(frozen=True)
class Candidate:
    """A configuration with its mesh. What it takes is computed when it is first read."""

    config: Config
    mesh: MeshShape

    @cached_property
    def time(self) -> StepTime:
        """Predicted time of a step."""
        return step_time(self.config, self.mesh)

    @property
    def speed(self) -> float:
        """Predicted tokens per second of all ranks."""
        return self.time.tokens_per_second

    @cached_property
    def bound(self) -> float:
        """Tokens per second that ``speed`` cannot exceed: those without the pipeline's bubble, ten times as cheap."""
        return step_time(self.config, self.mesh, bubble=False).tokens_per_second

    @cached_property
    def peak(self) -> float:
        """Bytes of the rank that needs most, at even load of the experts, without the reserve."""
        return max(
            rank.peak
            for rank in plan_memory(self.config, self.mesh, plan_batch(self.config, self.mesh))
        )

    @cached_property
    def _uneven_ranks(self) -> list[RankMemory]:
        batch = at_load(plan_batch(self.config, self.mesh), UNEVEN, self.config, self.mesh)
        return plan_memory(self.config, self.mesh, batch)

    @property
    def uneven_peak(self) -> float:
        """``peak`` if experts get ``UNEVEN`` times their even share of tokens."""
        return max(rank.peak for rank in self._uneven_ranks)

    @cached_property
    def needed(self) -> float:
        """Bytes of a GPU, ``uneven_peak`` with the reserve."""
        return needed(self.config, self.mesh, self._uneven_ranks)

    @property
    def fits(self) -> bool:
        """True if ``needed`` is within the GPU's memory, or that is not known."""
        limit = self.config.cluster.memory_bytes
        return not limit or self.needed <= limit

    def with_recompute(self, names: list[str] | str) -> Candidate:
        """Return the same run with the modules ``names`` run again."""
        parallel = replace(self.config.parallel, recompute=names)
        return replace(self, config=replace(self.config, parallel=parallel))


def ladder(config: Config, fixed: Sequence[str] = ()) -> list[list[str] | str]:
    """Return what may run again, from nothing to everything; each rung frees more memory and takes more time.

    Args:
        fixed: keys that keep their value; one of ``RECOMPUTE_KEYS`` leaves a single rung.
    """
    if RECOMPUTE_KEYS & set(fixed):
        return [config.parallel.recompute]

    def legal(names: list[str]) -> bool:
        parallel = replace(config.parallel, recompute=names, recompute_layers=None)
        return not any(
            broken for _, broken, _, _ in recompute_rows(replace(config, parallel=parallel))
        )

    names = [name for name in LADDER if legal([name])]
    return [*(names[:count] for count in range(len(names) + 1)), FULL]


def first_that_fits(rungs: Sequence[Candidate]) -> int | None:
    """Return the index of the first rung that fits, each of which needs less than the one before; None if none does."""
    if not rungs[-1].fits:
        return None
    low, high = 0, len(rungs) - 1
    while low < high:
        middle = (low + high) // 2
        if rungs[middle].fits:
            high = middle
        else:
            low = middle + 1
    return low
