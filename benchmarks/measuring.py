"""What every script here needs: the commit and the processor of a result, seconds on a device, where a result goes; and the blocks to try.

Importing this module puts the checkout on the path: a script measures the checkout that it lies in, also on a machine where
automoe is not installed. Torch is imported only by functions that need it.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from automoe.kernels.tiling import Blocks

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
PEAK = 989.5e12  # dense bfloat16 FLOP/s of H100 and H200 SXM


def commit(*paths: str) -> str:
    """Return the hash of the checkout's commit, with ``+`` if tracked or new files differ from it.

    A copy of the files without their history says its commit in the variable ``MEASURED_COMMIT``.

    Args:
        paths: files and folders that count, relative to this folder; default: every tracked file.
    """
    if said := os.environ.get("MEASURED_COMMIT"):
        return said

    def git(*words: str) -> str:
        command = ["git", "-C", str(HERE), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    changed = git("status", "--porcelain", *(("--", *paths) if paths else ("-uno",)))
    return git("rev-parse", "HEAD") + ("+" if changed else "")


def cpu_model() -> str:
    """Return the processor's name if the system tells it."""
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else ():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def result_file(chosen: Path | None, name: str, quick: bool) -> Path:
    """Return where a script's JSON goes. Toy numbers of ``--quick`` never replace measured ones."""
    folder = Path(tempfile.gettempdir()) if quick else HERE / "results"
    return chosen or folder / f"{name}.json"


def memory(field: str) -> float:
    """Return VmRSS or VmHWM of this process in MB."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{field}:")[1].split()[0]) / 1024


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Time ``work``: between two events on a GPU, in CPU seconds of this process elsewhere."""
    if device.type != "cuda":
        start = time.process_time()
        work()
        return time.process_time() - start
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def candidates(product: str) -> list[Blocks]:
    """Return the blocks that ``tune_kernels.py`` times; ``HOPPER``'s choice comes first."""
    from automoe.kernels.tiling import HOPPER

    chosen = HOPPER[product]
    narrow = replace(chosen, columns=chosen.columns // 2)
    tilings = [chosen, narrow]
    if not product.startswith("grad_weights"):
        tilings += [replace(chosen, tma=not chosen.tma)]
    if product == "back":
        tilings += [replace(narrow, columns_at_once=64)]
    if product == "grad_weights_gathered":
        tilings += [replace(chosen, num_stages=7), replace(narrow, num_stages=10)]
    else:
        # Three stages of half the columns leave room for a second program, which computes while the
        # first one stores (not for "back", which takes too many registers).
        tilings += [replace(chosen, num_stages=3), replace(narrow, num_stages=3), replace(narrow, num_warps=4)]
    return tilings + [replace(chosen, summed=128, num_stages=2)]
