"""How the single-GPU benchmarks take time; on the CPU the same calls serve to check the scripts."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from tests.support.host_syncs import host_syncs as host_syncs

PEAK = 989.5e12  # dense bfloat16 FLOP/s of H100 and H200 SXM


def result_file(chosen: Path | None, name: str, quick: bool) -> Path:
    """Where a script's JSON goes: toy numbers of ``--quick`` never over measured ones."""
    folder = Path(tempfile.gettempdir()) if quick else Path(__file__).resolve().parent / "results"
    return chosen or folder / f"{name}.json"


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
