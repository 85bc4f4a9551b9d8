"""Bytes on every pipeline rank at the moment of a step when they are most, by what they are.

Sharding is FSDP2's: the first dim of a parameter cut into equal chunks over dp_shard x cp, the last
chunks shorter or empty, after tp has taken its slice; experts first over ep (experts) and etp (their
width), then over ep_shard (rows). The figures are those of the first shard, which is never smaller than another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from automoe.config.batch import BatchPlan
from automoe.config.mesh_shape import MeshShape, split_layers, stage_of_rank, stays_unsharded
from automoe.config.schema import Config
from automoe.errors import ConfigError
from automoe.model.adapters import as_stored, with_adapters
from automoe.model.params import Param, stage_params
from automoe.planner.activations import TokenLoad
from automoe.planner.step_memory import (
    Moment,
    Sizes,
    StagePlan,
    gathered_numel,
    local_numel,
    plan_stage,
    trained,
)

UNITS_RESIDENT = 2  # FSDP units gathered at once when freed after use: the one at work and the next
SENDS_KEPT = (
    2  # of each stage and direction (``automoe.parallel.pipeline``), where stages are interleaved
)
INPUT_BYTES = (
    6 * 8 + 1
)  # a token: ids, labels, positions, document, index, row; whether it is padding
BATCH_BYTES = (
    4 * 8
)  # and on the CPU, where they are anyway, the first four as they came from the loader
# An update of stochastically rounded parameters on the CPU: numbers in float32, indices and random bits in int64, a
# block of this many elements at a time. On CUDA it is one kernel.
UPDATE_BYTES, UPDATE_BLOCK = 56, 1 << 22


@dataclass(frozen=True)
class RankMemory:
    """Bytes on the first rank of a pipeline stage group, at the moment of a step when they are most.

    That is in a backward pass, with or without what the loss takes, or in the optimizer step after the last of them.
    Of both kinds of gradient each field has what is there at that moment.
    """

    pp_rank: int
    layers: list[int]
    params: int  # parameters of the rank's stages, before sharding, without adapters
    weights: int  # sharded, as the optimizer updates them
    moments: int  # AdamW's two, sharded
    averages: int  # of weights (optim.ema_decay), sharded, in float32
    gradients: float  # sharded, after reduction
    gathered_weights: float  # whole weights in compute precision
    unsharded_gradients: float  # whole gradients waiting for their reduction
    inputs: int  # rows of the whole step: ids, labels, positions, documents
    receive_buffers: float  # of the pipeline, beside the inputs that micro-batches in flight keep
    activations: float  # of all micro-batches in flight
    head: float  # cross-entropy workspace, last stage only
    recompute: float  # what one recomputed region holds again during its backward pass
    widened: int  # the largest packed matrix (lora.base) as it is multiplied
    temporaries: (
        float  # of the part of a layer that is in its backward pass; of a reduction; of the update
    )
    micro_batches_in_flight: list[int]  # of each of the rank's stages
    moment: str  # which it is

    @property
    def parts(self) -> dict[str, float]:
        """The bytes by field, of which ``peak`` is the sum."""
        return {name: getattr(self, name) for name in PARTS}

    @property
    def peak(self) -> float:
        return sum(self.parts.values())


PARTS = tuple(
    "weights moments averages gradients gathered_weights unsharded_gradients inputs receive_buffers activations head "
    "recompute widened temporaries".split()
)


def widened_numel(param: Param, mesh: MeshShape) -> int:
    """Numbers of a packed ``param`` where a rank multiplies by it; blocks count as whole."""
    return gathered_numel(param, mesh) // param.shape[-1] * param.packed


def plan_memory(config: Config, mesh: MeshShape, batch: BatchPlan) -> list[RankMemory]:
    """Bytes of every pp rank, in order."""
    return [_plan_rank(config, mesh, batch, pp_rank) for pp_rank in range(mesh.pp)]


def _plan_rank(config: Config, mesh: MeshShape, batch: BatchPlan, pp_rank: int) -> RankMemory:
    model, parallel = config.model, config.parallel
    layers = split_layers(
        model.num_layers, mesh.pp * parallel.stages_per_rank, parallel.layers_per_stage
    )
    numbers = stage_of_rank(mesh.pp, parallel.stages_per_rank)[pp_rank]
    bare = [stage_params(model, layers, stage) for stage in numbers]
    held = [as_stored(with_adapters(stage, config), config) for stage in bare]
    params = [param for stage in held for param in stage]
    sizes, load = Sizes(config, mesh), TokenLoad.of(config, mesh, batch)
    stages = [
        plan_stage(
            config, sizes, load, list(layers[stage]), own, stage == 0, stage == len(layers) - 1
        )
        for stage, own in zip(numbers, held, strict=True)
    ]
    if mesh.pp > 1:
        moments = [*_pipeline_moments(config, mesh, batch, stages, pp_rank)]
    else:
        moments = [*_loop_moments(config, mesh, batch, stages[0], params)]
    moments.append(_update_moment(config, sizes, params))
    most = max(moments, key=lambda moment: moment.total)
    widened = sizes.compute * max(param.packed and widened_numel(param, mesh) for param in params)
    return RankMemory(
        pp_rank=pp_rank,
        layers=[layer for stage in numbers for layer in layers[stage]],
        params=sum(param.numel for stage in bare for param in stage),
        weights=sizes.weights(params),
        moments=sizes.moments(params),
        averages=sizes.total(local_numel, trained(params), sizes.wide)
        if config.optim.ema_decay
        else 0,
        inputs=(INPUT_BYTES // mesh.cp + BATCH_BYTES * load.on_cpu)
        * batch.rows_per_rank
        * config.train.seq_len,
        **most.parts,
        widened=0 if most.name == "update" else widened,
        micro_batches_in_flight=most.in_flight,
        moment=most.name,
    )


def _loop_moments(
    config: Config, mesh: MeshShape, batch: BatchPlan, stage: StagePlan, params: list[Param]
) -> Iterator[Moment]:
    """Micro-batches one after another on a rank with the whole model."""
    parallel, sizes = config.parallel, Sizes(config, mesh)
    deferred = parallel.grad_sync == "step" and batch.num_micro_batches > 1
    if stays_unsharded(config, mesh):
        deferred = False  # each gradient is added to what is there as it comes
        # Adapters are rounded where they are multiplied, and kept so for the backward pass.
        copies = sizes.compute < sizes.wide and config.lora.rank
        rounded = (
            sizes.compute * sum(gathered_numel(param, mesh) for param in trained(params))
            if copies
            else 0
        )
        stage = replace(
            stage, rest_weights=rounded, rest_gradients=0,
            layers=[replace(layer, weights=0, gradients=0, experts=0) for layer in stage.layers],
        )  # fmt: skip
    # Whether a micro-batch finds whole gradients there, reduced ones, and is reduced itself.
    kinds = {(False, False, not deferred)}
    if batch.num_micro_batches > 1:
        kinds.add((deferred, not deferred, True))
    if deferred and batch.num_micro_batches > 2:
        kinds.add((True, False, False))
    few = _resident_units(params, mesh, sizes.compute)
    for adds, added, reduces in kinds:
        loss = replace(stage.loss(adds), gathered_weights=stage.weights)
        for moment in (loss, *stage.backward(adds, reduces, mesh.ep_shard)):
            if parallel.reshard == "micro_batch":
                moment = replace(moment, gathered_weights=min(stage.weights, few))
            yield replace(
                moment, in_flight=[1], gradients=stage.sharded if added else moment.gradients
            )


def _pipeline_moments(
    config: Config, mesh: MeshShape, batch: BatchPlan, stages: list[StagePlan], pp_rank: int
) -> Iterator[Moment]:
    """A stage keeps weights from its first backward pass, and gradients until its last, whatever the policy."""
    parallel, num_micro_batches = config.parallel, batch.num_micro_batches
    if parallel.schedule != "GPipe" and num_micro_batches % mesh.pp == 0:
        num_micro_batches = min(
            num_micro_batches, 4 * mesh.pp
        )  # after the warm-up each round is like the one before
    gathered = sum(stage.weights for stage in stages)
    held, done, seen = [0] * len(stages), [False] * len(stages), set()
    most = {
        (i, adds): max(stage.backward(adds, False, mesh.ep_shard), key=lambda moment: moment.total)
        for i, stage in enumerate(stages)
        for adds in (False, True)
    }
    for is_forward, i in rank_actions(
        parallel.schedule, mesh.pp, len(stages), num_micro_batches, pp_rank
    ):
        stage = stages[i]
        held[i] += is_forward
        in_flight = list(held)
        like = is_forward, i, *held, *done
        if like in seen:  # most rounds are like the one before
            held[i] -= not is_forward
            continue
        seen.add(like)
        others = (
            sum(count * each.kept for count, each in zip(held, stages, strict=True)) - stage.kept
        )
        gradients = sum(each.gradients for each, some in zip(stages, done, strict=True) if some)
        if is_forward:
            now = stage.loss(False, others)
            there, kept = float(gradients), now.activations
        else:
            now = most[i, done[i]]
            there = gradients - stage.gradients * done[i] + now.unsharded_gradients
            kept = others + now.activations
            held[i] -= 1
            done[i] = True
        # The gradient that came, and those that are still on their way to the stages before.
        sent = (
            SENDS_KEPT * sum(not each.first for each in stages)
            if len(stages) > 1
            else not stage.first
        )
        buffers = stage.border * ((not stage.last) + sent)
        yield replace(
            now, in_flight=in_flight, unsharded_gradients=there, activations=kept, gathered_weights=gathered,
            receive_buffers=buffers,
        )  # fmt: skip
    whole = sum(stage.gradients for stage in stages)
    flat = max(
        (layer.experts or layer.gradients for stage in stages for layer in stage.layers), default=0
    )
    yield Moment(
        "reduction", held, unsharded_gradients=whole, gathered_weights=gathered,
        temporaries=flat * (1 + (mesh.ep_shard == 1)),
    )  # fmt: skip


def _update_moment(config: Config, sizes: Sizes, params: list[Param]) -> Moment:
    largest = max((local_numel(param, sizes.mesh) for param in trained(params)), default=0)
    rounds = config.optim.master_weights == "stochastic" or config.optim.moments == "bfloat16"
    in_torch = config.cluster.gpu == "cpu" and rounds
    scratch = UPDATE_BYTES * min(largest, UPDATE_BLOCK) * in_torch
    return Moment("update", [], gradients=sizes.sharded_gradients(params), temporaries=scratch)


def _resident_units(params: list[Param], mesh: MeshShape, size: int) -> int:
    """Bytes, at ``size`` a number, of the FSDP units gathered at once: each as large as a layer, or what is outside."""
    units: dict[int | None, int] = {}
    for param in params:
        units[param.layer] = units.get(param.layer, 0) + gathered_numel(
            param, mesh
        ) * param.bytes_each(size)
    return UNITS_RESIDENT * max(units.values(), default=0)


def rank_actions(
    schedule: str, pp: int, stages_per_rank: int, num_micro_batches: int, pp_rank: int
) -> Iterator[tuple[bool, int]]:
    """(is_forward, local stage) of one pp rank's whole step, in order.

    The orders are those of torch.distributed.pipelining: GPipe runs all forwards first; 1F1B starts
    ``pp - pp_rank`` forwards, then alternates; Interleaved1F1B takes rounds of up to ``pp``
    micro-batches through its stages in turn (arXiv 2104.04473, section 2.2).

    Raises:
        ConfigError: the rounds of Interleaved1F1B would not be equal; torch's schedule refuses that too.
    """
    total, rounds = num_micro_batches * stages_per_rank, max(1, num_micro_batches // pp)
    round_size, left = divmod(num_micro_batches, rounds)
    if schedule == "Interleaved1F1B" and stages_per_rank > 1 and left:
        rule = f"Interleaved1F1B runs {num_micro_batches} micro-batches in {rounds} equal rounds: {left} are left"
        raise ConfigError(
            "parallel.schedule", schedule, rule, f"Run a multiple of mesh.pp={pp} micro-batches"
        )
    if schedule == "GPipe":
        ahead = total
    elif schedule == "1F1B":
        ahead = pp - pp_rank
    else:
        ahead = (stages_per_rank - 1) * round_size + 2 * (pp - 1 - pp_rank) + 1
    ahead = min(ahead, total)
    for index in range(total + ahead):
        if index < total:
            yield True, index // round_size % stages_per_rank
        done = index - ahead + 1
        if 0 <= done < total:
            yield False, stages_per_rank - 1 - done // round_size % stages_per_rank
