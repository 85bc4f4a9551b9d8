"""Everything automoe takes from torchtitan, behind one file: its public names change between releases.

Imported only when called: it loads triton and torch's distributed stack.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType
from typing import TYPE_CHECKING

from automoe.errors import import_backend

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

_A100 = 312e12  # what torchtitan answers for any device that it does not know


def titan_grad_norm(parameters: Iterable[torch.Tensor], pp_mesh: DeviceMesh | None = None) -> torch.Tensor:
    """torchtitan's global gradient norm of the same parameters: an independent check of ours.

    Gradients keep their values as long as the norm is finite (they are "clipped" to infinity).

    Args:
        parameters: this rank's parameters, with expert weights on a mesh that has an axis ``ep``.
        pp_mesh: one-dimensional mesh over the pipeline stages.

    Returns:
        A scalar in the gradients' dtype.
    """
    parameters = list(parameters)
    meshes = [getattr(parameter, "device_mesh", None) for parameter in parameters]
    ep_enabled = any("ep" in (mesh.mesh_dim_names or ()) for mesh in meshes if mesh is not None)
    clip = _titan("torchtitan.distributed.utils").clip_grad_norm_
    return clip(parameters, max_norm=float("inf"), pp_mesh=pp_mesh, ep_enabled=ep_enabled)


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 FLOP/s of a device named as ``torch.cuda.get_device_name`` does; None if unknown.

    torchtitan answers with an A100 for any device that is not in its table, which would turn an unknown
    peak into a wrong utilisation: that answer counts only for an A100. On a machine with an H100 it looks
    at the hardware first and answers for that card, whatever the name.
    """
    get_peak_flops = _titan("torchtitan.tools.utils").get_peak_flops
    logger = _titan("torchtitan.tools.logging").logger
    disabled, logger.disabled = logger.disabled, True  # it warns about the guess that is discarded here
    try:
        flops = float(get_peak_flops(device_name))
    finally:
        logger.disabled = disabled
    return None if flops == _A100 and "A100" not in device_name else flops


def _titan(module: str) -> ModuleType:
    use = "its table of peak FLOPs and to cross-check gradient norms"
    remedy = (
        f"torchtitan is used for {use}: install torchtitan (and triton, which it needs and does not declare), or say "
        "cluster.peak_flops, dense bfloat16 FLOP/s of one GPU"
    )
    return import_backend(module, "torchtitan", remedy)
