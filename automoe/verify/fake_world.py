"""One rank of a large world simulated in this process: real meshes, real shards, no storage.

torch's fake process group completes every collective at once without moving data, and parameters
stay on the meta device, so one of 1,024 ranks costs seconds and no memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from automoe.config.mesh_shape import MeshShape, stays_unsharded
from automoe.config.schema import Config
from automoe.interop.torch_private import fake_store
from automoe.parallel.mesh import build_meshes
from automoe.parallel.parallelize import build_parts


@contextmanager
def fake_world(rank: int, world_size: int) -> Iterator[None]:
    """Context manager with a default process group in which this process is ``rank`` and has no peers.

    Raises:
        RuntimeError: this process already has a default process group.
    """
    if dist.is_initialized():
        raise RuntimeError("a fake world needs a process without a default process group")
    dist.init_process_group("fake", store=fake_store(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def local_shards(
    config: Config, shape: MeshShape, rank: int
) -> dict[str, tuple[tuple[int, ...], int]]:
    """Return the storage of ``rank`` in a run: {parameter: (shape of its shard, bytes)}.

    If the embedding is tied to the head and the rank's stages hold both, the second one's name
    begins with the number of its stage.
    """
    shards: dict[str, tuple[tuple[int, ...], int]] = {}
    with fake_world(rank, shape.world_size):
        meshes = build_meshes(shape, torch.device("cpu"))
        for stage, part in build_parts(config, meshes).items():
            for name, parameter in part.named_parameters():
                sharded = isinstance(parameter, DTensor)
                assert sharded or stays_unsharded(config, shape), f"{name} is not sharded"
                local = tuple((parameter.to_local() if sharded else parameter).shape)
                key = name if name not in shards else f"{stage}.{name}"
                shards[key] = (local, prod(local) * parameter.dtype.itemsize)
    return shards
