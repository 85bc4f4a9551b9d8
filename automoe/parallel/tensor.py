"""Tensor parallelism with sequence parallelism: weights cut over the tp axis, tokens cut between blocks.

Each product of a block is cut by columns first and by rows last (Megatron-LM, arXiv 1909.08053, with the
norms' tokens cut as in arXiv 2205.05198): tokens are gathered before, sums reduced and cut after. MLA
gathers its latents, which are narrower than the hidden state. The router therefore sees distinct tokens
on every tp rank, and experts folded over tp need no communication of their own for it.
Shapes: B rows, S positions that enter attention together, s = S / tp.
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
from automoe.moe.communicators import Communicator
from automoe.parallel.mesh import Meshes


class SplitWeight(ParallelStyle):
    """Makes the weight of a linear layer or embedding a DTensor, cut over one mesh axis.

    Dim 0 cuts output features (or vocabulary rows), a bias with them; dim 1 input features, and then a bias
    stays whole: it is added to the sum (``Linear.summed``).
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            if self.dim < parameter.dim():
                _cut(module, name, device_mesh, self.dim)
        return module


def _cut(module: nn.Module, name: str, mesh: DeviceMesh, dim: int) -> None:
    """Make parameter ``name`` of ``module`` a DTensor, cut on ``dim``."""
    cut = distribute_tensor(getattr(module, name).data, mesh, [Shard(dim)], src_data_rank=None)
    module.register_parameter(name, nn.Parameter(cut))


BY_OUTPUT, BY_INPUT = SplitWeight(0), SplitWeight(1)

_PLANS: dict[type[nn.Module], dict[str, ParallelStyle]] = {
    MLP: {"gate_proj": BY_OUTPUT, "up_proj": BY_OUTPUT, "down_proj": BY_INPUT},
    GroupedQueryAttention: {
        "q_proj": BY_OUTPUT,
        "k_proj": BY_OUTPUT,
        "v_proj": BY_OUTPUT,
        "o_proj": BY_INPUT,
    },
    LatentAttention: {"q_proj": BY_OUTPUT, "q_b_proj": BY_OUTPUT, "kv_b_proj": BY_OUTPUT, "o_proj": BY_INPUT},
    GatedDeltaNet: {"in_proj_qkvz": BY_OUTPUT, "in_proj_ba": BY_OUTPUT, "out_proj": BY_INPUT},
    Decoder: {"embed_tokens": BY_OUTPUT, "lm_head": BY_OUTPUT},
}


def apply_tensor_parallel(model: Decoder, meshes: Meshes) -> None:
    """Cut attention, dense and shared FFNs, embedding and head over tp."""
    mesh = meshes.axis("tp")
    if mesh is None:
        return
    sequence = model.comms.sequence
    assert sequence.num_ranks == mesh.size(), "built for another mesh"
    for module in model.modules():
        plan = _PLANS.get(type(module))
        if plan is None:
            continue
        plan = {name: style for name, style in plan.items() if getattr(module, name, None) is not None}
        if isinstance(module, GroupedQueryAttention):
            plan = _share_kv_heads(module, plan, sequence)
            if module.sinks is not None:  # one a query head
                _cut(module, "sinks", mesh, 0)
        if isinstance(module, GatedDeltaNet):
            _cut(module, "A_log", mesh, 0)
            _cut(module, "dt_bias", mesh, 0)
            module.first_key_head = sequence.rank * module.key_heads // sequence.num_ranks
        parallelize_module(module, mesh, plan)
    model.first_id = sequence.rank * model.config.vocab_size // sequence.num_ranks
    if model.embed_tokens is not None:
        model.embed_tokens.first_id = model.first_id


def _share_kv_heads(
    module: GroupedQueryAttention, plan: dict[str, ParallelStyle], sequence: Communicator
) -> dict[str, ParallelStyle]:
    """Where key/value heads are fewer than tp ranks, every rank keeps them all and uses one."""
    kv_heads = module.k_proj.weight.shape[0] // module.head_dim
    if kv_heads >= sequence.num_ranks:
        return plan
    head = sequence.rank * kv_heads // sequence.num_ranks
    for projection in (module.k_proj, module.v_proj):
        projection.rows = slice(head * module.head_dim, (head + 1) * module.head_dim)
    return {name: style for name, style in plan.items() if name not in ("k_proj", "v_proj")}
