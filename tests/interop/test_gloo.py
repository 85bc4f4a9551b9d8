"""Gloo groups have one worker thread: two corrupt the heap under torch 2.11 to 2.15."""

from __future__ import annotations

import os
import resource

import pytest
import torch
import torch.distributed as dist

from automoe.config.mesh_shape import resolve_mesh
from automoe.config.schema import MeshConfig
from automoe.errors import LaunchError
from automoe.interop.gloo import use_one_worker
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


def refused_for_want_of_files() -> str:
    """With as many open files allowed as there are."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")), limits[1]))
    try:
        with pytest.raises(LaunchError) as error:
            dist.new_group()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    return str(error.value)


def test_too_few_open_files_are_told(ranks: RankPool) -> None:
    (said,) = ranks.run(refused_for_want_of_files, 1)
    assert "a group of 1 ranks takes two open files a rank, beyond the" in said and "ulimit -Hn 65536" in said


def files_of_groups(lazy: bool) -> list[int]:
    """Open files that three groups add: when they are made, after a sum, and after all have sent something to all."""
    before = len(os.listdir("/proc/self/fd"))
    use_one_worker(lazy)
    groups = [dist.new_group(group_desc="checkpoint") for _ in range(3)]
    found = [len(os.listdir("/proc/self/fd")) - before]
    for group in groups:
        dist.all_reduce(total := torch.ones(4), group=group)
        assert total.tolist() == [dist.get_world_size()] * 4
    found.append(len(os.listdir("/proc/self/fd")) - before)
    for group in groups:
        sent = torch.arange(dist.get_world_size()) + 100 * dist.get_rank()
        dist.all_to_all_single(got := torch.empty_like(sent), sent, group=group)
        assert got.tolist() == [100 * rank + dist.get_rank() for rank in range(dist.get_world_size())]
    use_one_worker()
    return [*found, len(os.listdir("/proc/self/fd")) - before]


def test_lazy_groups_open_no_more_connections_than_they_use(ranks: RankPool) -> None:
    """Of a thousand ranks a group would take a thousand files of each; a sum takes two neighbours."""
    eager, lazy = (ranks.run(files_of_groups, 8, lazy)[0] for lazy in (False, True))
    assert eager[0] >= 3 * 8 and lazy[0] <= 3 * 5 and lazy[1] <= 3 * 7 < eager[1]
    assert lazy[2] >= 3 * 8
