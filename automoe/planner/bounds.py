"""Bounds of the time and memory of many candidates of a mesh search at once, in numpy arrays.

What a layer costs does not depend on the pipeline, so layers are timed once for each ``Family``, a
combination of mesh axes and settings. A column is a record of a numpy array: the times and bytes
of each kind of layer, for one family and one value of ``parallel.recompute``. ``Layout``, a pipeline
with its schedule, adds up the layers of each pipeline rank, for all columns at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import gcd
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from automoe.config.batch import plan_batch
from automoe.config.mesh_shape import MeshShape, gathers_once, stage_layers
from automoe.config.pipeline import (
    ALL_FORWARDS_FIRST,
    Entry,
    pipeline_order,
    runs_halves,
    stages_of_ranks,
)
from automoe.config.recompute import FULL
from automoe.config.schema import Config
from automoe.config.tier import tier_of
from automoe.model.params import embedding_stages
from automoe.planner.activations import UNEVEN, TokenLoad, at_load, layer_activation_bytes
from automoe.planner.candidate import changed
from automoe.planner.communication import NOTHING
from automoe.planner.layer_time import add_experts, head_time, local_time, time_again
from automoe.planner.layer_weights import ends_trained, layer_weights
from automoe.planner.machine import Machine
from automoe.planner.place import Pass, Passes, Place, key_of
from automoe.planner.reserve import FRAGMENTATION
from automoe.planner.schedule import GRAIN, HIDDEN
from automoe.planner.step_memory import DTYPE_BYTES, layer_kind
from automoe.planner.time import host_times, optimizer_time

Array = NDArray[Any]
# Values of a layer: seconds of both passes and of its all-to-alls, bytes gathered over fsdp, numbers
# with gradients, numbers that the optimizer updates on all ranks of a pipeline rank, and activations.
LAYER = "forward backward sent gathered trained state kept".split()
# Values computed apart for a layer's routed experts and for the rest, then added: those of LAYER,
# seconds of recomputation (again), and launch seconds of both passes.
VALUES = "forward backward again sent forward_host backward_host".split() + LAYER[3:]
# More kinds of layers: the embedding, the head, and what a stage sends to the next one.
HEAD, OUTPUT, NUM_ENDS = 1, 2, 3
DENSE, EXPERTS = ("norms", "attention", "ffn"), ("experts", "router")  # of a layer's activations
# Values of a column: rows of a micro-batch, cp * tp, and ep * etp.
COLUMN = "micro ranks local".split()
# What waits: upper bound of tokens/s, least bytes, number of the layout, number in ``Space.rungs``, and a family
# or a candidate.
WAITING = np.dtype(
    [("bound", float), ("bytes", float), ("layout", int), ("rung", int), ("item", object)]
)


class Family(NamedTuple):
    """Mesh axes and settings on which the time of a layer depends.

    The fields have the names of mesh axes and of configuration keys. Candidates of a mesh search
    with equal values share the times of their layers, which are computed once.
    """

    tp: int
    cp: int
    ep: int
    etp: int
    context: str
    micro_batch_size: int
    fp8: str
    dispatcher: str
    dispatch_dtype: str
    expert_wgrad: str

    @property
    def plain(self) -> Family:
        """Copy with ep=1, etp=1 and the default dispatcher, dispatch_dtype and expert_wgrad.

        Only routed experts depend on these. Families with an equal copy have equal times of a layer
        without its routed experts.
        """
        return self._replace(
            ep=1, etp=1, dispatcher="", dispatch_dtype="auto", expert_wgrad="autograd"
        )

    @property
    def routed(self) -> Family:
        """Copy with context="gather", and cp and micro-batch size divided by their greatest common
        divisor.

        The tokens of a rank in a micro-batch stay the same. Families with an equal copy have equal
        times of routed experts.
        """
        both = gcd(self.cp, self.micro_batch_size)
        micro = self.micro_batch_size // both
        return self._replace(cp=self.cp // both, micro_batch_size=micro, context="gather")

    def of(self, config: Config, **parallel: Any) -> Config:
        """Return ``config`` with all settings of this family except its axes (tp, cp, ep, etp).

        The section ``mesh`` of ``config`` stays as it is.

        Args:
            parallel: values of further keys of ``parallel``, such as ``recompute``.
        """
        return changed(
            config,
            moe={"dispatcher": self.dispatcher, "dispatch_dtype": self.dispatch_dtype},
            train={"micro_batch_size": self.micro_batch_size, "fp8": self.fp8},
            parallel={**parallel, "context": self.context, "expert_wgrad": self.expert_wgrad},
        )


class Space:
    """Times and bytes of a model's layers, computed once for each ``Family`` (mesh axes and settings) of a search.

    Args:
        config: configuration that the search varies.
        rungs: values of ``parallel.recompute`` that the search tries, from the least memory freed
            to the most.
    """

    def __init__(self, config: Config, rungs: Sequence[list[str] | str]) -> None:
        self.config = config
        self.rungs = rungs
        self.key = key_of(config)
        variants = [changed(config, parallel={"recompute": names}) for names in rungs]
        kinds = [tuple(layer_kind(c, layer) for c in variants) for layer in config.model.all_layers]
        # layers of one kind cost the same with each choice of recomputation
        self.kinds = {kind: layer for layer, kind in enumerate(kinds)}
        number = {kind: index for index, kind in enumerate(self.kinds)}
        self.kind_of = np.array([number[kind] for kind in kinds])
        self.whole = [*np.bincount(self.kind_of), 1, 1, 0]  # the model: its layers and both ends
        # What many families share: settings, passes of a layer, and its values with and without experts.
        self._settings = cache(self._of_family)
        self._local = cache(lambda family, layer: local_time(self._place(family), layer))
        self._plain, self._experts = cache(self._plain_values), cache(self._expert_values)

    def columns(self, families: Sequence[Family], rungs: int | None = None) -> Array:
        """Return the times and bytes of ``families`` with the first ``rungs`` choices of recomputation.

        Args:
            families: combinations of mesh axes and settings.
            rungs: number of values of ``parallel.recompute`` to time for each family; None: all.

        Returns:
            Array with one record per family (``item``) and choice, family by family. Fields:
            ``rung``, index of the choice; ``micro``, rows of a micro-batch; ``ranks``, cp * tp;
            ``local``, ep * etp; ``bound``, ``bytes`` and ``layout``, which the search sets. Fields
            with a value for each kind of layer, and for embedding, head and a stage's output:
            seconds of the ``forward`` and ``backward`` pass and of all-to-alls (``sent``); bytes
            that FSDP gathers (``gathered``); trained elements on a rank before FSDP shards them
            (``trained``), and summed over tp, or ep and etp (``state``); bytes of activations at
            twice the even expert load (``kept``).
        """
        parts = (
            [self._plain(family.plain, rungs) for family in families],
            [self._experts(family.routed, rungs) for family in families],
        )
        count = len(self.rungs[:rungs])
        num_kinds = len(self.kinds) + NUM_ENDS
        shape = 2, len(families), count, num_kinds, len(VALUES)
        added = np.array(parts).reshape(shape).sum(axis=0)
        values = dict(zip(VALUES, np.moveaxis(added, -1, 0), strict=True))
        for name, again in (("forward", 0.0), ("backward", values["again"])):
            late = values[f"{name}_host"]
            if not self.config.cluster.on_cpu:  # the GPU repeats work while it waits for launches
                late = np.maximum(late - values[name], 0.0)
                again = np.maximum(again - late, 0.0)
            values[name] = values[name] + late + again
        sizes = [(f.micro_batch_size, f.cp * f.tp, f.ep * f.etp) for f in families]
        kinds = [(name, float, num_kinds) for name in LAYER]
        fields = [*WAITING.descr, *((name, float) for name in COLUMN), *kinds]
        columns = np.zeros((len(families), count), fields)
        columns["rung"] = np.arange(count)
        columns["item"].T[:] = np.fromiter(families, object, len(families))
        for name, column in zip(COLUMN, np.array(sizes).reshape(-1, 3).T, strict=True):
            columns[name].T[:] = column
        for name in LAYER:
            columns[name] = values[name]
        return columns.reshape(-1)

    def _place(self, family: Family) -> Place:
        config, machine = self._settings(family._replace(tp=1, cp=1, ep=1, etp=1))
        mesh = MeshShape(1, 1, 1, family.cp, family.tp, 1, 1, family.ep, family.etp)
        return Place(config, mesh, machine, plan_batch(config, mesh), read_key=self.key)

    def _of_family(self, family: Family) -> tuple[Config, Machine]:
        config = family.of(self.config)
        return config, Machine.of(config)

    def _plain_values(self, family: Family, rungs: int | None) -> Array:
        """Return times and bytes of layers without their routed experts: [rungs, kinds of layers, values].

        After the kinds come embedding, head and a stage's output. ``VALUES`` names the values, in order,
        such as the seconds of ``forward``.

        Args:
            family: mesh axes and settings; those of routed experts have no effect.
            rungs: number of choices of recomputation, least memory freed first; None: all.
        """
        place = self._place(family)
        load = TokenLoad.of(place.config, place.mesh, place.batch)
        made = list[list[tuple[float, ...]]]()
        for kinds, layer in self.kinds.items():
            weights = layer_weights(self.key, self.config, layer, family.tp)
            trained = weights.dense_trained
            fixed = weights.dense_bytes, trained, trained * family.tp
            passes = self._local(family, layer)
            rows = list[tuple[float, ...]]()
            for again in (kind.recomputed for kind in kinds[:rungs]):
                size = self._kept(layer, load, again, DENSE)
                rows.append((*_seconds(passes, again), 0.0, 0.0, *fixed, size))
            made.append(rows)
        made += [[row] * len(rows) for row in self._ends(place)]
        return np.array(made).swapaxes(0, 1)

    def _ends(self, place: Place) -> Array:
        """Return [3, values]: the times and bytes of the embedding, the head and a stage's output, one in each row.

        The columns are in the order of ``VALUES``. The output is the hidden states sent to the next stage, and
        ``place`` has the mesh and the machine.
        """
        config, tp = self.config, place.mesh.tp
        model, compute = config.model, DTYPE_BYTES[config.train.dtype][1]
        # A tied head has the embedding's weights.
        held = (
            model.vocab_size * model.hidden_size / tp * np.array([1, not model.tie_embeddings, 0])
        )
        trained = held * [*ends_trained(config), 0]
        values = dict.fromkeys(VALUES, np.zeros(NUM_ENDS))
        values |= {"gathered": compute * held, "trained": trained, "state": trained * tp}
        ends = np.array([*values.values()]).T
        ends[HEAD, :2] = head_time(place, 1 + model.num_mtp_layers)  # forward and backward
        ends[OUTPUT, -1] = compute * place.tokens * model.hidden_size  # kept
        return ends

    def _expert_values(self, family: Family, rungs: int | None) -> Array:
        """Return times and bytes of routed experts, and of the host's kernel launches for whole layers.

        The array is [choices of recomputation, kinds of layers (those of equal cost), values in the
        order of ``VALUES``].

        Args:
            family: mesh axes and settings.
            rungs: number of choices of recomputation; None: all.
        """
        place = self._place(family)
        config, mesh = place.config, place.mesh
        load = TokenLoad.of(config, mesh, at_load(place.batch, UNEVEN, config, mesh))
        cut = family.ep * family.etp
        # layers that differ in attention alone have equal experts
        known = dict[Any, dict[frozenset[str], tuple[float, ...]]]()
        made = list[list[tuple[float, ...]]]()
        for kinds, layer in self.kinds.items():
            weights = layer_weights(self.key, config, layer, family.tp)
            trained = weights.expert_trained
            fixed = weights.expert_bytes / cut, trained / cut, trained
            launches = host_times(place, layer)
            shared = self._local(family.plain, layer).forward.parts.get("shared_experts", 0.0)
            timed = dict[bool, Passes]()
            # no other module that is recomputed is a part of the experts
            repeated = [kind.recomputed & {FULL, "moe"} for kind in kinds[:rungs]]
            rows = known.setdefault((shared, *fixed), {})
            for again in {*repeated} - rows.keys():
                # only rows in 8 bits are encoded once more
                arrives = family.dispatch_dtype == "fp8" and bool(again)
                if arrives not in timed:
                    passes = timed[arrives] = Passes(Pass(parts={"shared_experts": shared}), Pass())
                    if kinds[0].routed:
                        add_experts(place, layer, passes, arrives)
                    del passes.forward.parts["shared_experts"]
                size = self._kept(layer, load, again, EXPERTS)
                rows[again] = *_seconds(timed[arrives], again), *launches, *fixed, size
            made.append([rows[again] for again in repeated])
        return np.pad(np.array(made).swapaxes(0, 1), ((0, 0), (0, NUM_ENDS), (0, 0)))

    def _kept(
        self, layer: int, load: TokenLoad, again: frozenset[str], parts: Sequence[str]
    ) -> float:
        """Return the bytes of ``parts`` of ``layer``'s activations if it recomputes the modules ``again``.

        The result is 0 for a model that transformers computes, since measuring it would import torch.

        Args:
            load: sizes of a micro-batch on the rank.
            parts: kinds of activations: ``DENSE`` (norms, attention, ffn) or ``EXPERTS`` (experts, router).
        """
        model = self.config.model
        if not tier_of(model).resizable:  # it is measured, which imports torch
            return 0.0
        sizes = layer_activation_bytes(model, layer, load, again)
        return sum(sizes.get(part, 0.0) for part in parts)


def _seconds(passes: Passes, again: frozenset[str]) -> tuple[float, float, float, float]:
    """Return seconds of: the forward pass, the backward pass, recomputation, and the ep all-to-alls in these three.

    Args:
        passes: forward and backward pass of a layer or a part of it, recomputation not included.
        again: modules that are recomputed.
    """
    more, costs = time_again(passes.forward, again)
    sent = [half.communication.get("ep", NOTHING).seconds for half in passes]
    sent += [cost.seconds for axis, cost in costs if axis == "ep"]
    more += sum(cost.seconds for _, cost in costs)
    return passes.forward.seconds, passes.backward.seconds, more, sum(sent)


def seconds_once(config: Config, ranks: int) -> float:
    """Return a lower bound of the seconds of a step of ``config`` besides its micro-batches, on any mesh.

    They are the fixed time of a step, and the products of Muon's iterations. The run has ``ranks`` ranks.
    """
    alone = MeshShape(ranks, *[1] * 8)  # no rank shares a matrix, so none is sent
    machine = Machine.of(config)
    place = Place(config, alone, machine, plan_batch(config, alone))
    return machine.constants.step + optimizer_time(place, [])


class Layout:
    """A pipeline schedule on ``pp`` ranks with an FSDP policy; its methods bound a step's time and memory.

    Args:
        space: times and bytes of the model's layers.
        pp: pipeline ranks.
        settings: {key of ``parallel``: value}: the schedule, stages per rank, when FSDP reshards
            and reduces, and whether all-to-alls overlap. Other keys are those of ``space.config``.
    """

    def __init__(self, space: Space, pp: int, settings: dict[str, Any]) -> None:
        self.pp = pp
        self.settings = settings
        self.config = changed(space.config, parallel=settings)
        parallel = self.parallel = self.config.parallel
        self.each = parallel.stages_per_rank
        self._order = cache(self._pipeline)
        self.held = stages_of_ranks(pp, self.each, parallel.schedule)
        kinds = np.eye(len(space.kinds))
        split = stage_layers(self.config, MeshShape(pp, *[1] * 8))
        embedded, last = embedding_stages(self.config.model, split), len(split) - 1
        ends = [(stage in embedded, stage == last, stage < last) for stage in range(len(split))]
        layers = [kinds[space.kind_of[list(stage)]].sum(axis=0) for stage in split]
        self.sizes = np.hstack([layers, ends])  # of each stage: layers of each kind, and ends
        self.own = np.array([self.sizes[stages].sum(axis=0) for stages in self.held])
        self.first = np.array([[min(stages)] for stages in self.held])
        self.before = np.array([self.sizes[:stage].sum(axis=0) for (stage,) in self.first])

    def counts(self, columns: Array, ranks: int) -> NDArray[np.int64]:
        """Return the number of micro-batches in a step, for each record of ``columns``.

        It is 0 if ``ranks`` is not divisible by both pp cp tp and pp ep etp, or the global batch by the
        rows that all data-parallel ranks take in a micro-batch. With ``parallel.overlap_all_to_all`` it
        is also 0 for a single micro-batch, and if there is no all-to-all.

        Args:
            columns: records of ``Space.columns``: each has mesh axes, settings and recomputation.
            ranks: number of ranks of the whole run.
        """
        dp, rest = np.divmod(ranks, self.pp * columns["ranks"])
        unit = np.maximum(dp, 1) * columns["micro"]
        count, rows = np.divmod(self.config.train.global_batch_size, unit)
        left = rest + rows + ranks % (self.pp * columns["local"])
        # Hidden all-to-alls need two micro-batches, and something to hide.
        if self.parallel.overlap_all_to_all:
            left += (count < 2) + (columns["sent"] @ self.own.sum(axis=0) == 0)
        return np.where(left, 0, count).astype(int)

    def seconds(self, columns: Array, indices: Array, count: int) -> Array:
        """Return a lower bound of a step's seconds, for each of the records ``columns[indices]``.

        Args:
            columns: records of ``Space.columns``: each has mesh axes, settings and recomputation.
            indices: [n] indices into ``columns``; the result is [n] in their order.
            count: micro-batches of the step on each data-parallel rank.
        """
        parallel = self.parallel
        forward = columns["forward"][indices].T
        whole = forward + columns["backward"][indices].T
        work = self.own @ whole
        stages = self.sizes @ whole
        unit = stages.max(axis=0) / GRAIN  # the simulation rounds times of stages to it
        busy = count * work
        if parallel.overlap_all_to_all:
            hidden = HIDDEN * (self.own @ columns["sent"][indices].T + self.each * unit)
            few, pairs, *_ = self._order(count)
            busy -= (pairs + count - few) * np.minimum(hidden, work / 2 + self.each * unit)
        # A rank waits for the stages before its first one: at the start for activations, and at
        # the end for gradients, unless gradients of weights fill that time.
        waiting = forward if runs_halves(parallel.schedule) else whole
        waits = self.before @ waiting - self.first * unit
        least: Array = (busy + np.maximum(waits, 0.0)).max(axis=0)
        return least

    def bytes(self, columns: Array, indices: Array, count: int, ranks: int) -> Array:
        """Return a lower bound of the bytes on the fullest rank for each of ``indices``: one number each.

        It is the larger of the bytes at two moments of the step: the end of the forward pass after
        which a rank holds the most activations, and the optimizer's update.

        Args:
            columns: result of ``Space.columns``: an array of records, each with the times and bytes
                of one choice of mesh axes, settings and recomputation.
            indices: which records to take.
            count: micro-batches of the step.
            ranks: number of all ranks.
        """
        parallel, optim = self.parallel, self.config.optim
        wide, compute, reduced = DTYPE_BYTES[self.config.train.dtype]
        moment = compute if optim.moments == "bfloat16" else wide
        weights = compute if optim.master_weights == "stochastic" else wide
        moments = moment * (1 if optim.algorithm == "muon" else 2)
        *_, held, done = self._order(count)
        state = self.pp / ranks * (self.own @ columns["state"][indices].T)
        sharded = weights * state  # reduced gradients are as wide as weights
        moving = held @ columns["kept"][indices].T
        if ranks > 1 and gathers_once(self.config, self.pp):
            moving += self.own @ columns["gathered"][indices].T
        if self.pp == 1 and parallel.grad_sync == "micro_batch":
            moving += sharded * (count > 1)
        elif ranks > 1:
            moving += reduced * done @ columns["trained"][indices].T
        spread = 1 + FRAGMENTATION * (not self.config.cluster.on_cpu)
        least: Array = (moments + weights) * state + spread * np.maximum(moving, sharded)
        return least.max(axis=0)

    def _pipeline(self, count: int) -> tuple[Array, ...]:
        """Return how many passes overlap and how many layers hold activations or gradients under the schedule.

        The step has ``count`` micro-batches; only the first ones are looked at if the order of
        passes then repeats.

        Returns:
            Four arrays: the number of micro-batches that were looked at; [pp, 1] each rank's pairs
            of a forward and a backward pass that overlap, divided by its stages; and, at the moment
            when a rank holds the most activations, [pp, kinds of layers] numbers of layers that
            hold activations (counted for each micro-batch), and of layers that hold gradients.
        """
        schedule = self.parallel.schedule
        if schedule not in ALL_FORWARDS_FIRST and count % self.pp == 0:
            count = min(count, 4 * self.pp)
        order = pipeline_order(
            schedule, self.pp, self.each, count, self.parallel.overlap_all_to_all
        )
        pairs = [[sum(len(entry) == 2 for entry in entries) / self.each] for entries in order]
        held, done = zip(*map(self._most, self.held, order), strict=True)
        return tuple(map(np.array, (count, pairs, held, done)))

    def _most(self, stages: list[int], entries: tuple[Entry, ...]) -> Array:
        flying, done = dict.fromkeys(stages, 0), dict.fromkeys(stages, 0)
        total, most = 0, (0, 0)
        at_most = flying.copy(), done.copy()
        for kind, stage, _ in (action for entry in entries for action in reversed(entry)):
            ends = kind in "BW"
            total += (change := (kind == "F") - ends)
            flying[stage] += change
            done[stage] |= ends
            if change > 0 and total >= most[0] and (now := (total, sum(done.values()))) > most:
                most, at_most = now, (flying.copy(), done.copy())
        sizes: Array = np.array([[*held.values()] for held in at_most]) @ self.sizes[stages]
        return sizes
