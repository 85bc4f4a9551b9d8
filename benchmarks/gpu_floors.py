"""What a MoE layer on one GPU cannot go below, from shapes alone: operations, bytes, and bytes kept.

Nothing runs: tensors are on the meta device. The bytes of a design are what its operators and kernels read and
write, every operand once: what a GPU moves if caches serve every other reading.

    python benchmarks/gpu_floors.py    # anywhere, half a minute: the tables of layers in NOTES.md; steps: step_floors.py
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # our kernels' own code runs up to the launch, on a machine without a GPU too

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import checkout  # noqa: F401
import torch
from kernel_peers import Layer, Shape, transformers_grouped_mm
from measuring import PEAK
from moe_kernel import SHAPES
from torch.utils._python_dispatch import TorchDispatchMode
from triton.tools.tensor_descriptor import TensorDescriptor

import automoe.kernels.launches as kernels
from automoe.config.schema import ModelConfig, MoEConfig
from automoe.kernels.tiling import HOPPER
from automoe.moe.dispatch.base import LocalDispatcher
from automoe.moe.experts import expert_backend
from automoe.moe.layer import MoE
from automoe.moe.tokens import Tokens
from tests.support.gpu import conf_model

META = torch.device("meta")
BANDWIDTH = {"H100": 3.35e12, "H200": 4.8e12}  # bytes/s, as NVIDIA states them
MEMORY = {"H100": 79.1 * 2**30, "H200": 139.8 * 2**30}  # bytes, as torch reports them
SCATTERS = {"scatter_", "scatter_add_"}
GATHERS = {"index_select", "index", "gather", "embedding"}  # read as much as they write


class Traffic(TorchDispatchMode):
    """Adds up in ``bytes`` what operators and launched kernels read and write while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if func.is_view or "empty" in name or name in ("detach", "_unsafe_view"):
            return out
        given = {key: value for key, value in (kwargs or {}).items() if key != "out"}
        read, written = list(_tensors((args, given))), list(_tensors(out))
        if name in GATHERS:
            read = read[1:] + written
        elif name in SCATTERS:  # read and written where indices say, and nowhere else
            read, written = [*read[1:], read[-1]], [read[-1]]
        elif name.startswith(("new_", "zeros", "ones", "full")):  # what they are made like is not read
            read = []
        self.bytes += sum(map(_moved, (*read, *written)))
        return out

    def launch(self, *operands: Any, **_flags: Any) -> None:
        """What a Triton kernel is given; a pointer that stands in for an absent operand is another's."""
        given = [x.base if isinstance(x, TensorDescriptor) else x for x in operands]
        tensors = [x for x in given if isinstance(x, torch.Tensor)]
        self.bytes += sum({x.untyped_storage()._cdata: _moved(x) for x in tensors}.values())


class _Kernels:
    """In place of the module of Triton kernels: counts, and launches nothing."""

    def __init__(self, launch: Callable[..., None]) -> None:
        self._launch = launch

    def __getattr__(self, _name: str) -> _Kernels:
        return self

    def __getitem__(self, _grid: Any) -> Callable[..., None]:
        return self._launch


@contextmanager
def traffic(kind: type[Traffic] = Traffic) -> Iterator[Traffic]:
    """Counts while entered, kernels of ``moe.experts=triton`` included, which are not launched."""
    with (
        kind() as counter,
        patch.object(kernels, "products", _Kernels(counter.launch)),
        patch.object(kernels, "blocks_of", lambda product, _dtype, _aligned: HOPPER[product]),
    ):
        yield counter


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    return (x for x in torch.utils._pytree.tree_leaves(value) if isinstance(x, torch.Tensor))


def _moved(x: torch.Tensor) -> int:
    return min(x.numel() * x.element_size(), x.untyped_storage().nbytes())


def ours(backend: str) -> Callable[[Shape, torch.Tensor], Layer]:
    """``kernel_peers.ours`` without its look at the device."""

    def build(shape: Shape, ids: torch.Tensor) -> Layer:
        dispatch, experts = LocalDispatcher(shape.experts), expert_backend(backend)

        def layer(x, weights, w_gate_up, w_down):
            return dispatch(x, ids, weights, lambda *rows: experts(*rows, w_gate_up, w_down))

        return layer

    return build


