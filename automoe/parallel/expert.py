"""Expert parallelism as a ``ParallelStyle``: sharded experts, and a dispatcher for their tokens.

Shapes: T tokens of this rank, K top-k, H hidden, E experts, R rows that this rank computes.
"""

from __future__ import annotations

import inspect
import socket
import zlib
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.func import functional_call

from automoe.comm.collectives import ProcessGroupDispatch
from automoe.comm.local_shard import local_shard
from automoe.config.plugins import registered
from automoe.config.schema import ClusterConfig, Config
from automoe.errors import BackendError, ConfigError
from automoe.interop.deepep import open_deepep
from automoe.model.causal_lm import CausalLM
from automoe.moe.dispatch.allgather import AllGatherDispatcher
from automoe.moe.dispatch.alltoall import AllToAllDispatcher
from automoe.moe.dispatch.base import Dispatcher
from automoe.moe.dispatch.deepep import DeepEPDispatcher
from automoe.moe.dispatch.etp import ExpertTensorDispatcher
from automoe.moe.dispatch.hierarchical import HierarchicalDispatcher
from automoe.moe.experts import GroupedExperts
from automoe.parallel.mesh import Meshes
from automoe.parallel.overlap import TURNS, OverlappedDispatch


def _deepep(num_experts: int, ep: ProcessGroupDispatch) -> Dispatcher:
    finish = TURNS.finish if isinstance(ep, OverlappedDispatch) else None
    return DeepEPDispatcher(num_experts, ep.num_ranks, open_deepep(ep.group, finish), ep.in_8_bits)


def _hierarchical(
    num_experts: int, ep: ProcessGroupDispatch, gpus_per_node: int, timeout: timedelta | None
) -> Dispatcher:
    groups = node_levels(ep.group, gpus_per_node, timeout)
    return HierarchicalDispatcher(num_experts, [type(ep)(group, ep.in_8_bits) for group in groups])


