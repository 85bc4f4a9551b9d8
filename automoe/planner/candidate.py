"""Candidates of the mesh search and of ``remedies``, with predicted time and memory.

A candidate is a configuration on a mesh.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from operator import attrgetter
from typing import Any

from automoe.config.batch import plan_batch
from automoe.config.mesh_shape import MeshShape, split_layers
from automoe.config.pipeline import stages_of_ranks
from automoe.config.recompute import FULL, recompute_rows, recomputed_names
from automoe.config.schema import Config
from automoe.config.validate import mesh_rows
from automoe.planner.activations import UNEVEN, at_load
from automoe.planner.memory import plan_memory, plan_rank
from automoe.planner.reserve import needed
from automoe.planner.step_memory import RankMemory
from automoe.planner.time import StepTime, step_time

# Modules that may be recomputed, in the order of time lost per byte saved, cheapest first.
LADDER = ("layernorm", "mla_up_proj", "shared_experts", "mlp", "moe", "core_attn")
RECOMPUTE_KEYS = {"parallel.recompute", "parallel.recompute_layers"}
ONE_STAGE: dict[str, Any] = {
    "schedule": "1F1B",
    "stages_per_rank": 1,
    "layers_per_stage": None,
    "layout": None,
}
PIPELINE_KEYS = {f"parallel.{key}" for key in ONE_STAGE}
MOVES = 4  # most layers that ``balanced`` moves
# Settings that a search tries and that have never run on GPUs with other values than the defaults.
NEW = (
    "moe.dispatcher moe.dispatch_dtype parallel.context parallel.overlap_all_to_all "
    "parallel.schedule"
).split()


@dataclass(frozen=True)
class Candidate:
    """A configuration with its mesh; predicted time and memory are computed on first access."""

    config: Config
    mesh: MeshShape

    @cached_property
    def time(self) -> StepTime:
        """Predicted time of a training step."""
        return step_time(self.config, self.mesh)

    @property
    def speed(self) -> float:
        """Predicted tokens per second of all ranks."""
        return self.time.tokens_per_second

    @cached_property
    def peak(self) -> float:
        """Peak bytes of the rank that needs most, at even expert load.

        The reserve for the CUDA context, communicators and fragmentation is not included.
        """
        batch = plan_batch(self.config, self.mesh)
        return max(rank.peak for rank in plan_memory(self.config, self.mesh, batch))

    @cached_property
    def _uneven(self) -> Callable[[int], RankMemory]:
        """Cached function: pp rank -> its memory (``RankMemory``) at twice the even expert load."""
        batch = at_load(plan_batch(self.config, self.mesh), UNEVEN, self.config, self.mesh)
        return cache(partial(plan_rank, self.config, self.mesh, batch))

    @property
    def _uneven_ranks(self) -> list[RankMemory]:
        return [*map(self._uneven, range(self.mesh.pp))]

    @property
    def uneven_peak(self) -> float:
        """Peak bytes of the fullest rank at twice the even expert load, without any reserve."""
        return max(rank.peak for rank in self._uneven_ranks)

    @cached_property
    def needed(self) -> float:
        """GPU memory to provide, in bytes.

        It is the peak at twice the even expert load, and a reserve for the CUDA context,
        communicators and fragmentation.
        """
        return needed(self.config, self.mesh, self._uneven_ranks)

    @property
    def fits(self) -> bool:
        """True if ``needed`` is within the GPU's memory, or if this memory is unknown."""
        limit = self.config.cluster.memory_bytes
        ranks = map(self._uneven, range(self.mesh.pp))  # the first one that is too large is enough
        return not limit or all(needed(self.config, self.mesh, [rank]) <= limit for rank in ranks)

    @property
    def plainness(self) -> tuple[int, int]:
        """(Number of settings that have only run on CPUs, number of recomputed modules): less is plainer."""
        return len(levers(self.config)), len(recomputed_names(self.config.parallel))

    def changed(self, **sections: dict[str, Any]) -> Candidate:
        """Return the candidate with other settings: ``changed(train={"seq_len": 4096})``.

        Args:
            sections: for each section of the configuration its new values, {key: value}.
        """
        return replace(self, config=changed(self.config, **sections))

    def with_recompute(self, names: list[str] | str) -> Candidate:
        """Return the candidate with ``names`` as ``parallel.recompute``: modules, or ``full``."""
        return self.changed(parallel={"recompute": names})


