"""Where code makes the host wait for a GPU: counted on one, and found without one.

Without: the meta device holds no numbers either. Code that reads a number of a meta tensor, or copies without
queueing the copy, is noted by function. Whatever else needs numbers there (``nonzero``, a mask as an index, lengths
of ``repeat_interleave``) raises torch's own error.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import automoe

PACKAGE = Path(automoe.__file__).resolve().parent
DEVICE = torch.device("meta")  # stands in for a GPU
aten = torch.ops.aten


def host_syncs(work: Callable[[], object], device: torch.device) -> dict[str, int] | None:
    """How often the host waited for the GPU within ``work``, by file and line; None where there is no GPU to ask."""
    if device.type != "cuda":
        return None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        caught.clear()  # that this mode is a beta feature
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [warning for warning in caught if "synchroniz" in str(warning.message)]
    return dict(Counter(f"{_within(Path(warning.filename))}:{warning.lineno}" for warning in waits))


def _within(file: Path) -> Path:
    """Return the path of a file below the checkout, or below where packages lie."""
    for root in (PACKAGE.parent, *map(Path, sys.path)):
        if file.is_absolute() and root.name and file.is_relative_to(root):
            return file.relative_to(root)
    return file


class HostReads(TorchFunctionMode):
    """While entered, ``count`` is how often code of one folder of automoe reads a tensor's numbers on the host.

    On a GPU each such read waits for the device; here they are counted on any device, ranks of gloo included.
    """

    READS = {
        torch.Tensor.tolist,
        torch.Tensor.item,
        torch.Tensor.__int__,
        torch.Tensor.__bool__,
        torch.Tensor.__index__,
        torch.Tensor.__float__,
    }

    def __init__(self, room: str = "moe/dispatch") -> None:
        super().__init__()
        self.count, self._room = 0, PACKAGE / room

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.READS:
            paths = (Path(frame.f_code.co_filename) for frame in _frames())
            reader = next((path for path in paths if path.is_relative_to(PACKAGE)), None)
            self.count += reader is not None and reader.is_relative_to(self._room)
        return func(*args, **(kwargs or {}))


class HostSyncFinder(TorchDispatchMode):
    """While entered, ``places`` counts waits for a tensor on ``DEVICE``; what is read or copied from there is one.

    A place is the innermost function of automoe, as ``training/stats.py:gather_stats``. Copies onto the
    device count unless they are ``non_blocking``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.places: Counter[str] = Counter()
        self._constants = _Constants(self._note)

    def __enter__(self) -> HostSyncFinder:
        self._constants.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self._constants.__exit__(*exc)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten._local_scalar_dense.default and args[0].device == DEVICE:
            self._note()
            return torch.ones((), dtype=args[0].dtype).item()
        if func is aten._to_copy.default:
            from_device, to_device = args[0].device, torch.device(kwargs.get("device") or args[0].device)
            if from_device == DEVICE and to_device != DEVICE:
                self._note()
                return torch.ones(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype, device=to_device)
            if from_device != to_device and not kwargs.get("non_blocking"):
                self._note()
        elif func is aten.copy_.default and args[0].device != args[1].device:
            queued = kwargs.get("non_blocking") or (len(args) > 2 and args[2])
            if args[1].device == DEVICE:
                self._note()
                return args[0].fill_(1)
            if not queued and args[1].dim():
                self._note()
        return func(*args, **kwargs)

    def _note(self) -> None:
        for frame in _frames():
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(PACKAGE):
                self.places[f"{path.relative_to(PACKAGE)}:{frame.f_code.co_name}"] += 1
                return
        self.places["elsewhere"] += 1


class _Constants(TorchFunctionMode):
    """Tells of ``torch.tensor`` on the device: a copy of numbers from the host that nothing queues."""

    def __init__(self, note: Callable[[], None]) -> None:
        super().__init__()
        self.note = note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.tensor, torch.as_tensor, torch.asarray) and out.device == DEVICE:
            if not isinstance(args[0], torch.Tensor):  # whose copy is seen below
                self.note()
        return out


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
