"""Changes that make a run fit in memory, with their cost: single ones and a combination.

All changes keep the number of ranks: recomputed modules, a smaller micro-batch, FSDP's reshard
policy, doubled mesh axes that shard tensors or layers, other pipeline stages. No change affects a
training's results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import combinations

from automoe.config.mesh_shape import MeshShape, largest_divisor
from automoe.config.recompute import FULL
from automoe.config.schema import Config, MeshConfig
from automoe.config.validate import mesh_rows
from automoe.planner.candidate import Candidate, first_that_fits, ladder
from automoe.planner.search import AXES

TOGETHER = 2  # largest number of mesh axes that are doubled at once
STAGES = (1, 2, 4)  # numbers of pipeline stages per rank that are tried
_TAKEN_FROM = {
    "tp": ("dp_shard",),
    "cp": ("dp_shard",),
    "ep": ("ep_shard",),
    "pp": ("dp_shard", "ep_shard"),
}


@dataclass(frozen=True)
class Remedy:
    """Configuration overrides that save memory, with their cost.

    ``needed`` is peak and reserve in bytes, at twice the even expert load.
    """

    changes: list[str]
    needed: float
    tokens_per_second: float
    slower: float  # lost share of the speed; below 0: the change is faster

    def __str__(self) -> str:
        pace = f"{abs(self.slower):.1%} {'slower' if self.slower > 0 else 'faster'}"
        return f"{' '.join(self.changes)} ({gib(self.needed)}, {self.tokens_per_second:,.0f} tokens/s, {pace})"


def remedies(config: Config, mesh: MeshShape, speed: float) -> tuple[list[Remedy], Remedy | None]:
    """Find changes that reduce the memory of a run.

    Args:
        speed: predicted tokens/s of ``config`` without changes.

    Returns:
        The single changes that need less memory, fastest first; and the fastest combination that
        fits, None if none does.
    """
    now = Candidate(config, mesh)

    def remedy(one: Candidate) -> Remedy:
        changed = [
            (f"mesh.{axis}", getattr(now.mesh, axis), getattr(one.mesh, axis)) for axis in AXES
        ]
        for section in ("parallel", "train"):
            ours, theirs = (asdict(getattr(each.config, section)) for each in (now, one))
            changed += [(f"{section}.{key}", ours[key], theirs[key]) for key in ours]
        return Remedy(
            [f"{key}={_text(after)}" for key, before, after in changed if before != after],
            one.needed,
            one.speed,
            1 - one.speed / speed,
        )

    near = [*_axes(now, 1), *(one for way in _WAYS[1:] for one in way(now))]
    alone = [one for one in near if _legal(one)]
    everywhere = now.changed(parallel={"recompute_layers": None})
    alone += map(everywhere.with_recompute, [*ladder(config), *_without_moe(config)])
    singles = [remedy(one) for one in alone if one.needed < now.needed]
    singles.sort(key=lambda one: -one.tokens_per_second)
    best = _fastest(everywhere)
    return singles, remedy(best) if best else None


def _legal(one: Candidate) -> bool:
    return not any(broken for _, broken, _, _ in mesh_rows(one.config, one.mesh, "auto"))


def _fastest(now: Candidate) -> Candidate | None:
    """Return the fastest combination that fits, with the least recomputation; None if none fits."""
    rungs = ladder(now.config)
    made = [now]
    for way in _WAYS:
        made += [two for one in made for two in way(one)]
    lightest = [one.with_recompute(rungs[0]) for one in made if _legal(one)]
    best = None
    most = 0.0
    for one in sorted(lightest, key=lambda one: -one.speed):
        if one.speed <= most:  # recomputation only takes time
            break
        candidates = [*map(one.with_recompute, rungs)]
        index = first_that_fits(candidates)
        if index is None:
            continue
        found = [candidates[index]]
        if index > len(rungs) - 4:
            found += map(one.with_recompute, _without_moe(now.config))
        for each in found:
            if each.speed > most and each.fits:
                best = each
                most = each.speed
    return best


def _without_moe(config: Config) -> list[list[str] | str]:
    """Return all recomputable modules except ``moe``, whose recomputation adds a dispatch.

    This choice helps if attention's memory alone is too large.
    """
    names = [names for names in ladder(config) if names != FULL][-1]
    return [[name for name in names if name != "moe"]] if "moe" in names else []


def _axes(one: Candidate, together: int = TOGETHER) -> Iterator[Candidate]:
    """Yield ``one`` with up to ``together`` mesh axes that shard tensors or layers doubled."""
    for count in range(1, together + 1):
        for axes in combinations(_TAKEN_FROM, count):
            sizes = asdict(one.mesh)
            for axis in axes:
                sizes[axis] *= 2
                for other in _TAKEN_FROM[axis]:
                    sizes[other] = sizes[other] // 2 if sizes[other] % 2 == 0 else 0
            if all(sizes.values()) and sizes["tp"] <= one.config.cluster.gpus_per_node:
                shape = MeshShape(**sizes)
                yield Candidate(replace(one.config, mesh=MeshConfig(**vars(shape))), shape)


def _rows(one: Candidate) -> Iterator[Candidate]:
    """Yield ``one`` with smaller micro-batches: the next lower divisor, and one row."""
    now = one.config.train.micro_batch_size
    if now > 1:
        for rows in {largest_divisor(now, now - 1), 1}:
            yield one.changed(train={"micro_batch_size": rows})


def _policies(one: Candidate) -> Iterator[Candidate]:
    parallel = one.config.parallel
    if one.mesh.pp == 1 and "step" in (parallel.reshard, parallel.grad_sync):
        yield one.changed(parallel={"reshard": "micro_batch", "grad_sync": "micro_batch"})


def _stages(one: Candidate) -> Iterator[Candidate]:
    parallel = one.config.parallel
    for count in STAGES if one.mesh.pp > 1 and parallel.layers_per_stage is None else ():
        if count != parallel.stages_per_rank and count * one.mesh.pp <= one.config.model.num_layers:
            schedule = "Interleaved1F1B" if count > 1 else "1F1B"
            yield one.changed(parallel={"schedule": schedule, "stages_per_rank": count})


def _contexts(one: Candidate) -> Iterator[Candidate]:
    if one.mesh.cp > 1 and one.config.parallel.context == "gather":
        yield one.changed(parallel={"context": "ulysses"})


_WAYS: tuple[Callable[[Candidate], Iterator[Candidate]], ...] = (
    _axes,
    _rows,
    _policies,
    _stages,
    _contexts,
)


def _text(value: object) -> str:
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    return "null" if value is None else str(value)


def gib(num_bytes: float) -> str:
    """Format bytes as ``36.4 GiB``, or in MiB below one GiB."""
    return (
        f"{num_bytes / 2**30:,.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:,.1f} MiB"
    )