def node_levels(
    ep: dist.ProcessGroup, gpus_per_node: int, timeout: timedelta | None
) -> list[dist.ProcessGroup]:
    """Split the ep group in two: ranks of equal place on every node, and the ranks of this node.

    Returns only the ep group if either of the two would have one rank. Collective over the world,
    since NCCL makes groups by splitting the world's.

    Raises:
        ConfigError: the nodes hold unequal numbers of the group's ranks.
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
        _check_one_machine(levels[-1], gpus_per_node)
    return levels


def _check_one_machine(node: dist.ProcessGroup, gpus_per_node: int) -> None:
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


# Constructors of dispatchers from the number of experts and the ep group.
DISPATCHERS: dict[str, Callable[..., Dispatcher]] = {
    "alltoall": AllToAllDispatcher,
    "allgather": AllGatherDispatcher,
    "hierarchical": _hierarchical,
    "deepep": _deepep,
}


class ExpertParallel(ParallelStyle):
    """Style that shards a module's experts over a mesh and routes its calls through a dispatcher.

        parallelize_module(model, mesh, {"model.layers.*.mlp.experts": ExpertParallel()})

    The module is automoe's ``GroupedExperts``, or another module like those of transformers: all of
    its parameters have the experts as dim 0, its attribute ``num_experts`` is their number, and its
    arguments are rows [T, H], chosen experts [T, K] and their weights [T, K]. Its parameters
    become DTensors on the mesh; its own code computes this rank's experts. Gradients of experts are
    summed over the tokens of all ranks, those of other parameters are not: average or sum these as
    for data parallelism. Every rank applies the style, and makes every call, with or without
    tokens.

    The mesh has one axis, or the axes ep and etp; the latter shards the width of ``GroupedExperts``
    (``WIDTH_DIMS``). ``fully_shard`` may follow, over another axis of the same mesh.

    Args:
        dispatcher: alltoall, allgather (equal numbers of tokens on all ranks), hierarchical,
            deepep, or the name of a plugin.
        gpus_per_node: consecutive ranks that hierarchical takes for a node.
        timeout: timeout of the groups that hierarchical makes; None is torch's default.
        overlap: let the other merged pass run during all-to-alls (``parallel.overlap_all_to_all``).
        in_8_bits: rows are sent to their experts in 8 bits (``moe.dispatch_dtype=fp8``).

    Raises:
        BackendError: no such dispatcher, one that this machine does not have, or a plugin with
            ``in_8_bits``.
        ConfigError: no rank per node; when the style is applied, a module or a mesh that it cannot
            shard.
    """

    def __init__(
        self,
        dispatcher: str = "alltoall",
        gpus_per_node: int = ClusterConfig.gpus_per_node,
        timeout: timedelta | None = None,
        overlap: bool = False,
        in_8_bits: bool = False,
    ) -> None:
        dispatchers = DISPATCHERS | registered("moe.dispatcher")
        if dispatcher not in dispatchers:
            raise BackendError(
                f"moe.dispatcher={dispatcher}: no such dispatcher. Available: {', '.join(dispatchers)}"
            )
        if gpus_per_node < 1:
            raise ConfigError(
                "gpus_per_node", gpus_per_node, "a node has at least one rank", "Set 1 or more"
            )
        if in_8_bits and dispatcher not in DISPATCHERS:
            raise BackendError(
                f"moe.dispatch_dtype=fp8: the dispatcher {dispatcher} of a plugin sends tokens in its own format. "
                "Set moe.dispatch_dtype=auto"
            )
        self._make = dispatchers[dispatcher]
        hierarchical = self._make is _hierarchical
        self._options = {"gpus_per_node": gpus_per_node, "timeout": timeout} if hierarchical else {}
        group = OverlappedDispatch if overlap else ProcessGroupDispatch
        self._group = partial(group, in_8_bits=in_8_bits)
        self._in_8_bits = in_8_bits
        # Layers share a dispatcher, because groups and buffers are costly.
        self._dispatchers: dict[tuple[str, int], Dispatcher] = {}

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        grouped = isinstance(module, GroupedExperts)
        num_experts = _check_module(module)
        meshes = _axes(device_mesh, ("ep", "etp") if grouped else ("ep",))
        self._shard(module, device_mesh, meshes)
        if "ep" in meshes:
            dispatcher = self.dispatcher(meshes["ep"].get_group(), num_experts)
        else:
            dispatcher = module.dispatcher
        if "etp" in meshes:
            etp = meshes["etp"]
            group = ProcessGroupDispatch(etp.get_group(), self._in_8_bits)
            dispatcher = ExpertTensorDispatcher(dispatcher, group)
        if grouped:
            module.bind(dispatcher)
        else:
            module.forward = RoutedCall(module, dispatcher).route
            # the module's own code counts its local experts
            module.num_experts = num_experts // device_mesh.size()
        return module

    def dispatcher(self, group: dist.ProcessGroup, num_experts: int) -> Dispatcher:
        """Return the shared dispatcher of ``group`` and ``num_experts``, made at the first call."""
        key = group.group_name, num_experts
        if key not in self._dispatchers:
            self._dispatchers[key] = self._make(num_experts, self._group(group), **self._options)
        return self._dispatchers[key]

    def _shard(
        self, module: nn.Module, device_mesh: DeviceMesh, meshes: dict[str, DeviceMesh]
    ) -> None:
        shards: dict[nn.Parameter, nn.Parameter] = {}  # a parameter with two names stays shared
        for name, whole in list(module.named_parameters(remove_duplicate=False)):
            width = module.WIDTH_DIMS[name] if isinstance(module, GroupedExperts) else None
            dims = {
                axis: dim
                for axis, dim in (("ep", 0), ("etp", width))
                if axis in meshes and dim is not None
            }
            for axis, dim in dims.items():
                if name != "down_proj_bias" or axis == "ep":  # ranks may add unequal columns
                    _check_divides(axis, meshes[axis].size(), name, whole, dim)
            if not dims:
                continue
            if whole not in shards:
                mesh = device_mesh if len(dims) == device_mesh.ndim else device_mesh[tuple(dims)]
                placements = [Shard(dim) for dim in dims.values()]
                shard = distribute_tensor(
                    whole.data, mesh, placements, src_data_rank=self.src_data_rank
                )
                shards[whole] = nn.Parameter(shard, whole.requires_grad)
            parent, _, last = name.rpartition(".")
            module.get_submodule(parent).register_parameter(last, shards[whole])


def _axes(mesh: DeviceMesh, allowed: tuple[str, ...]) -> dict[str, DeviceMesh]:
    """Return the mesh of each axis by name; the only axis of a mesh is ep unless named etp."""
    names = tuple(mesh.mesh_dim_names or ())
    if mesh.ndim == 1 and names != ("etp",):
        return {"ep": mesh}
    if not names or not set(names) <= set(allowed):
        raise ConfigError(
            "mesh",
            names,
            f"ExpertParallel shards this module over the axes {' and '.join(allowed)}",
            f"Give it the part of the mesh with these axes, such as mesh[{allowed[0]!r}]",
        )
    return {name: mesh[name] for name in names}


def _check_module(module: nn.Module) -> int:
    """Return the number of experts.

    Raises:
        ConfigError: the module is no experts module, or is sharded already.
    """
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    num_experts = getattr(module, "num_experts", None)
    arguments = list(inspect.signature(module.forward).parameters)
    other = [
        f"{name} {list(shape)}"
        for name, shape in shapes.items()
        if len(shape) < 2 or shape[0] != num_experts
    ]
    remedy = (
        "Apply ExpertParallel to the module that holds the stacked weights of a layer's experts"
    )
    if any(isinstance(parameter, DTensor) for parameter in module.parameters()):
        rule = (
            "its parameters are sharded already, and ExpertParallel shards those of a module once"
        )
        remedy = "Apply it once to each module, before fully_shard; one that several layers share is one module"
    elif not shapes:
        rule = "it has no parameters to shard"
    elif not isinstance(num_experts, int):
        rule = f"it has no attribute num_experts; its parameters are {shapes}"
    elif other:
        rule = f"dim 0 of every parameter must be its {num_experts} experts (num_experts), and is not in {other}"
    elif len(arguments) < 3:
        rule = (
            f"it is called with ({', '.join(arguments)}), and ExpertParallel needs three arguments: rows [T, H], "
            "chosen experts [T, K] and their weights [T, K]"
        )
    else:
        return num_experts
    raise ConfigError("module", type(module).__name__, rule, remedy)


def _check_divides(axis: str, size: int, name: str, parameter: torch.Tensor, dim: int) -> None:
    number = parameter.shape[dim]
    if number % size:
        what = (
            f"{number} experts" if axis == "ep" else f"dim {dim} of {name} {list(parameter.shape)}"
        )
        raise ConfigError(
            axis,
            size,
            f"every rank holds an equal part of {what}: {number} % {size} = {number % size}",
            f"Choose {axis} among {', '.join(str(n) for n in range(1, number + 1) if number % n == 0)}",
        )


class RoutedCall(nn.Module):
    """Forward of an experts module that dispatches tokens to the module's code on local shards.

    The module's code knows no ranks. Its hooks, for example those of ``fully_shard``, run once,
    around the routed call.
    """

    def __init__(self, module: nn.Module, dispatcher: Dispatcher) -> None:
        super().__init__()
        self.num_experts = module.num_experts
        self.module = module  # registered, so that functional_call finds its parameters
        self.own_forward = module.forward
        self.dispatcher = dispatcher
        self.signature = inspect.signature(module.forward)

    def route(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return [T, H], the weighted sum of each token's experts on all ranks.

        Raises:
            ConfigError: the arguments are not rows, chosen experts and their weights; on the CPU,
                a choice is no expert.
        """
        given = self.signature.bind(*args, **kwargs).args
        shapes = [tuple(getattr(value, "shape", ())) for value in given]
        if (
            [len(shape) for shape in shapes] != [2, 2, 2]
            or shapes[1] != shapes[2]
            or given[1].dtype not in (torch.int32, torch.int64)
        ):
            raise ConfigError(
                "module",
                type(self.module).__name__,
                f"it was called with {shapes}, and ExpertParallel takes calls with rows [T, H], chosen experts [T, K] "
                "as int32 or int64 and their weights [T, K]",
                "Compute these three before the call. A mask over all experts names no choices",
            )
        x_TH, topk_ids_TK, weights_TK = given
        # Not checked on CUDA, where reading the bounds would be a host sync.
        if topk_ids_TK.is_cpu and topk_ids_TK.numel():
            least, most = (int(bound) for bound in topk_ids_TK.aminmax())
            if least < 0 or most >= self.num_experts:
                raise ConfigError(
                    "module",
                    type(self.module).__name__,
                    f"experts {least} to {most} were chosen, and it has experts 0 to {self.num_experts - 1}",
                    "Give each of the K choices an expert; one that should not count has weight 0",
                )
        # Dispatchers send ids and weights as words of one type; a narrow one would round ids.
        wide = torch.promote_types(weights_TK.dtype, torch.float32)

        def experts(x_TH, gather_idx_R, offsets_E, probs_R) -> torch.Tensor:
            return self._run_local(x_TH[gather_idx_R], offsets_E, probs_R.to(weights_TK.dtype))

        routed = self.dispatcher(x_TH, topk_ids_TK.to(torch.int64), weights_TK.to(wide), experts)
        # The caller may add to the result in place; FSDP's hook would be lost with a view.
        return routed.clone()

    def _run_local(
        self, rows_RH: torch.Tensor, offsets_E: torch.Tensor, probs_R: torch.Tensor
    ) -> torch.Tensor:
        parameters = dict(self.module.named_parameters())
        shards = {f"module.{name}": local_shard(one) for name, one in parameters.items()}
        if not len(rows_RH):
            # Modules may skip experts without rows, and other ranks wait for this one in the
            # backward pass. Empty slices give every input a gradient of zeros.
            nothing = sum(shard[:0].sum() for shard in shards.values())
            return rows_RH * (probs_R.unsqueeze(1) + nothing).to(rows_RH.dtype)
        expert_R = torch.searchsorted(
            offsets_E, torch.arange(len(rows_RH), device=rows_RH.device), right=True
        )
        # Adapters take their own shards: dropout counts features by their place in the whole.
        own = {name: one for name, one in shards.items() if ".lora." not in name}
        return functional_call(self, own, (rows_RH, expert_R.unsqueeze(1), probs_R.unsqueeze(1)))

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return self.own_forward(*args)


