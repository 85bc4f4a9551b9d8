"""Expert parallelism: a ``ParallelStyle`` that shards experts over the axes ep and etp."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from automoe.errors import ConfigError
from automoe.model.causal_lm import CausalLM
from automoe.parallel.mesh import Meshes


class ExpertStyle(ParallelStyle):
    """Parallel style that shards ``GroupedExperts`` over a mesh.

    The mesh has one axis, or the axes ep and etp; the latter shards the width of ``GroupedExperts``
    (``WIDTH_DIMS``). ``fully_shard`` may follow, over another axis of the same mesh.

    Raises:
        ConfigError: when the style is applied, the mesh has an axis other than ep and etp, or an
            axis's size does not divide the dim that it shards.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        widths = getattr(module, "WIDTH_DIMS", {})
        meshes = expert_axes(device_mesh, ("ep", "etp") if widths else ("ep",))
        shards: dict[nn.Parameter, nn.Parameter] = {}  # a parameter with two names stays shared
        for name, whole in list(module.named_parameters(remove_duplicate=False)):
            dims = {
                axis: dim
                for axis, dim in (("ep", 0), ("etp", widths.get(name)))
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
        return module


def expert_axes(mesh: DeviceMesh, allowed: tuple[str, ...]) -> dict[str, DeviceMesh]:
    """Return the one-axis submeshes of ``mesh`` by name, "ep" or "etp".

    The only axis of a mesh counts as ep unless it is named etp.

    Args:
        allowed: names that the axes may have.

    Raises:
        ConfigError: an axis has another name.
    """
    names = tuple(mesh.mesh_dim_names or ())
    if mesh.ndim == 1 and names != ("etp",):
        return {"ep": mesh}
    if not names or not set(names) <= set(allowed):
        raise ConfigError(
            "mesh",
            names,
            f"experts of this module can be sharded only over the axes {' and '.join(allowed)}",
            f"Give it the part of the mesh with these axes, such as mesh[{allowed[0]!r}]",
        )
    return {name: mesh[name] for name in names}


def _check_divides(axis: str, size: int, name: str, parameter: torch.Tensor, dim: int) -> None:
    number = parameter.shape[dim]
    if number % size:
        parts = (
            f"{number} experts" if axis == "ep" else f"dim {dim} of {name} {list(parameter.shape)}"
        )
        raise ConfigError(
            axis,
            size,
            f"every rank holds an equal part of {parts}: {number} % {size} = {number % size}",
            f"Choose {axis} among {', '.join(str(n) for n in range(1, number + 1) if number % n == 0)}",
        )


def expert_mesh(meshes: Meshes) -> DeviceMesh | None:
    """Return the mesh over which experts are sharded, with the axes ep, etp or both; None if both have one rank."""
    axes = tuple(axis for axis in ("ep", "etp") if meshes.submesh(axis) is not None)
    return meshes.moe[axes] if axes else None


def apply_expert_parallel(model: CausalLM, meshes: Meshes, style: ExpertStyle) -> None:
    """Shard every MoE layer's experts by ``style`` over ep and etp, if these axes have several ranks."""
    if (mesh := expert_mesh(meshes)) is not None:
        experts = {layer.experts for _, layer in model.moe_layers()}
        plan = {name: style for name, module in model.named_modules() if module in experts}
        parallelize_module(model, mesh, plan, src_data_rank=None)
