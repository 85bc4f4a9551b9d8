"""Tensor parallelism with sequence parallelism: weights sharded over the tp axis, positions sharded between blocks.

The first weights of a block are colwise and the last rowwise (Megatron-LM, arXiv 1909.08053), with the norms' positions
sharded as in arXiv 2205.05198: tokens are gathered before, sums reduce-scattered after. MLA gathers its latents, which
are narrower than the hidden state. The router therefore sees other tokens on every tp rank, and experts folded over tp
need no communication of their own for it.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from automoe.model.attention import GroupedQueryAttention, LatentAttention
from automoe.model.decoder import Decoder
from automoe.model.delta_net import GatedDeltaNet
from automoe.model.mlp import MLP
from automoe.parallel.mesh import Meshes


class ShardWeight(ParallelStyle):
    """Makes the weight of a linear layer or embedding a DTensor, sharded on one dim over one mesh axis.

    Colwise (dim 0, as torch calls it) shards output features or vocabulary rows, and a bias with them. Rowwise (dim 1)
    shards input features; a bias then stays whole and is added to the sum (``Linear.reduce_scatter``).
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            if self.dim < parameter.dim():
                _shard(module, name, device_mesh, self.dim)
        return module


def _shard(module: nn.Module, name: str, mesh: DeviceMesh, dim: int) -> None:
    """Make parameter ``name`` of ``module`` a DTensor, sharded on ``dim``."""
    sharded = distribute_tensor(getattr(module, name).data, mesh, [Shard(dim)], src_data_rank=None)
    module.register_parameter(name, nn.Parameter(sharded))


COLWISE, ROWWISE = ShardWeight(0), ShardWeight(1)

_PLANS: dict[type[nn.Module], dict[str, ParallelStyle]] = {
    MLP: {"gate_proj": COLWISE, "up_proj": COLWISE, "down_proj": ROWWISE},
    GroupedQueryAttention: {"q_proj": COLWISE, "k_proj": COLWISE, "v_proj": COLWISE, "o_proj": ROWWISE},
    LatentAttention: {"q_proj": COLWISE, "q_b_proj": COLWISE, "kv_b_proj": COLWISE, "o_proj": ROWWISE},
    GatedDeltaNet: {"in_proj_qkvz": COLWISE, "in_proj_ba": COLWISE, "out_proj": ROWWISE},
    Decoder: {"embed_tokens": COLWISE, "lm_head": COLWISE},
}


def apply_tensor_parallel(model: Decoder, meshes: Meshes) -> None:
    """Shard attention, dense and shared FFNs, embedding and head over tp."""
    mesh = meshes.axis("tp")
    if mesh is None:
        return
    assert model.runtime.comms.sequence.num_ranks == mesh.size(), "built for another mesh"
    for module in model.modules():
        plan = _PLANS.get(type(module))
        if plan is None:
            continue
        plan = {name: style for name, style in plan.items() if getattr(module, name, None) is not None}
        if isinstance(module, GroupedQueryAttention):
            if module.k_proj.rows is not None:  # fewer heads than ranks: each keeps them all and uses one
                plan = {name: style for name, style in plan.items() if name not in ("k_proj", "v_proj")}
            if module.sinks is not None:  # one a query head
                _shard(module, "sinks", mesh, 0)
        if isinstance(module, GatedDeltaNet):
            _shard(module, "A_log", mesh, 0)
            _shard(module, "dt_bias", mesh, 0)
        parallelize_module(module, mesh, plan)
