"""Each private part of torch is there and means what the package takes it for, in the installed release.

Tried: 2.11, 2.13, 2.14, 2.15. The release is in the name of every test, so that one which fails says which torch changed.
``make smoke-floor`` and ``make smoke-latest`` run it with the oldest and the newest release.
"""

from __future__ import annotations

import ast
import functools
import gc
import inspect
import io
import pickle
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from automoe.checkpoint.planner import CachedPlanner
from automoe.interop import torch_fsdp, torch_pipelining, torch_private
from automoe.verify.fake_world import fake_world
from automoe.verify.pool import RankPool
from tests.support.gpu import one_rank

pytestmark = pytest.mark.usefixtures("release")
CPU = torch.device("cpu")


@pytest.mark.parametrize("module", [torch_fsdp, torch_private, torch_pipelining])
def test_every_private_part_has_a_test(module: ModuleType) -> None:
    files = sorted(Path(__file__).parent.glob("test_torch_*.py"))
    tree = ast.parse("".join(file.read_text() for file in files))
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    public = {name for name in vars(module) if not name.startswith("_")}
    own = {name for name in public if getattr(vars(module)[name], "__module__", None) == module.__name__}
    assert own and own <= used, own - used
    for name in own:
        documented = inspect.getdoc(vars(module)[name]) or ""
        assert "2.11" in documented or name == "cached_functions", f"{name} does not say in which releases"


# ---- process groups ----


def groups_and_members() -> tuple[bool, dict[str, list[int]], list[str]]:
    pair, alone = dist.new_group(group_desc="pair"), dist.new_group([0], group_desc="alone")
    mine = [dist.group.WORLD, pair, *([alone] if dist.get_rank() == 0 else [])]
    found = torch_private.process_groups()
    same = len(found) == len(mine) and all(one is other for one, other in zip(found, mine, strict=True))
    return same, torch_private.group_members(), [group.group_name for group in mine]


def test_groups_are_listed_in_the_order_of_their_making_with_their_ranks(ranks: RankPool) -> None:
    for rank, (same, members, names) in enumerate(ranks.run(groups_and_members, 2)):
        assert same
        assert members == {name: ranks_of for name, ranks_of in zip(names, ([0, 1], [0, 1], [0]), strict=False)}, rank


def a_changed_timeout() -> tuple[list[float], float]:
    group = dist.new_group(timeout=timedelta(seconds=500))
    current = torch_private.gloo_timeout(group)
    assert current is not None
    seconds = [current().total_seconds()]
    torch_private.set_group_timeout(timedelta(seconds=1), group)
    seconds.append(current().total_seconds())
    began = time.monotonic()
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match="(?i)timed ?out|timeout"):
            dist.all_reduce(torch.ones(1), group=group)
    return seconds, time.monotonic() - began


def test_a_group_takes_another_timeout(ranks: RankPool) -> None:
    (seconds, waited), _ = ranks.run(a_changed_timeout, 2)
    assert seconds == [500, 1] and 0.5 < waited < 100


def test_a_fake_group_answers_at_once_and_has_no_timeout() -> None:
    dist.init_process_group("fake", store=torch_private.fake_store(), rank=5, world_size=64)
    try:
        dist.all_reduce(total := torch.ones(3))
        assert total.tolist() == [1, 1, 1] and dist.get_rank() == 5
        assert torch_private.gloo_timeout(dist.group.WORLD) is None
    finally:
        dist.destroy_process_group()


def threads_of_groups() -> tuple[int, int, bool, float]:
    gloo = torch_private.Gloo
    store = dist.PrefixStore("one", dist.distributed_c10d._get_default_store())
    devices = [gloo.create_default_device()]
    making, later = timedelta(seconds=30), timedelta(seconds=7)
    made = torch_private.gloo_group(store, dist.get_rank(), 2, devices, making, later)
    calls = []
    replaced = dist.distributed_c10d.ProcessGroupGloo

    class Counting(type(replaced)):
        def __call__(cls, *args, **kwargs):
            calls.append(args)
            return replaced(*args, **kwargs)

    torch_private.replace_gloo(Counting("CountingGloo", (), {}))
    try:
        dist.new_group()
    finally:
        torch_private.replace_gloo(replaced)
    return made.options._threads, gloo._Options()._threads, bool(calls), made.options._timeout.total_seconds()


def test_gloo_groups_are_made_by_us_with_one_thread_where_torch_takes_two(ranks: RankPool) -> None:
    assert ranks.run(threads_of_groups, 2) == [(1, 2, True, 7.0)] * 2


