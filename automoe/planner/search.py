"""Best-first search for the fastest mesh, by bounds of time and memory.

A queue holds meshes and ever more detailed settings on them, each with an upper bound of tokens/s. The entry with
the highest bound is replaced by the more detailed ones that it contains; a candidate in full detail is timed. A
timed candidate at the head is the fastest of all that are left; it is a result if it fits in memory.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from math import prod
from operator import attrgetter
from typing import Any

import numpy as np

from automoe.config.mesh_shape import DEFAULT_AXES, MOE_AXES, MeshShape
from automoe.config.pipeline import MERGES, V_SHAPED, misfit
from automoe.config.schema import Config
from automoe.config.tier import tier_of
from automoe.config.validate import mesh_rows
from automoe.planner.bounds import WAITING, Array, Family, Layout, Space, seconds_once
from automoe.planner.candidate import (
    ONE_STAGE,
    PIPELINE_KEYS,
    RECOMPUTE_KEYS,
    Candidate,
    balanced,
    changed,
    ladder,
)
from automoe.planner.reserve import standing_reserve
from automoe.planner.schedule import GRAIN, HIDDEN

Axes = tuple[int, int, int, int, str]  # tp, cp, ep, etp, context
TOP = 10  # number of candidates in the result
ROWS = (1, 2, 4, 8, 16, 32, 64)  # tried rows per micro-batch
STAGES = range(2, 9)  # tried stages per rank
# Tried values besides the configured one. The plan does not know DeepEP's buffers, gives
# expert_wgrad=delayed the time of fused, and never finds allgather faster than alltoall.
LEVERS: dict[str, tuple[Any, ...]] = {
    "moe.dispatcher": ("alltoall", "hierarchical"),
    "moe.dispatch_dtype": ("auto", "fp8"),
    "parallel.context": ("gather", "ulysses", "ring"),
    "parallel.expert_wgrad": ("autograd", "fused"),
    "parallel.overlap_all_to_all": (False, True),
    "train.fp8": ("off",),
}
# Meshes, columns, candidates and timed candidates that are looked at together: at most so many, and
# none with a bound below this share of the highest. Timed ones are equally fast, but for rounding.
BATCHES = (4000, 16_000, 16, 1000)
LEVELS = (0.95, 0.95, 0.98, 1 - 1e-9)
PATIENCE = 4096  # After so many candidates without a result, the best that was timed is one.
BALANCED = 3  # so many of the fastest candidates have layers moved between stages


@dataclass
class Search:
    """Result of a mesh search.

    Attributes:
        world_size: number of ranks.
        found: best candidates that fit in memory, fastest first.
        num_timed: number of candidates that were timed.
        refused: configuration key -> number of meshes and candidates that break its rule, of those looked at.
        too_large: number of candidates that do not fit.
        missed: some candidates that do not fit in memory: first those before any was timed, each smaller than the last.
        rest: upper bound of the tokens/s of all candidates that were left in the queue.
    """

    world_size: int
    found: list[Candidate] = field(default_factory=list)
    num_timed: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    too_large: int = 0
    missed: list[Candidate] = field(default_factory=list)
    rest: float = 0.0


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
        device: cpu or cuda; what is valid depends on it.
        fixed: keys that keep the value of ``config``, such as ``mesh.tp`` or ``parallel.recompute``.
        tell: progress callback with the phase's name, the number of items done, and the total.
    """
    result = Search(world_size)
    collects = gc.isenabled()
    gc.disable()  # a tenth of the time: there are many objects, and hardly a cycle
    try:
        queue = Queue(config, mesh_shapes(config, world_size, fixed), device, fixed, result)
        while len(result.found) < TOP and queue.look():
            tell("found", len(result.found), TOP)
    finally:
        if collects:
            gc.enable()
    result.rest = max(queue.highest())
    result.found = [
        balanced(candidate, device, fixed) if place < BALANCED else candidate
        for place, candidate in enumerate(result.found)
    ]
    result.found.sort(key=lambda candidate: -candidate.speed)
    return result


