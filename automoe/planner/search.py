"""Search for the fastest mesh: predict the time of every legal mesh, and keep the best that fit.

Recomputation only takes time, so the time without it bounds the speed of a mesh. Candidates are
examined in order of this bound, highest first, each with the least recomputation that fits. The
search ends if no remaining bound exceeds the speed of the last result, or if many candidates in a
row were slower.
"""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any

from automoe.config.mesh_shape import DEFAULT_AXES, MOE_AXES, MeshShape, split_layers
from automoe.config.pipeline import V_SHAPED, stages_of_ranks
from automoe.config.schema import Config, MeshConfig
from automoe.config.validate import mesh_rows
from automoe.model.params import ParamCount, count_params
from automoe.planner.candidate import RECOMPUTE_KEYS, Candidate, changed, first_that_fits, ladder
from automoe.planner.step_memory import DTYPE_BYTES

TOP = 10  # number of candidates in the result
# tried rows per micro-batch; tried stages per rank
ROWS = (1, 2, 4, 8)
STAGES = (2, 4, 8)
CONTEXTS = ("gather", "ulysses", "ring")
# Meshes that a process times in one call; candidates fitted between two updates of the result.
CHUNK = 128
STRIDE = 64
ONE_STAGE: dict[str, Any] = {
    "schedule": "1F1B",
    "stages_per_rank": 1,
    "layers_per_stage": None,
    "layout": None,
}
PIPELINE_KEYS = {f"parallel.{key}" for key in ONE_STAGE}
PATIENCE = 512  # The search ends after this many candidates in a row without a new result.
MOVES = 4  # most layers moved between stages, in each of the fastest BALANCED candidates
BALANCED = 3


@dataclass
class Search:
    """Result of a search: the best candidates, the number timed, and the reasons of the others."""

    world_size: int
    found: list[Candidate] = field(default_factory=list)
    num_timed: int = 0
    # number of refused candidates for each key whose rule they break
    refused: Counter[str] = field(default_factory=Counter)
    too_large: int = 0
    smallest: Candidate | None = None  # smallest candidate that does not fit
    bound: float = 0.0  # upper bound of the tokens/s of unexamined candidates


def search(
    config: Config,
    world_size: int,
    device: str,
    fixed: Sequence[str] = (),
    tell: Callable[[str, int, int], Any] = lambda phase, done, total: None,
    processes: int | None = None,
    begin: Callable[[], object] | None = None,
) -> Search:
    """Rank the meshes of ``world_size`` ranks by predicted tokens/s, each at its fastest settings.

    Args:
        config: valid except for its mesh; cluster and batch size are taken from it.
        fixed: keys that keep the value of ``config``, such as ``mesh.tp`` or
            ``parallel.recompute``.
        tell: progress callback with the phase's name, the number of items done, and the total.
        processes: number of worker processes; None: one per core; 1 runs in this process.
        begin: what each worker process calls first.
    """
    result = Search(world_size)
    shapes = list(mesh_shapes(config, world_size, fixed))
    processes = processes or os.cpu_count() or 1
    with ExitStack() as stack:
        each: Callable[..., Iterator[Any]] = map
        if processes > 1:
            # Fork is safe: this process has no threads yet and has not loaded torch.
            context = multiprocessing.get_context("fork")
            pool = ProcessPoolExecutor(processes, context, begin)
            each = stack.enter_context(pool).map
        timed: list[Candidate] = []
        work = partial(_timed, config, device, fixed)
        chunks = [shapes[start : start + CHUNK] for start in range(0, len(shapes), CHUNK)]
        for done, (some, refused, too_large) in enumerate(each(work, chunks), 1):
            timed += some
            result.refused += refused
            result.too_large += too_large
            tell("timed", min(done * CHUNK, len(shapes)), len(shapes))
        result.num_timed = len(timed)
        timed.sort(key=lambda one: -one.bound)
        _look(
            result,
            timed,
            lambda some, floor: each(partial(_fitting, fixed=fixed, floor=floor), some),
            tell,
        )
    result.found = [
        balanced(one, device, fixed) if place < BALANCED else one
        for place, one in enumerate(result.found)
    ]
    result.found.sort(key=lambda one: -one.speed)
    return result


