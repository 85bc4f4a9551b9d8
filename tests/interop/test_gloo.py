"""Gloo groups have one worker thread: two corrupt the heap under torch 2.11 to 2.15."""

from __future__ import annotations

import torch
import torch.distributed as dist

from automoe.config.mesh_shape import resolve_mesh
from automoe.config.schema import MeshConfig
from automoe.parallel.mesh import build_meshes
from automoe.verify.pool import RankPool


def worker_threads_of_every_group() -> list[int]:
    meshes = build_meshes(resolve_mesh(MeshConfig(pp=1, dp_shard=2, ep=2, tp=2), 4), torch.device("cpu"))
    groups = [dist.group.WORLD, dist.new_group(), meshes.group("tp"), meshes.group("ep")]
    gloo = [group._get_backend(torch.device("cpu")) for group in groups if group is not None]
    assert all(isinstance(backend, dist.ProcessGroupGloo) for backend in gloo)
    return [backend.options._threads for backend in gloo]


def test_every_gloo_group_has_one_worker_thread(ranks: RankPool) -> None:
    for threads in ranks.run(worker_threads_of_every_group, 4):
        assert threads == [1, 1, 1, 1]