class Queue:
    """Best-first queue of a mesh search, ordered by an upper bound of tokens/s.

    Its entries are meshes; then columns: a mesh with settings of experts and recomputation; then candidates: a
    column with a pipeline schedule, if it may fit in memory. Only candidates are timed.

    Args:
        config: configuration that the search varies.
        meshes: meshes to search, all with ``result.world_size`` ranks.
        device: cpu or cuda; what is valid depends on it.
        fixed: keys that keep the value of ``config``.
        result: ``Search`` with the number of ranks; receives the best candidates and the counts.
    """

    def __init__(
        self,
        config: Config,
        meshes: Iterable[MeshShape],
        device: str,
        fixed: Sequence[str],
        result: Search,
    ) -> None:
        if not RECOMPUTE_KEYS & set(fixed):
            config = changed(config, parallel={"recompute": [], "recompute_layers": None})
        self.config = config
        self.device = device
        self.fixed = fixed
        self.result = result
        self.world = result.world_size
        self.tokens = config.train.global_batch_size * config.train.seq_len  # of a step
        self.once = seconds_once(config, self.world)
        self.shapes = dict[Axes, dict[int, MeshShape]]()
        self._mesh = cache(self._legal_mesh)
        # A mesh is held to the first value of each lever that is free: it has the fewest rules.
        self.plain = config
        for key, (value, *_) in LEVERS.items():
            if value in tried(config, fixed, key):
                section, name = key.split(".")
                self.plain = changed(self.plain, **{section: {name: value}})
        self._layout = cache(lambda pp: next(layouts(self.plain, pp, fixed)))
        micros = [n for n in ROWS if config.train.global_batch_size % n == 0]
        if "train.micro_batch_size" in fixed:
            micros = [config.train.micro_batch_size]
        self.fewest = min(micros)
        contexts = tried(config, fixed, "parallel.context")
        for shape in meshes:
            for context in contexts[: None if shape.cp > 1 else 1]:
                axes = shape.tp, shape.cp, shape.ep, shape.etp, context
                self.shapes.setdefault(axes, {})[shape.pp] = shape
        made = [
            (pp, variant, ladder(changed(config, mesh={"pp": pp}, parallel=variant), fixed))
            for pp in sorted({pp for stage_counts in self.shapes.values() for pp in stage_counts})
            if any(self._mesh(axes, pp) for axes in self.shapes)
            for variant in layouts(config, pp, fixed)
        ]
        rungs = [*{str(variant): variant for *_, names in made for variant in names}.values()]
        self.space = Space(config, rungs)
        self.layouts = [
            (Layout(self.space, pp, variant), np.array([rung in names for rung in rungs]))
            for pp, variant, names in made
        ]
        keys = "train.fp8", "parallel.expert_wgrad"
        adds = config.moe.experts == "grouped_mm" and not config.lora.rank
        families = [
            Family(*axes, micro, fp8, "deepep", "auto", grad)
            for axes in (self.shapes if made else ())
            for micro, fp8, grad in product(micros, *(tried(config, fixed, key) for key in keys))
            if grad == "autograd" or (adds and fp8 == "off")
        ]
        # meshes, columns, candidates, timed candidates: each by its bound, the highest first
        spread = _sorted(self._spread(families, 1, 1.0))
        self.left = [spread, spread[:0], *[np.empty(0, WAITING)] * 3]
        self.since = 0  # candidates since the last result
        self.nearest = np.inf  # about the fewest bytes among candidates that cannot fit

    def highest(self) -> list[float]:
        """Return five numbers: the highest upper bound of tokens/s among the entries of each kind; 0 without entries.

        The kinds are meshes, meshes with settings of experts and recomputation, those with a pipeline schedule too
        (candidates), timed candidates, and timed ones left over because the list of 10 results is full.
        """
        return [float(rows["bound"][:1].max(initial=0.0)) for rows in self.left]

    def look(self) -> bool:
        """Take a step of the best-first search; return False if nothing is left.

        The entries with the highest bounds are replaced by more detailed ones: meshes by meshes with settings of
        experts and recomputation, those by candidates with a pipeline schedule too, those by timed candidates, and
        these become results.
        """
        highest = self.highest()
        # Of equal bounds the last kind comes first: it is closest to a result.
        most, kind = max(zip(highest, range(4), strict=False))
        if self.since >= PATIENCE and (highest[3] or self.result.found):
            kind, most = 3, highest[3]
        if not most:
            return False
        left = self.left[kind]
        number = int((left["bound"][: BATCHES[kind]] >= LEVELS[kind] * most).sum())
        self.left[kind] = left[number:]
        split = (self._columns, self._candidates, self._timed, self._found)[kind]
        self.left[kind + 1] = _sorted(self.left[kind + 1], *split(left[:number]))
        return True

    def _legal_mesh(self, axes: Axes, pp: int) -> MeshShape | None:
        """Return the mesh of ``axes`` (tp, cp, ep, etp, kind of cp) and ``pp``; None: no such shape, or it breaks a rule."""
        shape = self.shapes[axes].get(pp)
        if shape is None:
            return None
        parallel = {**self._layout(pp), "context": axes[-1]}
        train = {"micro_batch_size": self.fewest}
        config = changed(_on(self.plain, shape), parallel=parallel, train=train)
        return shape if self._legal(config, shape) else None

    def _legal(self, config: Config, shape: MeshShape) -> bool:
        """Return True if ``config`` breaks no rule on ``shape``; else count the first one in ``result.refused``."""
        for key, broken, _, _ in mesh_rows(config, shape, self.device):
            if broken:
                self.result.refused[key] += 1
                return False
        return True

    def _spread(self, families: Sequence[Family], rungs: int | None, hidden: float) -> Array:
        """Return the records of ``Space.columns``, with an upper bound of tokens/s in the field ``bound``.

        There is one for each family and recomputation. Bounds assume pipeline ranks with equal work that never wait.

        Args:
            families: combinations of mesh axes and settings.
            rungs: number of values of ``parallel.recompute`` per family; None: all.
            hidden: share of the all-to-alls' time that is assumed to overlap with computation.
        """
        columns = self.space.columns(families, rungs)
        times = columns["forward"] + columns["backward"] - hidden * columns["sent"]
        whole = times @ self.space.whole
        share = columns["micro"] / columns["ranks"] * self.config.train.seq_len
        speed = self.world * share / whole * (1 + 1 / GRAIN)
        columns["bound"] = self.tokens / (self.tokens / speed + self.once)
        return columns

    def _columns(self, meshes: Array) -> list[Array]:
        """Return one array: a record per mesh, dispatcher, dispatch dtype and recomputation to try, in a list.

        A record's ``bound`` is an upper bound of tokens/s. Settings that the user chose are not varied. Meshes that
        break a configuration rule with every pp are left out.

        Args:
            meshes: records whose field ``item`` is a ``Family`` (mesh axes and settings) without a dispatcher yet.
        """
        keys = "moe.dispatcher", "moe.dispatch_dtype"
        names, dtypes = (tried(self.config, self.fixed, key) for key in keys)
        families = [
            mesh._replace(dispatcher=name, dispatch_dtype=dtype)
            for mesh in meshes["item"]
            if any(self._mesh(mesh[:5], pp) for pp in self.shapes[mesh[:5]])
            for name in names[: None if mesh.ep > 1 else 1]
            for dtype in dtypes[: None if mesh.ep * mesh.etp > 1 else 1]
        ]
        return [self._spread(families, None, HIDDEN)]

    def _candidates(self, columns: Array) -> Iterator[Array]:
        """Yield arrays of the candidates that may fit in memory, one per pipeline layout and number of micro-batches.

        Records have bounds: most tokens/s, least bytes of a rank. ``result.too_large`` counts those that cannot fit.

        Args:
            columns: records of ``Space.columns``, each a mesh with settings of experts and recomputation.
        """
        config = self.config
        limit = config.cluster.memory_bytes or np.inf
        for number, (layout, rungs) in enumerate(self.layouts):
            counts = layout.counts(columns, self.world) * rungs[columns["rung"]]
            for count in map(int, np.unique(counts[counts > 0])):
                if misfit(layout.parallel.schedule, layout.pp, layout.each, count):
                    continue
                here = np.flatnonzero(counts == count)
                least = layout.bytes(columns, here, count, self.world)
                fits = least <= limit
                self.result.too_large += len(here) - int(fits.sum())
                if not fits.any():
                    # Activations tell those with equal weights apart.
                    near = least + columns["kept"][here].sum(axis=1)
                    if near.min() < self.nearest and not self.result.num_timed:
                        column = columns[here[near.argmin()]]
                        self._miss(
                            self._candidate(number, column["rung"], column["item"]), near.min()
                        )
                    continue
                here = here[fits]
                waiting = np.empty(len(here), WAITING)
                for name in ("rung", "item"):
                    waiting[name] = columns[name][here]
                waiting["bytes"] = least[fits]
                waiting["layout"] = number
                seconds = layout.seconds(columns, here, count) + self.once
                waiting["bound"] = self.tokens / seconds
                yield waiting

    def _timed(self, waiting: Array) -> Iterator[Array]:
        """Time the candidates ``waiting``; for each yield an array of one record, with predicted tokens/s as ``bound``.

        A record has the dtype ``WAITING``. A candidate is skipped if ``result.found`` has one on the same mesh. A
        candidate that breaks a rule, or whose lower bound of bytes exceeds the GPU's memory, is also skipped, and
        counted in ``result``.

        Args:
            waiting: records of candidates, whose ``bound`` is an upper bound of tokens/s.
        """
        limit = self.config.cluster.memory_bytes or np.inf
        for _, num_bytes, *settings in waiting:
            if candidate := self._candidate(*settings):
                self.since += 1
                config, shape = candidate.config, candidate.mesh
                num_bytes += standing_reserve(config, shape)
                if num_bytes > limit:
                    self.result.too_large += 1
                    self._miss(candidate, num_bytes)
                elif self._legal(config, shape):
                    self.result.num_timed += 1
                    yield np.array([(candidate.speed, 0.0, 0, 0, candidate)], WAITING)

    def _candidate(self, number: int, rung: int, family: Family) -> Candidate | None:
        """Return the candidate of pipeline layout ``number``, recomputation choice ``rung`` and settings ``family``.

        None if its mesh breaks a rule, or if one of ``result.found`` (the best so far) has the same mesh.
        """
        layout, _ = self.layouts[number]
        shape = self._mesh(family[:5], layout.pp)
        if not shape or any(candidate.mesh == shape for candidate in self.result.found):
            return None
        again = self.space.rungs[rung]
        return Candidate(
            family.of(_on(self.config, shape), **layout.settings, recompute=again), shape
        )

    def _miss(self, candidate: Candidate | None, near: float) -> None:
        """Add a candidate that cannot fit to ``result.missed`` if it is legal and misses by less than all before.

        ``near`` is about the bytes that it needs. Nothing is added for None, or once a candidate was timed.
        """
        if candidate and near < self.nearest and not self.result.num_timed:
            if self._legal(candidate.config, candidate.mesh):
                self.nearest = near
                self.result.missed.append(candidate)

    def _found(self, waiting: Array) -> list[Array]:
        """Add timed candidates to ``result.found``, one per mesh; to ``result.missed`` if they do not fit in memory.

        ``waiting`` are queue records of equally fast candidates (``item``): those with the plainest settings
        come first. Returns [records left over] if ``result.found`` reaches 10 before all are added, else [].
        """
        result = self.result
        order = sorted(
            range(len(waiting)), key=[item.plainness for item in waiting["item"]].__getitem__
        )
        for place, item in enumerate(waiting["item"][order]):
            if len(result.found) == TOP:
                return [waiting[order[place:]]]
            if any(other.mesh == item.mesh for other in result.found):
                continue
            if item.fits:
                result.found.append(item)
                self.since = 0
            else:
                result.too_large += 1
                result.missed.append(item)
        return []


