"""Bounds of the time and the memory of many meshes at once, in arrays.

What a layer costs does not depend on the pipeline, so layers are timed once for each ``Family``. A
column of ``Columns`` is a family with one choice of recomputation. ``Layout.limits`` then adds up
the stages of each pipeline rank for all columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from automoe.config.batch import plan_batch
from automoe.config.mesh_shape import MeshShape, stage_layers
from automoe.config.pipeline import (
    ALL_FORWARDS_FIRST,
    IN_HALVES,
    Entry,
    misfit,
    pipeline_order,
    runs_halves,
    stages_of_ranks,
)
from automoe.config.recompute import FULL
from automoe.config.rules_model import TRANSFORMERS
from automoe.config.schema import Config
from automoe.planner.activations import UNEVEN, TokenLoad, at_load, layer_activation_bytes
from automoe.planner.candidate import changed
from automoe.planner.communication import NOTHING
from automoe.planner.layer_time import head_time, local_time, plain_time, time_again
from automoe.planner.machine import Constants, Machine
from automoe.planner.place import Pass, Passes, Place
from automoe.planner.reserve import FRAGMENTATION
from automoe.planner.schedule import GRAIN, HIDDEN
from automoe.planner.step_memory import DTYPE_BYTES, LayerKind, layer_kind
from automoe.planner.time import Stage, add_layer

Array = NDArray[np.float64]


class Family(NamedTuple):
    """What the time of a layer depends on, besides what all candidates of a search share."""

    tp: int
    cp: int
    ep: int
    etp: int
    micro_batch_size: int
    context: str
    dispatcher: str
    dispatch_dtype: str
    expert_wgrad: str
    fp8: str

    def of(self, config: Config, **parallel: Any) -> Config:
        """Return ``config`` with the settings of the family."""
        parallel |= {"context": self.context, "expert_wgrad": self.expert_wgrad}
        moe = {"dispatcher": self.dispatcher, "dispatch_dtype": self.dispatch_dtype}
        train = {"micro_batch_size": self.micro_batch_size, "fp8": self.fp8}
        return changed(config, moe=moe, train=train, parallel=parallel)

    @property
    def mesh(self) -> MeshShape:
        """The axes that a layer sees."""
        return MeshShape(1, 1, 1, self.cp, self.tp, 1, 1, self.ep, self.etp)


@dataclass
class Columns:
    """Arrays over families and choices of recomputation; rows are kinds of layers."""

    families: list[Family]
    rungs: NDArray[np.int64]  # number of the choice in ``Space.rungs``
    forward: Array  # seconds of a layer
    backward: Array
    sent: Array  # seconds of its all-to-alls, both passes
    halved: Array  # seconds of its experts' gradients, which halves of a backward pass repeat
    kept: Array  # activations of a micro-batch
    dense: Array  # bytes gathered over fsdp
    experts: Array
    dense_trained: Array  # numbers
    experts_trained: Array
    micro: Array  # one row each from here on: rows of a micro-batch
    tp: Array
    ranks: Array  # cp * tp
    local: Array  # ep * etp
    head: Array  # seconds of the head, both passes
    border: Array  # bytes of a hidden state
    ends: Array  # bytes of the gathered head, or of the embedding
    fused: NDArray[np.bool_]  # products of experts add to gradients themselves
    hides: NDArray[np.bool_]  # all-to-alls may run behind another micro-batch

    @classmethod
    def joined(cls, parts: Sequence[Columns]) -> Columns:
        arrays = {
            one.name: np.concatenate([getattr(part, one.name) for part in parts], axis=-1)
            for one in fields(cls)[1:]
        }
        return cls([family for part in parts for family in part.families], **arrays)

    def __getitem__(self, chosen: NDArray[Any] | slice) -> Columns:
        """Return the columns that an index or a mask chooses."""
        where = np.arange(len(self.families))[chosen]
        arrays = {one.name: getattr(self, one.name)[..., chosen] for one in fields(self)[1:]}
        return Columns([self.families[i] for i in where], **arrays)

    def seconds(self, layers: Array) -> Array:
        """Return the least seconds of a micro-batch in all ``layers`` of each kind together."""
        sent = layers @ self.sent
        whole = layers @ (self.forward + self.backward) + self.head
        hidden = np.maximum(whole - HIDDEN * sent - whole / GRAIN, whole / 2)
        return np.where(sent > 0, hidden, whole)


class Space:
    """Layers of a configuration, timed once for each family."""

    def __init__(
        self, config: Config, rungs: Sequence[list[str] | str], like: Space | None = None
    ) -> None:
        self.config = config
        self.rungs = rungs
        one = [changed(config, parallel={"recompute": names}) for names in rungs]
        kinds = [tuple(layer_kind(c, layer) for c in one) for layer in config.model.all_layers]
        # layers of one kind cost the same with each choice of recomputation
        self.kinds = {kind: layer for layer, kind in enumerate(kinds)}
        number = {kind: index for index, kind in enumerate(self.kinds)}
        self.kind_of = np.array([number[kind] for kind in kinds])
        self._timed = dict[Any, list[list[float]]]()
        # the same for ``like``, whose choices of recomputation alone are others
        self._parts: dict[Any, Passes] = like._parts if like else {}
        self._kept = dict[Any, list[float]]()

    def columns(self, families: Sequence[Family]) -> Columns:
        """Time the layers of ``families`` with every choice of recomputation."""
        made = [self._family(family) for family in families]
        number = len(self.rungs)
        again = [index for index in range(len(families)) for _ in range(number)]
        layers = np.array([layers for layers, _ in made])  # family, value, kind, rung
        values = layers.transpose(1, 2, 0, 3).reshape(layers.shape[1], len(self.kinds), -1)
        ends = np.array([one for _, one in made]).T[:, again]
        rungs = np.tile(np.arange(number), len(families))
        flags = [
            [one.expert_wgrad != "autograd", one.ep > 1 and one.dispatcher != "allgather"]
            for one in families
        ]
        fused, hides = np.array(flags, bool)[again].T
        arrays = [rungs, *values, *ends, fused, hides]
        named = {one.name: array for one, array in zip(fields(Columns)[1:], arrays, strict=True)}
        return Columns([families[i] for i in again], **named)

    def share(self, columns: Columns, pp: int, ranks: int) -> NDArray[np.int64]:
        """Return the micro-batches of a step on ``pp`` pipeline ranks; 0 if ranks are left over."""
        dp, rest = np.divmod(ranks, (pp * columns.ranks).astype(int))
        made = np.maximum(dp, 1) * columns.micro.astype(int)
        count, rows = np.divmod(self.config.train.global_batch_size, made)
        left = (rest > 0) | (rows > 0) | (ranks % (pp * columns.local) > 0)
        return np.where(left, 0, count)

    def _family(self, family: Family) -> tuple[list[Any], list[float]]:
        config = family.of(self.config)
        mesh = family.mesh
        batch = plan_batch(config, mesh)
        place = Place(config, mesh, Machine.of(config, Constants.load()), batch)
        load = TokenLoad.of(config, mesh, at_load(batch, UNEVEN, config, mesh))
        values: list[list[Any]] = []
        for kinds, layer in self.kinds.items():
            # delayed products take the time of fused ones; a dense layer knows no experts
            grads = family.expert_wgrad.replace("delayed", "fused")
            same: tuple[Any, ...] = (layer, family._replace(expert_wgrad=grads))
            if not kinds[0].routed:
                same = layer, family[:2], family[4:6], family.fp8
            if same not in self._timed:
                self._timed[same] = self._layer(place, layer, kinds, family)
            if (load, layer) not in self._kept:
                self._kept[load, layer] = [self._bytes(load, layer, kind) for kind in kinds]
            values.append([*self._timed[same], self._kept[load, layer]])
        numel = config.model.vocab_size * config.model.hidden_size / mesh.tp
        size = DTYPE_BYTES[config.train.dtype][1]
        ends = [
            family.micro_batch_size,
            family.tp,
            family.cp * family.tp,
            family.ep * family.etp,
            sum(head_time(place, 1 + config.model.num_mtp_layers)),
            size * place.tokens * config.model.hidden_size,
            size * numel,
        ]
        order = 0, 1, 2, 3, 8, 4, 5, 6, 7
        return [[kind[i] for kind in values] for i in order], ends

    def _layer(
        self, place: Place, layer: int, kinds: Sequence[LayerKind], family: Family
    ) -> list[list[float]]:
        """Return the values of ``Columns`` for one layer: a list over choices of recomputation."""
        rows = []
        plain = dict[bool, tuple[Stage, Pass]]()
        cpu = place.config.cluster.gpu == "cpu"
        for kind in kinds:
            again = place.config.moe.dispatch_dtype == "fp8" and bool(
                kind.recomputed & {FULL, "moe"}
            )
            if again not in plain:
                timed = plain_time(place, layer, again, self._local(place, layer, family))
                plain[again] = Stage(Passes(Pass(), Pass())), timed.forward
                add_layer(place, plain[again][0], layer, 1, timed)
            one, forward = plain[again]
            ahead, back = one.passes
            more, costs = time_again(forward, kind.recomputed)
            more += sum(cost.seconds for _, cost in costs)
            sent = [cost.seconds for axis, cost in costs if axis == "ep"]
            sent += [half.communication.get("ep", NOTHING).seconds for half in (ahead, back)]
            # Repeated work fills the time in which a GPU waits for launches.
            seconds = back.seconds + (more if cpu else max(0.0, more - back.idle))
            numbers = one.dense, one.experts, one.dense_trained, one.experts_trained
            rows.append([ahead.seconds, seconds, sum(sent), back.experts, *numbers])
        return [list(row) for row in zip(*rows, strict=True)]

    def _local(self, place: Place, layer: int, family: Family) -> Passes:
        key = layer, family[:6], family.expert_wgrad == "autograd", family.fp8
        if key not in self._parts:
            self._parts[key] = local_time(place, layer)
        return Passes(*(half.copy() for half in self._parts[key]))

    def _bytes(self, load: TokenLoad, layer: int, kind: LayerKind) -> float:
        if self.config.model.family == TRANSFORMERS:  # measured, which imports torch
            return 0.0
        return sum(layer_activation_bytes(self.config.model, layer, load, kind.recomputed).values())


class Layout:
    """Pipeline ranks with their stages: a schedule on ``pp`` ranks, and what FSDP does."""

    def __init__(self, space: Space, pp: int, settings: dict[str, Any]) -> None:
        self.pp = pp
        self.settings = settings
        config = changed(space.config, parallel=settings)
        parallel = self.parallel = config.parallel
        self.config = config
        shape = MeshShape(pp, *[1] * 8)
        self.each = parallel.stages_per_rank
        self._orders = dict[int, tuple[int, Array, Array, Array, Array]]()
        self.held = stages_of_ranks(pp, self.each, parallel.schedule)
        kinds = np.eye(len(space.kinds))
        self.sizes = np.array(
            [kinds[space.kind_of[list(stage)]].sum(axis=0) for stage in stage_layers(config, shape)]
        )
        self.own = np.array([self.sizes[stages].sum(axis=0) for stages in self.held])
        first = np.array([min(stages) for stages in self.held])
        self.before = np.array([self.sizes[:stage].sum(axis=0) for stage in first])
        self.first = first[:, None]
        last = pp * self.each - 1
        self.has_head = np.array([[float(last in stages)] for stages in self.held])
        self.has_ends = self.has_head * (not config.model.tie_embeddings) + (self.first == 0)

    def allows(self, columns: Columns, count: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which columns keep the rules of this layout with ``count`` micro-batches a step."""
        parallel, pp = self.parallel, self.pp
        overlap = parallel.overlap_all_to_all
        allowed = np.ones(len(count), bool)
        if pp > 1 and runs_halves(parallel.schedule) or parallel.grad_sync == "micro_batch":
            allowed &= ~columns.fused
        if overlap:
            allowed &= columns.hides & (count > 1)
        for number in map(int, np.unique(count)):
            if pp > 1 and misfit(parallel.schedule, pp, self.each, number):
                allowed &= count != number
        return allowed

    def seconds(self, columns: Columns, count: NDArray[np.int64]) -> Array:
        """Return for each column the least seconds of a step of ``count`` micro-batches."""
        parallel = self.parallel
        whole = columns.forward + columns.backward
        work = self.own @ whole + self.has_head * columns.head
        stages = self.sizes @ whole
        stages[-1] += columns.head
        unit = stages.max(axis=0) / GRAIN  # the simulation rounds times of stages to it
        if parallel.schedule in IN_HALVES and self.pp > 1:
            work = work + (self.own - self.sizes[0] * (self.first == 0)) @ columns.halved
        busy = count * work
        if parallel.overlap_all_to_all:
            hidden = HIDDEN * (self.own @ columns.sent + self.each * unit)
            hidden = np.minimum(hidden, work / 2 + self.each * unit)
            for number in np.unique(count):
                few, *_, pairs = self._order(int(number))
                here = count == number
                busy[:, here] -= (pairs + number - few) * hidden[:, here]
        # A rank waits for the stages before its first one: at the start for activations, and at
        # the end for gradients, unless gradients of weights fill that time.
        filled = self.pp > 1 and runs_halves(parallel.schedule)
        waits = self.before @ (columns.forward if filled else whole)
        waits = np.maximum(waits - self.first * unit, 0.0)
        least: Array = (busy + waits).max(axis=0)
        return least

    def bytes(
        self, columns: Columns, count: NDArray[np.int64], world: Sequence[int], allowed: Any
    ) -> Array:
        """Return the least bytes of the rank that needs most, at the end of a forward pass.

        Args:
            world: ranks, and those of them that hold copies of other layers and of experts.
            allowed: columns to look at; the others get infinity.
        """
        ranks, copies, expert_copies = world
        config, pp = self.config, self.pp
        wide, compute, reduced = DTYPE_BYTES[config.train.dtype]
        optim = config.optim
        moment = compute if optim.moments == "bfloat16" else wide
        stored = compute if optim.master_weights == "stochastic" else wide
        stored += moment * (1 if optim.algorithm == "muon" else 2)
        state = columns.dense_trained * columns.tp * (copies * pp / ranks)
        state = state + columns.experts_trained * columns.local * (expert_copies * pp / ranks)
        standing = stored * (self.own @ state)
        if pp > 1 or (self.parallel.reshard == "step" and ranks > 1):
            gathered = self.own @ (columns.dense + columns.experts) + self.has_ends * columns.ends
            standing += (1 + FRAGMENTATION) * gathered
        summed = reduced * (columns.dense_trained + columns.experts_trained)
        found = np.full(len(count), np.inf)
        for number in np.unique(count[allowed]):
            here = np.flatnonzero(allowed & (count == number))
            _, held, done, sent, _ = self._order(int(number))
            if self.pp == 1 and not self.parallel.overlap_all_to_all:
                sums = self.parallel.grad_sync == "step" and number > 1 < ranks
                held, done = self.own, self.own * sums
            moving = held @ columns.kept[:, here] + done @ summed[:, here]
            moving += sent * columns.border[here]
            found[here] = (standing[:, here] + (1 + FRAGMENTATION) * moving).max(axis=0)
        return found

    def _order(self, count: int) -> tuple[int, Array, Array, Array, Array]:
        """Return what each rank holds most of at the end of a forward pass, and how much it pairs.

        These are the micro-batches after which rounds repeat, layers in flight by kind, layers with
        gradients, micro-batches whose hidden states it keeps to send them, and pairs of passes.
        """
        schedule = self.parallel.schedule
        if schedule not in ALL_FORWARDS_FIRST and count % self.pp == 0:
            count = min(count, 4 * self.pp)
        if count not in self._orders:
            overlap = self.parallel.overlap_all_to_all
            order = pipeline_order(schedule, self.pp, self.each, count, overlap)
            found = [self._most(*one) for one in zip(self.held, order, strict=True)]
            held, done, sent = map(np.array, zip(*found, strict=True))
            pairs = [[sum(len(entry) == 2 for entry in one) / self.each] for one in order]
            self._orders[count] = count, held, done, sent * (self.pp > 1), np.array(pairs)
        return self._orders[count]

    def _most(
        self, stages: list[int], entries: tuple[Entry, ...]
    ) -> tuple[Array, Array, list[int]]:
        held, done = np.zeros(len(stages), int), np.zeros(len(stages), bool)
        most, kept = (0, 0), (held, done)
        for kind, stage, _ in (action for entry in entries for action in reversed(entry)):
            local = stages.index(stage)
            held[local] += (kind == "F") - (kind in "BW")
            done[local] |= kind in "BW"
            now = int(held.sum()), int(done.sum())
            if kind == "F" and now > most:
                most, kept = now, (held.copy(), done.copy())
        sizes = self.sizes[stages]
        border = kept[0] @ (np.array(stages) < len(self.sizes) - 1)
        return kept[0] @ sizes, kept[1] @ sizes, [int(border)]
