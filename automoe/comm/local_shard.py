"""This rank's shard of a tensor, whether the tensor is a DTensor or not."""

from __future__ import annotations

from copy import copy

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from automoe.interop.torch_private import offset_of_shard


def local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, differentiably; return any other tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def global_offset(tensor: Tensor) -> tuple[int, ...]:
    """Return the index at which this rank's shard of ``tensor`` begins in each dim of the full tensor.

    For a tensor that is not a DTensor all are zero.
    """
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.dim()
    return offset_of_shard(tensor)


def take_over(module: nn.Module, base: nn.Module) -> None:
    """Initialise ``module`` with all parameters, submodules and attributes of ``base``.

    Constructors of modules that replace ``base`` in a model (``LoRALinear``, ``FP8Linear``,
    ``LoRAExperts``) call it; parameters keep their names and are not copied.
    """
    nn.Module.__init__(module)
    for name, value in vars(base).items():
        vars(module)[name] = copy(value) if isinstance(value, dict) else value
