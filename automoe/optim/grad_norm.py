"""Global gradient norm over DTensors of every mesh and all pipeline stages, and clipping by it.

Summing local shards over one group of ranks would count replicated tensors once per replica;
summing over each mesh alone would give the ranks of another mesh a different norm. This module sums
squares over exactly the axes on which a tensor is sharded, so every rank gets the norm of the whole
model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from automoe.comm.local_shard import local_shard
from automoe.interop.torch_private import foreach_mul_, foreach_norm

# The CPU widens this many numbers at a time: 256 KiB of float64, which stay in its cache.
_BLOCK = 1 << 15
# On a GPU a float64 copy of a smaller tensor takes less time than the launch of a kernel for it.
_SMALL = 1 << 20
# A mesh, and its axes along which a tensor is sharded.
_Sharding = tuple[DeviceMesh | None, tuple[int, ...]]


@torch.no_grad()
def global_grad_norm(
    parameters: Iterable[Tensor],
    pp_group: dist.ProcessGroup | None = None,
    device_type: str = "cpu",
) -> Tensor:
    """Return the L2 norm of all gradients of the model, the same on every rank. Collective.

    Squares are accumulated in float64 and all-reduced over the sharded axes: one scalar for each
    combination of mesh and sharded axes, then one scalar over the stages. Replicated DTensors and
    plain tensors count once. A parameter without a gradient counts as zeros, so ranks agree on the
    collectives even if an expert on one of them saw no token. A gradient that is not finite gives a
    norm that is not finite.

    Args:
        parameters: this rank's parameters; the other ranks of its stage pass the same ones. A
            tensor given twice counts once. Copies of a tied tensor on two stages are two tensors:
            pass only one of them.
        pp_group: process group over the pipeline stages; each stage adds its own parameters.
        device_type: device of the scalar on a stage without parameters: that of other stages.

    Returns:
        A float64 scalar on the gradients' device.

    Raises:
        ValueError: the layout of a gradient differs from its parameter's. An example is a Partial
            gradient, which is not summed over ranks yet: the norm of the terms is not the norm of
            the sum.
    """
    by_sharding: dict[_Sharding, list[Tensor]] = {}
    device = torch.device(device_type)
    for parameter in _distinct(parameters):
        device = parameter.device
        gradients = by_sharding.setdefault(_sharding(parameter), [])
        if parameter.grad is not None:
            gradients.append(_local_gradient(parameter))
    total = torch.zeros((), dtype=torch.float64, device=device)
    for (mesh, axes), gradients in by_sharding.items():
        squares = torch.zeros_like(total)
        if gradients:
            squares += _sum_of_squares(gradients)
        for axis in axes:
            assert mesh is not None
            dist.all_reduce(squares, group=mesh.get_group(axis))
        total += squares
    if pp_group is not None:
        dist.all_reduce(total, group=pp_group)
    return total.sqrt_()


def _sum_of_squares(gradients: list[Tensor]) -> Tensor:
    """Return the sum of squares of all numbers of the gradients, in float64, as a scalar."""
    if gradients[0].is_cuda:
        from automoe.kernels.squares import sum_of_squares

        small = [each for each in gradients if each.numel() < _SMALL]
        sums = [sum_of_squares(each) for each in gradients if each.numel() >= _SMALL]
        norms = foreach_norm(small, torch.float64) if small else ()
        return torch.stack([*sums, *(norm.square() for norm in norms)]).sum()
    # On the CPU, torch's norm in another dtype widens number by number and is five times slower.
    total = torch.zeros((), dtype=torch.float64)
    for gradient in gradients:
        for block in gradient.reshape(-1).split(_BLOCK):
            widened = block.double()
            total += torch.dot(widened, widened)
    return total


@torch.no_grad()
def clip_(parameters: Iterable[Tensor], norm: float, max_norm: float) -> None:
    """Scale every gradient in place by ``min(1, max_norm / norm)``.

    If ``norm`` is not finite, gradients are left as they are: the caller decides whether to skip
    the step.

    Args:
        parameters: the parameters whose gradients are scaled.
        norm: the result of ``global_grad_norm`` as a number, which no gradient's dtype rounds.
        max_norm: largest norm after clipping; 0 switches clipping off.
    """
    if max_norm == 0 or not math.isfinite(norm) or norm <= max_norm:
        return
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for parameter in _distinct(parameters):
        if parameter.grad is not None:
            gradient = _local_gradient(parameter)
            by_dtype.setdefault(gradient.dtype, []).append(gradient)
    scale = max_norm / norm
    for dtype, gradients in by_dtype.items():
        if dtype.itemsize >= 4:  # for narrower dtypes the one kernel would round the scale
            foreach_mul_(gradients, scale)
        else:
            for gradient in gradients:
                gradient.mul_(scale)


def _distinct(parameters: Iterable[Tensor]) -> Iterator[Tensor]:
    seen: set[int] = set()
    for parameter in parameters:
        if parameter.requires_grad and id(parameter) not in seen:
            seen.add(id(parameter))
            yield parameter


def _sharding(parameter: Tensor) -> _Sharding:
    if not isinstance(parameter, DTensor):
        return None, ()
    mesh = parameter.device_mesh
    axes = [i for i, placement in enumerate(parameter.placements) if not placement.is_replicate()]
    return mesh, tuple(axis for axis in axes if mesh.size(axis) > 1)


def _local_gradient(parameter: Tensor) -> Tensor:
    gradient = parameter.grad
    assert gradient is not None
    have, want = (getattr(tensor, "placements", ()) for tensor in (gradient, parameter))
    if have != want or any(placement.is_partial() for placement in have):
        raise ValueError(
            f"gradient of a parameter of shape {tuple(parameter.shape)} is {have} and the parameter {want}: "
            "the gradient's sum over ranks must be finished, and its layout the parameter's, before its norm "
            "is taken"
        )
    return local_shard(gradient)
