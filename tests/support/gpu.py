"""What tests and scripts for one GPU share: models without Hydra, a world of one rank, what a compiled kernel takes."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml

from automoe.config.convert import config_from_dict
from automoe.config.schema import LaunchConfig, ModelConfig
from automoe.config.shipped import shipped_folder
from automoe.launch.ranks import close_ranks, init_ranks
from tests.support.imported import freeze_many, leave_and_freeze

_hidden: list[Any] = []  # caches of torch.distributed that are frozen


def conf_model(name: str) -> ModelConfig:
    """``model=name`` of the command line, read without Hydra, which a GPU machine need not have."""
    text = (shipped_folder("conf") / "model" / f"{name}.yaml").read_text()
    return config_from_dict({"model": yaml.safe_load(text)}).model


@contextmanager
def one_rank(device: str) -> Iterator[torch.device]:
    """Initialise ``torch.distributed`` for one rank, as a training rank on ``device`` (cpu, cuda) does.

    Afterwards the process groups are gone, and every cache that remembers a mesh over them is empty.
    """
    freeze_many(_hidden)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    launch = LaunchConfig(device=device, threads_per_rank=0)  # type: ignore[arg-type]
    rank_device = init_ranks(launch, rank=0, world_size=1, local_rank=0, store=store)
    try:
        yield rank_device
        close_ranks()
    finally:
        leave_and_freeze(_hidden)


def resource_usage(compiled: Any) -> tuple[int, int]:
    """Registers, and bytes spilled to memory, of one thread of what ``triton.compile`` made for CUDA.

    CUDA's own tool reads them from the code; no GPU is needed.
    """
    import triton

    [tool] = Path(triton.__file__).parent.glob("backends/nvidia/bin/cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage.stdout)
    assert found is not None, usage.stdout
    return int(found[1]), int(found[2])