def recorded() -> list[list[dict]]:
    dist.all_reduce(torch.ones(1))
    store, early = dist.distributed_c10d._get_default_store(), dist.get_rank() == 1
    if early:
        pending = dist.all_reduce(torch.ones(2), async_op=True)
    for _ in range(100):  # gloo's thread retires the first sum a moment after it has ended
        found = [
            pickle.loads(record)["entries"]
            for active in (False, True)
            for name, record in torch_private.flight_records(active)
            if name == "flight"
        ]
        if sum(not entry["retired"] for entry in found[0]) == early:
            break
        time.sleep(0.1)
    if early:
        store.set("recorded", "yes")
        pending.wait()
    else:
        store.wait(["recorded"])
        dist.all_reduce(torch.ones(2))
    return found


def test_the_flight_recorder_tells_what_ended_and_what_goes_on(ranks: RankPool) -> None:
    (_, one), (all_of_two, two) = ranks.run(recorded, 2)
    names = [entry["profiling_name"] for entry in all_of_two]
    assert "gloo:all_reduce" in names and len(two) <= len(names)
    known = {"record_id", "process_group", "collective_seq_id", "p2p_seq_id", "is_p2p", "timeout_ms", "retired"}
    assert all(known <= entry.keys() for entry in all_of_two)
    for entries, pending in ((one, []), (two, ["gloo:all_reduce"])):
        going_on = [entry for entry in entries if not entry["retired"]]
        assert [entry["profiling_name"] for entry in going_on] == pending


# ---- differentiable collectives ----


def collectives() -> list[list[float]]:
    """Values and gradients on a rank of two, with warnings as errors: torch warns at names that it will drop."""
    with warnings.catch_warnings():  # the rank serves other tests afterwards
        warnings.simplefilter("error")
        rank, group = dist.get_rank(), dist.group.WORLD
        x = torch.arange(4.0, requires_grad=True)
        weights = torch.arange(1.0, 9.0) * (rank + 1)
        gathered = torch_private.all_gather(x + 10 * rank, 0, group)
        reduced = torch_private.reduce_scatter(x * (rank + 1), "sum", 0, group)
        swapped = torch_private.all_to_all(x + 10 * rank, [1, 1] if rank == 0 else [3, 3], [1, 3], group)
    assert all(isinstance(one, torch_private.AsyncTensor) for one in (gathered, reduced, swapped))
    found = [gathered.trigger_wait().tolist(), reduced.trigger_wait().tolist(), swapped.trigger_wait().tolist()]
    (gradient,) = torch.autograd.grad((gathered * weights).sum(), x)
    return [*found, gradient.tolist()]


def test_collectives_are_differentiable_and_asynchronous(ranks: RankPool) -> None:
    first, second = ranks.run(collectives, 2)
    assert first[0] == second[0] == [0, 1, 2, 3, 10, 11, 12, 13]
    assert (first[1], second[1]) == ([0, 3], [6, 9])
    assert (first[2], second[2]) == ([0, 10], [1, 2, 3, 11, 12, 13])
    assert (first[3], second[3]) == ([3, 6, 9, 12], [15, 18, 21, 24])


# ---- meshes and DTensor ----


def test_axes_are_flattened_split_and_put_together() -> None:
    with fake_world(5, 8):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
        flat = torch_private.flatten_mesh(mesh["b", "c"], "bc")
        assert dist.get_process_group_ranks(flat.get_group()) == [4, 5, 6, 7]
        assert torch_private.flatten_mesh(mesh["b", "c"], "bc").get_group() is flat.get_group()
        both = torch_private.concatenate_meshes([mesh["a"], flat])
        assert both.mesh_dim_names == ("a", "bc") and both.mesh.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_dim_that_two_axes_shard_is_strided_and_has_an_offset() -> None:
    """FSDP shards, of a dim that tp has sharded, the slice of this rank."""
    for rank, row in enumerate((0, 4, 2, 6)):  # coordinates (fsdp, tp) are (0, 0), (0, 1), (1, 0), (1, 1)
        with fake_world(rank, 4):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
            layer = nn.Linear(3, 8, bias=False)
            layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh["tp"], [Shard(0)]))
            weight = fully_shard(layer, mesh=mesh["fsdp"]).weight
            assert isinstance(weight, DTensor) and weight.to_local().shape == (2, 3)
            strided, plain = weight.placements
            assert torch_private.is_strided_shard(strided) and strided.dim == 0
            assert not torch_private.is_strided_shard(plain)
            assert torch_private.offset_of_shard(weight) == (row, 0)
        torch_private.forget_meshes([])


def ring_handlers() -> bool:
    torch_private.use_ring_attention()
    handlers = DTensor._op_dispatcher._custom_op_handlers
    return torch.ops.aten._scaled_dot_product_flash_attention.default in handlers


def test_attention_of_tensors_sharded_along_the_sequence_is_a_ring(ranks: RankPool) -> None:
    assert ranks.run(ring_handlers, 1) == [True]


