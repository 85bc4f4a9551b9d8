"""Initialisation that depends on a parameter's name and an element's index alone.

It does not depend on the mesh, the rank or the order of calls: a rank fills only its own shard, and
any two meshes start from the same numbers (``automoe.kernels.counter_random`` over the element's
global index).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod

import torch
from torch import Tensor, nn

from automoe.comm.local_shard import global_offset, local_shard
from automoe.kernels.counter_random import normal_at, uniform_at

# Elements filled at once, which bound scratch memory. Those of a CPU stay in its caches (7 times
# faster than 1 << 22); a GPU takes 16 times as many, to need few launches.
_CHUNK = 1 << 18


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Set torch's default dtype to ``dtype`` within the context."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(default)


@torch.no_grad()
def fill_normal_(parameter: Tensor, name: str, std: float, seed: int) -> None:
    """Fill this rank's shard of ``parameter`` (a tensor or a DTensor) with normal(0, std).

    Numbers depend on ``name``, ``seed`` and the index in the full parameter, so every mesh has the
    same values.
    """
    local = local_shard(parameter)
    for block, index in indexed_blocks(parameter):
        local[block] = (normal_at(index, name, seed) * std).to(local.dtype)


def indexed_blocks(parameter: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Iterate over this rank's shard of ``parameter`` (a tensor or a DTensor), block by block.

    Yields:
        A slice of the shard's first dim, and for each element in it the row-major index in the full
        parameter (int64).
    """
    local = local_shard(parameter)
    offset = global_offset(parameter)
    if local.numel() == 0:
        return
    assert local.is_contiguous()
    strides = [prod(parameter.shape[dim + 1 :]) for dim in range(parameter.dim())]
    inner = local[0].numel()
    chunk = _CHUNK if local.device.type == "cpu" else 16 * _CHUNK
    rows_at_once = max(1, chunk // max(inner, 1))
    within = torch.zeros((), dtype=torch.int64, device=local.device)
    for dim in range(1, local.dim()):
        steps = (
            torch.arange(offset[dim], offset[dim] + local.shape[dim], device=local.device)
            * strides[dim]
        )
        within = within.unsqueeze(-1) + steps
    for start in range(0, local.shape[0], rows_at_once):
        stop = min(start + rows_at_once, local.shape[0])
        first = torch.arange(offset[0] + start, offset[0] + stop, device=local.device) * strides[0]
        yield slice(start, stop), first.view(-1, *[1] * (local.dim() - 1)) + within


def index_runs(parameter: Tensor) -> tuple[int, list[tuple[int, int]]]:
    """Return where this rank's shard of ``parameter`` lies in the full parameter, as a few numbers.

    Returns:
        The row-major index of the shard's first element in the full parameter, and (size, stride in
        the full parameter) of the shard's dims. Dims that follow each other without a gap are
        merged; the last stride is one.
    """
    local = local_shard(parameter)
    offset = global_offset(parameter)
    assert local.is_contiguous()
    first = 0
    stride = 1
    runs = [(1, 1)]
    for size, whole, start in zip(
        local.shape[::-1], parameter.shape[::-1], offset[::-1], strict=True
    ):
        first += start * stride
        before, before_stride = runs[-1]
        if before * before_stride == stride:
            runs[-1] = (before * size, before_stride)
        elif size > 1:
            runs.append((size, stride))
        stride *= whole
    return first, runs[::-1]


@torch.no_grad()
def initialize(model: nn.Module, std: float, seed: int) -> None:
    """Fill every parameter of ``model`` with its initial values.

    By default biases become zero and all other parameters normal(0, std). A module's attribute
    ``first_values`` maps names of its own parameters to other values: a word (``zeros``, ``ones``,
    ``log_uniform``, or ``kept``: leave it unchanged) or the full tensor. ``model`` may be a
    pipeline stage (its names are global) and its parameters DTensors of any mesh. A random number
    depends on ``seed``, the parameter's name and the number's index in the full parameter.
    """
    for prefix, module in model.named_modules():
        first_values = getattr(module, "first_values", {})
        for last, parameter in module.named_parameters(recurse=False):
            name = f"{prefix}.{last}" if prefix else last
            kind = first_values.get(
                last,
                "zeros" if last in ("bias", "gate_up_proj_bias", "down_proj_bias") else "normal",
            )
            if isinstance(kind, Tensor):
                local = local_shard(parameter)
                ranges = zip(global_offset(parameter), local.shape, strict=True)
                local.copy_(kind[tuple(slice(at, at + size) for at, size in ranges)])
            elif kind == "normal":
                fill_normal_(parameter, name, std, seed)
            elif kind == "log_uniform":
                _fill_log_uniform_(parameter, name, seed)
            elif kind != "kept":
                local_shard(parameter).fill_(float(kind == "ones"))


def _fill_log_uniform_(parameter: Tensor, name: str, seed: int) -> None:
    """Fill this rank's shard with log(16 u), u uniform in (0, 1).

    u depends on ``seed``, ``name`` and the index.
    """
    local = local_shard(parameter)
    for block, index in indexed_blocks(parameter):
        local[block] = (16 * uniform_at(index, name, seed)).log().to(local.dtype)


def reset_buffers(model: nn.Module) -> None:
    """Give the buffers of every module their first values, which ``to_empty`` leaves undefined.

    It calls the method ``reset_buffers`` of each module that has one.
    """
    for module in model.modules():
        if callable(reset := getattr(module, "reset_buffers", None)):
            reset()
