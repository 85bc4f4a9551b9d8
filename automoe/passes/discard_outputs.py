"""Output-discarding recompute: outputs are freed after use and recomputed in the backward pass.

In place of a discarded output, the operations that use it save the function that computed it and
the function's inputs, which are kept anyway. The first backward formula that needs the output
recomputes it once for all of these operations, and the last one frees it. Gradients take their
usual path. Only values are recomputed, so gradients are equal to the bit; the function should keep
nothing but its inputs for its own backward pass.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import nullcontext
from contextvars import ContextVar, Token
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from automoe.interop.torch_private import innermost_saved_tensor_hooks, storage_address


def discard_scope(fn: Callable[..., Any], outermost: bool = False) -> Callable[..., Any]:
    """Return ``fn`` wrapped so that functions inside it can discard their outputs.

    Outputs of functions that ``discard_outputs`` wraps are then freed after the forward pass and
    computed again in the backward pass. The wrapper has the positional arguments and the result of ``fn``.

    Args:
        outermost: change nothing if other saved-tensor hooks are active: an outer
            ``discard_scope`` already discards, and a checkpointed region keeps nothing.
    """

    def call(*args: Any) -> Any:
        within = outermost and innermost_saved_tensor_hooks() is not None
        with _Hooks() if torch.is_grad_enabled() and not within else nullcontext():
            return fn(*args)

    return call


def discard_outputs(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``fn`` wrapped so that the backward recomputes its outputs instead of keeping them.

    Outputs are discarded only inside of a ``discard_scope``.

    Args:
        fn: function of tensors and other arguments that returns a tensor or a tuple of tensors. No
            result may share storage with an argument. A single result may be an argument itself,
            which is then kept. A second run must give the same numbers.
    """

    def call(*args: Any) -> Any:
        outputs = fn(*args)
        if not any(outputs is arg for arg in args):
            discard(outputs, fn, *args)
        return outputs

    return call


def discard(outputs: Any, fn: Callable[..., Any], *args: Any) -> None:
    """Mark ``outputs``, the values of ``fn(*args)``, as not to be kept for the backward.

    Inside a ``discard_scope``, an operation that needs an output for its backward saves ``fn`` and
    ``args`` instead, and computes the output again.
    """
    hooks = _CURRENT.get()
    # A checkpointed region inside the scope has its own hooks and keeps nothing to discard.
    if (
        torch.is_grad_enabled()
        and hooks is not None
        and innermost_saved_tensor_hooks() == hooks.pair
    ):
        hooks.discard(_Recompute(fn, args), outputs)


class _Hooks(saved_tensors_hooks):
    """Saved-tensor hooks of ``discard_scope``: for a discarded output they save its recomputation.

    Other tensors are saved as they would be without these hooks.
    """

    def __init__(self) -> None:
        super().__init__(self._pack, operator.call)
        self.pair = (self.pack_hook, self.unpack_hook)
        self.outer = innermost_saved_tensor_hooks()
        # Keyed by storage address, which is not reused while a weak reference exists.
        self.discarded: dict[int, tuple[StorageWeakRef, _Recompute, int, torch.dtype]] = {}

    def __enter__(self) -> None:
        super().__enter__()
        self._token: Token = _CURRENT.set(self)

    def __exit__(self, *exc: object) -> None:
        _CURRENT.reset(self._token)
        super().__exit__(*exc)
        # Saved tensors keep these hooks alive, and this dict would keep every recomputation alive.
        self.discarded.clear()

    def discard(self, recompute: _Recompute, outputs: Any) -> None:
        for i, tensor in enumerate(_as_tuple(outputs)):
            reference = StorageWeakRef(tensor.untyped_storage())
            self.discarded[storage_address(tensor)] = (reference, recompute, i, tensor.dtype)

    def _pack(self, tensor: Tensor) -> Callable[[], Tensor]:
        _, recompute, i, dtype = self.discarded.get(storage_address(tensor), (None, None, 0, None))
        if recompute is not None and tensor.dtype == dtype:
            return _SavedView(recompute, i, tensor)
        if self.outer is not None:
            pack, unpack = self.outer
            return partial(unpack, pack(tensor))
        # Detached: a node that saves its own output would otherwise form a reference cycle.
        detached = tensor.detach()
        return lambda: detached


_CURRENT: ContextVar[_Hooks | None] = ContextVar("discard_outputs", default=None)


def _as_tuple(outputs: Any) -> tuple[Tensor, ...]:
    return (outputs,) if isinstance(outputs, Tensor) else outputs


class _Recompute:
    """Recomputation of the outputs of ``fn(*args)`` in the backward pass, once for all readers.

    The recomputed outputs are freed when every saved tensor that needs them has been read.
    """

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.fn = fn
        self.others = [None if isinstance(arg, Tensor) else arg for arg in args]
        self.tensors = [i for i, arg in enumerate(args) if isinstance(arg, Tensor)]
        # Saved through autograd, so an input that is itself discarded is recomputed and not kept.
        self.inputs = _SaveInputs.apply(
            torch.empty(0, requires_grad=True), *(args[i] for i in self.tensors)
        )
        self.readers = self.waiting = self.times = 0
        self.recomputed: tuple[Tensor, ...] | None = None

    def outputs(self) -> tuple[Tensor, ...]:
        if self.recomputed is None:
            args = list(self.others)
            for i, tensor in zip(self.tensors, self.inputs.grad_fn.saved_tensors, strict=True):
                args[i] = tensor
            with torch.no_grad():
                self.recomputed = _as_tuple(self.fn(*args))
            self.waiting = self.readers
            self.times = self.times + 1
        return self.recomputed

    def count_read(self) -> None:
        self.waiting -= 1
        if self.waiting == 0:
            self.recomputed = None


class _SavedView:
    """What autograd saves in place of a discarded tensor: a function that computes it again.

    Args:
        recompute: call whose output number ``index`` the tensor is, or is a view of.
        tensor: the tensor, of which only size, strides and offset are kept.
    """

    def __init__(self, recompute: _Recompute, index: int, tensor: Tensor) -> None:
        self.recompute = recompute
        self.index = index
        self.layout = (tensor.size(), tensor.stride(), tensor.storage_offset())
        self.times_read = 0
        recompute.readers += 1

    def __call__(self) -> Tensor:
        output = self.recompute.outputs()[self.index]
        if self.times_read != self.recompute.times:  # a retained graph may run backward again
            self.times_read = self.recompute.times
            self.recompute.count_read()
        return output.as_strided(*self.layout)


class _SaveInputs(torch.autograd.Function):
    """Autograd function (anchor, tensors): save ``tensors``, return an empty tensor with a ``grad_fn``.

    In the model's backward pass ``_Recompute`` reads them from ``grad_fn.saved_tensors``. The
    function's own backward is never called.
    """

    @staticmethod
    def forward(ctx, anchor, *tensors):
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx, *grads):
        raise AssertionError("no gradient comes here")