@contextmanager
def unhidden() -> Iterator[list[Any]]:
    """A look at what the pool's ranks hide, imports before the first case; yields the caches that a rank would clear.

    Caches that are there at the end are cleared after later cases too.
    """
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_name != "_work":
        frame = frame.f_back
    assert frame is not None
    imported = frame.f_locals["imported"]
    cleared = imported + torch_private.cached_functions()
    gc.unfreeze()
    yield cleared
    imported[:] = torch_private.cached_functions()
    gc.freeze()


def not_cleared() -> tuple[int, list[str]]:
    with unhidden() as cleared:
        caches, known = torch_private.cached_functions(), {id(cache) for cache in cleared}
    return len(caches), [f"{cache.__module__}.{cache.__name__}" for cache in caches if id(cache) not in known]


def test_a_rank_of_tests_clears_every_cache(ranks: RankPool) -> None:
    """Its pool looks for the caches once, in the process that the ranks are forked from."""
    for caches, left in ranks.run(not_cleared, 2):
        assert caches > 0 and left == []


def remembered() -> tuple[int, int, int]:
    with unhidden():
        mesh = init_device_mesh("cpu", (2,))
        (distribute_tensor(torch.ones(4), mesh, [Shard(0)]) * 2).full_tensor()
        sizes = [cached.cache_info().currsize for cached in torch_private.cached_functions()]
        del mesh
        torch_private.forget_meshes([])
        left = [cached.cache_info().currsize for cached in torch_private.cached_functions()]
    return len(sizes), sum(sizes), sum(left)


def test_what_torch_remembers_of_meshes_is_emptied(ranks: RankPool) -> None:
    for caches, before, after in ranks.run(remembered, 2):
        assert caches > 0 and before > 0 and after == 0


LATE: list[Any] = []


def filled_late() -> int:
    """What a cache holds that the first case of this rank brought, before it is filled again."""
    if not LATE:
        LATE.append(functools.lru_cache(int))
        LATE[0].__module__ = "torch.distributed.late"
    before = LATE[0].cache_info().currsize
    LATE[0]("1")
    return before


def test_a_cache_that_a_case_brought_is_cleared_after_every_later_one(ranks: RankPool) -> None:
    """Ranks of tests freeze what a case has imported."""
    assert [ranks.run(filled_late, 1) for _ in range(3)] == [[0]] * 3


def test_a_mesh_that_outlives_its_world_stays_in_sight() -> None:
    with one_rank("cpu"):
        mesh = init_device_mesh("cpu", (1,))
    assert any(thing is mesh for thing in gc.get_objects())


def a_product_on(axes: tuple[int, ...]) -> list[float]:
    names = tuple(f"axis{i}" for i in range(len(axes)))
    mesh: DeviceMesh = init_device_mesh("cpu", axes, mesh_dim_names=names)
    whole = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)] * len(axes))
    return (whole * 2).full_tensor().tolist()


def test_a_later_world_does_not_answer_from_the_caches_of_an_earlier_one(ranks: RankPool) -> None:
    for axes in ((4,), (2, 2), (4,)):
        assert ranks.run(a_product_on, 4, axes) == [[2.0 * i for i in range(8)]] * 4


# ---- autograd, kernels, profiler ----


def test_the_innermost_hooks_of_saved_tensors_are_known() -> None:
    pack, unpack = (lambda x: x), (lambda x: x)
    assert torch_private.innermost_saved_tensor_hooks() is None
    with saved_tensors_hooks(lambda x: x, lambda x: x), saved_tensors_hooks(pack, unpack):
        assert torch_private.innermost_saved_tensor_hooks() == (pack, unpack)
    assert torch_private.innermost_saved_tensor_hooks() is None


def test_a_storage_has_an_address_that_views_share_and_freeing_keeps() -> None:
    x = torch.ones(4)
    before = torch_private.storage_address(x)
    assert torch_private.storage_address(x[1:].view(3, 1)) == before
    assert torch_private.storage_address(x.clone()) != before
    x.untyped_storage().resize_(0)
    assert x.data_ptr() == 0 and torch_private.storage_address(x) == before


def test_operations_on_many_tensors_at_once() -> None:
    tensors = [torch.arange(3.0), torch.full((2, 2), 2.0)]
    wide = torch_private.foreach_norm(tensors, torch.float64)
    assert [one.dtype for one in wide] == [torch.float64] * 2
    assert [one.item() for one in wide] == pytest.approx([5**0.5, 4.0], rel=1e-15)
    torch_private.foreach_add_(tensors, 1)
    torch_private.foreach_mul_(tensors, 2.0)
    assert tensors[0].tolist() == [2, 4, 6] and tensors[1].tolist() == [[6, 6], [6, 6]]


