"""Data parallelism: FSDP2 and HSDP, experts on their own axis, sums instead of averages.

The loss is already divided by the global batch's token count, so gradients are summed over ranks:
FSDP's gradient divide factor is one, and nothing depends on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from automoe.comm.collectives import GlooReduceScatter, over_gloo
from automoe.config.schema import ParallelConfig
from automoe.interop.torch_fsdp import forget_pass
from automoe.model.causal_lm import CausalLM
from automoe.model.mtp import MTPBlock
from automoe.model.params import find_spec
from automoe.parallel.mesh import Meshes

# by ``train.dtype``: the optimizer updates parameters in the first, products are in the second
MASTER_DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.float32}
COMPUTE_DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


def _row_shards(experts: nn.Module, num_ranks: int) -> Callable[[nn.Parameter], Shard]:
    """Return FSDP's ``shard_placement_fn`` for ``experts``: it returns the dim on which a parameter is sharded.

    Parameters are cut by rows: I of gate_up_proj [E, 2, I, H] and H of down_proj [E, H, I]. A row
    shard of one expert's matrix is contiguous in a HuggingFace checkpoint, and dim 0 already
    belongs to the ep axis. Experts of transformers are cut along the first dim after dim 0 that
    ``num_ranks``, the number of shards, divides.
    """
    rows = getattr(experts, "ROW_DIMS", {})
    shards = {}
    for name, parameter in experts.named_parameters():
        even = (dim for dim in range(1, parameter.dim()) if parameter.shape[dim] % num_ranks == 0)
        shards[parameter] = Shard(rows[name] if rows else next(even))
    return lambda parameter: shards[parameter]


def apply_data_parallel(
    model: CausalLM, meshes: Meshes, parallel: ParallelConfig, dtype: str
) -> None:
    """Apply ``fully_shard`` to the experts of each layer, to each layer, and then to the model.

    If parameters are multiplied in a narrower dtype than they are stored in, modules that multiply
    in the stored dtype (``ParamSpec.wide``: routers, hyper-connections) are FSDP units of their
    own. The model is a unit too, so a pipeline stage is an ``FSDPModule``, for which torch's
    schedules can defer gradient reduction and resharding over micro-batches.

    Args:
        dtype: ``train.dtype``, in which unsharded parameters are multiplied.
    """
    compute = COMPUTE_DTYPES[dtype]
    reduce = MASTER_DTYPES[dtype]
    # Only the inputs of a layer are cast to its dtype. Those of experts (with routing weights) and
    # those of the whole model (with inputs of the loss) keep their precision.
    dense = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce)
    as_is = replace(dense, cast_forward_inputs=False)
    wide = replace(as_is, param_dtype=reduce)
    shard = partial(fully_shard, mesh=meshes.fsdp, reshard_after_forward=parallel.reshard != "step")
    if compute != reduce:
        specs = ((name, find_spec(name)) for name, _ in model.named_parameters())
        paths = (name.rpartition(".")[0] for name, spec in specs if spec and spec.wide)
        for path in dict.fromkeys(paths):
            shard(model.get_submodule(path), mp_policy=wide)
    for unit in model.units():
        if unit.experts is not None:
            shard(
                unit.experts,
                mesh=meshes.expert_fsdp,
                mp_policy=as_is,
                shard_placement_fn=_row_shards(unit.experts, meshes.shape.ep_shard),
            )
        shard(unit.layer, mp_policy=dense)
    shard(model, mp_policy=as_is, reshard_after_forward=False)
    for module in fsdp_modules(model):
        # Any other factor would use a pre-multiplied sum, which gloo lacks.
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)
        if over_gloo(meshes.fsdp.get_all_groups()[-1]):
            module.set_custom_reduce_scatter(GlooReduceScatter())  # type: ignore[arg-type]  # its class is private
    _gather_ahead(model)


def _gather_ahead(model: CausalLM) -> None:
    """Make each FSDP unit start to all-gather the next unit's weights before its own forward pass.

    By default FSDP starts the all-gather when the host reaches the unit, and the host waits in
    every MoE layer for the dispatch's sizes. Backward passes prefetch by themselves, in the
    opposite order.
    """
    units = [module for unit in model.units() for module in fsdp_modules(unit.layer)]
    for unit, following in zip(units, units[1:], strict=False):
        if isinstance(following, MTPBlock):
            continue  # a forward pass that only generates does not run these modules
        unit.set_modules_to_forward_prefetch([following])


def fsdp_modules(model: nn.Module) -> Iterable[FSDPModule]:
    """Return every FSDP unit of the model, the root first."""
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def reshard(model_parts: Iterable[nn.Module]) -> None:
    """Free what a pass left in every FSDP unit: unsharded weights, and unreduced gradients.

    A forward pass without a backward pass leaves the weights allocated: a checkpoint would save
    them, and the optimizer has no state for them. A training pass that failed leaves both, and the
    next one would add to the gradients.
    """
    for part in model_parts:
        forget_pass(part)


def defer_reduction(model: nn.Module, parallel: ParallelConfig, last: bool) -> None:
    """Set whether FSDP reduces gradients and reshards weights after the next micro-batch.

    This is for steps without a pipeline. ``parallel.grad_sync`` and ``parallel.reshard`` say
    whether each happens in every micro-batch, or in the step's last one. If only in the last one,
    unsharded weights and gradients stay on the rank for the whole step, which the memory planner
    counts: the price of a single all-gather and reduction per step. A model without FSDP is left
    alone.

    Args:
        last: the next micro-batch is the step's last one.
    """
    if not isinstance(model, FSDPModule):
        return
    model.set_requires_gradient_sync(last or parallel.grad_sync == "micro_batch")
    model.set_reshard_after_backward(last or parallel.reshard == "micro_batch")
    model.set_is_last_backward(last)
