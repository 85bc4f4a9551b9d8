"""What code does on a GPU, traced where there is none: shapes, dtypes and devices, and no numbers.

Tensors on ``cuda`` are torch's fake ones and those of the CPU are real, so whatever mixes the two, or asks for what an
operator cannot do, raises as it does there. Ones are what the host reads from the device (eights, where they are
integers: sizes). Intercepted, because only a GPU has them: streams and events, which order nothing here, pinned memory, and
Triton's launches, which are compiled for Hopper, for exactly these arguments, and not run.

``tests.support.cuda_device`` has to be imported before torch, which goes in a process of its own alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from automoe.kernels import attention as attention_kernels
from tests.support.cuda_device import SHIM

CAPABILITY = (9, 0)
aten = torch.ops.aten
_PLAIN = (torch.Tensor, torch.nn.Parameter, FakeTensor)


class FakeCuda(TorchDispatchMode):
    """Operations on the device go to torch's fake tensors; ``reads`` has the shape of each tensor that the host read."""

    def __init__(self) -> None:
        super().__init__()
        self.fakes = FakeTensorMode()
        self.reads: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        if any(isinstance(x, torch.Tensor) and type(x) not in _PLAIN for x in leaves):
            return NotImplemented  # a DTensor, say: what it is made of comes here
        if not any(isinstance(x, FakeTensor) or _on_cuda(x) for x in leaves):
            if func is aten._pin_memory.default:
                return args[0].clone()
            return func(*args, **kwargs)
        if func is aten._local_scalar_dense.default:
            return self._read(args[0]).item()
        if func is aten.record_stream.default:
            return None
        if func is aten._to_copy.default and _on_cuda(args[0].device):
            if torch.device(kwargs.get("device") or args[0].device).type == "cpu":
                return self._read(args[0]).to(kwargs.get("dtype") or args[0].dtype)
        if func is aten.copy_.default and _on_cuda(args[1].device) and not _on_cuda(args[0].device):
            return args[0].copy_(self._read(args[1]))
        if func is aten._scaled_grouped_mm_v2.default:  # no fake of it: its first version's has the same rules
            a, b, (scale_a,), _, _, (scale_b,), _, _, offsets, bias, dtype = args[:11]
            func, args, kwargs = aten._scaled_grouped_mm.default, (a, b, scale_a, scale_b), {}
            kwargs.update(offs=offsets, bias=bias, out_dtype=dtype)
        with self.fakes:
            return func(*tree_map(self._fake, args), **tree_map(self._fake, kwargs))

    def _read(self, x: torch.Tensor) -> torch.Tensor:
        self.reads.append(tuple(x.shape))
        return torch.full(x.shape, 1 if x.is_floating_point() or x.dtype == torch.bool else 8, dtype=x.dtype)

    def _fake(self, x: Any) -> Any:
        real = isinstance(x, torch.Tensor) and not isinstance(x, FakeTensor)
        return self.fakes.from_tensor(x) if real else x


def _on_cuda(x: Any) -> bool:
    return isinstance(x, torch.device) and x.type == "cuda"


class _Stream(torch.Stream):
    def __new__(cls, device: Any = None, priority: int = 0) -> _Stream:
        return super().__new__(cls, device="cuda", priority=priority)


class _Event(torch.Event):
    def __new__(cls, enable_timing: bool = False, blocking: bool = False) -> _Event:
        return super().__new__(cls, device="cuda", enable_timing=enable_timing, blocking=blocking)

    def record(self, stream: Any = None) -> _Event:  # type: ignore[override]  # CUDA's returns itself
        super().record(torch.cuda.current_stream() if stream is None else stream)
        return self


@dataclass(frozen=True)
class Launch:
    """One launch of a Triton kernel: its name, its grid, and what was compiled for it."""

    kernel: str
    grid: tuple[int, ...]
    compiled: Any


class _Pointer:
    """What Triton asks of a tensor: memory starts at multiples of 512 bytes, as torch's allocator has it."""

    def __init__(self, x: torch.Tensor) -> None:
        if x.device.type != "cuda":
            raise ValueError(f"a kernel was given a pointer to memory of the {x.device.type}")
        self.dtype, self._offset = x.dtype, x.storage_offset() * x.element_size()

    def data_ptr(self) -> int:
        return 512 + int(self._offset)

    @staticmethod
    def ptr_range() -> int:
        return 0


class _Hopper:
    """Triton's driver, as far as compiling needs one."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 10 * CAPABILITY[0] + CAPABILITY[1], 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def traced_launches() -> Iterator[list[Launch]]:
    """Within it kernels are compiled for the arguments of their launch and listed, each specialisation once."""
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    launches: dict[Any, Launch] = {}
    compile_for = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        args, kwargs = tree_map(_pointer, args), tree_map(_pointer, kwargs)
        compiled = compile_for(self, *args, grid=grid, warmup=True, **kwargs)
        if not all(0 < n <= limit for n, limit in zip(grid, (2**31 - 1, 65535, 65535), strict=False)):
            raise ValueError(f"{self.__name__} was launched over a grid of {grid}")
        launches.setdefault(id(compiled), Launch(self.__name__, tuple(grid), compiled))
        return compiled

    driver.set_active(_Hopper())
    found: list[Launch] = []
    with patch.object(JITFunction, "run", run):
        yield found
        found += launches.values()


def _pointer(x: Any) -> Any:
    return _Pointer(x) if isinstance(x, torch.Tensor) else x


@contextmanager
def fake_cuda() -> Iterator[FakeCuda]:
    """Within it this process has one Hopper GPU that computes nothing."""
    SHIM.set_guard()

    def current_stream(device: Any = None) -> torch.Stream:
        return torch._C._accelerator_getStream(0)

    answers: dict[str, Any] = dict(
        is_available=lambda: True,
        is_initialized=lambda: True,
        device_count=lambda: 1,
        current_device=lambda: 0,
        set_device=lambda device: None,
        get_device_capability=lambda device=None: CAPABILITY,
        synchronize=lambda device=None: None,
        max_memory_allocated=lambda device=None: 0,
        get_rng_state=lambda device="cuda": torch.zeros(16, dtype=torch.uint8),
        set_rng_state=lambda state, device="cuda": None,
        Stream=_Stream,
        Event=_Event,
        current_stream=current_stream,
        stream=lambda stream: nullcontext() if stream is None else stream,
        _lazy_init=lambda: None,
    )
    with ExitStack() as stack:
        # torch.tensor(..., device="cuda"): made on the CPU, then copied like any other tensor.
        stack.callback(torch._C._set_only_lift_cpu_tensors, torch._C._only_lift_cpu_tensors())
        torch._C._set_only_lift_cpu_tensors(True)
        for name, answer in answers.items():
            stack.enter_context(patch.object(torch.cuda, name, answer))
        # The libraries of a CUDA build have a cuDNN, but nothing runs it here.
        stack.enter_context(patch.object(attention_kernels, "cudnn_first", False))
        yield stack.enter_context(FakeCuda())