def test_a_profiler_that_runs_is_noticed() -> None:
    assert not torch_private.profiler_runs()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert torch_private.profiler_runs()
    assert not torch_private.profiler_runs()


# ---- checkpoints ----


def test_the_stager_copies_into_memory_that_it_keeps() -> None:
    stager = torch_private.state_dict_stager(pin_memory=False)
    weight = torch.arange(4.0)
    first = stager.stage({"weight": weight}, non_blocking=False)["weight"]
    place = first.data_ptr()
    assert place != weight.data_ptr() and first.tolist() == [0, 1, 2, 3]
    weight += 1
    assert first.tolist() == [0, 1, 2, 3], "a copy, not a view"
    second = stager.stage({"weight": weight}, non_blocking=False)["weight"]
    assert second.data_ptr() == place and second.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "saved", [torch.randn(30, 50), torch.arange(12).view(3, 4).t(), torch.tensor(3.0), torch.zeros(0)]
)
def test_the_place_of_a_saved_tensor(saved: torch.Tensor) -> None:
    stream = io.BytesIO()
    torch.save(saved, stream)
    whole = b"before" + stream.getvalue() + b"behind"
    place = SimpleNamespace(offset=6, length=stream.tell())
    tensor, begin = torch_private.stored_tensor(dcp.FileSystemReader("."), io.BytesIO(whole), place)
    assert (tensor.shape, tensor.stride(), tensor.dtype) == (
        saved.shape,
        saved.stride(),
        saved.dtype,
    ) and tensor.is_meta
    raw = saved.untyped_storage()
    assert whole[begin : begin + raw.nbytes()] == bytes(raw.tolist())


def plans_by_key(folder: str) -> list[set[str]]:
    found = []
    for step in range(2):
        planner = CachedPlanner("mine")  # calls cache_plans_under
        torch_private.cache_plans_under(planner, "ours")
        dcp.save({"weight": torch.ones(4)}, checkpoint_id=f"{folder}/{step}", planner=planner)
    caches = {name: cache for name, cache in vars(SavePlanner).items() if name.startswith("_cached_")}
    found.append({key for cache in caches.values() for key in cache if key == "ours"})
    torch_private.forget_cached_plans("ours")
    found.append({key for cache in caches.values() for key in cache if key == "ours"})
    return found


def test_plans_are_cached_under_a_key_of_ours_and_forgotten(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(plans_by_key, 2, str(tmp_path)) == [[{"ours"}, set()]] * 2


def test_a_part_of_the_keys_has_its_part_of_the_gradients() -> None:
    """The second half of the keys, some of whose queries see none of them."""
    generator = torch.Generator().manual_seed(1)
    q, k, v, grad = (torch.randn(2, 3, 8, 16, generator=generator, dtype=torch.float64) for _ in range(4))
    mask = torch.ones(1, 1, 8, 8, dtype=torch.bool).tril()
    inputs = [one.requires_grad_() for one in (q, k, v)]
    out = F.scaled_dot_product_attention(*inputs, mask, scale=0.3)
    out.backward(grad)
    scores = (q @ k.mT * 0.3).masked_fill(~mask, -torch.inf).detach()
    late = slice(4, None)
    with torch.no_grad():
        part, lse = torch_private.cpu_attention(q, k[:, :, late], v[:, :, late], mask[..., late], 0.3)
        assert torch.equal(lse.isinf(), torch.arange(8).expand(2, 3, 8) < 4) and not part[:, :, :4].any()
        torch.testing.assert_close(lse[:, :, late], scores[:, :, late, late].logsumexp(-1))
        found = torch_private.cpu_attention_backward(
            grad, q, out, scores.logsumexp(-1), k[:, :, late], v[:, :, late], mask[..., late], 0.3
        )
    for one, wanted in zip(found[1:], (k.grad, v.grad), strict=True):
        torch.testing.assert_close(one, wanted[:, :, late])


def test_bytes_of_fake_tensors_count_until_they_are_freed() -> None:
    """Views count once, what was there before not at all; reads of numbers and chosen rows have an answer."""
    from automoe.interop.torch_fake import AliveBytes, FakeTensorMode

    with FakeTensorMode():
        given = torch.zeros(8, 4)
        with AliveBytes(num_experts=2, before=[given]) as alive:
            assert alive.now == 0
            kept = given + 1
            assert kept.view(32)[:4].sum().item() == 0 and not bool((kept > 0).any())
            gone = torch.cat((kept, kept))
            assert alive.now == 4 * 32 + 4 * 64 and alive.most >= alive.now
            del gone
            assert alive.now == 4 * 32
            assert torch.nonzero(kept).shape == (16, 2), "of two experts each has half"