def balanced(one: Candidate, device: str, fixed: Sequence[str] = ()) -> Candidate:
    """Return ``one`` with layers moved from its busiest pipeline rank to the least busy one.

    A layer moves only if the step is faster and fits in memory; ``MOVES`` layers at most.
    """
    shape = one.mesh
    if shape.pp == 1 or PIPELINE_KEYS & set(fixed):
        return one
    parallel = one.config.parallel
    num_layers = one.config.model.num_layers
    num_stages = shape.pp * parallel.stages_per_rank
    held = stages_of_ranks(shape.pp, parallel.stages_per_rank, parallel.schedule)
    sizes = list(map(len, split_layers(num_layers, num_stages, parallel.layers_per_stage)))
    for _ in range(MOVES):
        by_rank = one.time.by_rank
        most, least = (by_rank.index(edge(by_rank)) for edge in (max, min))
        sizes[max(held[most], key=lambda stage: sizes[stage])] -= 1
        sizes[min(held[least], key=lambda stage: sizes[stage])] += 1
        other = one.changed(parallel={"layers_per_stage": list(sizes)})
        if any(broken for _, broken, _, _ in mesh_rows(other.config, shape, device)):
            break
        if other.speed <= one.speed or not other.fits:
            break
        one = other
    return one


def _look(
    result: Search,
    timed: list[Candidate],
    fitting: Callable[[list[Candidate], float], Iterator[Candidate | None]],
    tell: Callable[[str, int, int], Any],
) -> None:
    """Fill ``result`` with the candidates that fit, in order of their bounds, highest first."""
    best = dict[MeshShape, Candidate]()
    since = 0
    for start in range(0, len(timed), STRIDE):
        some = timed[start : start + STRIDE]
        floor = result.found[-1].speed if len(result.found) == TOP else 0.0
        if some[0].bound < floor or since >= PATIENCE:
            result.bound = some[0].bound
            break
        for one in fitting(some, floor):
            if one is None:
                continue
            if one.fits:
                best[one.mesh] = max(one, best.get(one.mesh, one), key=lambda other: other.speed)
                continue
            result.too_large += 1
            if result.smallest is None or one.needed < result.smallest.needed:
                result.smallest = one
        result.found = sorted(best.values(), key=lambda one: -one.speed)[:TOP]
        since = 0 if floor == 0.0 or result.found[-1].speed > floor else since + STRIDE
        tell("fitted", start + len(some), len(timed))


