"""Expert parallelism: the experts' weights sharded over the ep axis, and a dispatcher that spans it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from automoe.config.plugins import registered
from automoe.config.schema import MoEConfig
from automoe.errors import BackendError
from automoe.interop.deepep import open_deepep
from automoe.model.decoder import Decoder
from automoe.moe.dispatch import (
    AllGatherDispatcher,
    AllToAllDispatcher,
    DeepEPDispatcher,
    Dispatcher,
    ExpertTensorDispatcher,
)
from automoe.moe.experts import GroupedExperts
from automoe.moe.layer import local_dispatcher
from automoe.parallel.collectives import ProcessGroupDispatch
from automoe.parallel.mesh import Meshes


class ExpertParallel(ParallelStyle):
    """Makes the weights of a ``GroupedExperts`` DTensors: experts over ep, its ``WIDTH_DIMS`` over etp.

    The mesh has one of the two axes or both.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, GroupedExperts)
        axes = device_mesh.mesh_dim_names or ()
        for name, parameter in list(module.named_parameters(recurse=False)):
            dims = {"ep": 0, "etp": module.WIDTH_DIMS[name]}
            placements = [Shard(dims[axis]) for axis in axes]
            sharded = distribute_tensor(parameter.data, device_mesh, placements, src_data_rank=None)
            module.register_parameter(name, nn.Parameter(sharded))
        module.local_shard = DTensor.to_local
        if "etp" in axes:
            etp = device_mesh["etp"]
            module.first_bias_column = etp.get_local_rank() * module.hidden_size // etp.size()
        return module


def _deepep(ep: ProcessGroupDispatch) -> Callable[[int], Dispatcher]:
    exchange = open_deepep(ep.group)
    return lambda num_experts: DeepEPDispatcher(num_experts, ep.num_ranks, exchange)


# For the ep group, what makes a dispatcher from the number of experts.
DISPATCHERS: dict[str, Callable[[ProcessGroupDispatch], Callable[[int], Dispatcher]]] = {
    "alltoall": lambda ep: partial(AllToAllDispatcher, ep=ep),
    "allgather": lambda ep: partial(AllGatherDispatcher, ep=ep),
    "deepep": _deepep,
}


def build_dispatcher(meshes: Meshes, num_experts: int, moe: MoEConfig) -> Dispatcher:
    """What brings tokens to experts in every MoE layer: over ep as the config names it, and over etp around that.

    Raises:
        BackendError: no such dispatcher, or none on this machine; names those that there are.
    """
    dispatchers = DISPATCHERS | registered("moe.dispatcher")
    if moe.dispatcher not in dispatchers:
        raise BackendError(f"moe.dispatcher={moe.dispatcher}: no such dispatcher. There are: {', '.join(dispatchers)}")
    ep, etp = meshes.group("ep"), meshes.group("etp")
    dispatcher = (
        local_dispatcher(num_experts, moe)
        if ep is None
        else dispatchers[moe.dispatcher](ProcessGroupDispatch(ep))(num_experts)
    )
    return dispatcher if etp is None else ExpertTensorDispatcher(dispatcher, ProcessGroupDispatch(etp))


def apply_expert_parallel(model: Decoder, meshes: Meshes) -> None:
    """Shard every MoE layer's experts over ep and etp."""
    if axes := tuple(axis for axis in ("ep", "etp") if meshes.axis(axis) is not None):
        for _, layer in model.moe_layers():
            parallelize_module(layer.experts, meshes.moe[axes], ExpertParallel())
