"""Gloo groups have one worker thread: two corrupt the heap under torch 2.11 to 2.15."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from automoe.config.mesh_shape import resolve_mesh
from automoe.config.schema import MeshConfig
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


def seconds_until_a_receive_fails() -> float:
    """Rank 0's; rank 1 sends nothing, and joins a sum later than a receive may take."""
    use_one_worker(receive_timeout=timedelta(seconds=0.5))
    collectives, receives = (dist.new_group([0, 1], timeout=timedelta(seconds=60)) for _ in range(2))
    use_one_worker()
    began = time.monotonic()
    if dist.get_rank() == 1:
        time.sleep(1.0)
    dist.all_reduce(torch.ones(1), group=collectives)
    if dist.get_rank() == 0:
        began = time.monotonic()
        with pytest.raises(RuntimeError, match="[Tt]imed out"):
            dist.irecv(torch.empty(1), src=1, group=receives).wait()
    seconds = time.monotonic() - began
    dist.barrier()
    return seconds


def test_a_receive_fails_after_its_own_time_and_collectives_after_theirs(ranks: RankPool) -> None:
    """Of a stage whose link is cut: groups of a DeviceMesh would wait torch's half an hour."""
    assert ranks.run(seconds_until_a_receive_fails, 2)[0] < 30