def mesh_shapes(config: Config, world_size: int, fixed: Sequence[str] = ()) -> Iterator[MeshShape]:
    """Yield every mesh of ``world_size`` ranks.

    tp and etp stay within a node. dp_replicate and ep_replicate are 1 unless ``fixed`` names them.
    """
    node = config.cluster.gpus_per_node
    experts = max(1, config.model.num_experts)

    def given(axis: str) -> int | None:
        size: int = getattr(config.mesh, axis)
        return size if f"mesh.{axis}" in fixed and size > 0 else None

    def sizes(axis: str, rest: int, limit: int) -> list[int]:
        if (size := given(axis)) is not None:
            return [size] if rest % size == 0 else []
        return [size for size in range(1, min(rest, limit) + 1) if rest % size == 0]

    def cuts(ranks: int, last: str, *limits: tuple[str, int]) -> list[dict[str, int]]:
        """Return all sizes of the axes in ``limits``; ``last`` takes the remaining ranks."""
        made: list[tuple[int, dict[str, int]]] = [(ranks, {})]
        for axis, limit in limits:
            made = [
                (rest // n, {**one, axis: n})
                for rest, one in made
                for n in sizes(axis, rest, limit)
            ]
        return [{**one, last: rest} for rest, one in made if given(last) in (None, rest)]

    copies = {axis: given(axis) or 1 for axis in ("dp_replicate", "ep_replicate")}
    for pp in sizes("pp", world_size, config.model.num_layers):
        ranks = world_size // pp
        if any(ranks % count for count in copies.values()):
            continue
        narrow = node if config.model.num_moe_layers else 1
        routed = cuts(ranks // copies["ep_replicate"], "ep_shard", ("etp", narrow), ("ep", experts))
        for one in cuts(ranks // copies["dp_replicate"], "dp_shard", ("tp", node), ("cp", ranks)):
            for other in routed:
                yield MeshShape(pp=pp, **copies, **one, **other)


def _timed(
    config: Config, device: str, fixed: Sequence[str], shapes: Sequence[MeshShape]
) -> tuple[list[Candidate], Counter[str], int]:
    """Time each legal run on each mesh with the least recomputation.

    Returns:
        The timed candidates, the number of refused ones by broken key, and the number of meshes
        that cannot fit in memory.
    """
    timed = []
    refused = Counter[str]()
    too_large = 0
    lightest = ladder(config, fixed)[0]
    params = count_params(config.model)
    for shape in shapes:
        if _cannot_fit(config, shape, params):
            too_large += 1
            continue
        on_mesh = replace(config, mesh=MeshConfig(**vars(shape)))
        if config.launch.num_ranks is not None:
            on_mesh = changed(on_mesh, launch={"num_ranks": shape.world_size})
        for one in _ways(on_mesh, shape, fixed):
            broken = next(
                (key for key, is_broken, _, _ in mesh_rows(one, shape, device) if is_broken), None
            )
            if broken is not None:
                refused[broken] += 1
                continue
            candidate = Candidate(one, shape).with_recompute(lightest)
            assert candidate.bound  # Computes and caches the bound here, in a worker process.
            timed.append(candidate)
    return timed, refused, too_large


def _ways(config: Config, shape: MeshShape, fixed: Sequence[str]) -> Iterator[Config]:
    """Yield ``config`` with every combination of the settings that are not fixed.

    These are micro-batch size, pipeline schedule, FSDP policy and kind of context parallelism.
    """
    train = config.train
    most = max(1, train.global_batch_size // shape.dp)
    micro = [n for n in ROWS if n <= most]
    if "train.micro_batch_size" in fixed:
        micro = [train.micro_batch_size]
    stage_counts = [n for n in STAGES if n * shape.pp <= config.model.num_layers]
    pipelines = [ONE_STAGE]
    if PIPELINE_KEYS & set(fixed):
        pipelines = [{}]
    elif shape.pp > 1:
        pipelines += [
            {**ONE_STAGE, "schedule": "Interleaved1F1B", "stages_per_rank": n} for n in stage_counts
        ]
        if 2 in stage_counts:
            pipelines += [
                {**ONE_STAGE, "schedule": name, "stages_per_rank": 2} for name in V_SHAPED
            ]
    policies: list[dict[str, Any]] = [{"reshard": "step", "grad_sync": "step"}]
    if {"parallel.reshard", "parallel.grad_sync"} & set(fixed):
        policies = [{}]
    elif shape.pp == 1:
        policies.append({"reshard": "micro_batch", "grad_sync": "micro_batch"})
    contexts: list[dict[str, Any]] = [{}]
    if shape.cp > 1 and "parallel.context" not in fixed:
        contexts = [{"context": name} for name in CONTEXTS]
    no_recompute: dict[str, Any] = {"recompute": [], "recompute_layers": None}
    if RECOMPUTE_KEYS & set(fixed):
        no_recompute = {}
    for size in micro:
        for pipeline in pipelines:
            for policy, context in product(policies, contexts):
                settings = pipeline | policy | context | no_recompute
                yield changed(config, train={"micro_batch_size": size}, parallel=settings)


def _cannot_fit(config: Config, shape: MeshShape, params: ParamCount) -> bool:
    """Return True if unsharded weights and gradients of an average pipeline rank exceed its memory.

    A pipeline keeps both until the end of the step.
    """
    limit = config.cluster.memory_bytes
    if not limit or shape.pp == 1 or config.lora.rank:
        return False
    routed = params.by_part.get("routed_experts", 0)
    whole = routed / (shape.pp * shape.ep * shape.etp) + (params.total - routed) / (
        shape.pp * shape.tp
    )
    _, weight, gradient = DTYPE_BYTES[config.train.dtype]
    return whole * (gradient + weight * (config.parallel.reshard == "step")) > limit


def _fitting(candidate: Candidate, fixed: Sequence[str], floor: float) -> Candidate | None:
    """Return ``candidate`` with the least recomputation that fits.

    If not even full recomputation fits, return the candidate with full recomputation. Return None
    if the candidate is slower than ``floor`` tokens/s.
    """
    names = ladder(candidate.config, fixed)
    rungs = []
    for rung in map(candidate.with_recompute, names):
        if rung.speed < floor:
            break
        rungs.append(rung)
    if not rungs:
        return None
    index = first_that_fits(rungs)
    if index is not None:
        return rungs[index]
    return rungs[-1] if len(rungs) == len(names) else None


AXES = tuple(dict.fromkeys(DEFAULT_AXES + MOE_AXES))
# Keys of ``parallel`` that a search sets.
SEARCHED = (
    "schedule stages_per_rank layers_per_stage layout overlap_all_to_all reshard grad_sync context "
    "recompute recompute_layers"
).split()


def overrides_of(candidate: Candidate) -> dict[str, dict[str, Any]]:
    """Return the configuration values of ``candidate``'s ``mesh=`` preset, by section."""
    config = candidate.config
    return {
        # All axes are written: the configuration may set others itself.
        "mesh": {axis: getattr(candidate.mesh, axis) for axis in AXES},
        "parallel": {key: getattr(config.parallel, key) for key in SEARCHED},
        "train": {"micro_batch_size": config.train.micro_batch_size},
    }
