"""Private parts of torch to run code on fake tensors, which have shapes but no storage.

``automoe.classes.activations`` uses them to estimate the activation memory of a class of
``transformers``. Tests of both modules fail when a torch release changes these parts. Import this
module only in functions, since the import takes long.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
# what code raises that reads a number, or whose results have as many rows as numbers say
NEED_NUMBERS = (DataDependentOutputException, DynamicOutputShapeException)


class AliveBytes(TorchDispatchMode):
    """Dispatch mode that counts the bytes of operators' results from creation until they are freed.

    ``now`` is the current number of bytes, ``most`` its peak. Torch's own tracker counts by module.
    Fake tensors have no values: if code reads a number, it gets 0; a condition is False; every
    expert gets the same number of tokens. The private parts are those of torch 2.13: fake tensors,
    the operator that reads a number, and the key of a storage.

    Args:
        num_experts: number of experts of an MoE layer, among which tokens are divided equally.
        before: tensors that are not counted.
    """

    def __init__(self, num_experts: int, before: list[torch.Tensor]) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.held = {tensor.untyped_storage()._cdata: 0 for tensor in before}
        self.now = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten._local_scalar_dense.default:
            return False if args[0].dtype == torch.bool else 0
        if func is aten._grouped_mm.default:  # torch has no fake implementation for float32
            a, b, ends_E = args[:3]
            out = a.new_empty(*ends_E.shape * (b.dim() == 2), len(a), b.shape[-1])
        elif func is aten.nonzero.default:
            dims = args[0].dim()
            number = args[0].numel() // (1 if dims == 1 else self.num_experts)
            out = args[0].new_zeros((number, dims), dtype=torch.int64)
        else:
            out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                key = storage._cdata
                if key not in self.held:
                    self.held[key] = storage.nbytes()
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self._free, key)
        self.most = max(self.most, self.now)
        return out

    def _free(self, key: int) -> None:
        self.now -= self.held.pop(key)