DESIGNS: dict[str, Callable[[Shape, torch.Tensor], Layer]] = {
    "triton": ours("triton"),
    "grouped_mm": ours("grouped_mm"),
    "transformers": transformers_grouped_mm,
}


def ideal_bytes(shape: Shape) -> int:
    """Both passes of a layer that keeps its rows and gate and up: each moved as seldom as can be, all in bfloat16.

    The rows in and out, their gradients, the rows again; gate and up written and read; the weights twice and their
    gradients.
    """
    rows = 5 * 2 * shape.tokens * shape.hidden
    gate_up = 2 * 4 * shape.tokens * shape.top_k * shape.width
    return rows + gate_up + 3 * 6 * shape.experts * shape.hidden * shape.width


def design_bytes(design: str, shape: Shape) -> int:
    """Both passes of one of ``DESIGNS``."""

    def leaf(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=META, requires_grad=True)

    t, h, i, e = shape.tokens, shape.hidden, shape.width, shape.experts
    ids = torch.empty(t, shape.top_k, dtype=torch.int64, device=META)
    layer = DESIGNS[design](shape, ids)
    leaves = leaf(t, h), leaf(t, shape.top_k, dtype=torch.float32), leaf(e, 2, i, h), leaf(e, h, i)
    with traffic() as counter:
        layer(*leaves).backward(torch.empty(t, h, dtype=torch.bfloat16, device=META))
    return counter.bytes


def saved_bytes(model: ModelConfig, experts: str, rows: int = 2, seq_len: int = 4096) -> float:
    """What a whole MoE layer without shared experts keeps for its backward, its input included, in bytes a token."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with META:
            layer = MoE(model, MoEConfig(experts=experts, seq_balance_coef=1e-4), 0, None)  # type: ignore[arg-type]
            layer.router.float()  # as within FSDP
            x = torch.empty(rows, seq_len, model.hidden_size, requires_grad=True)
    finally:
        torch.set_default_dtype(default)
    index = torch.empty(rows, seq_len, dtype=torch.int64, device=META)
    weights = {parameter.untyped_storage()._cdata for parameter in layer.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with traffic(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(x, Tokens(index, index, None, index[0, 0], row_ids=index, not_padding=index >= 0))
    return sum(storage.nbytes() for at, storage in kept.items() if at not in weights) / (rows * seq_len)


def print_layers() -> None:
    """Operations at the peak, bytes at the bandwidth; milliseconds of both passes."""
    head = "".join(f"{name:>18}" for name in ("ideal", *DESIGNS))
    print(f"{'one layer, both passes: GB (ms on H100)':42}{'TFLOP':>7}{'ms':>7}{head}")
    for name, shape in SHAPES.items():
        moved = [ideal_bytes(shape), *(design_bytes(design, shape) for design in DESIGNS)]
        cells = (f"{n / 1e9:.1f} ({1e3 * n / BANDWIDTH['H100']:.1f})" for n in moved)
        flops = 3 * shape.flops
        print(f"{name:42}{flops / 1e12:7.2f}{1e3 * flops / PEAK:7.1f}" + "".join(f"{c:>18}" for c in cells))


def print_saved() -> None:
    """Bytes that a layer keeps, over the least."""
    print(f"\n{'kept for the backward, a token':42}{'ideal':>10}{'grouped_mm':>18}{'triton':>18}")
    for name in ("qwen3_30b_a3b", "moonlight_16b_a3b", "dsv3_671b", "mixtral_8x7b"):
        model = conf_model(name)
        shape = Shape(1, model.hidden_size, model.moe_intermediate_size, 1, model.num_experts_per_token)
        ideal = shape.ideal_saved_bytes
        kept = (saved_bytes(model, experts) for experts in ("grouped_mm", "triton"))
        print(f"{name:42}{ideal:10}" + "".join(f"{f'{n:.0f} ({n / ideal:.3f})':>18}" for n in kept))


if __name__ == "__main__":
    print_layers()
    print_saved()
