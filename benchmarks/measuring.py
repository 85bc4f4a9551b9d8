"""How the single-GPU benchmarks take time and count waits; on the CPU the same calls serve to check the scripts."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Callable

import torch

PEAK = 989.5e12  # dense bfloat16 FLOP/s of H100 and H200 SXM


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Between two events on a GPU, of this process' CPU elsewhere."""
    if device.type != "cuda":
        start = time.process_time()
        work()
        return time.process_time() - start
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def host_syncs(work: Callable[[], object], device: torch.device) -> dict[str, int] | None:
    """How often the host waited for the device, by place in the code; None where that cannot be asked."""
    if device.type != "cuda":
        return None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        work()
        torch.cuda.set_sync_debug_mode("default")
    waits = [warning for warning in caught if "synchroniz" in str(warning.message)]
    return dict(Counter(f"{warning.filename}:{warning.lineno}" for warning in waits))
