"""This process as the only rank of a world: what one GPU, or one CPU process, can run of a training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from automoe.config.schema import LaunchConfig
from automoe.launch.ranks import close_ranks, init_ranks
from automoe.verify.pool import leave_world


@contextmanager
def one_rank(device: str) -> Iterator[torch.device]:
    """Initialise ``torch.distributed`` for one rank, as a training rank on ``device`` (cpu, cuda) does.

    Afterwards the process groups are gone, and every cache that remembers a mesh over them is empty.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    launch = LaunchConfig(device=device, threads_per_rank=0)  # type: ignore[arg-type]
    rank_device = init_ranks(launch, rank=0, world_size=1, local_rank=0, store=store)
    try:
        yield rank_device
        close_ranks()
    finally:
        leave_world([])