def expert_parallel_style(meshes: Meshes, config: Config) -> ExpertParallel:
    """Return the configured style, one object for all of a rank's parts. World collective.

    Raises:
        BackendError: as ``ExpertParallel``, or a GPU without 8-bit numbers.
    """
    in_8_bits = config.moe.dispatch_dtype == "fp8" and config.model.num_moe_layers > 0
    if in_8_bits and meshes.default.device_type == "cuda":
        if (found := torch.cuda.get_device_capability()) < (8, 9):
            raise BackendError(
                f"moe.dispatch_dtype=fp8 needs a GPU of compute capability 8.9 or later, and this one has {found}. "
                "Set moe.dispatch_dtype=auto"
            )
    style = ExpertParallel(
        config.moe.dispatcher,
        config.cluster.gpus_per_node,
        meshes.timeout,
        config.parallel.overlap_all_to_all,
        in_8_bits,
    )
    if (ep := meshes.group("ep")) is not None:
        # NCCL makes groups by splitting the world's, so ranks of a pipeline stage without experts
        # take part.
        style.dispatcher(ep, config.model.num_experts)
    return style


def apply_expert_parallel(model: CausalLM, meshes: Meshes, style: ExpertParallel) -> None:
    """Shard every MoE layer's experts over ep and etp, if these axes have several ranks."""
    axes = tuple(axis for axis in ("ep", "etp") if meshes.axis(axis) is not None)
    if axes:
        experts = {layer.experts for _, layer in model.moe_layers()}
        plan = {name: style for name, module in model.named_modules() if module in experts}
        parallelize_module(model, meshes.moe[axes], plan, src_data_rank=None)
