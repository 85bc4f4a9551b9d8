"""Outputs that are freed once they are read, and made again when their readers' backward passes ask for them.

What a reader would save of such an output is a promise: the function and its inputs, which somebody keeps
anyway. The first backward formula that wants the output makes it again, once for all readers, and the last one
frees it. Gradients take the path they always took: only values are made again, so they are equal to the bit,
and the function should keep nothing but its inputs for its own backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar, Token
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef


class Region:
    """``fn`` as a region in which the outputs of ``Remade`` functions are promised; same arguments, same result."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn

    def __call__(self, *args: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.fn(*args)
        with _Hooks():
            return self.fn(*args)


class Remade:
    """``fn``, whose outputs are promised where it is called straight in a ``Region``.

    Args:
        fn: of tensors and other arguments, to a tensor or a tuple of them, none of which shares storage with
            an argument. Run again, it must give the same numbers.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn

    def __call__(self, *args: Any) -> Any:
        made = self.fn(*args)
        hooks = _CURRENT.get()
        # A checkpointed part of the region keeps nothing, and has hooks of its own.
        if torch.is_grad_enabled() and hooks is not None and _top_hooks() == hooks.pair:
            hooks.promise(_Promise(self.fn, args), made)
        return made


class _Hooks(saved_tensors_hooks):
    """Saves promises of what has been promised, and the rest as it would have been saved without them."""

    def __init__(self) -> None:
        super().__init__(self._pack, _unpack)
        self.pair = (self.pack_hook, self.unpack_hook)
        self.outer = _top_hooks()
        # By address of the storage, which no other can have while there is a weak reference to it.
        self.promised: dict[int, tuple[StorageWeakRef, _Promise, int, torch.dtype]] = {}

    def __enter__(self) -> None:
        super().__enter__()
        self._token: Token = _CURRENT.set(self)

    def __exit__(self, *exc: object) -> None:
        _CURRENT.reset(self._token)
        super().__exit__(*exc)
        self.promised.clear()  # saved tensors hold on to these hooks, and so would promises to each other

    def promise(self, promise: _Promise, made: Any) -> None:
        for i, tensor in enumerate(_tuple(made)):
            storage = tensor.untyped_storage()
            self.promised[storage._cdata] = (StorageWeakRef(storage), promise, i, tensor.dtype)

    def _pack(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        _, promise, i, dtype = self.promised.get(tensor.untyped_storage()._cdata, (None, None, 0, None))
        if promise is not None and tensor.dtype == dtype:
            return _Saved(promise, i, tensor)
        if self.outer is not None:
            pack, unpack = self.outer
            return partial(unpack, pack(tensor))
        kept = tensor.detach()  # itself, it would be in a cycle with the node that saves its own output
        return lambda: kept


_CURRENT: ContextVar[_Hooks | None] = ContextVar("promises", default=None)


def _top_hooks() -> tuple[Callable, Callable] | None:
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def _unpack(saved: Callable[[], torch.Tensor]) -> torch.Tensor:
    return saved()


def _tuple(made: Any) -> tuple[torch.Tensor, ...]:
    return (made,) if isinstance(made, torch.Tensor) else made


class _Promise:
    """The way to outputs of ``fn(*args)``, and while some of their readers still wait, the outputs."""

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.fn = fn
        self.others = [None if isinstance(arg, torch.Tensor) else arg for arg in args]
        self.tensors = [i for i, arg in enumerate(args) if isinstance(arg, torch.Tensor)]
        # Saved as an operation saves its inputs, so that one which is promised itself is not kept either.
        self.inputs = _Inputs.apply(torch.empty(0, requires_grad=True), *(args[i] for i in self.tensors))
        self.readers = self.waiting = self.times = 0
        self.made: tuple[torch.Tensor, ...] | None = None

    def outputs(self) -> tuple[torch.Tensor, ...]:
        if self.made is None:
            args = list(self.others)
            for i, tensor in zip(self.tensors, self.inputs.grad_fn.saved_tensors, strict=True):
                args[i] = tensor
            with torch.no_grad():
                self.made = _tuple(self.fn(*args))
            self.waiting, self.times = self.readers, self.times + 1
        return self.made

    def was_read(self) -> None:
        self.waiting -= 1
        if self.waiting == 0:
            self.made = None


class _Saved:
    """What one reader has of a promised output: any view of its storage."""

    def __init__(self, promise: _Promise, index: int, tensor: torch.Tensor) -> None:
        self.promise, self.index = promise, index
        self.layout = (tensor.size(), tensor.stride(), tensor.storage_offset())
        self.times_read = 0
        promise.readers += 1

    def __call__(self) -> torch.Tensor:
        made = self.promise.outputs()[self.index]
        if self.times_read != self.promise.times:  # a graph that is kept may be walked again
            self.times_read = self.promise.times
            self.promise.was_read()
        return made.as_strided(*self.layout)


class _Inputs(torch.autograd.Function):
    """Nothing, from tensors that it saves."""

    @staticmethod
    def forward(ctx, anchor: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx, *grads: torch.Tensor):
        raise AssertionError("no gradient comes here")
