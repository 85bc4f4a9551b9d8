"""Peak memory of every pipeline rank in a training step, split by kind.

Sharding is FSDP2's. After tp has taken its slice, the first dim of a parameter is split into equal
chunks over dp_shard x cp; the last chunks may be shorter or empty. Experts are sharded over ep (by
expert), then over etp (by width), then over ep_shard (by rows). All figures are those of the first
shard, which is the largest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from operator import attrgetter

from automoe.config.batch import BatchPlan
from automoe.config.facts import MUON_ROUND, SENDS_KEPT
from automoe.config.mesh_shape import MeshShape, gathers_once, stage_layers, stays_unsharded
from automoe.config.pipeline import ALL_FORWARDS_FIRST, pipeline_order, stages_of_ranks
from automoe.config.schema import Config
from automoe.model.params import Param, num_states, stage_params
from automoe.model.trainable import as_stored, with_adapters
from automoe.planner.activations import TokenLoad
from automoe.planner.layer_weights import cached
from automoe.planner.place import key_of
from automoe.planner.step_memory import (
    RankMemory,
    Sizes,
    StagePlan,
    gathered_numel,
    local_numel,
    plan_stage,
    trained,
)

UNITS_RESIDENT = 2  # FSDP units gathered at once with resharding: the current one and the next
# Bytes per token: six int64 (ids, labels, positions, document, index, row) and a padding flag.
INPUT_BYTES = 6 * 8 + 1
MTP_BYTES = 2 * 8  # more bytes per depth of multi-token prediction: ids and labels
# Additional bytes on a CPU: the first four tensors, as the loader delivered them.
BATCH_BYTES = 4 * 8
# A stochastically rounded update on the CPU works on blocks of UPDATE_BLOCK elements. Each element
# takes UPDATE_BYTES for its float32 values, int64 indices and int64 random bits. On CUDA the update
# is one kernel and needs no blocks.
UPDATE_BYTES = 56
UPDATE_BLOCK = 1 << 22


def plan_memory(config: Config, mesh: MeshShape, batch: BatchPlan) -> list[RankMemory]:
    """Return the memory of every pp rank at its fullest moment, in the order of pp ranks.

    Args:
        batch: sizes of a step, with the (token, expert) pairs that a rank computes.
    """
    return [plan_rank(config, mesh, batch, pp_rank) for pp_rank in range(mesh.pp)]


def plan_rank(config: Config, mesh: MeshShape, batch: BatchPlan, pp_rank: int) -> RankMemory:
    """Return the memory of pipeline rank ``pp_rank`` at the fullest moment of a step.

    Args:
        batch: sizes of a step, with the (token, expert) pairs that a rank computes.
    """
    model = config.model
    parallel = config.parallel
    layers = stage_layers(config, mesh)
    numbers = stages_of_ranks(mesh.pp, parallel.stages_per_rank, parallel.schedule)[pp_rank]
    key = key_of(config)

    def stage_held(stage: int) -> tuple[int, list[Param]]:
        """Return (number of parameters without adapters, all stored parameters) of stage number ``stage``.

        The latter include adapters, and packed matrices (``lora.base``) as they are stored.
        """
        bare = stage_params(model, layers, stage)
        return sum(param.numel for param in bare), as_stored(with_adapters(bare, config), config)

    both = [cached((key, *layers, stage), partial(stage_held, stage)) for stage in numbers]
    held = [stored for _, stored in both]
    params = [param for stage in held for param in stage]
    sizes = Sizes(config, mesh)
    load = TokenLoad.of(config, mesh, batch)
    states = [0, *(num_states(model, stage) for stage in layers)]
    last = len(layers) - 1
    stages = [
        plan_stage(
            config, sizes, load, list(layers[stage]), numbers_held, states[stage], stage == last
        )
        for stage, numbers_held in zip(numbers, held, strict=True)
    ]
    if mesh.pp > 1 or parallel.overlap_all_to_all:
        moments = [
            *_pipeline_moments(
                config, mesh, batch, dict(zip(numbers, stages, strict=True)), pp_rank
            )
        ]
    else:
        moments = [*_loop_moments(config, mesh, batch, stages[0], params)]
    if config.train.fp8 != "off" and gathers_once(config, mesh.pp):
        codes = sum(gathered_numel(param, mesh) for param in params if param.spec.fp8)
        moments = [
            replace(state, gathered_weights=state.gathered_weights + codes) for state in moments
        ]
    moments.append(_update_moment(config, sizes, params, sum(stage.sharded for stage in stages)))
    most = max(moments, key=attrgetter("peak"))
    # The last dim of a packed parameter is the bytes of a block, ``packed`` its elements.
    widened = sizes.compute * max(
        (gathered_numel(p, mesh) // p.shape[-1] * p.packed for p in params if p.packed), default=0
    )
    averaged = trained(params) if config.optim.ema_decay else []
    return replace(
        most,
        pp_rank=pp_rank,
        layers=[layer for stage in numbers for layer in layers[stage]],
        params=sum(numel for numel, _ in both),
        weights=sizes.weights(params),
        moments=sizes.moments(params),
        averages=sizes.wide * sum(local_numel(param, mesh) for param in averaged),
        inputs=(
            (INPUT_BYTES + MTP_BYTES * model.num_mtp_layers) // mesh.cp + BATCH_BYTES * load.on_cpu
        )
        * batch.rows_per_rank
        * config.train.seq_len,
        widened=0 if most.moment == "update" else widened,
    )


def _loop_moments(
    config: Config, mesh: MeshShape, batch: BatchPlan, stage: StagePlan, params: list[Param]
) -> Iterator[RankMemory]:
    """Yield the memory at each moment of a step without a pipeline, before the optimizer's update.

    Sharded weights, optimizer state and inputs, which never change, are left at 0.

    Args:
        batch: sizes of the step.
        stage: bytes of the whole model.
        params: all stored parameters of the model.
    """
    parallel = config.parallel
    sizes = Sizes(config, mesh)
    deferred = parallel.grad_sync == "step" and batch.num_micro_batches > 1
    if stays_unsharded(config, mesh):
        deferred = False  # each new gradient is added to the existing one
        # Adapters are cast to the compute dtype for each matmul; the backward pass keeps the
        # copies.
        copies = sizes.compute < sizes.wide and config.lora.rank
        rounded = sizes.compute * sum(
            gathered_numel(param, mesh) for param in trained(params) if copies
        )
        stage = replace(
            stage, rest_weights=rounded, rest_gradients=0,
            layers=[replace(layer, weights=0, gradients=0, experts=0) for layer in stage.layers],
        )  # fmt: skip
    # Each kind says whether a micro-batch finds unsharded gradients, finds reduced gradients, and
    # is reduced itself.
    kinds = {(False, False, not deferred)}
    if batch.num_micro_batches > 1:
        kinds.add((deferred, not deferred, True))
    if deferred and batch.num_micro_batches > 2:
        kinds.add((True, False, False))
    # An FSDP unit is a layer, or all parameters outside layers; a few are gathered at once.
    units: dict[int | None, int] = {}
    for param in params:
        unit = gathered_numel(param, mesh) * param.bytes_each(sizes.compute)
        units[param.layer] = units.get(param.layer, 0) + unit
    few = UNITS_RESIDENT * max(units.values(), default=0)
    for adds, added, reduces in kinds:
        loss = replace(stage.loss(adds), gathered_weights=stage.weights)
        for moment in (loss, *stage.backward(adds, reduces, mesh.ep_shard)):
            if parallel.reshard == "micro_batch":
                moment = replace(moment, gathered_weights=min(stage.weights, few))
            yield replace(
                moment,
                micro_batches_in_flight=[1],
                gradients=stage.sharded if added else moment.gradients,
            )


def _pipeline_moments(
    config: Config,
    mesh: MeshShape,
    batch: BatchPlan,
    held_stages: dict[int, StagePlan],
    pp_rank: int,
) -> Iterator[RankMemory]:
    """Yield the memory at each moment of a step of one pipeline rank, before the optimizer's update.

    Sharded weights, optimizer state and inputs, which never change, are left at 0. Whatever the
    FSDP policy, the unsharded weights of all stages count at every moment, and the unsharded
    gradients of a stage from its first backward pass to the end. Where a backward pass is split in
    two (gradients of inputs, then of weights), activations are kept until the second half.

    Args:
        batch: sizes of the step.
        held_stages: bytes of the rank's stages, by number of the stage.
    """
    parallel = config.parallel
    schedule = parallel.schedule
    stages = list(held_stages.values())
    local = {stage: i for i, stage in enumerate(held_stages)}
    num_micro_batches = batch.num_micro_batches
    if schedule not in ALL_FORWARDS_FIRST and num_micro_batches % mesh.pp == 0:
        # After the warm-up, every round repeats the previous one.
        num_micro_batches = min(num_micro_batches, 4 * mesh.pp)
    gathered = sum(stage.weights for stage in stages)
    held, done = [0] * len(stages), [False] * len(stages)
    seen = set()

    @cache
    def most(i: int, adds: bool, merged: int | None) -> RankMemory:
        beside = None if merged is None else stages[merged]
        moments = stages[i].backward(adds, False, mesh.ep_shard, beside)
        return max(moments, key=attrgetter("peak"))

    overlap = parallel.overlap_all_to_all
    order = pipeline_order(schedule, mesh.pp, len(stages), num_micro_batches, overlap)[pp_rank]
    # An entry has one or two actions, which run at the same time: a backward pass beside a forward one.
    actions = (
        (kind, local[stage], local[entry[0][1]] if entry[1:] and kind == "B" else None)
        for entry in order
        for kind, stage, _ in reversed(entry)
    )
    for kind, i, merged in actions:
        is_forward = kind == "F"
        stage = stages[i]
        held[i] += is_forward
        in_flight = list(held)
        like = kind, i, merged, *held, *done
        if like in seen:  # most rounds repeat the previous one
            held[i] -= kind in "BW"
            continue
        seen.add(like)
        others = (
            sum(count * each.kept for count, each in zip(held, stages, strict=True)) - stage.kept
        )
        gradients = sum(each.gradients for each, some in zip(stages, done, strict=True) if some)
        if is_forward:
            now = stage.loss(False, others)
            there = float(gradients)
            num_bytes = now.activations
        else:
            now = most(i, done[i], merged)
            there = gradients - stage.gradients * done[i] + now.unsharded_gradients
            num_bytes = others + now.activations
            held[i] -= kind in "BW"
            done[i] |= kind in "BW"
        # One buffer holds the received gradient; the others hold gradients still being sent to
        # earlier stages.
        kept_sends = SENDS_KEPT if len(stages) > 1 else 1
        sent = kept_sends * sum(each.received for each in stages)
        buffers = stage.border * (not stage.last) + sent
        yield replace(
            now, micro_batches_in_flight=in_flight, unsharded_gradients=there, activations=num_bytes,
            gathered_weights=gathered, receive_buffers=buffers,
        )  # fmt: skip
    whole = sum(stage.gradients for stage in stages)
    flat = max(
        (layer.experts or layer.gradients for stage in stages for layer in stage.layers), default=0
    )
    yield RankMemory(
        "reduction", micro_batches_in_flight=held, unsharded_gradients=whole, gathered_weights=gathered,
        temporaries=flat * (1 + (mesh.ep_shard == 1)),
    )  # fmt: skip


def _update_moment(config: Config, sizes: Sizes, params: list[Param], gradients: int) -> RankMemory:
    rounds = config.optim.master_weights == "stochastic" or config.optim.moments == "bfloat16"
    scratch = _muon_scratch(config, sizes, trained(params))
    if config.cluster.on_cpu and rounds:
        largest = max((local_numel(param, sizes.mesh) for param in trained(params)), default=0)
        scratch += UPDATE_BYTES * min(largest, UPDATE_BLOCK)
    return RankMemory("update", gradients=gradients, temporaries=scratch)


def _muon_scratch(config: Config, sizes: Sizes, params: list[Param]) -> int:
    """Return the bytes that Muon allocates at its peak: when it exchanges matrices, or iterates.

    An exchange holds four copies of the matrices that are exchanged at once. An iteration holds
    updates and whole matrices, and for those of one shape two more copies and two Gram matrices.
    With another optimizer the result is 0.

    Args:
        sizes: bytes of parameters on the rank.
        params: trained parameters of the rank's stages.
    """
    if config.optim.algorithm != "muon":
        return 0
    held: Counter[tuple[int, ...]] = Counter()
    largest = MUON_ROUND  # of a round, or one parameter if it is larger
    for param in params:
        if param.spec.orthogonalized:
            number = local_numel(param, sizes.mesh)
            held[param.shape[-2:]] += number
            largest = max(largest, number)
    total = held.total()
    share = min(1.0, largest / max(total, 1))
    of_one_shape = max((n * (1 + min(s) / max(s)) for s, n in held.items()), default=0.0)
    alone = sizes.mesh.world_size == sizes.mesh.pp
    copies = 2 * (total + of_one_shape)
    copies = copies if alone else max(copies, 4 * total)
    return int(share * copies) * (2 if config.optim.muon_dtype == "bfloat16" else sizes.wide)
