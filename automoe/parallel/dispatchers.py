"""The dispatcher that brings tokens to the ranks of their experts: chosen by name, made for a mesh."""

from __future__ import annotations

import socket
import zlib
from collections.abc import Callable
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from automoe.comm.collectives import DispatchGroup
from automoe.config.plugins import look_up, registered
from automoe.config.schema import ClusterConfig, Config, MoEConfig
from automoe.errors import BackendError, ConfigError
from automoe.moe.dispatch.allgather import AllGatherDispatcher
from automoe.moe.dispatch.alltoall import AllToAllDispatcher
from automoe.moe.dispatch.base import Dispatcher, LocalDispatcher
from automoe.moe.dispatch.etp import ExpertTensorDispatcher
from automoe.moe.dispatch.hierarchical import HierarchicalDispatcher
from automoe.parallel.expert import expert_axes, expert_mesh
from automoe.parallel.mesh import Meshes
from automoe.parallel.overlap import OverlappedDispatch


def node_levels(
    ep: dist.ProcessGroup, gpus_per_node: int, timeout: timedelta | None
) -> list[dist.ProcessGroup]:
    """Return two groups of ep ranks: those of equal position on every node, then those of this node.

    If either of the two would have one rank, the list holds the group ``ep`` alone. Collective over
    the world, since NCCL makes groups by splitting the world's.

    Args:
        gpus_per_node: consecutive ranks that count as one node.
        timeout: of the new groups' collectives; None is torch's default.

    Raises:
        ConfigError: the nodes hold unequal numbers of the group's ranks, or these are not in the
            order of nodes.
        BackendError: ranks that count as one node are on several machines.
    """
    ranks = dist.get_process_group_ranks(ep)
    nodes = [rank // gpus_per_node for rank in ranks]
    per_node = nodes.count(nodes[0])
    if nodes != sorted(nodes) or any(nodes.count(node) != per_node for node in nodes):
        raise ConfigError(
            "gpus_per_node",
            gpus_per_node,
            f"the hierarchical dispatcher needs equal numbers of the ep group's ranks on each node, and {ranks} are on "
            f"the nodes {nodes}",
            "Choose a number that divides the ranks evenly, or the dispatcher alltoall",
        )
    levels = [ep]
    if 1 < per_node < len(ranks):
        place = ranks.index(dist.get_rank())
        first = place - place % per_node
        levels = [
            dist.new_group(
                group, timeout=timeout, use_local_synchronization=True, group_desc=description
            )
            for group, description in (
                (ranks[place % per_node :: per_node], "mesh_ep_nodes"),
                (ranks[first : first + per_node], "mesh_ep_node"),
            )
        ]
    if per_node > 1:
        node = levels[-1]
        here = zlib.crc32(socket.gethostname().encode())
        device = "cuda" if "nccl" in dist.get_backend_config(node) else "cpu"
        seen = torch.tensor([here, -here], device=device)
        dist.all_reduce(seen, dist.ReduceOp.MAX, group=node)
        if seen.tolist() != [here, -here]:
            raise BackendError(
                f"moe.dispatcher=hierarchical takes {gpus_per_node} consecutive ranks as a node "
                f"(cluster.gpus_per_node), and those around rank {dist.get_rank()}, on {socket.gethostname()}, are on "
                "several machines. Number the ranks machine by machine and set cluster.gpus_per_node to how many each "
                "has, or set moe.dispatcher=alltoall"
            )
    return levels


# Constructors of dispatchers from the number of experts and the ep group; the hierarchical one takes
# the groups of its levels.
DISPATCHERS: dict[str, Callable[..., Dispatcher]] = {
    "alltoall": AllToAllDispatcher,
    "allgather": AllGatherDispatcher,
    "hierarchical": HierarchicalDispatcher,
    "deepep": lambda *args: look_up("moe.dispatcher", "deepep")(*args),
}


class Dispatchers:
    """Maker of one kind of dispatcher, for any mesh of ep, etp or both.

    Layers share a dispatcher, because groups and buffers are costly: it is made once for an ep
    group and a number of experts.

    Args:
        name: alltoall, allgather (equal numbers of tokens on all ranks), hierarchical, deepep, or
            the name of a plugin.
        gpus_per_node: consecutive ranks that the hierarchical dispatcher counts as one node.
        timeout: timeout of the groups that the hierarchical dispatcher makes; None is torch's
            default.
        overlap: run another micro-batch's pass while all-to-alls travel
            (``parallel.overlap_all_to_all``).
        in_8_bits: tokens are sent to their experts in 8 bits (``moe.dispatch_dtype=fp8``).

    Raises:
        BackendError: no such dispatcher, one that this machine does not have, or a plugin with
            ``in_8_bits``.
        ConfigError: gpus_per_node is below 1.
    """

    def __init__(
        self,
        name: str = "alltoall",
        gpus_per_node: int = ClusterConfig.gpus_per_node,
        timeout: timedelta | None = None,
        overlap: bool = False,
        in_8_bits: bool = False,
    ) -> None:
        dispatchers = DISPATCHERS | registered("moe.dispatcher")
        if name not in dispatchers:
            raise BackendError(
                f"moe.dispatcher={name}: no such dispatcher. Available: {', '.join(dispatchers)}"
            )
        if gpus_per_node < 1:
            raise ConfigError(
                "gpus_per_node", gpus_per_node, "a node has at least one rank", "Set 1 or more"
            )
        if in_8_bits and name not in DISPATCHERS:
            raise BackendError(
                f"moe.dispatch_dtype=fp8: the dispatcher {name} of a plugin sends tokens in its own format. "
                "Set moe.dispatch_dtype=auto"
            )
        make_group = OverlappedDispatch if overlap else DispatchGroup

        @cache
        def over_ep(group: dist.ProcessGroup, num_experts: int) -> Dispatcher:
            if name == "hierarchical":
                groups = node_levels(group, gpus_per_node, timeout)
                levels = [make_group(level, in_8_bits) for level in groups]
                return HierarchicalDispatcher(num_experts, levels)
            return dispatchers[name](num_experts, make_group(group, in_8_bits))

        self._over_ep = over_ep
        self._in_8_bits = in_8_bits

    def over(
        self, device_mesh: DeviceMesh, num_experts: int, moe: MoEConfig, zero_experts: bool = False
    ) -> Dispatcher:
        """Return the dispatcher to experts sharded over ``device_mesh``, for all MoE layers.

        Making it is collective over the world.

        Args:
            device_mesh: mesh with the axes ep, etp or both.
            num_experts: number of experts of all ranks.
            moe, zero_experts: ``moe`` section of the configuration, and whether the model has zero
                experts; read only without an axis ep: this rank then has all experts
                (``LocalDispatcher``).
        """
        meshes = expert_axes(device_mesh, ("ep", "etp"))
        dispatcher: Dispatcher = LocalDispatcher(num_experts, moe, zero_experts)
        if "ep" in meshes:
            dispatcher = self._over_ep(meshes["ep"].get_group(), num_experts)
        if "etp" in meshes:
            etp = DispatchGroup(meshes["etp"].get_group(), self._in_8_bits)
            dispatcher = ExpertTensorDispatcher(dispatcher, etp)
        return dispatcher


def configured_dispatchers(meshes: Meshes, config: Config) -> Dispatchers:
    """Return the object that makes dispatchers of kind ``moe.dispatcher``, for all pipeline stages of a rank.

    Raises:
        BackendError: the dispatcher is missing or cannot run here; or ``moe.dispatch_dtype`` is fp8,
            and the GPU's compute capability is below 8.9.
    """
    in_8_bits = config.moe.dispatch_dtype == "fp8" and config.model.num_moe_layers > 0
    on_gpu = meshes.default.device_type == "cuda"
    if in_8_bits and on_gpu and (capability := torch.cuda.get_device_capability()) < (8, 9):
        raise BackendError(
            f"moe.dispatch_dtype=fp8 needs a GPU of compute capability 8.9 or later, and this one has {capability}. "
            "Set moe.dispatch_dtype=auto"
        )
    return Dispatchers(
        config.moe.dispatcher,
        config.cluster.gpus_per_node,
        meshes.timeout,
        config.parallel.overlap_all_to_all,
        in_8_bits,
    )


def expert_dispatcher(
    dispatchers: Dispatchers, meshes: Meshes, config: Config
) -> Dispatcher | None:
    """Return this run's dispatcher, made by ``dispatchers``; None if ep and etp have one rank each.

    Collective over the world, since NCCL makes groups by splitting the world's: ranks of a pipeline
    stage without experts take part, too.
    """
    if (mesh := expert_mesh(meshes)) is None:
        return None
    model = config.model
    zeros = model.router.num_zero_experts > 0
    return dispatchers.over(mesh, model.num_experts, config.moe, zeros)
