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

from automoe.model.attention import GroupedQueryAttention, LatentAttention
from automoe.model.block import MLP
from automoe.model.decoder import Decoder
from automoe.model.delta_net import GatedDeltaNet
from automoe.model.linear import Linear
from automoe.parallel.mesh import Meshes

# The dim of a weight that is sharded: output features, heads or vocabulary rows, and a bias with them; or input
# features, where a bias stays whole and is added to the sum (``Linear.reduce_scatter``).
COLWISE, ROWWISE = 0, 1

_PLANS: dict[type[nn.Module], dict[str, int]] = {
    MLP: {"gate_proj": COLWISE, "up_proj": COLWISE, "down_proj": ROWWISE},
    GroupedQueryAttention: {
        "q_proj": COLWISE, "k_proj": COLWISE, "v_proj": COLWISE, "o_proj": ROWWISE, "sinks": COLWISE,
    },
    LatentAttention: {"q_proj": COLWISE, "q_b_proj": COLWISE, "kv_b_proj": COLWISE, "o_proj": ROWWISE},
    GatedDeltaNet: {
        "in_proj_qkvz": COLWISE, "in_proj_ba": COLWISE, "out_proj": ROWWISE, "A_log": COLWISE, "dt_bias": COLWISE,
    },
    Decoder: {"embed_tokens": COLWISE, "lm_head": COLWISE},
}  # fmt: skip


def shard_parameter(module: nn.Module, name: str, mesh: DeviceMesh, *dims: int) -> None:
    """Make parameter ``name`` of ``module`` a DTensor, sharded over each axis of ``mesh`` on one of ``dims``."""
    placements = [Shard(dim) for dim in dims]
    whole = getattr(module, name)
    sharded = distribute_tensor(whole.data, mesh, placements, src_data_rank=None)
    module.register_parameter(name, nn.Parameter(sharded, whole.requires_grad))


def apply_tensor_parallel(model: Decoder, meshes: Meshes) -> None:
    """Shard attention, dense and shared FFNs, embedding and head over tp."""
    mesh = meshes.axis("tp")
    if mesh is None:
        return
    assert model.runtime.comms.sequence.num_ranks == mesh.size(), "built for another mesh"
    for module in model.modules():
        for name, dim in _PLANS.get(type(module), {}).items():
            part = getattr(module, name, None)
            if isinstance(part, nn.Parameter):
                shard_parameter(module, name, mesh, dim)
            elif isinstance(part, Linear) and part.rows is not None:
                continue  # fewer key and value heads than ranks: each keeps them all and uses one
            elif part is not None:
                for each, parameter in list(part.named_parameters(recurse=False)):
                    if dim < parameter.dim():
                        shard_parameter(part, each, mesh, dim)
                if isinstance(part, Linear) and part.lora is not None:
                    shard_parameter(part.lora, "B" if dim == COLWISE else "A", mesh, dim)
