"""Search for the fastest mesh: the best first, by bounds of time and memory.

A queue holds what may contain fast candidates, each with an upper bound of tokens/s. What has the
highest bound is replaced by its parts. A timed candidate at the head is the fastest of all that are
left; it is a result if it fits in memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import count, groupby, product
from operator import attrgetter
from typing import Any

import numpy as np

from automoe.config.mesh_shape import DEFAULT_AXES, MOE_AXES, MeshShape, split_layers
from automoe.config.pipeline import MERGES, V_SHAPED, stages_of_ranks
from automoe.config.recompute import recompute_rows
from automoe.config.rules_context import context_rows
from automoe.config.rules_model import TRANSFORMERS
from automoe.config.schema import Config, MeshConfig
from automoe.config.validate import mesh_rows
from automoe.planner.bounds import Array, Columns, Family, Layout, Space
from automoe.planner.candidate import RECOMPUTE_KEYS, Candidate, changed, ladder
from automoe.planner.machine import Constants, Machine
from automoe.planner.reserve import CONTEXT, communicators
from automoe.planner.schedule import GRAIN

Axes = tuple[int, int, int, int]  # tp, cp, ep, etp
TOP = 10  # number of candidates in the result
ROWS = (1, 2, 4, 8, 16, 32, 64)  # tried rows per micro-batch
STAGES = range(2, 9)  # tried stages per rank
CONTEXTS = ("gather", "ulysses", "ring")
# Tried values besides the configured one; the plan does not know DeepEP's buffers, and gives
# expert_wgrad=delayed the time of fused.
LEVERS: dict[str, tuple[Any, ...]] = {
    "moe.dispatcher": ("alltoall", "hierarchical", "allgather"),
    "moe.dispatch_dtype": ("auto", "fp8"),
    "parallel.expert_wgrad": ("autograd", "fused"),
    "parallel.overlap_all_to_all": (False, True),
    "train.fp8": ("off",),
}
BATCH = 4096  # columns whose candidates are bounded at once
# What has a bound within this share of the highest is looked at together, in arrays.
LEVEL = 0.98
ONE_STAGE: dict[str, Any] = {
    "schedule": "1F1B",
    "stages_per_rank": 1,
    "layers_per_stage": None,
    "layout": None,
}
PIPELINE_KEYS = {f"parallel.{key}" for key in ONE_STAGE}
MOVES = 4  # most layers moved between stages, in each of the fastest BALANCED candidates
BALANCED = 3


@dataclass
class Search:
    """Result of a search: the best candidates, the number timed, and the reasons of the others."""

    world_size: int
    found: list[Candidate] = field(default_factory=list)
    num_timed: int = 0
    # number of refused meshes and candidates for each key whose rule they break
    refused: Counter[str] = field(default_factory=Counter)
    too_large: int = 0
    smallest: Candidate | None = None  # smallest candidate that does not fit
    fixed: tuple[str, ...] = ()  # keys that kept their value
    rest: float = 0.0  # upper bound of the tokens/s of the candidates that were not timed
    bound: float = 0.0  # upper bound of all that other values of the searched keys can reach


def search(
    config: Config,
    world_size: int,
    device: str,
    fixed: Sequence[str] = (),
    tell: Callable[[str, int, int], Any] = lambda phase, done, total: None,
) -> Search:
    """Rank the meshes of ``world_size`` ranks by predicted tokens/s, each at its fastest settings.

    Args:
        config: valid except for its mesh; cluster and batch size are taken from it.
        fixed: keys that keep the value of ``config``, such as ``mesh.tp`` or
            ``parallel.recompute``.
        tell: progress callback with the phase's name, the number of items done, and the total.
    """
    result = Search(world_size, fixed=tuple(fixed))
    queue = Queue(config, world_size, device, fixed, result)
    while len(result.found) < TOP and (most := queue.most):
        queue.look(LEVEL * most)
        tell("found", len(result.found), TOP)
    result.rest = queue.most
    result.found = [
        balanced(one, device, fixed) if place < BALANCED else one
        for place, one in enumerate(result.found)
    ]
    result.found.sort(key=lambda one: -one.speed)
    return result


class Queue:
    """What is left to look at: groups, meshes, columns and candidates, by bound of tokens/s."""

    def __init__(
        self, config: Config, world_size: int, device: str, fixed: Sequence[str], result: Search
    ) -> None:
        self.config = config
        self.device = device
        self.fixed = fixed
        self.result = result
        self.world = world_size, 1, 1
        self.items: dict[str, list[tuple[float, int, tuple[Any, ...]]]] = {
            kind: [] for kind in ("group", "mesh", "columns", "candidate")
        }
        self.numbers = count()
        self.reserves = dict[Any, float]()
        self.shapes = dict[Axes, dict[int, MeshShape]]()
        for shape in mesh_shapes(config, world_size, fixed):
            self.world = world_size, shape.dp_replicate, shape.ep_replicate
            if self._legal(next(ways(_on(config, shape), shape, device, fixed)), shape):
                axes = shape.tp, shape.cp, shape.ep, shape.etp
                self.shapes.setdefault(axes, {})[shape.pp] = shape
        rungs = dict[str, list[str] | str]()
        made = []
        for pp in sorted({pp for found in self.shapes.values() for pp in found}):
            on_mesh = replace(config, mesh=MeshConfig(pp=pp))
            for settings in layouts(config, pp, fixed):
                one = changed(on_mesh, parallel=settings)
                typed = RECOMPUTE_KEYS & set(fixed)
                if typed and any(broken for _, broken, _, _ in recompute_rows(one)):
                    continue
                names = {str(names): names for names in ladder(one, fixed)}
                made.append((pp, settings, names))
                rungs |= names
        self.space = Space(config, list(rungs.values()))
        self.lightest = Space(config, self.space.rungs[:1], self.space)
        self.layouts = [
            (Layout(self.space, pp, settings), np.array([one in names for one in rungs]))
            for pp, settings, names in made
        ]
        self.tokens = config.train.global_batch_size * config.train.seq_len
        self._groups()

    @property
    def most(self) -> float:
        """Upper bound of the tokens/s of all that is left."""
        return max((-heap[0][0] for heap in self.items.values() if heap), default=0.0)

    def look(self, level: float) -> None:
        """Look at everything with a bound of at least ``level``, until there are enough results."""
        for given in self._pop("group", level):
            self._meshes(*given)
        if meshes := list(self._pop("mesh", level)):
            self._families(meshes)
        if parts := [columns for (columns,) in self._pop("columns", level)]:
            columns = Columns.joined(parts)
            for start in range(0, len(columns.families), BATCH):
                self._columns(columns[start : start + BATCH])
        for given in self._pop("candidate", level):
            if isinstance(given[0], Candidate):
                self._take(given[0])
            else:
                self._candidates(*given)
            if len(self.result.found) == TOP:
                return

    def _pop(self, kind: str, level: float) -> Iterator[tuple[Any, ...]]:
        heap = self.items[kind]
        while heap and -heap[0][0] >= level:
            yield heappop(heap)[2]

    def _push(self, bound: float, kind: str, *given: Any) -> None:
        heappush(self.items[kind], (-bound, next(self.numbers), given))

    def _legal(self, config: Config, shape: MeshShape) -> bool:
        """Return True if ``config`` breaks no rule on ``shape``; else count the rule."""
        rows = mesh_rows(config, shape, self.device)
        broken = next((key for key, is_broken, _, _ in rows if is_broken), None)
        if broken is not None:
            self.result.refused[broken] += 1
        return broken is None

    def _groups(self) -> None:
        """Push each tp, cp, context and micro-batch as if tokens reached experts at no cost.

        The most that any micro-batch reaches bounds whatever a plan can express.
        """
        config = self.config
        free = {"gate": "balanced", "pad_to_capacity": False, "capacity_factor": 0.0}
        space = Space(changed(config, moe=free), self.space.rungs[:1])
        rows = config.train.global_batch_size
        whole = ("train.micro_batch_size" not in self.fixed) * [rows]
        for tp, cp in sorted({axes[:2] for axes in self.shapes}):
            for context in contexts(
                config, MeshShape(1, 1, 1, cp, tp, 1, 1, 1, 1), self.device, self.fixed
            ):
                for micro, fp8 in product(
                    {*micro_batches(config, self.fixed), *whole},
                    tried(config, self.fixed, "train.fp8"),
                ):
                    group = micro, context, "deepep", "auto", "autograd", fp8
                    experts = max(1, config.model.num_experts)
                    bound = self._ideal(space, Family(tp, cp, experts, 1, *group))
                    self.result.bound = max(self.result.bound, bound * (1 + 1 / GRAIN))
                    if micro in micro_batches(config, self.fixed):
                        self._push(bound, "group", tp, cp, *group)

    def _ideal(self, space: Space, family: Family) -> float:
        """Return the tokens/s of a mesh whose ep sends for nothing, without recomputation."""
        grads = tried(self.config, self.fixed, "parallel.expert_wgrad")
        columns = space.columns([family._replace(expert_wgrad=one) for one in grads])
        columns.forward -= columns.sent
        columns.sent *= 0
        return float(self._speeds(space, columns).max())

    def _meshes(self, tp: int, cp: int, *group: Any) -> None:
        """Push each ep and etp of a group."""
        for axes in self.shapes:
            if axes[:2] == (tp, cp):
                plain = Family(*axes, *group)
                self._push(self._ideal(self.lightest, plain), "mesh", plain)

    def _speeds(self, space: Space, columns: Columns) -> Array:
        """Return the tokens/s of columns whose layers are spread evenly, with nothing else."""
        layers = np.bincount(space.kind_of).astype(float)
        share = columns.micro / columns.ranks * self.config.train.seq_len
        speeds: Array = self.world[0] * share / columns.seconds(layers)
        return speeds

    def _families(self, meshes: Sequence[tuple[Any, ...]]) -> None:
        """Time the layers of meshes with each setting of experts."""
        families = [
            one for (plain,) in meshes for one in with_experts(self.config, plain, self.fixed)
        ]
        columns = self.space.columns(families)
        speeds = self._speeds(self.space, columns)
        order = np.argsort(-speeds, kind="stable")
        highest = speeds[order[0]]
        bands = np.floor(np.log(speeds[order] / highest) / np.log(LEVEL))
        for band in np.unique(bands):
            where = order[bands == band]
            self._push(speeds[where[0]], "columns", columns[where])

    def _columns(self, columns: Columns) -> None:
        """Bound the candidates of columns, on each pipeline that their rules allow."""
        limit = self.config.cluster.memory_bytes or np.inf
        step = Machine.of(self.config, Constants.load()).constants.step
        found = [np.empty((3, 0))]
        for pp, layouts in groupby(enumerate(self.layouts), key=lambda item: item[1][0].pp):
            count = self.space.share(columns, pp, self.world[0])
            where = np.flatnonzero(count)
            if not len(where):
                continue
            some, count = columns[where], count[where]
            reserves = [
                np.array([self._reserve(one, pp, single) for one in some.families])
                for single in (False, True)
            ]
            for number, (layout, rungs) in layouts:
                allowed = rungs[some.rungs] & layout.allows(some, count)
                needed = layout.bytes(some, count, self.world, allowed) + reserves[layout.each == 1]
                fits = allowed & (needed <= limit)
                self.result.num_timed += int(allowed.sum())
                self.result.too_large += int((allowed & ~fits).sum())
                if fits.any():
                    seconds = layout.seconds(some[fits], count[fits]) + step
                    bounds = self.tokens / seconds
                    found.append(np.stack([bounds, np.full(len(bounds), number), where[fits]]))
        made = np.concatenate(found, axis=1)
        if made.size:
            made = made[:, np.argsort(-made[0], kind="stable")]
            self._push(made[0, 0], "candidate", columns, made, 0)

    def _reserve(self, family: Family, pp: int, single: bool) -> float:
        """Return the bytes beside tensors of a rank, from a cache."""
        shape = self.shapes[family[:4]].get(pp)
        if shape is None or self.config.cluster.gpu == "cpu":
            return 0.0
        key = shape, family.dispatcher, family.context, single
        if key not in self.reserves:
            config = family.of(self.config, schedule="1F1B" if single else "Interleaved1F1B")
            self.reserves[key] = CONTEXT + communicators(config, shape)
        return self.reserves[key]

    def _candidates(self, columns: Columns, made: Array, place: int) -> None:
        """Time the candidate ``place`` of ``made``: its bound, layout and column."""
        while place < made.shape[1]:
            number, column = map(int, made[1:, place])
            layout, _ = self.layouts[number]
            family = columns.families[column]
            shape = self.shapes[family[:4]].get(layout.pp)
            place += 1
            if shape is None or any(one.mesh == shape for one in self.result.found):
                continue
            names = self.space.rungs[columns.rungs[column]]
            again = {"recompute": names, "recompute_layers": None}
            again = {} if RECOMPUTE_KEYS & set(self.fixed) else again
            config = family.of(_on(self.config, shape), **layout.settings, **again)
            if place < made.shape[1]:
                self._push(made[0, place], "candidate", columns, made, place)
            if self._legal(config, shape):
                one = Candidate(config, shape)
                self._push(one.speed, "candidate", one)
            return

    def _take(self, one: Candidate) -> None:
        """Keep a candidate, of which no other is faster, if it is the first of its mesh that fits."""
        result = self.result
        if any(other.mesh == one.mesh for other in result.found):
            return
        if one.fits:
            result.found.append(one)
        else:
            result.too_large += 1
            result.smallest = min(result.smallest or one, one, key=lambda each: each.needed)


def _on(config: Config, shape: MeshShape) -> Config:
    number = None if config.launch.num_ranks is None else shape.world_size
    on_mesh = replace(config, mesh=MeshConfig(**vars(shape)))
    return changed(on_mesh, launch={"num_ranks": number})


def tried(config: Config, fixed: Sequence[str], key: str) -> list[Any]:
    """Return the values of ``key`` that a search tries: the configured one, then ``LEVERS``."""
    own = attrgetter(key)(config)
    free = key not in fixed and config.model.num_moe_layers and config.model.family != TRANSFORMERS
    return list(dict.fromkeys([own, *(LEVERS[key] if free else ())]))


def micro_batches(config: Config, fixed: Sequence[str]) -> list[int]:
    if "train.micro_batch_size" in fixed:
        return [config.train.micro_batch_size]
    return [n for n in ROWS if config.train.global_batch_size % n == 0]


def contexts(config: Config, shape: MeshShape, device: str, fixed: Sequence[str]) -> list[str]:
    """Return the kinds of context parallelism that the rules allow on ``shape``."""
    if shape.cp == 1 or "parallel.context" in fixed:
        return [config.parallel.context]
    made = [changed(config, parallel={"context": name}) for name in CONTEXTS]
    return [
        one.parallel.context
        for one in made
        if not any(broken for _, broken, _, _ in context_rows(one, shape, device))
    ]


def with_experts(config: Config, plain: Family, fixed: Sequence[str]) -> Iterator[Family]:
    """Yield ``plain`` with each dispatcher, format of dispatched rows and kind of experts' gradients."""
    own = config.moe.dispatcher, config.moe.dispatch_dtype
    dispatchers = tried(config, fixed, "moe.dispatcher") if plain.ep > 1 else own[:1]
    dtypes = tried(config, fixed, "moe.dispatch_dtype") if plain.ep * plain.etp > 1 else own[1:]
    adds = config.moe.experts == "grouped_mm" and plain.fp8 == "off" and not config.lora.rank
    for name, dtype, grads in product(
        dispatchers, dtypes, tried(config, fixed, "parallel.expert_wgrad")
    ):
        if adds or grads in ("autograd", config.parallel.expert_wgrad):
            yield plain._replace(dispatcher=name, dispatch_dtype=dtype, expert_wgrad=grads)


