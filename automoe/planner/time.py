"""Predicted seconds of one training step, split by cause: a pure function of the configuration.

A stage's layers are timed for one micro-batch (``layer_time``), and the pipeline is simulated with
these times (``schedule``). Work done once per step is added: FSDP's deferred gathers and
reductions, and the optimizer. The parts are those of the busiest pipeline rank; its waiting time is
the bubble.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from automoe.config.batch import BatchPlan, plan_batch
from automoe.config.facts import MUON_STEPS
from automoe.config.mesh_shape import MeshShape, gathers_once, stage_layers
from automoe.config.pipeline import IN_HALVES, stages_of_ranks
from automoe.config.schema import Config
from automoe.model.params import embedding_stages, model_params, num_states
from automoe.model.trainable import is_trained
from automoe.observe.flops import step_flops_per_token
from automoe.planner.communication import NOTHING, Cost, all_to_all, gather, send
from automoe.planner.layer_time import head_time, layer_time
from automoe.planner.layer_weights import cached, ends_trained, layer_weights
from automoe.planner.machine import Constants, Machine
from automoe.planner.place import AXES, Pass, Passes, Place
from automoe.planner.schedule import Span, StageTimes, simulate, stretch
from automoe.planner.step_memory import DTYPE_BYTES, layer_kind

# Bytes per parameter in float32: weight, gradient and two moments are read, all but the gradient written.
OPTIMIZER_BYTES = 28
LAYER_KERNELS = 80  # kernels that a MoE layer launches in ``host_layer`` seconds (constants.toml)
REPEATED = "experts in both halves"  # part of a backward pass that runs in halves
# Relative error to expect of a prediction, from runs that the constants were not fitted to
# (docs/plan_accuracy.md). BAND is for GPUs with a measured matmul curve, UNCALIBRATED_BAND for
# other GPUs.
BAND = 0.20
UNCALIBRATED_BAND = 0.40
MEASURED_BAND = 0.45  # with the machine's own calibration (``benchmarks/plan_correlation.py``)


@dataclass(frozen=True)
class StepTime:
    """Predicted time of a step on the busiest pipeline rank, with throughput, MFU and traffic.

    Attributes:
        compute, communication, bubble, other: seconds that add up to ``seconds``: computation,
            exposed communication by mesh axis, waiting for other pipeline ranks, and the optimizer,
            slow kernel launches and fixed overhead.
        traffic, off_node: bytes that a rank sends in a step, by axis, and those that leave its
            node.
        tokens_per_second: of all ranks together.
        mfu, mfu_full_attention: MFU with causal and with full attention FLOPs; None if the
            cluster's peak is unknown.
        calibrated: whether the cluster's speeds were measured.
        spread: expected relative error of the prediction, up or down.
        busy: seconds of work of all ranks, if they share ``cluster.cores``; else 0.
        by_rank: seconds of work of each pipeline rank.
    """

    compute: float
    communication: dict[str, float]  # exposed seconds by axis: tp cp ep etp fsdp pp
    bubble: float  # seconds of waiting for the pipeline and for slower stages
    other: float
    traffic: dict[str, float]  # bytes that a rank sends in a step, by axis
    off_node: dict[str, float]  # bytes of ``traffic`` that leave the node
    tokens_per_second: float  # of all ranks together
    mfu: float | None  # None if the cluster's peak FLOP/s is unknown
    mfu_full_attention: float | None
    calibrated: bool
    spread: float  # expected relative error of the prediction, up or down
    busy: float = 0.0
    by_rank: tuple[float, ...] = ()  # seconds of work of each pipeline rank

    @property
    def seconds(self) -> float:
        return self.compute + sum(self.communication.values()) + self.bubble + self.other

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of ``computing``, each axis (exposed communication), ``bubble``, ``other``: in all ``seconds``."""
        return {
            "computing": self.compute,
            **self.communication,
            "bubble": self.bubble,
            "other": self.other,
        }

    @property
    def band(self) -> tuple[float, float]:
        """Lowest and highest tokens per second to expect."""
        speed = self.tokens_per_second
        return speed * (1 - self.spread), speed * (1 + self.spread)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain data for JSON, with two more keys.

        ``seconds`` is the time of a step, ``tokens_per_second_band`` has the lowest and highest
        speed to expect.
        """
        return {"seconds": self.seconds, **asdict(self), "tokens_per_second_band": self.band}


@dataclass
class Stage:
    """Passes of one micro-batch in a pipeline stage, and what FSDP communicates for it.

    Attributes:
        passes: forward and backward pass.
        states, sent: numbers of hidden states from the previous stage and to the next one; of tensors that it sends.
        layers: number of layers.
        dense, experts: bytes that FSDP gathers of all weights but routed experts, and of routed experts.
        dense_trained, experts_trained: trained elements of all weights but routed experts, and of routed experts.
        once, each: exposed FSDP communication per step, and per micro-batch (forward, backward).
    """

    passes: Passes
    states: tuple[int, int] = (1, 1)
    sent: int = 2  # gradients and hidden states of a micro-batch
    layers: int = 0
    dense: float = 0.0  # bytes gathered over fsdp
    experts: float = 0.0  # bytes gathered over ep_shard
    dense_trained: int = 0  # number of trained elements outside experts
    experts_trained: float = 0.0
    once: Cost = NOTHING  # exposed FSDP communication per step
    each: tuple[Cost, Cost] = (NOTHING, NOTHING)

    @cached_property
    def times(self) -> StageTimes:
        """Seconds of the stage's passes of one micro-batch, in all and in parts, for the pipeline's simulation."""
        sent = sum(half.communication.get("ep", NOTHING).seconds for half in self.passes)
        forward, backward = (
            half.seconds + cost.seconds for half, cost in zip(self.passes, self.each, strict=True)
        )
        back = self.passes.backward
        weights = back.weights + back.experts
        inputs = backward - back.weights - back.parts.get(REPEATED, 0.0)
        return StageTimes(forward, backward, sent, (inputs, weights), self.states[0])


def step_time(
    config: Config,
    mesh: MeshShape,
    batch: BatchPlan | None = None,
    *,
    constants: Constants | None = None,
    overlap: bool = False,
    fused: bool = False,
    gradient_bytes: int = 0,
) -> StepTime:
    """Return the predicted time of one step of a validated ``config`` on ``mesh``.

    Args:
        batch: result of ``plan_batch``; None computes it.
        constants: constants of the time model; None loads ``constants.toml``.
        overlap: all-to-alls overlap with another micro-batch, whatever
            ``parallel.overlap_all_to_all`` is; the schedule must run forward and backward passes in
            pairs (1F1B, Interleaved1F1B, DualPipeV).
        fused: matmuls add to float32 gradients themselves (Megatron-Core); False: FSDP adds
            afterwards.
        gradient_bytes: bytes per gradient element in FSDP's reduction; 0: 4, or 8 in float64.
    """
    batch = batch or plan_batch(config, mesh)
    overlap = overlap or hides_all_to_alls(config)
    machine = Machine.of(config, constants)
    place = Place(config, mesh, machine, batch, fused, gradient_bytes)
    stages = _stages(place)
    count = batch.num_micro_batches
    schedule = config.parallel.schedule
    pp = mesh.pp
    ranks = stages_of_ranks(pp, config.parallel.stages_per_rank, schedule)
    held = [[stages[index] for index in of_rank] for of_rank in ranks]
    busy = [count * sum(stage.times.work for stage in of_rank) for of_rank in held]
    longest = max(busy)
    mine = held[busy.index(longest)]
    border = _border(place)

    # Pipeline: the busiest rank waits for other ranks, and for activations in transit.
    without_border = with_border = longest
    if pp > 1 or overlap:
        times = [stage.times for stage in stages]
        without_border = longest * stretch(schedule, times, pp, count, 0.0, overlap)
        with_border = longest * stretch(schedule, times, pp, count, border.seconds, overlap)
        with_border = max(without_border, with_border)
    communication, traffic, off_node = _by_axis(mine, count, border)
    # Pairs of micro-batches hide a part of the all-to-alls.
    if overlap and without_border < longest:
        communication["ep"] -= longest - without_border
        longest = without_border
    communication["pp"] = with_border - without_border
    waits = without_border - longest

    compute = count * sum(half.compute for stage in mine for half in stage.passes)
    idle = count * sum(sum(half.idle for half in stage.passes) for stage in mine)
    other = idle + optimizer_time(place, mine) + machine.constants.step
    seconds = compute + sum(communication.values()) + other + without_border - longest
    work = 0.0
    # A waiting rank leaves its core to other ranks, but the number of cores is limited.
    if config.cluster.cores:
        work = _work(place, held, count, border)
        cores = config.cluster.cores * -(-mesh.world_size // config.cluster.gpus_per_node)
        shared = waits + max(0.0, work / cores - seconds)
        seconds += shared - waits
        waits = shared
    speed = batch.tokens_per_step / seconds
    mfu, mfu_full_attention = _mfu(place, speed)
    band = BAND if machine.calibrated else UNCALIBRATED_BAND
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
        spread=MEASURED_BAND if config.cluster.constants else band,
        busy=work,
        by_rank=tuple(busy),
    )


def _mfu(place: Place, speed: float) -> tuple[float | None, float | None]:
    """Return the MFU with causal attention and with full attention; (None, None) without a peak.

    Args:
        place: configuration, mesh, speeds of the machine, and sizes of a step.
        speed: tokens/s of all ranks together.
    """
    config = place.config
    if not config.cluster.peak_flops:
        return None, None
    key = place.key, config.train.seq_len
    flops = cached(key, lambda: step_flops_per_token(config))
    return flops.mfu(speed, config.cluster.peak_flops * place.mesh.world_size)


def _work(place: Place, stages_of_ranks: list[list[Stage]], count: int, border: Cost) -> float:
    """Return GPU-seconds of a step: what all ranks compute and send, and their optimizer, summed.

    Waiting for other pipeline ranks is not included.

    Args:
        place: configuration, mesh, speeds of the machine, and sizes of a step.
        stages_of_ranks: stages of each pipeline rank.
        count: number of micro-batches.
        border: cost of sending a hidden state to the next pipeline rank.
    """
    per_rank = 0.0
    for stages in stages_of_ranks:
        each = sum(stage.times.work + sum(stage.states) * border.seconds for stage in stages)
        once = sum(stage.once.seconds for stage in stages)
        per_rank += count * each + once + optimizer_time(place, stages)
    return place.mesh.world_size * (per_rank / place.mesh.pp + place.machine.constants.step)


def hides_all_to_alls(config: Config) -> bool:
    """Return True with ``parallel.overlap_all_to_all``; always False on a CPU, whose cores compute and send."""
    return config.parallel.overlap_all_to_all and not config.cluster.on_cpu


def step_spans(config: Config, mesh: MeshShape) -> tuple[list[Span], list[float]]:
    """Simulate a training step; return what a plot of its schedule shows.

    Returns:
        (actions of all pipeline ranks; for each stage, recomputation's share of its backward pass).
    """
    batch = plan_batch(config, mesh)
    place = Place(config, mesh, Machine.of(config), batch)
    stages = _stages(place)
    spans = list[Span]()
    border = _border(place).seconds
    times = tuple(stage.times for stage in stages)
    overlap = hides_all_to_alls(config)
    count = batch.num_micro_batches
    simulate(config.parallel.schedule, times, mesh.pp, count, border, overlap, spans)
    return spans, [
        stage.passes.backward.parts.get("again", 0.0) / stage.times.backward for stage in stages
    ]


def _border(place: Place) -> Cost:
    """Return the cost of sending one hidden state, or its gradient, to the next pipeline rank.

    Args:
        place: configuration, mesh, speeds of the machine, and sizes of a step.
    """
    numbers = place.machine.number_bytes * place.tokens * place.config.model.residual_width
    return send(place.machine, place.group("pp"), numbers)


def _by_axis(stages: list[Stage], count: int, border: Cost) -> list[dict[str, float]]:
    """Return [exposed seconds, bytes sent, bytes that leave the node], each {mesh axis: number}.

    They are of a step of ``count`` micro-batches on the rank that has ``stages``; ``border`` is the
    cost of sending a hidden state to the next pipeline rank.
    """
    total = dict.fromkeys(AXES, NOTHING) | {
        "pp": border * (count * sum(stage.sent for stage in stages))
    }
    for stage in stages:
        for half in stage.passes:
            for axis, cost in half.communication.items():
                total[axis] += cost * count
        total["fsdp"] += stage.once + (stage.each[0] + stage.each[1]) * count
    return [
        {axis: getattr(cost, quantity) for axis, cost in total.items()}
        for quantity in ("seconds", "bytes", "off_node")
    ]


def _stages(place: Place) -> list[Stage]:
    """Return the times of all pipeline stages, in the model's order; equal stages are one object.

    Args:
        place: configuration, mesh, speeds of the machine, and sizes of a step.
    """
    config = place.config
    split = stage_layers(config, place.mesh)
    kinds = [layer_kind(config, layer) for layer in config.model.all_layers]
    example = {kind: layer for layer, kind in enumerate(kinds)}
    known = {layer: layer_time(place, layer, kind.recomputed) for kind, layer in example.items()}
    alike = [example[kind] for kind in kinds]
    made: dict[tuple[Any, ...], Stage] = {}
    stages = []
    embedded = embedding_stages(config.model, split)
    before = 1
    for index, layers in enumerate(split):
        counts = Counter(alike[layer] for layer in layers)
        ends = index == 0, index == len(split) - 1
        states = before, num_states(config.model, layers)
        before = states[1]
        key = (ends, states, *sorted(counts.items()))
        if key not in made:
            sent = states[0] * (not ends[0]) + states[1] * (not ends[1])  # back, and on
            stage = made[key] = Stage(Passes(Pass(), Pass()), states, sent)
            for layer, number in counts.items():
                add_layer(place, stage, layer, number, known[layer])
            _add_ends(place, stage, *ends, embeds=index in embedded)
            if config.parallel.schedule in IN_HALVES and index > 0:
                # The operation of the experts computes both gradients in either half.
                stage.passes.backward.add(REPEATED, stage.passes.backward.experts)
            _fsdp(place, stage)
        stages.append(made[key])
    return stages


def add_layer(place: Place, stage: Stage, layer: int, number: int, times: Passes) -> None:
    """Add ``number`` equal layers to ``stage``, in place: their times and FSDP's bytes.

    Args:
        place: configuration, mesh, speeds of the machine, and sizes of a step.
        layer: number of one of these layers, for its weights.
        times: passes of that layer.
    """
    mesh = place.mesh
    cpu = place.config.cluster.on_cpu
    for total, half, launches in zip(stage.passes, times, host_times(place, layer), strict=True):
        total.compute += number * half.compute
        total.weights += number * half.weights
        total.experts += number * half.experts
        total.parts["again"] = total.parts.get("again", 0.0) + number * half.parts.get("again", 0.0)
        for axis, cost in half.communication.items():
            total.send(axis, cost * number)
        total.idle += number * (launches if cpu else max(0.0, launches - half.seconds))
    stage.layers += number
    weights = layer_weights(place.key, place.config, layer, mesh.tp)
    cut = number / (mesh.ep * mesh.etp)
    stage.dense += number * weights.dense_bytes
    stage.dense_trained += number * weights.dense_trained
    stage.experts += cut * weights.expert_bytes
    stage.experts_trained += cut * weights.expert_trained


def host_times(place: Place, layer: int) -> tuple[float, float]:
    """Return seconds in which the host launches the kernels of ``layer``'s forward and backward pass.

    A GPU idles as long as they exceed its own time. A CPU launches nothing: they are its operators' fixed time.

    Args:
        place: configuration, mesh, speeds of the machine, and sizes of a step.
    """
    config, constants = place.config, place.machine.constants
    cpu, routed = config.cluster.on_cpu, layer in config.model.moe_layers
    # A dense layer launches half as many kernels. A CPU's time counts if host_layer was measured.
    share = float(not cpu or "host_layer" in config.cluster.constants) * (1 if routed else 0.5)
    forward = backward = share * constants.host_layer
    if config.parallel.expert_wgrad != "autograd" and routed:
        # two products of each expert, in place of two of all
        more = 2 * (config.model.num_experts // place.mesh.ep - 1)
        backward *= 1 + more / LAYER_KERNELS * (not cpu)
    return forward, backward


def _add_ends(place: Place, stage: Stage, first: bool, last: bool, embeds: bool) -> None:
    """Add bytes, elements and times of the embedding and the output head to a stage that has them.

    Args:
        place: configuration, mesh, speeds of the machine, and sizes of a step.
        first, last: True if ``stage`` is the first or the last one; the last has the head and the
            loss.
        embeds: True if ``stage`` stores the embedding.
    """
    model = place.config.model
    numel = model.vocab_size * model.hidden_size // place.mesh.tp
    embedding, head = ends_trained(place.config)
    apart = last and not model.tie_embeddings
    stage.dense += (embeds + apart) * numel * DTYPE_BYTES[place.config.train.dtype][1]
    stage.dense_trained += (embeds * embedding + apart * head) * numel
    gradient = place.machine.pass_over(10.0 * numel)
    if first or (embeds and not last):  # The embedding's gradient has the size of the embedding.
        stage.passes.backward.add("ends", gradient * embedding)
    if last:
        forward, backward = head_time(place, 1 + model.num_mtp_layers)
        copied = embeds and apart and not first  # for multi-token prediction
        stage.passes.add("ends", forward, backward + gradient * (head + copied * embedding))


def _fsdp(place: Place, stage: Stage) -> None:
    """Set the cost of FSDP's collectives that computation does not hide, in place.

    ``stage.once`` gets the cost per step, ``stage.each`` (forward, backward) that per micro-batch.

    Args:
        place: configuration, mesh, speeds of the machine, and sizes of a step.
    """
    config = place.config
    mesh = place.mesh
    machine = place.machine
    parallel = config.parallel
    wide = place.gradient_bytes or DTYPE_BYTES[config.train.dtype][2]
    dense = place.group("fsdp")
    experts = place.group("ep_shard")
    gathered = gather(machine, dense, stage.dense) + gather(machine, experts, stage.experts)
    reduced = gather(machine, dense, wide * stage.dense_trained, "reduce_scatter")
    reduced += gather(machine, experts, wide * stage.experts_trained, "reduce_scatter")
    # Without overlap, the latency of one collective per layer is exposed.
    if not machine.constants.overlap:
        delay = Cost(
            (stage.layers - 1) * machine.constants.latency * ((dense.size > 1) + (experts.size > 1))
        )
        gathered = gathered + delay
        reduced = reduced + delay
    # An all-reduce is a reduce-scatter and an all-gather.
    replicas = (
        gather(machine, place.group("dp_replicate"), wide * stage.dense_trained / mesh.fsdp)
        + gather(machine, place.group("ep_replicate"), wide * stage.experts_trained / mesh.ep_shard)
    ) * 2
    once_weights = gathers_once(place.config, mesh.pp)
    once_gradients = mesh.pp > 1 or parallel.grad_sync == "step"
    forward, backward = (machine.constants.overlap * half.seconds for half in stage.passes)

    def seen(cost: Cost, behind: float) -> Cost:
        return cost.seen(max(0.0, cost.seconds - behind))

    # Collectives of once per step overlap with one micro-batch of their stage.
    once = seen(gathered, forward) if once_weights else NOTHING
    once += seen(reduced + replicas, backward) if once_gradients else replicas
    each = NOTHING if once_weights else seen(gathered, forward)
    back = (NOTHING if once_weights else gathered) + (NOTHING if once_gradients else reduced)
    stage.once = once
    stage.each = (each, seen(back, backward))


def optimizer_time(place: Place, stages: list[Stage]) -> float:
    """Return seconds of the optimizer's update on a rank with ``stages``; if [], of Muon's iterations alone."""
    mesh = place.mesh
    held = sum(s.dense_trained / mesh.fsdp + s.experts_trained / mesh.ep_shard for s in stages)
    seconds = place.machine.pass_over(OPTIMIZER_BYTES * held)
    return seconds + (_muon(place) if place.config.optim.algorithm == "muon" else 0.0)


def _muon(place: Place) -> float:
    """Return the seconds of Muon's iterations, with the matrices divided evenly over ranks.

    All-to-alls before and after them are included. An iteration multiplies [m, n] x [n, m], [m, m]
    x [m, m] and [m, m] x [m, n], with m <= n.

    Args:
        place: configuration, mesh, speeds of the machine, and sizes of a step.
    """
    machine = place.machine
    number = 2 if place.config.optim.muon_dtype == "bfloat16" else 4
    seconds = 0.0
    moved = {"fsdp": 0.0, "ep_shard": 0.0}
    for param in model_params(place.config.model):
        if param.spec.orthogonalized and is_trained(param.name, place.config):
            m, n = sorted(param.shape[-2:])
            here = param.numel / (m * n * place.mesh.world_size)
            products = ((m, m, n), (m, m, m), (m, n, m))
            seconds += MUON_STEPS * sum(machine.gemm(a, b, c, here) for a, b, c in products)
            moved["ep_shard" if param.expert else "fsdp"] += number * here * m * n
    for axis, num_bytes in moved.items():
        seconds += 2 * all_to_all(machine, place.group(axis), num_bytes).seconds
    return seconds
