"""Expert parallelism for the experts modules of ``transformers`` models and similar modules.

Shapes: T tokens of this rank, K top-k, H hidden, E experts, R rows that this rank computes.
"""

from __future__ import annotations

import inspect
from datetime import timedelta

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from automoe.comm.local_shard import local_shard
from automoe.config.schema import ClusterConfig, MoEConfig
from automoe.errors import ConfigError
from automoe.kernels.row_sums import gather_rows
from automoe.moe.dispatch.base import Dispatcher
from automoe.moe.experts import GroupedExperts
from automoe.parallel.dispatchers import Dispatchers
from automoe.parallel.expert import ExpertStyle


class ExpertParallel(ExpertStyle):
    """Parallel style that shards a module's experts over a mesh and dispatches its tokens.

        parallelize_module(model, mesh, {"model.layers.*.mlp.experts": ExpertParallel()})

    The module is automoe's ``GroupedExperts``, or one like those of transformers: all of its
    parameters have the experts as dim 0, its attribute ``num_experts`` is their number, and its
    arguments are tokens [T, H], chosen experts [T, K] and their weights [T, K]. The parameters
    become DTensors on the mesh, and the module's own code computes this rank's experts. Gradients
    of experts are summed over the tokens of all ranks. Those of all other parameters are not:
    reduce them as for data parallelism. Every rank applies the style, and makes every call, even
    without tokens. The mesh has one axis; for ``GroupedExperts`` it may have the axes ep and etp,
    and etp shards the width of the experts.

    Args:
        dispatcher: alltoall, allgather (equal numbers of tokens on all ranks), hierarchical,
            deepep, the name of a plugin, or a ``Dispatchers`` (``automoe.parallel.dispatchers``),
            which several styles may share. The other arguments apply to a name alone.
        gpus_per_node: consecutive ranks that the hierarchical dispatcher counts as one node.
        timeout: timeout of the process groups that the hierarchical dispatcher makes.
        overlap: run another micro-batch's pass while all-to-alls travel
            (``parallel.overlap_all_to_all``).
        in_8_bits: send tokens to their experts in FP8 (``moe.dispatch_dtype=fp8``).

    Raises:
        BackendError: the dispatcher does not exist, is not available on this machine, or is a
            plugin's and gets ``in_8_bits``.
        ConfigError: ``gpus_per_node`` is below 1; a ``Dispatchers`` comes with other arguments;
            or, when the style is applied, the module or the mesh cannot be sharded.
    """

    def __init__(
        self,
        dispatcher: str | Dispatchers = "alltoall",
        gpus_per_node: int = ClusterConfig.gpus_per_node,
        timeout: timedelta | None = None,
        overlap: bool = False,
        in_8_bits: bool = False,
    ) -> None:
        options = gpus_per_node, timeout, overlap, in_8_bits
        if not isinstance(dispatcher, Dispatchers):
            dispatcher = Dispatchers(dispatcher, *options)
        elif options != (ClusterConfig.gpus_per_node, None, False, False):
            rule = (
                "a maker of dispatchers has its own gpus_per_node, timeout, overlap and in_8_bits"
            )
            raise ConfigError(
                "dispatcher", type(dispatcher).__name__, rule, "Give them to the maker"
            )
        self.dispatchers = dispatcher

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        rule = obstacle(module)
        remedy = (
            "Apply ExpertParallel to the module that holds the stacked weights of a layer's experts"
        )
        if any(isinstance(parameter, DTensor) for parameter in module.parameters()):
            rule = "its parameters are sharded already, and ExpertParallel shards those of a module once"
            remedy = "Apply it once to each module, before fully_shard; one that several layers share is one module"
        if rule:
            raise ConfigError("module", type(module).__name__, rule, remedy)
        super()._apply(module, device_mesh)
        dispatcher = self.dispatchers.over(device_mesh, module.num_experts, MoEConfig())
        call = RoutedRows if isinstance(module, GroupedExperts) else RoutedCall
        module.forward = call(module, dispatcher).route
        # the module's own code counts its local experts
        module.num_experts = len(local_shard(next(module.parameters())))
        return module


def obstacle(module: nn.Module) -> str:
    """Return text that says why the experts of ``module`` cannot be sharded; "" if they can."""
    shapes = {name: list(parameter.shape) for name, parameter in module.named_parameters()}
    num_experts = getattr(module, "num_experts", None)
    arguments = list(inspect.signature(module.forward).parameters)
    other = [
        f"{name} {shape}"
        for name, shape in shapes.items()
        if len(shape) < 2 or shape[0] != num_experts
    ]
    if not shapes:
        return "it has no parameters to shard"
    if other:
        return f"dim 0 of every parameter must be its {num_experts} experts (num_experts), and is not in {other}"
    if len(arguments) < 3:
        return (
            f"it is called with ({', '.join(arguments)}), and ExpertParallel needs three arguments: rows [T, H], "
            "chosen experts [T, K] and their weights [T, K]"
        )
    return ""


