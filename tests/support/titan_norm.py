"""torchtitan's global gradient norm, a reference that shares no code with ours."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.distributed.device_mesh import DeviceMesh


def titan_grad_norm(parameters: Iterable[torch.Tensor], pp_mesh: DeviceMesh | None = None) -> torch.Tensor:
    """The norm of all gradients together, as torchtitan computes it before it clips.

    Gradients keep their values as long as the norm is finite (they are "clipped" to infinity).

    Args:
        parameters: this rank's parameters, with expert weights on a mesh that has an axis ``ep``.
        pp_mesh: one-dimensional mesh over the pipeline stages.

    Returns:
        A scalar in the gradients' dtype.
    """
    from torchtitan.distributed.utils import clip_grad_norm_  # not on every machine with a GPU

    parameters = list(parameters)
    meshes = [getattr(parameter, "device_mesh", None) for parameter in parameters]
    ep_enabled = any("ep" in (mesh.mesh_dim_names or ()) for mesh in meshes if mesh is not None)
    return clip_grad_norm_(parameters, max_norm=float("inf"), pp_mesh=pp_mesh, ep_enabled=ep_enabled)
