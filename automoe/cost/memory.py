"""Bytes on every pipeline rank: weights, gradients, moments, what is kept gathered, activations.

Sharding is FSDP2's: the first dim of a parameter cut into equal chunks over dp_shard x cp, the last
chunks shorter or empty, after tp has taken its slice; experts first over ep (experts) and etp (their
width), then over ep_shard (rows). The figures are those of the first shard, which is never smaller than another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil

from automoe.config.mesh_shape import MeshShape, split_layers, stage_of_rank, stays_unsharded
from automoe.config.recompute import recomputed_modules
from automoe.config.schema import Config
from automoe.cost.activations import (
    BatchPlan,
    TokenLoad,
    head_workspace_bytes,
    layer_activation_bytes,
    recompute_workspace_bytes,
)
from automoe.cost.adapters import adapter_activation_bytes, as_stored, with_adapters
from automoe.cost.params import Param, stage_params

# Bytes of one number: (stored weights and moments, gathered weights and activations, summed gradients). With
# optim.master_weights=stochastic weights are stored as gathered, and so are moments with optim.moments=bfloat16.
DTYPE_BYTES = {"float64": (8, 8, 8), "float32": (4, 4, 4), "bfloat16": (4, 2, 4)}
UNITS_RESIDENT = 2  # FSDP units gathered at once when freed after use: the one at work and the next


@dataclass(frozen=True)
class RankMemory:
    """Bytes on the first rank of a pipeline stage group.

    Two moments of a step need the most: the backward pass, and the optimizer step after it. With
    ``grad_sync=step`` the sharded gradients only come into being as the unsharded ones are freed,
    so the two kinds of gradient are never both whole.
    """

    pp_rank: int
    layers: list[int]
    params: int  # parameters of the rank's stages, before sharding, without adapters
    weights: int  # sharded, as the optimizer updates them
    moments: int  # AdamW's two, sharded
    averages: int  # of weights (optim.ema_decay), sharded, in float32
    gradients: int  # sharded, after reduction
    gathered_weights: int  # whole weights in compute precision
    unsharded_gradients: int  # whole gradients waiting for their reduction
    receive_buffers: int  # of the pipeline: torch keeps one for every micro-batch of the step, and for its gradient
    activations: float  # at the peak of the schedule
    head: float  # cross-entropy workspace, last stage only
    recompute: float  # what one recomputed region holds again during its backward pass
    widened: int  # the largest packed matrix (lora.base) as it is multiplied
    micro_batches_in_flight: list[int]  # of each of the rank's stages, at that peak
    deferred_gradients: bool

    @property
    def backward_peak(self) -> float:
        gradients = max(self.unsharded_gradients, self.gradients)
        if not self.deferred_gradients:
            gradients = self.unsharded_gradients + self.gradients
        state = self.weights + self.moments + self.averages + self.gathered_weights + gradients + self.receive_buffers
        # The head's workspace is gone before the backward pass reaches a layer.
        return state + self.activations + max(self.head, self.recompute + self.widened)

    @property
    def optimizer_peak(self) -> float:
        return float(self.weights + self.moments + self.averages + self.gradients + self.receive_buffers)

    @property
    def peak(self) -> float:
        return max(self.backward_peak, self.optimizer_peak)


def local_numel(param: Param, mesh: MeshShape, fsdp_rank: int = 0) -> int:
    """Numbers of ``param`` that the rank at ``fsdp_rank`` of (dp_shard, cp), or of ep_shard, stores."""
    if param.expert:
        return gathered_numel(param, mesh) // mesh.ep_shard
    rows = param.shape[0] // (mesh.tp if param.tp_dim(mesh.tp) == 0 else 1)
    chunk = ceil(rows / mesh.fsdp)
    mine = max(0, min(chunk, rows - fsdp_rank * chunk))
    return mine * (gathered_numel(param, mesh) // rows)


def gathered_numel(param: Param, mesh: MeshShape) -> int:
    """Numbers of ``param`` on a rank while FSDP has it gathered."""
    if param.expert:
        return param.numel // (mesh.ep * (1 if param.whole_over_etp else mesh.etp))
    return param.numel // (1 if param.tp_dim(mesh.tp) is None else mesh.tp)


def widened_numel(param: Param, mesh: MeshShape) -> int:
    """Numbers of a packed ``param`` where a rank multiplies by it; blocks count as whole."""
    return gathered_numel(param, mesh) // param.shape[-1] * param.packed


def plan_memory(config: Config, mesh: MeshShape, batch: BatchPlan) -> list[RankMemory]:
    """Bytes of every pp rank, in order."""
    return [_plan_rank(config, mesh, batch, pp_rank) for pp_rank in range(mesh.pp)]


def _plan_rank(config: Config, mesh: MeshShape, batch: BatchPlan, pp_rank: int) -> RankMemory:
    model, parallel = config.model, config.parallel
    layers = split_layers(model.num_layers, mesh.pp * parallel.stages_per_rank, parallel.layers_per_stage)
    stages = stage_of_rank(mesh.pp, parallel.stages_per_rank)[pp_rank]
    wide, compute, reduced = DTYPE_BYTES[config.train.dtype]
    unsharded = stays_unsharded(config, mesh)
    held = [as_stored(with_adapters(stage_params(model, layers, stage), config), config) for stage in stages]
    params = [param for stage in held for param in stage]
    trained = [param for param in params if param.trained]

    def total(numel: Callable[[Param, MeshShape], int], params: list[Param], size: int) -> int:
        """Bytes at ``size`` a number; those of the router, which multiplies in at least float32, are always wide."""
        return sum(numel(param, mesh) * param.bytes_each(wide if param.part == "router" else size) for param in params)

    gradients = total(local_numel, trained, compute if config.optim.master_weights == "stochastic" else wide)
    weights = gradients + total(local_numel, [param for param in params if not param.trained], compute)  # as multiplied
    moments = 2 * total(local_numel, trained, compute if config.optim.moments == "bfloat16" else wide)
    waiting = sum(gathered_numel(param, mesh) for param in trained)
    # A pipeline stage keeps weights from its first backward, and gradients until its last, whatever
    # the policy; one micro-batch without a pipeline reduces each gradient as soon as it is there.
    keeps_weights = mesh.pp > 1 or parallel.reshard == "step"
    deferred = mesh.pp > 1 or (parallel.grad_sync == "step" and batch.num_micro_batches > 1)
    few, whole = _resident_units(params, mesh, compute), total(gathered_numel, params, compute)
    gathered = whole if keeps_weights else min(whole, few)
    if unsharded:  # adapters are rounded where they are multiplied, and kept so for the backward pass
        gathered = compute * waiting if compute < wide and config.lora.rank else 0
    if not deferred:
        waiting = min(waiting, _resident_units(trained, mesh, 1))
    load = TokenLoad.of(config, mesh, batch)
    border = compute * load.tokens * model.hidden_size if mesh.pp > 1 else 0  # what one stage gives the next
    received = sum((stage > 0) + (stage < len(layers) - 1) for stage in stages)  # inputs, and gradients of outputs
    again = {layer: recomputed_modules(parallel, layer) for stage in stages for layer in layers[stage]}
    layer_bytes = {
        layer: sum(layer_activation_bytes(model, layer, load, names).values())
        + adapter_activation_bytes(config, layer, load.tokens, load.expert_rows, load.number_bytes, names)
        for layer, names in again.items()
    }
    # A stage keeps its output, and the first its input; that of the others is a receive buffer.
    stage_bytes = [(1 + (stage == 0)) * border + sum(layer_bytes[layer] for layer in layers[stage]) for stage in stages]
    activations, in_flight = peak_in_flight(stage_bytes, parallel.schedule, mesh.pp, batch.num_micro_batches, pp_rank)
    head_trained = any(param.trained for param in params if param.part in ("embedding", "head"))
    return RankMemory(
        pp_rank=pp_rank,
        layers=list(again),
        params=sum(param.numel for stage in stages for param in stage_params(model, layers, stage)),
        weights=weights,
        moments=moments,
        averages=total(local_numel, trained, wide) if config.optim.ema_decay else 0,
        gradients=gradients,
        gathered_weights=gathered,
        unsharded_gradients=0 if unsharded else reduced * waiting,
        receive_buffers=received * batch.num_micro_batches * border,
        activations=activations,
        head=head_workspace_bytes(model, load.tokens, compute, mesh.tp, head_trained) * (len(layers) - 1 in stages),
        recompute=max(recompute_workspace_bytes(model, layer, load, names) for layer, names in again.items()),
        widened=compute * max(param.packed and widened_numel(param, mesh) for param in params),
        micro_batches_in_flight=in_flight,
        deferred_gradients=deferred,
    )


def _resident_units(params: list[Param], mesh: MeshShape, size: int) -> int:
    """Bytes, at ``size`` a number, of the FSDP units gathered at once: each as large as a layer, or what is outside."""
    units: dict[int | None, int] = {}
    for param in params:
        units[param.layer] = units.get(param.layer, 0) + gathered_numel(param, mesh) * param.bytes_each(size)
    return UNITS_RESIDENT * max(units.values(), default=0)


def rank_actions(
    schedule: str, pp: int, stages_per_rank: int, num_micro_batches: int, pp_rank: int
) -> Iterator[tuple[bool, int]]:
    """(is_forward, local stage) of one pp rank's whole step, in order.

    The orders are those of torch.distributed.pipelining: GPipe runs all forwards first; 1F1B starts
    ``pp - pp_rank`` forwards, then alternates; Interleaved1F1B takes rounds of up to ``pp``
    micro-batches through its stages in turn (arXiv 2104.04473, section 2.2).
    """
    total = num_micro_batches * stages_per_rank
    round_size = num_micro_batches // max(1, num_micro_batches // pp)
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


def peak_in_flight(
    stage_bytes: Sequence[float], schedule: str, pp: int, num_micro_batches: int, pp_rank: int
) -> tuple[float, list[int]]:
    """Most activation bytes that one pp rank holds, and how many micro-batches of each local stage then.

    Args:
        stage_bytes: activation bytes of one micro-batch in each of the rank's stages, in order.
    """
    if schedule != "GPipe" and num_micro_batches % pp == 0:
        num_micro_batches = min(num_micro_batches, 4 * pp)  # after the warm-up each round is like the one before
    held = [0] * len(stage_bytes)
    peak, peak_held = 0.0, list(held)
    for is_forward, stage in rank_actions(schedule, pp, len(stage_bytes), num_micro_batches, pp_rank):
        held[stage] += 1 if is_forward else -1
        now = sum(count * size for count, size in zip(held, stage_bytes, strict=True))
        if now > peak:
            peak, peak_held = now, list(held)
    return peak, peak_held
