"""The pool of ranks: results, isolation between cases, failures, and what a rank holds on to."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from automoe.verify.pool import RankError, RankPool


def sum_of_ranks(scale: int = 1) -> tuple[int, int, float]:
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), scale * total.item()


def test_results_in_rank_order_for_changing_world_sizes(ranks: RankPool) -> None:
    for world_size in (2, 8, 1, 4):
        total = 3.0 * sum(range(world_size))
        assert ranks.run(sum_of_ranks, world_size, scale=3) == [(r, world_size, total) for r in range(world_size)]


def process_and_threads() -> tuple[int, int, str]:
    return os.getpid(), torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]


def test_ranks_are_reused_and_have_one_thread(ranks: RankPool) -> None:
    first, second = ranks.run(process_and_threads, 2), ranks.run(process_and_threads, 4)
    assert first == second[:2]
    assert len({pid for pid, _, _ in second}) == 4
    assert {(threads, omp) for _, threads, omp in second} == {(1, "1")}


def dirty_state() -> None:
    torch.set_default_dtype(torch.float64)
    torch.rand(7)


def draw() -> tuple[torch.dtype, float]:
    return torch.get_default_dtype(), torch.rand(1).item()


def test_every_case_starts_from_the_same_state(ranks: RankPool) -> None:
    first = ranks.run(draw, 2)
    ranks.run(dirty_state, 2)
    assert ranks.run(draw, 2) == first
    assert first[0] == first[1] == (torch.float32, first[0][1])


def redistribute_over_named_mesh(groups_before: int) -> torch.Tensor:
    """The same mesh as in another case, but with its groups created after ``groups_before`` others."""
    for _ in range(groups_before):
        dist.new_group([0, 1])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    x = distribute_tensor(torch.arange(16.0).view(4, 4), mesh, [Shard(0), Shard(1)])
    y = (x @ x.redistribute(mesh, [Replicate(), Shard(0)])).redistribute(mesh, [Replicate(), Replicate()])
    assert isinstance(y, DTensor) and y.device_mesh is mesh  # and not an equal mesh of a case before
    return y.to_local()


@pytest.mark.exhaustive
def test_an_equal_mesh_of_an_earlier_case_is_forgotten(ranks: RankPool) -> None:
    x = torch.arange(16.0).view(4, 4)
    for groups_before in (0, 3, 1):
        for result in ranks.run(redistribute_over_named_mesh, 4, groups_before):
            assert torch.equal(result, x @ x)


STORES: list[dist.Store] = []


def keep_the_store() -> None:
    STORES.append(dist.distributed_c10d._get_default_store())
    STORES[0].set("short", "read")
    STORES[0].get("short")


def let_go_of_a_kept_store() -> None:
    # In one file the kept store would go on to read in the middle of this.
    dist.distributed_c10d._get_default_store().set("long", "value" * 1000)
    dist.barrier()
    assert STORES
    STORES.clear()


@pytest.mark.exhaustive
def test_a_store_that_outlives_its_case_reads_nothing_of_another_case() -> None:
    pool = RankPool(2, timeout_s=60.0)
    pool.run(keep_the_store, 2)
    pool.run(let_go_of_a_kept_store, 2)  # it read on for ever, at full load, past the end of the file
    pool.close()


def fail_on_rank(rank: int) -> None:
    if dist.get_rank() == rank:
        raise KeyError("no such expert")
    dist.barrier()


def test_the_first_error_is_shown_and_peers_do_not_hang(ranks: RankPool) -> None:
    with pytest.raises(RankError, match=r"(?s)rank 1 of 3 raised.*fail_on_rank.*no such expert") as caught:
        ranks.run(fail_on_rank, 3, 1)
    assert (caught.value.rank, caught.value.kind) == (1, "KeyError")
    assert [r[0] for r in ranks.run(sum_of_ranks, 3)] == [0, 1, 2]


def exit_on_rank(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(7)
    dist.barrier()


def test_a_rank_that_dies_is_named_with_its_exit_code(ranks: RankPool) -> None:
    with pytest.raises(RankError, match="rank 2 died with exit code 7"):
        ranks.run(exit_on_rank, 3, 2)


def wait_on_rank(rank: int) -> None:
    if dist.get_rank() == rank:
        threading.Event().wait()


@pytest.mark.exhaustive
def test_ranks_that_hang_are_named_and_replaced() -> None:
    pool = RankPool(max_ranks=3, timeout_s=20.0)
    try:
        pids = [pid for pid, _, _ in pool.run(process_and_threads, 3)]
        with pytest.raises(ValueError, match="world_size=4: this pool has 1 to 3 ranks"):
            pool.run(process_and_threads, 4)
        assert pids == [pid for pid, _, _ in pool.run(process_and_threads, 3)]
        pool.timeout_s = 0.5
        with pytest.raises(RankError, match=r"ranks \[1\] of 3 did not finish in 0.5 s") as caught:
            pool.run(wait_on_rank, 3, 1)
        assert caught.value.kind == "timeout"
        assert "in wait_on_rank" in str(caught.value)  # where its threads are
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
        pool.timeout_s = 20.0
        assert not set(pids) & {pid for pid, _, _ in pool.run(process_and_threads, 3)}
    finally:
        pool.close()


def test_a_world_larger_than_the_pool_is_refused(ranks: RankPool) -> None:
    with pytest.raises(ValueError, match="world_size=17: this pool has 1 to 16 ranks"):
        ranks.run(sum_of_ranks, 17)


def shard_on_two_meshes() -> None:
    """One FSDP2 step with sub-meshes of two views of the same ranks: what leaks if anything does."""
    dense = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    moe = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep_shard", "ep"))
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    fully_shard(model[0], mesh=moe["ep_shard"])
    fully_shard(model, mesh=dense["dp", "cp"]._flatten("fsdp"))
    model(torch.ones(2, 8)).sum().backward()


def held() -> tuple[int, int]:
    """File descriptors and threads of this process."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform != "linux", reason="counts through /proc")
def test_many_meshes_leave_nothing_behind(ranks: RankPool) -> None:
    ranks.run(shard_on_two_meshes, 4)
    before = ranks.run(held, 4)
    for _ in range(25):
        ranks.run(shard_on_two_meshes, 4)
    after = ranks.run(held, 4)
    print(f"file descriptors and threads a rank: {before} before, {after} after 25 cases with two meshes")
    for (fds_before, threads_before), (fds_after, threads_after) in zip(before, after, strict=True):
        assert fds_after <= fds_before + 8
        assert threads_after <= threads_before + 4


SESSION = """
import sys, threading
from automoe.verify.pool import RankPool
import test_pool
pool = RankPool(max_ranks=2)
print(*[pid for pid, _, _ in pool.run(test_pool.process_and_threads, 2)], flush=True)
pool.run(test_pool.wait_on_rank, 2, 0)
"""


@pytest.mark.faults
@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_a_killed_session_takes_its_ranks_with_it() -> None:
    here = Path(__file__).parent
    env = dict(os.environ, PYTHONPATH=os.pathsep.join([str(here), str(here.parents[1])]))
    session = subprocess.Popen([sys.executable, "-c", SESSION], env=env, stdout=subprocess.PIPE, text=True)
    assert session.stdout is not None
    pids = session.stdout.readline().split()
    assert len(pids) == 2
    session.kill()
    session.wait()
    session.stdout.close()
    for pid in pids:  # no bound on how long: the suite's own timeout ends a wait for a rank that stays
        while Path(f"/proc/{pid}").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text():
            time.sleep(0.01)
