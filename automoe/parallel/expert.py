"""Expert parallelism: the experts' weights sharded over the ep axis, and a dispatcher that spans it."""

from __future__ import annotations

import socket
import zlib
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from automoe.config.plugins import registered
from automoe.config.schema import Config
from automoe.errors import BackendError
from automoe.interop.deepep import open_deepep
from automoe.model.decoder import Decoder
from automoe.moe.dispatch.allgather import AllGatherDispatcher
from automoe.moe.dispatch.alltoall import AllToAllDispatcher
from automoe.moe.dispatch.base import Dispatcher
from automoe.moe.dispatch.deepep import DeepEPDispatcher
from automoe.moe.dispatch.etp import ExpertTensorDispatcher
from automoe.moe.dispatch.hierarchical import HierarchicalDispatcher
from automoe.moe.layer import local_dispatcher
from automoe.parallel.collectives import ProcessGroupDispatch
from automoe.parallel.mesh import Meshes
from automoe.parallel.tensor import shard_parameter


def _deepep(ep: ProcessGroupDispatch) -> Callable[[int], Dispatcher]:
    exchange = open_deepep(ep.group)
    return lambda num_experts: DeepEPDispatcher(num_experts, ep.num_ranks, exchange)


def _hierarchical(meshes: Meshes, gpus_per_node: int) -> Callable[[int], Dispatcher]:
    levels = [ProcessGroupDispatch(group) for group in meshes.ep_levels(gpus_per_node)]
    if meshes.shape.ep_per_node(gpus_per_node) > 1:  # the last level is a node's own
        here = zlib.crc32(socket.gethostname().encode())
        seen = torch.tensor([here, -here], device=meshes.moe.device_type)
        dist.all_reduce(seen, dist.ReduceOp.MAX, group=levels[-1].group)
        if seen.tolist() != [here, -here]:
            raise BackendError(
                f"moe.dispatcher=hierarchical takes {gpus_per_node} consecutive ranks for a node "
                f"(cluster.gpus_per_node), and those around rank {dist.get_rank()}, on {socket.gethostname()}, are on "
                "several machines. Number the ranks machine by machine and set cluster.gpus_per_node to how many each "
                "has, or set moe.dispatcher=alltoall"
            )
    return partial(HierarchicalDispatcher, levels=levels)


# For the ep group, what makes a dispatcher from the number of experts; a hierarchical one is made from the meshes.
DISPATCHERS: dict[str, Callable[..., Callable[[int], Dispatcher]]] = {
    "alltoall": lambda ep: partial(AllToAllDispatcher, ep=ep),
    "allgather": lambda ep: partial(AllGatherDispatcher, ep=ep),
    "hierarchical": _hierarchical,
    "deepep": _deepep,
}


def build_dispatcher(meshes: Meshes, config: Config) -> Dispatcher:
    """What brings tokens to experts in every MoE layer: over ep as the config names it, and over etp around that.

    Raises:
        BackendError: no such dispatcher, or none on this machine; names those that there are.
    """
    moe, num_experts = config.moe, config.model.num_experts
    dispatchers = DISPATCHERS | registered("moe.dispatcher")
    if moe.dispatcher not in dispatchers:
        raise BackendError(f"moe.dispatcher={moe.dispatcher}: no such dispatcher. There are: {', '.join(dispatchers)}")
    ep, etp = meshes.group("ep"), meshes.group("etp")
    if ep is None:
        dispatcher: Dispatcher = local_dispatcher(num_experts, moe)
    elif (make := dispatchers[moe.dispatcher]) is _hierarchical:
        dispatcher = make(meshes, config.cluster.gpus_per_node)(num_experts)
    else:
        dispatcher = make(ProcessGroupDispatch(ep))(num_experts)
    return dispatcher if etp is None else ExpertTensorDispatcher(dispatcher, ProcessGroupDispatch(etp))


def apply_expert_parallel(model: Decoder, meshes: Meshes) -> None:
    """Shard every MoE layer's experts over ep, and their ``WIDTH_DIMS`` over etp."""
    axes = tuple(axis for axis in ("ep", "etp") if meshes.axis(axis) is not None)
    if not axes:
        return
    for _, layer in model.moe_layers():
        experts = layer.experts
        for name, _ in list(experts.named_parameters()):
            module, _, last = name.rpartition(".")
            dims = {"ep": 0, "etp": experts.WIDTH_DIMS[name]}
            cut = tuple(axis for axis in axes if dims[axis] is not None)
            if cut:
                shard_parameter(experts.get_submodule(module), last, meshes.moe[cut], *(dims[axis] for axis in cut))
        if "etp" in axes:
            etp = meshes.moe["etp"]
            experts.first_bias_column = etp.get_local_rank() * experts.hidden_size // etp.size()
