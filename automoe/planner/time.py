"""Seconds of one optimizer step, split into what they are spent on. A pure function of the configuration.

A stage's layers are timed on one micro-batch (``layer_time``), the pipeline is simulated with those times
(``schedule``), and what happens once a step is added: FSDP's gathers and reductions that are deferred, the optimizer.
The parts are those of the busiest pipeline rank; what it waits for others is the bubble.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from automoe.config.batch import BatchPlan, plan_batch
from automoe.config.mesh_shape import MeshShape, split_layers
from automoe.config.recompute import recomputed_modules
from automoe.config.schema import Config, is_linear, window_of
from automoe.model.flops import TokenFlops, step_flops_per_token
from automoe.planner.communication import NOTHING, Cost, gather, reduce_all, send
from automoe.planner.layer_time import AXES, Pass, Place, head_time, layer_time, layer_weights
from automoe.planner.machine import Constants, Machine
from automoe.planner.schedule import Span, StageTimes, rank_of, simulate, stretch
from automoe.planner.step_memory import DTYPE_BYTES

OPTIMIZER_BYTES = (
    28  # a number: weight, gradient and two moments read, all but the gradient written, in float32
)
# How far a prediction may be off either way, from runs that the constants were not fitted to (docs/plan_accuracy.md).
# A GPU whose products were not measured is another matter, and so is a machine that only its own calibration knows.
BAND, UNCALIBRATED_BAND = 0.20, 0.40
MEASURED_BAND = (
    0.45  # of a machine that only its calibration knows (``benchmarks/plan_correlation.py``)
)


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step on the busiest pipeline rank, which sum to ``seconds``, and what follows from them."""

    compute: float
    communication: dict[str, float]  # exposed, by axis: tp cp ep etp fsdp pp
    bubble: float  # the pipeline's, and waiting for slower stages
    other: (
        float  # the optimizer, kernels that the host is too slow to launch, what a step has besides
    )
    traffic: dict[str, float]  # bytes that a rank sends in a step, by axis
    off_node: dict[str, float]  # of those, what leaves the node
    tokens_per_second: float  # of all ranks
    mfu: float | None  # None: the cluster's peak is unknown
    mfu_full_attention: float | None
    calibrated: bool
    spread: float  # how far the prediction may be off either way, as a share
    busy: float = 0.0  # seconds that all ranks together compute and send, where they share ``cluster.cores``; else 0
    by_rank: tuple[float, ...] = ()  # seconds that each pipeline rank's micro-batches take it

    @property
    def seconds(self) -> float:
        return self.compute + sum(self.communication.values()) + self.bubble + self.other

    @property
    def band(self) -> tuple[float, float]:
        """Lowest and highest tokens per second to expect."""
        return self.tokens_per_second * (1 - self.spread), self.tokens_per_second * (
            1 + self.spread
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"seconds": self.seconds, **asdict(self), "tokens_per_second_band": self.band}


@dataclass
class _Stage:
    """Seconds of one micro-batch in a stage by what they are, and the numbers that FSDP moves for it."""

    forward: Pass
    backward: Pass
    idle_host: tuple[float, float] = (0.0, 0.0)  # forward, backward: the GPU waits for launches
    layers: int = 0
    dense: float = 0.0  # bytes gathered over fsdp
    experts: float = 0.0  # over ep_shard
    dense_trained: int = 0  # numbers
    experts_trained: float = 0.0
    once: Cost = NOTHING  # FSDP's, exposed: of a step
    each: tuple[Cost, Cost] = (NOTHING, NOTHING)  # of a micro-batch, forward and backward

    @cached_property
    def times(self) -> StageTimes:
        """As the pipeline's simulation takes them."""
        forward, backward = self.seconds
        sent = sum(
            half.communication.get("ep", NOTHING).seconds for half in (self.forward, self.backward)
        )
        return StageTimes(forward + self.each[0].seconds, backward + self.each[1].seconds, sent)

    @property
    def seconds(self) -> tuple[float, float]:
        return self.forward.seconds + self.idle_host[0], self.backward.seconds + self.idle_host[1]