def _sorted(*rows: Array) -> Array:
    """Join arrays of records to one, sorted by ``bound`` (tokens/s), highest first; equal ones keep their order."""
    joined = np.concatenate(rows)
    return joined[np.argsort(-joined["bound"], kind="stable")]


def _on(config: Config, shape: MeshShape) -> Config:
    number = config.launch.num_ranks and shape.world_size
    return changed(config, mesh=vars(shape), launch={"num_ranks": number})


def tried(config: Config, fixed: Sequence[str], key: str) -> list[Any]:
    """Return the values of ``key`` to try in a search: the configured one, then others.

    The others (``LEVERS``) are none if the user chose the key, and, except for ``parallel.context``,
    in models without routed experts or computed by transformers; nor is fp8 on a GPU that lacks it.

    Args:
        fixed: keys that the user chose.
        key: configuration key, such as ``moe.dispatcher``.
    """
    setting = attrgetter(key)(config)
    routed = config.model.num_moe_layers and tier_of(config.model).resizable
    lacks = key == "moe.dispatch_dtype" and not config.cluster.has_fp8
    free = key not in fixed and not lacks and (routed or key == "parallel.context")
    return list(dict.fromkeys([setting, *(LEVERS[key] if free else ())]))


def layouts(config: Config, pp: int, fixed: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the combinations {key: value} of settings of ``parallel`` to try on ``pp`` pipeline ranks.

    The keys: schedule, stages per rank, when FSDP reshards and reduces gradients, whether all-to-alls overlap.

    Args:
        fixed: keys that the user chose, such as ``parallel.schedule``: they keep their value.
    """
    names = [("1F1B", 1)]
    if pp > 1:
        names += [("Interleaved1F1B", n) for n in STAGES] + [(name, 2) for name in V_SHAPED]
    pipelines: list[dict[str, Any]] = [
        {**ONE_STAGE, "schedule": name, "stages_per_rank": n}
        for name, n in names
        if n == 1 or n * pp <= config.model.num_layers
    ]
    if PIPELINE_KEYS & set(fixed):
        pipelines = [{}]
    keys = "reshard", "grad_sync"
    policies = [dict.fromkeys(keys, choice) for choice in ("step", "micro_batch")[: 1 + (pp == 1)]]
    if {f"parallel.{key}" for key in keys} & set(fixed):
        policies = [{}]
    overlaps = tried(config, fixed, "parallel.overlap_all_to_all")
    for choice, policy, overlap in product(pipelines, policies, overlaps):
        settings = {**choice, **policy, "overlap_all_to_all": overlap}
        parallel = replace(config.parallel, **settings)
        pairs = pp == 1 or parallel.schedule in MERGES
        pairs &= parallel.reshard == parallel.grad_sync == "step"
        if pairs or not overlap or len(overlaps) == 1:
            yield settings


def mesh_shapes(config: Config, world_size: int, fixed: Sequence[str] = ()) -> Iterator[MeshShape]:
    """Yield the meshes of ``world_size`` ranks in which dp_replicate and ep_replicate are 1.

    tp and etp are at most the GPUs of a node, pp the layers, ep the experts; without MoE layers ep and etp are 1.

    Args:
        fixed: keys that the user chose; an axis among them, such as ``mesh.tp``, has its configured size instead.
    """
    node = config.cluster.gpus_per_node
    limits = dict.fromkeys(("cp", "dp_shard", "ep_shard"), world_size)
    limits |= {"pp": config.model.num_layers, "tp": node}
    if config.model.num_moe_layers:
        limits |= {"ep": config.model.num_experts, "etp": node}

    def sizes(axis: str) -> list[int]:
        size: int = getattr(config.mesh, axis)
        typed = f"mesh.{axis}" in fixed and size > 0
        tried = [size] if typed else range(1, min(world_size, limits.get(axis, 1)) + 1)
        return [n for n in tried if world_size % n == 0]

    views = [
        [
            dict(zip(axes, sizes_of_axes, strict=True))
            for sizes_of_axes in product(*map(sizes, axes))
            if prod(sizes_of_axes) == world_size
        ]
        for axes in (DEFAULT_AXES, MOE_AXES)
    ]
    for sizes_of_axes, other in product(*views):
        if sizes_of_axes["pp"] == other["pp"]:
            yield MeshShape(**sizes_of_axes | other)


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
    """Return {section: {key: value}} of what the search chose, for the preset that it writes."""
    # All axes are written: the configuration may set others itself.
    return {"mesh": {axis: getattr(candidate.mesh, axis) for axis in AXES}} | {
        section: {key: getattr(getattr(candidate.config, section), key) for key in keys.split()}
        for section, keys in SEARCHED.items()
    }
