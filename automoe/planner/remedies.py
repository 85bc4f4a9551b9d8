"""Changes that make a run fit in memory, with their cost: single ones and a combination.

All changes keep the number of ranks: recomputed modules, a smaller micro-batch, FSDP's reshard
policy, doubled mesh axes that shard tensors or layers, other pipeline stages. No change affects a
training's results.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from typing import Any

from automoe.config.mesh_shape import MeshShape, largest_divisor
from automoe.config.schema import Config, MeshConfig
from automoe.config.validate import mesh_rows
from automoe.planner.candidate import Candidate, first_that_fits, ladder
from automoe.planner.search import AXES

TOGETHER = 2  # largest number of mesh axes that are doubled at once
# Schedules with numbers of pipeline stages per rank that are tried.
STAGES = (("1F1B", 1), ("Interleaved1F1B", 2), ("Interleaved1F1B", 4))
_TAKEN_FROM = {
    "tp": ("dp_shard",),
    "cp": ("dp_shard",),
    "ep": ("ep_shard",),
    "pp": ("dp_shard", "ep_shard"),
}


@dataclass(frozen=True)
class Remedy:
    """Configuration changes that save memory, with predicted memory and speed of a run with them.

    Attributes:
        changes: overrides such as ``mesh.tp=2``.
        needed: bytes of GPU memory that the fullest rank needs, with the reserve, if its experts
            get twice the mean number of tokens.
        tokens_per_second: tokens/s of all ranks together.
        slower: 1 - speed with the changes / speed without them; negative if the run is faster.
    """

    changes: list[str]
    needed: float
    tokens_per_second: float
    slower: float

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

    def remedy(candidate: Candidate) -> Remedy:
        changed = [
            (f"mesh.{axis}", getattr(now.mesh, axis), getattr(candidate.mesh, axis))
            for axis in AXES
        ]
        for section in ("parallel", "train"):
            ours, theirs = (asdict(getattr(each.config, section)) for each in (now, candidate))
            changed += [(f"{section}.{key}", ours[key], theirs[key]) for key in ours]
        return Remedy(
            [f"{key}={_text(after)}" for key, before, after in changed if before != after],
            candidate.needed,
            candidate.speed,
            1 - candidate.speed / speed,
        )

    near = [*_axes(now, 1)]
    near += [now.changed(**each) for alternatives in _settings(now) for each in alternatives]
    alone = [candidate for candidate in near if _legal(candidate)]
    everywhere = now.changed(parallel={"recompute_layers": None})
    alone += map(everywhere.with_recompute, ladder(config))
    singles = [remedy(candidate) for candidate in alone if candidate.needed < now.needed]
    singles.sort(key=lambda candidate: -candidate.tokens_per_second)
    best = _fastest(everywhere)
    return singles, remedy(best) if best else None


def _legal(candidate: Candidate) -> bool:
    return not any(
        broken for _, broken, _, _ in mesh_rows(candidate.config, candidate.mesh, "auto")
    )


def _fastest(now: Candidate) -> Candidate | None:
    """Return the fastest variant of ``now`` that fits in memory; None if none fits.

    Settings and mesh axes that save memory are combined, each combination with the least
    recomputation with which it fits.
    """
    rungs = ladder(now.config)
    made = [other for candidate in (now, *_axes(now)) for other in _combined(candidate)]
    lightest = [candidate.with_recompute(rungs[0]) for candidate in made if _legal(candidate)]
    best = None
    most = 0.0
    for candidate in sorted(lightest, key=lambda candidate: -candidate.speed):
        if candidate.speed <= most:  # recomputation only takes time
            break
        candidates = [*map(candidate.with_recompute, rungs)]
        index = first_that_fits(candidates)
        if index is None:
            continue
        if candidates[index].speed > most:
            best = candidates[index]
            most = best.speed
    return best


def _axes(candidate: Candidate, together: int = TOGETHER) -> Iterator[Candidate]:
    """Yield ``candidate`` on other meshes, with up to ``together`` of its sharding axes doubled.

    The axes are tp, cp, ep and pp. The number of ranks stays: doubling tp or cp halves dp_shard, ep
    halves ep_shard, and pp both.
    """
    for count in range(1, together + 1):
        for axes in combinations(_TAKEN_FROM, count):
            sizes = asdict(candidate.mesh)
            for axis in axes:
                sizes[axis] *= 2
                for other in _TAKEN_FROM[axis]:
                    sizes[other] = sizes[other] // 2 if sizes[other] % 2 == 0 else 0
            if all(sizes.values()) and sizes["tp"] <= candidate.config.cluster.gpus_per_node:
                shape = MeshShape(**sizes)
                yield Candidate(replace(candidate.config, mesh=MeshConfig(**vars(shape))), shape)


def _settings(candidate: Candidate) -> list[list[dict[str, Any]]]:
    """Return changes that save memory on the mesh of ``candidate``, as {section: {key: value}}.

    Each list has alternatives, of which one can be chosen: smaller micro-batches (the next smaller
    divisor, or one row), FSDP that reshards and reduces in each micro-batch, a schedule with its
    stages per rank, and Ulysses in place of gathered keys.
    """
    parallel = candidate.config.parallel
    rows = candidate.config.train.micro_batch_size
    pp, num_layers = candidate.mesh.pp, candidate.config.model.num_layers
    sharded = pp == 1 and "step" in (parallel.reshard, parallel.grad_sync)
    gathered = candidate.mesh.cp > 1 and parallel.context == "gather"
    return [
        [
            {"train": {"micro_batch_size": n}}
            for n in {largest_divisor(rows, max(1, rows - 1)), 1}
            if n < rows
        ],
        [{"parallel": dict.fromkeys(("reshard", "grad_sync"), "micro_batch")}] * sharded,
        [
            {"parallel": {"schedule": schedule, "stages_per_rank": count}}
            for schedule, count in STAGES
            if pp > 1 and parallel.layers_per_stage is None
            if count != parallel.stages_per_rank and count * pp <= num_layers
        ],
        [{"parallel": {"context": "ulysses"}}] * gathered,
    ]


def _combined(candidate: Candidate) -> list[Candidate]:
    """Return ``candidate`` and all its variants: at most one change of each list of ``_settings`` (alternatives)."""
    made = [candidate]
    for alternatives in _settings(candidate):
        made += [each.changed(**settings) for each in made for settings in alternatives]
    return made


def _text(value: object) -> str:
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    return "null" if value is None else str(value)


def gib(num_bytes: float) -> str:
    """Format bytes as ``36.4 GiB``, or in MiB below one GiB."""
    return (
        f"{num_bytes / 2**30:,.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:,.1f} MiB"
    )
