"""Tensor parallelism with sequence parallelism: weights and positions sharded over the tp axis.

In attention and in dense and shared FFNs the first weights are colwise and the last ones rowwise
(Megatron-LM, arXiv 1909.08053). Outside of them the positions are sharded (arXiv 2205.05198): each
of these modules all-gathers its input over tp and reduce-scatters its output. MLA gathers latents
instead, which are narrower than hidden states. Routers and routed experts gather nothing over tp:
each tp rank routes its own tokens, so an ep axis that spans tp ranks (folding, arXiv 2504.14960)
needs no extra communication.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from automoe.model.causal_lm import CausalLM
from automoe.model.params import find_spec
from automoe.parallel.mesh import Meshes


def apply_tensor_parallel(model: CausalLM, meshes: Meshes) -> None:
    """Shard attention, dense and shared FFNs, embedding and head over tp (``ParamSpec.tp``).

    If there are fewer key and value heads than ranks, each rank keeps all of them and uses one.
    """
    mesh = meshes.submesh("tp")
    if mesh is None:
        return
    assert model.backend.pg_collection.tp.num_ranks == mesh.size(), "built for another mesh"
    for name, whole in list(model.named_parameters()):
        spec = find_spec(name)
        if (
            spec is None
            or spec.tp is None
            or (spec.per_kv_head and model.config.attention.num_kv_heads < mesh.size())
        ):
            continue
        path, _, last = name.rpartition(".")
        sharded = distribute_tensor(whole.data, mesh, [Shard(spec.tp)], src_data_rank=None)
        parameter = nn.Parameter(sharded, whole.requires_grad)
        model.get_submodule(path).register_parameter(last, parameter)