def levers(config: Config) -> list[str]:
    """Return ``key=value`` of settings that differ from their default and have only run on CPUs.

    Args:
        config: configuration of a candidate of the mesh search.
    """
    default = Config()
    values = {key: attrgetter(key)(config) for key in NEW}
    return [
        f"{key}={value}".replace("True", "true")
        for key, value in values.items()
        if value != attrgetter(key)(default)
    ]


def changed(config: Config, **sections: dict[str, Any]) -> Config:
    """Return ``config`` with other settings: ``changed(config, train={"seq_len": 4096})``.

    Args:
        sections: for each section of the configuration its new values, {key: value}.
    """
    others = {name: replace(getattr(config, name), **keys) for name, keys in sections.items()}
    return replace(config, **others)


def ladder(config: Config, fixed: Sequence[str] = ()) -> list[list[str] | str]:
    """Return the legal values of ``parallel.recompute``, from the least memory freed to the most.

    The first is no recomputation; each list adds a module to the one before it; ``full`` is last.

    Args:
        fixed: keys that the user chose. If they include ``parallel.recompute`` or
            ``parallel.recompute_layers``, only the configured value is returned.
    """
    if RECOMPUTE_KEYS & set(fixed):
        return [config.parallel.recompute]

    def legal(names: list[str] | str) -> bool:
        tried = changed(config, parallel={"recompute": names, "recompute_layers": None})
        return not any(broken for _, broken, _, _ in recompute_rows(tried))

    names = [name for name in LADDER if legal([name])]
    return [*(names[:count] for count in range(len(names) + 1)), *([FULL] if legal(FULL) else [])]


def first_that_fits(rungs: Sequence[Candidate]) -> int | None:
    """Return the index of the first candidate that fits in memory; None if none fits.

    Args:
        rungs: candidates that differ in recomputation; each needs less memory than the one before.
    """
    if not rungs[-1].fits:
        return None
    return bisect_left(rungs, True, hi=len(rungs) - 1, key=lambda rung: rung.fits)


def balanced(candidate: Candidate, device: str, fixed: Sequence[str] = ()) -> Candidate:
    """Return ``candidate`` with layers moved from its busiest pipeline rank to the least busy one.

    A layer moves only if the step gets faster and fits in memory; at most 4 (``MOVES``) move.

    Args:
        device: cpu or cuda; what is valid depends on it.
        fixed: keys that the user chose; no layer moves if one of them is ``parallel.schedule``,
            ``stages_per_rank``, ``layers_per_stage`` or ``layout``.
    """
    shape = candidate.mesh
    if shape.pp == 1 or PIPELINE_KEYS & set(fixed):
        return candidate
    parallel = candidate.config.parallel
    model = candidate.config.model
    num_stages = shape.pp * parallel.stages_per_rank
    held = stages_of_ranks(shape.pp, parallel.stages_per_rank, parallel.schedule)
    unit = model.layers_together
    sizes = [*map(len, split_layers(model.num_layers, num_stages, parallel.layers_per_stage, unit))]
    for _ in range(MOVES):
        by_rank = candidate.time.by_rank
        most, least = (by_rank.index(edge(by_rank)) for edge in (max, min))
        sizes[max(held[most], key=lambda stage: sizes[stage])] -= unit
        sizes[min(held[least], key=lambda stage: sizes[stage])] += unit
        other = candidate.changed(parallel={"layers_per_stage": list(sizes)})
        if any(broken for _, broken, _, _ in mesh_rows(other.config, shape, device)):
            break
        if other.speed <= candidate.speed or not other.fits:
            break
        candidate = other
    return candidate