class OwnCode(nn.Module):
    """Module that calls the ``forward`` that ``module`` had when this object was made.

    With it ``torch.func.functional_call`` can run that forward with other weights, even after
    ``module.forward`` was replaced.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module  # registered, so that functional_call finds its parameters
        self.own_forward = module.forward

    def forward(self, *args, **kwargs) -> Tensor:
        return self.own_forward(*args, **kwargs)


class RoutedCall(OwnCode):
    """Replacement for the forward of an experts module (``route``) with expert parallelism.

    It dispatches tokens to the ranks of their experts and runs the module's own code, which knows
    no ranks, on the local shards. The module's hooks, such as those of ``fully_shard``, run once,
    around the whole call.
    """

    def __init__(self, module: nn.Module, dispatcher: Dispatcher) -> None:
        super().__init__(module)
        self.num_experts = module.num_experts
        self.dispatcher = dispatcher
        self.signature = inspect.signature(module.forward)

    def route(self, *args, **kwargs) -> Tensor:
        """Return [T, H], the weighted sum of each token's experts, which may be on other ranks.

        Arguments are those of the experts module's forward: tokens [T, H], expert ids [T, K] and
        their weights [T, K].

        Raises:
            ConfigError: the arguments have other shapes or dtypes, or (checked on the CPU) an id is
                not that of an expert.
        """
        arguments = self.signature.bind(*args, **kwargs).args
        shapes = [tuple(getattr(value, "shape", ())) for value in arguments]
        if (
            [len(shape) for shape in shapes] != [2, 2, 2]
            or shapes[1] != shapes[2]
            or arguments[1].dtype not in (torch.int32, torch.int64)
        ):
            raise ConfigError(
                "module",
                type(self.module).__name__,
                f"it was called with {shapes}, and ExpertParallel takes calls with rows [T, H], chosen experts [T, K] "
                "as int32 or int64 and their weights [T, K]",
                "Compute these three before the call. A mask over all experts names no choices",
            )
        x_TH, topk_ids_TK, probs_TK = arguments
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
        wide = torch.promote_types(probs_TK.dtype, torch.float32)

        def experts(x_TH, gather_idx_R, offsets_E, probs_R) -> Tensor:
            return self._run_local(
                gather_rows(x_TH, gather_idx_R), offsets_E, probs_R.to(probs_TK.dtype)
            )

        routed = self.dispatcher(x_TH, topk_ids_TK.to(torch.int64), probs_TK.to(wide), experts)
        # The caller may add to the result in place; FSDP's hook would be lost with a view.
        return routed.clone()

    def _run_local(self, rows_RH: Tensor, offsets_E: Tensor, probs_R: Tensor) -> Tensor:
        shards = {name: local_shard(tensor) for name, tensor in self.named_parameters()}
        if not len(rows_RH):
            # Modules may skip experts without rows, and other ranks wait for this one in the
            # backward pass. Empty slices give every input a gradient of zeros.
            nothing = sum(shard[:0].sum() for shard in shards.values())
            return rows_RH * (probs_R.unsqueeze(1) + nothing).to(rows_RH.dtype)
        expert_R = torch.searchsorted(
            offsets_E, torch.arange(len(rows_RH), device=rows_RH.device), right=True
        )
        # Adapters take their own shards: dropout counts features by their place in the whole.
        weights = {name: tensor for name, tensor in shards.items() if ".lora." not in name}
        return functional_call(
            self, weights, (rows_RH, expert_R.unsqueeze(1), probs_R.unsqueeze(1))
        )


class RoutedRows(RoutedCall):
    """Replacement for the forward of ``GroupedExperts`` with expert parallelism.

    The calling MoE layer passes (token, expert) rows as if all experts were local. This class
    dispatches the rows to the ranks of their experts, and returns the weighted outputs in the
    order of the rows.
    """

    def route(self, x_TH, gather_idx_R, offsets_E, probs_R) -> Tensor:
        row_R = torch.arange(len(gather_idx_R), device=x_TH.device)
        ids_R1 = torch.searchsorted(offsets_E, row_R, right=True).unsqueeze(1)
        rows_RH = gather_rows(x_TH, gather_idx_R)
        return self.dispatcher(rows_RH, ids_R1, probs_R.unsqueeze(1), self.own_forward)
