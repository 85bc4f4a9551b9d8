"""Where the time of a dispatch goes, and how often it waits for a number on the host.

Dispatchers name their stages and read sizes through this file. Without a ``StageTimer`` or ``HostSyncs`` in
effect, a stage is a shared null context and a read is a plain read: no clock, no event.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

# In the order of a forward pass. The exchange of sizes belongs to the collective that needs them.
STAGES = ("permute", "a2a_dispatch", "all_gather", "experts", "reduce_scatter", "a2a_combine", "unpermute")


class StageTimer:
    """Times the stages of every dispatch inside its ``with`` block. Each stage waits for its own collectives.

    Only the forward pass has stages; the backward runs the same collectives in reverse order.

    Args:
        device: the device whose clock counts. On CUDA nothing is synchronised until ``times`` is called.
    """

    _active: StageTimer | None = None

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._wall: Counter[str] = Counter()
        self._cpu: Counter[str] = Counter()
        self._events: list[tuple[str, Any, Any]] = []

    def __enter__(self) -> StageTimer:
        assert StageTimer._active is None, "one stage timer at a time"
        StageTimer._active = self
        return self

    def __exit__(self, *exc: object) -> None:
        StageTimer._active = None

    def times(self) -> dict[str, tuple[float, float]]:
        """Seconds so far of each stage that occurred, in the order of ``STAGES``: on the clock, and of the CPU.

        On CUDA the clock is between two events on the stage's stream, and the CPU's seconds are 0.0. Elsewhere these
        are of all threads of this process, the backend's included.
        """
        if self._events:
            torch.cuda.synchronize(self.device)
            for name, start, end in self._events:
                self._wall[name] += start.elapsed_time(end) / 1e3
            self._events.clear()
        return {name: (self._wall[name], self._cpu[name]) for name in STAGES if name in self._wall}

    @contextmanager
    def _time(self, name: str) -> Iterator[None]:
        if self.device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            yield
            end.record()
            self._events.append((name, start, end))
            return
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        self._wall[name] += time.perf_counter() - wall
        self._cpu[name] += time.process_time() - cpu


_UNTIMED = nullcontext()


def stage(name: str) -> AbstractContextManager[None]:
    """Times its ``with`` block as stage ``name`` if a ``StageTimer`` is in effect."""
    return _UNTIMED if StageTimer._active is None else StageTimer._active._time(name)


def stages_are_timed() -> bool:
    """Whether a ``StageTimer`` is entered. Collectives then wait for their data, so that no later stage has to."""
    return StageTimer._active is not None


class HostSyncs:
    """Counts in ``count`` how often dispatchers wait on the host for a tensor's values, inside its ``with`` block."""

    _active: HostSyncs | None = None

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> HostSyncs:
        self._outer, HostSyncs._active = HostSyncs._active, self
        return self

    def __exit__(self, *exc: object) -> None:
        HostSyncs._active = self._outer


def count_host_sync() -> None:
    """To be called where a library makes the host wait for the device on its own."""
    if HostSyncs._active is not None:
        HostSyncs._active.count += 1


def on_host(tensor: torch.Tensor) -> Any:
    """``tensor.tolist()``, counted. Dispatchers read every size that they need on the host through this function."""
    count_host_sync()
    return tensor.tolist()