def layouts(config: Config, pp: int, fixed: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the values of ``parallel`` for ``pp`` pipeline ranks: schedule, stages, FSDP, overlap."""
    pipelines = [ONE_STAGE]
    if PIPELINE_KEYS & set(fixed):
        pipelines = [{key: getattr(config.parallel, key) for key in ONE_STAGE}]
    elif pp > 1:
        counts = [n for n in STAGES if n * pp <= config.model.num_layers]
        pipelines += [
            {**ONE_STAGE, "schedule": "Interleaved1F1B", "stages_per_rank": n} for n in counts
        ]
        if 2 in counts:
            pipelines += [
                {**ONE_STAGE, "schedule": name, "stages_per_rank": 2} for name in V_SHAPED
            ]
    names = "reshard", "grad_sync"
    policies = [dict.fromkeys(names, "step")]
    if {"parallel.reshard", "parallel.grad_sync"} & set(fixed):
        policies = [{name: getattr(config.parallel, name) for name in names}]
    elif pp == 1:
        policies.append(dict.fromkeys(names, "micro_batch"))
    for one, policy, overlap in product(
        pipelines, policies, overlaps := tried(config, fixed, "parallel.overlap_all_to_all")
    ):
        pairs = pp == 1 or one["schedule"] in MERGES
        if not overlap or len(overlaps) == 1 or (pairs and "micro_batch" not in policy.values()):
            yield {**one, **policy, "overlap_all_to_all": overlap}


def ways(config: Config, shape: MeshShape, device: str, fixed: Sequence[str]) -> Iterator[Config]:
    """Yield ``config`` with every combination of the settings that a search tries on ``shape``."""
    no_recompute: dict[str, Any] = {"recompute": [], "recompute_layers": None}
    if RECOMPUTE_KEYS & set(fixed):
        no_recompute = {}
    for micro, fp8, context, settings in product(
        micro_batches(config, fixed),
        tried(config, fixed, "train.fp8"),
        contexts(config, shape, device, fixed) or [config.parallel.context],
        layouts(config, shape.pp, fixed),
    ):
        axes = shape.tp, shape.cp, shape.ep, shape.etp
        plain = Family(*axes, micro, context, "", "", "", fp8)
        for family in with_experts(config, plain, fixed):
            yield family.of(config, **settings, **no_recompute)


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


def mesh_shapes(config: Config, world_size: int, fixed: Sequence[str] = ()) -> Iterator[MeshShape]:
    """Yield every mesh of ``world_size`` ranks.

    tp and etp stay within a node. dp_replicate and ep_replicate are 1 unless ``fixed`` names them.
    """
    node = config.cluster.gpus_per_node
    experts = max(1, config.model.num_experts)
    layers = config.model.num_layers

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
    for pp in sizes("pp", world_size, layers):
        ranks = world_size // pp
        if any(ranks % count for count in copies.values()):
            continue
        narrow = node if config.model.num_moe_layers else 1
        routed = cuts(ranks // copies["ep_replicate"], "ep_shard", ("etp", narrow), ("ep", experts))
        for one in cuts(ranks // copies["dp_replicate"], "dp_shard", ("tp", node), ("cp", ranks)):
            for other in routed:
                yield MeshShape(pp=pp, **copies, **one, **other)


AXES = tuple(dict.fromkeys(DEFAULT_AXES + MOE_AXES))
# Keys that a search sets, by section.
SEARCHED = {
    "parallel": (
        "schedule stages_per_rank layers_per_stage layout overlap_all_to_all expert_wgrad reshard "
        "grad_sync context recompute recompute_layers"
    ),
    "moe": "dispatcher dispatch_dtype",
    "train": "micro_batch_size fp8",
}


def overrides_of(candidate: Candidate) -> dict[str, dict[str, Any]]:
    """Return the configuration values of ``candidate``'s ``mesh=`` preset, by section."""
    # All axes are written: the configuration may set others itself.
    return {"mesh": {axis: getattr(candidate.mesh, axis) for axis in AXES}} | {
        section: {key: getattr(getattr(candidate.config, section), key) for key in keys.split()}
        for section, keys in SEARCHED.items()
    }