def step_time(
    config: Config,
    mesh: MeshShape,
    batch: BatchPlan | None = None,
    *,
    constants: Constants | None = None,
    num_mtp: int = 0,
    overlap: bool = False,
    fused: bool = False,
    gradient_bytes: int = 0,
    bubble: bool = True,
) -> StepTime:
    """The time of one step of a validated ``config`` on ``mesh``.

    Args:
        batch: that of ``plan_batch``, if it is there already.
        constants: others than those that ship.
        num_mtp: multi-token-prediction modules behind the last layer.
        overlap: all-to-alls hide behind another micro-batch (schedules with pairs: 1F1B kinds, DualPipeV).
        fused: products add to float32 gradients themselves (Megatron-Core); here FSDP does so afterwards.
        gradient_bytes: of a number that FSDP reduces, where that is not automoe's width; 0: it is.
        bubble: False leaves the pipeline out, whose ranks then never wait: a bound from below, ten times as cheap.
    """
    batch = batch or plan_batch(config, mesh)
    machine = Machine.of(config, constants or Constants.load())
    place = Place.of(config, mesh, machine, batch, fused, gradient_bytes)
    stages = _stages(place, num_mtp)
    count, schedule, pp = batch.num_micro_batches, config.parallel.schedule, mesh.pp
    held = _stages_by_rank(stages, schedule, pp)
    busy = [
        count * sum(stage.times.forward + stage.times.backward for stage in own) for own in held
    ]
    longest = max(busy)
    mine, border = held[busy.index(longest)], _border(place)

    # The pipeline: what the busiest rank waits for others, and for activations on their way.
    without_border = with_border = longest
    if bubble and (pp > 1 or overlap):
        times = [stage.times for stage in stages]
        without_border = longest * stretch(schedule, times, pp, count, 0.0, overlap)
        with_border = longest * stretch(schedule, times, pp, count, border.seconds, overlap)
        with_border = max(without_border, with_border)
    communication, traffic, off_node = _by_axis(mine, count, border)
    by_rank = tuple(busy)
    if (
        overlap and without_border < longest
    ):  # pairs of micro-batches hide a part of the all-to-alls
        communication["ep"] -= longest - without_border
        longest = without_border
    communication["pp"] = with_border - without_border
    waits = without_border - longest

    compute = count * sum(
        half.compute for stage in mine for half in (stage.forward, stage.backward)
    )
    idle = count * sum(sum(stage.idle_host) for stage in mine)
    other = idle + _optimizer(place, mine) + machine.constants.step
    seconds = compute + sum(communication.values()) + other + without_border - longest
    work = 0.0
    if (
        config.cluster.cores
    ):  # a rank that waits leaves its core to others, but there are only so many cores
        work = _work(place, held, count, border)
        cores = config.cluster.cores * -(-mesh.world_size // config.cluster.gpus_per_node)
        shared = waits + max(0.0, work / cores - seconds)
        seconds += shared - waits
        waits = shared
    speed = batch.tokens_per_step / seconds
    mfu, mfu_full_attention = _mfu(place, speed)
    return StepTime(
        compute=compute,
        communication=communication,
        bubble=waits,
        other=other,
        traffic=traffic,
        off_node=off_node,
        tokens_per_second=speed,
        mfu=mfu,
        mfu_full_attention=mfu_full_attention,
        calibrated=machine.calibrated,
        spread=_spread(config, machine),
        busy=work,
        by_rank=by_rank,
    )


def _stages_by_rank(stages: list[_Stage], schedule: str, pp: int) -> list[list[_Stage]]:
    held: list[list[_Stage]] = [[] for _ in range(pp)]
    for index, stage in enumerate(stages):
        held[rank_of(index, schedule, pp)].append(stage)
    return held


def _mfu(place: Place, speed: float) -> tuple[float | None, float | None]:
    """MFU at ``speed`` tokens/s of all ranks, with causal attention and with all of it; None if no peak is known."""
    config = place.config
    if not config.cluster.peak_flops:
        return None, None
    flops = _flops(place.key, config.train.seq_len, config)
    return flops.mfu(speed, config.cluster.peak_flops * place.mesh.world_size)


def _spread(config: Config, machine: Machine) -> float:
    """Return how far a prediction may be off either way, as a share."""
    if config.cluster.constants:
        return MEASURED_BAND
    return BAND if machine.calibrated else UNCALIBRATED_BAND


def _work(place: Place, held: list[list[_Stage]], count: int, border: Cost) -> float:
    """Seconds that all ranks together compute and send in a step; ``held``: the stages of each pipeline rank."""
    per_rank = 0.0
    for stages in held:
        each = sum(
            stage.times.forward + stage.times.backward + 2 * border.seconds for stage in stages
        )
        per_rank += (
            count * each + sum(stage.once.seconds for stage in stages) + _optimizer(place, stages)
        )
    return place.mesh.world_size * (per_rank / place.mesh.pp + place.machine.constants.step)


def step_spans(config: Config, mesh: MeshShape) -> tuple[list[Span], list[float]]:
    """Every action of a step as it is simulated, and the share of recomputation in each stage's backward pass."""
    batch = plan_batch(config, mesh)
    place = Place.of(config, mesh, Machine.of(config, Constants.load()), batch)
    stages, spans, border = _stages(place, 0), list[Span](), _border(place).seconds
    times = tuple(stage.times for stage in stages)
    simulate(config.parallel.schedule, times, mesh.pp, batch.num_micro_batches, border, spans=spans)
    return spans, [
        stage.backward.parts.get("again", 0.0) / stage.times.backward for stage in stages
    ]


def _border(place: Place) -> Cost:
    """A micro-batch's activations, or their gradient, on the way to the next pipeline rank."""
    numbers = place.machine.number_bytes * place.tokens * place.config.model.hidden_size
    return send(place.machine, place.group("pp"), numbers)


_FLOPS: dict[tuple[str, int], TokenFlops] = {}


def _flops(key: str, seq_len: int, config: Config) -> TokenFlops:
    """``step_flops_per_token``, remembered."""
    if (key, seq_len) not in _FLOPS:
        _FLOPS[key, seq_len] = step_flops_per_token(config)
    return _FLOPS[key, seq_len]


def _by_axis(stages: list[_Stage], count: int, border: Cost) -> list[dict[str, float]]:
    """Of a whole step by axis: exposed seconds, bytes, and bytes that leave the node."""
    total = dict.fromkeys(AXES, NOTHING) | {"pp": border * (2 * count * len(stages))}
    for stage in stages:
        for axis, cost in (
            *stage.forward.communication.items(),
            *stage.backward.communication.items(),
        ):
            total[axis] += cost * count
        total["fsdp"] += stage.once + (stage.each[0] + stage.each[1]) * count
    return [
        {axis: getattr(cost, what) for axis, cost in total.items()}
        for what in ("seconds", "bytes", "off_node")
    ]


def _stages(place: Place, num_mtp: int) -> list[_Stage]:
    """Every stage; those of the same layers are one object."""
    config, mesh = place.config, place.mesh
    model, parallel, attention = config.model, config.parallel, config.model.attention
    split = split_layers(
        model.num_layers, mesh.pp * parallel.stages_per_rank, parallel.layers_per_stage
    )
    same = not (
        parallel.recompute_layers or attention.sliding_window or attention.linear_num_key_heads
    )
    kinds = [
        (layer >= model.first_k_dense,)
        if same
        else (
            layer >= model.first_k_dense,
            is_linear(attention, layer),
            window_of(attention, layer) > 0,
            recomputed_modules(parallel, layer),
        )
        for layer in range(model.num_layers)
    ]
    # The layer of a module for more tokens stands before a head that stands alone.
    extra = len(split) - 1 - (len(split) > 1 and not split[-1])
    example = {kind: layer for layer, kind in enumerate(kinds)}
    known = {
        kind: layer_time(place, layer, recomputed_modules(parallel, layer))
        for kind, layer in example.items()
    }
    made: dict[tuple[Any, ...], _Stage] = {}
    stages = []
    for index, layers in enumerate(split):
        counts = Counter(kinds[layer] for layer in layers)
        if num_mtp and index == extra:
            counts[kinds[-1]] += num_mtp
        ends = index == 0, index == len(split) - 1
        key = (ends, *sorted(counts.items(), key=str))
        if key not in made:
            stage = made[key] = _Stage(Pass(), Pass())
            for kind, number in counts.items():
                _add(place, stage, example[kind], number, known[kind])
            _add_ends(place, stage, *ends, num_mtp)
            _fsdp(place, stage)
        stages.append(made[key])
    return stages


def _add(place: Place, stage: _Stage, layer: int, number: int, times: tuple[Pass, Pass]) -> None:
    """Add ``number`` layers like ``layer``."""
    config, mesh, waits = place.config, place.mesh, []
    cpu, floor = config.cluster.gpu == "cpu", place.machine.constants.host_layer
    # A dense layer has half of the kernels. A CPU launches nothing: what its own operators take besides was measured.
    share = float(not cpu or "host_layer" in config.cluster.constants) * (
        1 if layer >= config.model.first_k_dense else 0.5
    )
    for total, half in zip((stage.forward, stage.backward), times, strict=True):
        total.compute += number * half.compute
        total.parts["again"] = total.parts.get("again", 0.0) + number * half.parts.get("again", 0.0)
        for axis, cost in half.communication.items():
            total.send(axis, cost * number)
        waits.append(number * share * (floor if cpu else max(0.0, floor - half.seconds / share)))
    stage.idle_host = (stage.idle_host[0] + waits[0], stage.idle_host[1] + waits[1])
    stage.layers += number
    found = layer_weights(place.key, config, layer, mesh.tp)
    cut = number / (mesh.ep * mesh.etp)
    stage.dense += number * found.dense_bytes
    stage.dense_trained += number * found.dense_trained
    stage.experts += cut * found.expert_bytes
    stage.experts_trained += cut * found.expert_trained


def _add_ends(place: Place, stage: _Stage, first: bool, last: bool, num_mtp: int) -> None:
    """The embedding and the head with its loss."""
    model, mesh, machine = place.config.model, place.mesh, place.machine
    numel = model.vocab_size * model.hidden_size // mesh.tp
    trained = place.config.lora.rank == 0
    ends = int(first) + int(last and not (model.tie_embeddings and first))
    stage.dense += ends * numel * DTYPE_BYTES[place.config.train.dtype][1]
    stage.dense_trained += ends * numel * trained
    if first:  # the gradient of the embedding is as large as the embedding
        stage.backward.add("ends", machine.pass_over(10.0 * numel * trained))
    if last:
        forward, backward = head_time(place, 1 + num_mtp)
        joined = machine.gemm(place.tokens, model.hidden_size, 2 * model.hidden_size)
        stage.forward.add("ends", forward + num_mtp * joined)
        stage.backward.add(
            "ends", backward + num_mtp * 2 * joined + machine.pass_over(10.0 * numel * trained)
        )


def _fsdp(place: Place, stage: _Stage) -> None:
    """Find the exposed gathers and reductions of a stage: ``once`` a step, and for ``each`` micro-batch."""
    config, mesh, machine = place.config, place.mesh, place.machine
    parallel = config.parallel
    wide = place.gradient_bytes
    dense, experts = place.group("fsdp"), place.group("ep_shard")
    gathered = gather(machine, dense, stage.dense) + gather(machine, experts, stage.experts)
    reduced = gather(machine, dense, wide * stage.dense_trained)
    reduced += gather(machine, experts, wide * stage.experts_trained)
    if not machine.constants.overlap:  # a collective a layer, and nothing hides its delay
        delay = Cost(
            (stage.layers - 1) * machine.constants.latency * ((dense.size > 1) + (experts.size > 1))
        )
        gathered, reduced = gathered + delay, reduced + delay
    replicas = reduce_all(
        machine, place.group("dp_replicate"), wide * stage.dense_trained / mesh.fsdp
    )
    replicas += reduce_all(
        machine, place.group("ep_replicate"), wide * stage.experts_trained / mesh.ep_shard
    )
    once_weights = mesh.pp > 1 or parallel.reshard == "step"
    once_gradients = mesh.pp > 1 or parallel.grad_sync == "step"
    forward, backward = (machine.constants.overlap * seconds for seconds in stage.seconds)

    def seen(cost: Cost, behind: float) -> Cost:
        return cost.seen(max(0.0, cost.seconds - behind))

    # Once a step the collectives of a stage hide behind one of its micro-batches.
    once = seen(gathered, forward) if once_weights else NOTHING
    once += seen(reduced + replicas, backward) if once_gradients else replicas
    each = NOTHING if once_weights else seen(gathered, forward)
    back = (NOTHING if once_weights else gathered) + (NOTHING if once_gradients else reduced)
    stage.once, stage.each = once, (each, seen(back, backward))


def _optimizer(place: Place, stages: list[_Stage]) -> float:
    mesh = place.mesh
    held = sum(s.dense_trained / mesh.fsdp + s.experts_trained / mesh.ep_shard for s in stages)
    return place.machine.pass_over(OPTIMIZER_BYTES * held)
