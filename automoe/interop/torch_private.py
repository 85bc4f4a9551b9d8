"""Private parts of torch that automoe uses, except for pipelining and fake tensors.

``automoe.interop.torch_pipelining`` and ``automoe.interop.torch_fake`` hold the parts for these
two.

Each function says what it does, why no public function of torch does it, and which form the private
name has in the releases that were tried: 2.11, 2.13, 2.14 and 2.15.
``tests/interop/test_torch_private.py`` has a test for each that fails when a release removes the
name or changes its meaning. No file outside these three names a private part of torch.

Packages of automoe, ``automoe.storage`` included, import this module; it imports none of them.
Parts of torch that take long to import, or that only some runs need, are imported in the function
that uses them.
"""

from __future__ import annotations

import functools
import gc
import logging
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

# before ``replace_gloo``; None on builds without it
Gloo: Any = getattr(distributed_c10d, "ProcessGroupGloo", None)

# Class of tensors that wait for their collective when an operation of torch first reads them.
# Public collectives return such a wait as a ``Work`` beside the tensor, which autograd cannot
# carry. 2.11 to 2.15: ``AsyncCollectiveTensor``.
AsyncTensor = functional.AsyncCollectiveTensor


# ---- process groups ----


def process_groups() -> list[dist.ProcessGroup]:
    """Return the groups of this rank in the order in which they were made.

    torch has a public count of them (``get_pg_count``) and no list. Torch 2.11 to 2.15:
    ``_world.pg_map``, a dict by group.
    """
    return list(distributed_c10d._world.pg_map)


def group_members() -> dict[str, list[int]]:
    """Return {group name: sorted global ranks}; [] for a group that another thread is making.

    ``get_process_group_ranks`` raises for such a group: it has a name before it has ranks.
    Torch 2.11 to 2.15: ``_world.pg_names`` (name by group) and ``_world.pg_group_ranks`` (by group,
    local rank by global rank).
    """
    world = distributed_c10d._world
    return {
        name: sorted(world.pg_group_ranks.get(group, ()))
        for group, name in list(world.pg_names.items())
    }


# Makes collectives of a group fail after a timeout from now on: ``(timeout, group)``. Publicly a
# timeout can only be given when a group is made, and DeviceMesh gives its groups torch's default.
# 2.11 to 2.15.
set_group_timeout = distributed_c10d._set_pg_timeout


def gloo_timeout(group: dist.ProcessGroup) -> Callable[[], timedelta] | None:
    """Return a getter of the current timeout of a gloo group; None for a fake group.

    The options are public only when a group is made. Torch 2.11 to 2.15:
    ``group._get_backend(device).options._timeout``, which ``set_group_timeout`` changes.
    """
    options = group._get_backend(torch.device("cpu")).options
    return None if options is None else lambda: options._timeout


def gloo_group(
    store: Any,
    rank: int,
    size: int,
    devices: list[Any],
    making: timedelta,
    timeout: timedelta,
    **others: Any,
) -> Any:
    """Make a gloo group with one worker thread, which ``init_process_group`` has no argument for.

    Torch 2.11 to 2.15: ``ProcessGroupGloo._Options`` with ``_threads``, ``_timeout`` and
    ``_devices``, and the group's ``_set_default_timeout``. Releases from 2.14 on add options, such
    as ``enable_reconfigure``.

    Args:
        store: torch's store through which ranks find each other.
        rank, size: this rank's number in the group, and the number of ranks.
        devices: results of ``Gloo.create_device``.
        making: timeout of the connections that ranks make now.
        timeout: timeout of collectives.
        others: further options by name.
    """
    options = Gloo._Options()
    options._threads = 1
    options._timeout = making
    options._devices = devices
    for name, value in others.items():
        setattr(options, name, value)
    group = Gloo(store, rank, size, options)
    group._set_default_timeout(timeout)
    return group


def replace_gloo(group_class: Any) -> None:
    """Make torch use the class ``group_class`` instead of ``ProcessGroupGloo`` for gloo groups.

    ``register_backend`` cannot replace a backend that is built in. Torch 2.11 to 2.15:
    ``distributed_c10d`` looks ``ProcessGroupGloo`` up among its own names, to make groups and to
    recognise them.
    """
    if Gloo is not None:
        vars(distributed_c10d)["ProcessGroupGloo"] = group_class


def flight_records(active: bool) -> Iterator[tuple[str, bytes]]:
    """Yield (name, pickled record) of this process's flight recorders.

    Names are ``flight`` (gloo's) and ``flight_nccl`` (NCCL's, if torch has NCCL).

    Public functions write records to files only when a watchdog ends the process. Torch 2.11-2.15:
    ``torch._C._distributed_c10d._dump_fr_trace`` and ``_dump_nccl_trace``, whose three arguments are whether to
    include collectives, to include stack traces, and to leave out ended ones.

    Args:
        active: leave out collectives that have ended.
    """
    import torch._C._distributed_c10d as c10d

    for name, dump in (("flight", "_dump_fr_trace"), ("flight_nccl", "_dump_nccl_trace")):
        if hasattr(c10d, dump):
            yield name, getattr(c10d, dump)(True, False, active)


def fake_store() -> Any:
    """Return the store of torch's fake process group (one without peers); register that backend.

    The store has no public name. Torch 2.11 to 2.15:
    ``torch.testing._internal.distributed.fake_pg.FakeStore``.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


# ---- differentiable collectives ----


# Concatenates every rank's tensor along a dim, differentiable and asynchronous: ``(x, dim, group)``.
# ``torch.distributed.nn`` waits in every collective. 2.11 has the second name, at which 2.13 and
# later warn.
all_gather = (
    getattr(functional, "all_gather_single_autograd", None) or functional.all_gather_tensor_autograd
)
# Sums a tensor over ranks and returns this rank's part of a dim, in the same way:
# ``(x, "sum", dim, group)``.
reduce_scatter = (
    getattr(functional, "reduce_scatter_single_autograd", None)
    or functional.reduce_scatter_tensor_autograd
)
# Exchanges rows with every rank, in the same way: ``(x, output_splits, input_splits, group)``.
# 2.11 to 2.15.
all_to_all = functional.all_to_all_single_autograd


# ---- meshes and DTensor ----


# Returns a mesh of one axis over all axes of a mesh: ``(mesh, name)``. Collective when first called.
# FSDP over two axes beside tensor parallelism needs a mesh of the same root;
# ``DeviceMesh.from_group`` makes a new root. 2.11 to 2.15; it keeps the group it has made.
flatten_mesh = DeviceMesh._flatten
# Returns a mesh with the axes of all meshes (a list) of one root, for HSDP over a flattened axis.
# Publicly, a slice of the root takes its own axes, not flattened ones. 2.11 to 2.15.
concatenate_meshes = DeviceMesh._concatenate


def offset_of_shard(tensor: Any) -> tuple[int, ...]:
    """Return the index in the full tensor of the first element of this rank's shard of a DTensor.

    Only torch knows the rule for strided placements. Torch 2.11 to 2.15:
    ``compute_local_shape_and_global_offset`` of ``torch.distributed.tensor._utils`` returns (shape,
    offset).
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return tuple(
        compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)[
            1
        ]
    )


def is_strided_shard(placement: Any) -> bool:
    """Return True for the placement by which FSDP shards a dim that tp or etp shards already.

    Torch 2.11 to 2.15: ``placement_types._StridedShard``, which has a ``dim`` like ``Shard`` but is
    no subclass of it.
    """
    from torch.distributed.tensor.placement_types import _StridedShard

    return isinstance(placement, _StridedShard)


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full tensor of a DTensor, without torch's warning of slow gathers. Collective.

    A tensor that is no DTensor is returned as it is. Torch 2.11 to 2.15: ``torch.distributed.tensor._redistribute``
    warns that a dim which two axes shard is gathered axis by axis. The warning is about time only: the result is exact.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    if logger.level != logging.ERROR:  # to set a level clears the caches of all loggers
        logger.setLevel(logging.ERROR)
    return tensor.full_tensor()


def use_ring_attention() -> None:
    """Make SDPA over DTensors sharded along the sequence run torch's ring attention, from now on.

    The public ``context_parallel`` ends with a ``with`` block, before the backward pass that a
    pipeline runs later. Torch 2.11 to 2.15:
    ``torch.distributed.tensor.experimental._attention._enable_context_parallel_dispatcher()``.
    """
    from torch.distributed.tensor.experimental._attention import _enable_context_parallel_dispatcher

    _enable_context_parallel_dispatcher()


def cached_functions() -> list[Any]:
    """Return every ``functools`` cache of torch.distributed that the garbage collector knows.

    The names of these caches change between releases, so they are found by type.
    """
    return [
        thing
        for thing in gc.get_objects()
        if type(thing) is functools._lru_cache_wrapper
        and (getattr(thing, "__module__", None) or "").startswith("torch.distributed.")
    ]


def forget_meshes(hidden: list[Any]) -> None:
    """Clear torch.distributed's caches of meshes whose groups are gone.

    DTensor caches results by mesh. After process groups are destroyed and made again, a new mesh
    may equal an old one although its groups have other names. Torch 2.11 to 2.15:
    ``torch.distributed.tensor.debug._clear_sharding_prop_cache``,
    ``torch.distributed.tensor._redistribute.clear_redistribute_planner_cache`` and
    ``DeviceMesh._pg_registry``, which keeps the groups of meshes that FSDP has seen.

    Args:
        hidden: result of ``cached_functions`` before a ``gc.freeze``, which hides them.
    """
    from torch.distributed.tensor._redistribute import clear_redistribute_planner_cache
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    for cached in hidden + cached_functions():
        cached.cache_clear()
    clear_redistribute_planner_cache()
    gc.collect()  # modules, hooks and schedules hold meshes in cycles
    for mesh in [thing for thing in gc.get_objects() if type(thing) is DeviceMesh]:
        getattr(mesh, "_pg_registry", {}).clear()


# ---- autograd, kernels, profiler ----


def cpu_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention [B, N, S, D] on the CPU, and the log-sum-exp [B, N, S] of the scores.

    Shapes: B batch, N heads, S queries, R keys, D head dim. ``scaled_dot_product_attention`` does
    not return the log-sum-exp. For a query that sees no key the results are 0 and -inf. Torch 2.11
    to 2.15: ``aten._scaled_dot_product_flash_attention_for_cpu``.

    Args:
        q: [B, N, S, D].
        k, v: [B, N, R, D].
        mask: [B, 1, S, R] or broadcast to it, True where a query sees a key; None: all see all.
        scale: factor of the products of queries and keys.
    """
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = op(q, k, v, attn_mask=_added(mask, q), scale=scale)
    return out, lse if mask is None else lse.masked_fill(~mask.any(-1), -torch.inf)


def cpu_attention_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of q, k and v of ``cpu_attention``.

    ``out`` and ``lse`` may cover more keys than k and v; the result is then these keys'
    contribution. Torch 2.11 to 2.15: ``aten._scaled_dot_product_flash_attention_for_cpu_backward``.

    Args:
        grad: gradient of ``out``.
        out, lse: results of ``cpu_attention``.
        mask, scale: mask [B, 1, S, R] for these keys, and scale, of ``cpu_attention``.
    """
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return op(grad, q, k, v, out, lse, 0.0, False, attn_mask=_added(mask, q), scale=scale)


def _added(mask: torch.Tensor | None, q: torch.Tensor) -> torch.Tensor | None:
    """Return a bool mask as numbers to add to scores: 0 where it is True, else -inf; None for None.

    Args:
        mask: [1 or B, 1, S, R], True where one of S queries sees one of R keys.
        q: [B, N, S, D]; the result, [B, 1, S, R], has its dtype.
    """
    if mask is None:
        return None
    added = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, -torch.inf)
    return added.expand(q.shape[0], -1, -1, -1)


def innermost_saved_tensor_hooks() -> tuple[Callable, Callable] | None:
    """Return the (pack, unpack) hooks that autograd would call now, or None.

    torch.autograd.graph sets hooks but cannot read them. Torch 2.11 to 2.15:
    ``torch._C._autograd._top_saved_tensors_default_hooks(ignore_is_tracing)``.
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def storage_address(tensor: torch.Tensor) -> int:
    """Return the address of the storage object of ``tensor``, equal for tensors that share it.

    ``data_ptr`` is 0 for every storage that was freed. Torch 2.11 to 2.15:
    ``UntypedStorage._cdata``.
    """
    return tensor.untyped_storage()._cdata


# Add a number to every tensor of a list, and multiply by it, in one kernel each. Neither has a public
# name: ``torch.nn.utils.clip_grads_with_norm_`` takes parameters, and scales their whole DTensors.
# 2.11 to 2.15.
foreach_add_ = torch._foreach_add_
foreach_mul_ = torch._foreach_mul_


def foreach_norm(tensors: list[torch.Tensor], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Return the 2-norm of each tensor, summed in ``dtype``, in one kernel.

    ``torch.nn.utils.get_total_norm`` sums in the gradients' dtype. Torch 2.11 to 2.15:
    ``torch._foreach_norm``.
    """
    return torch._foreach_norm(tensors, 2, dtype=dtype)


def profiler_runs() -> bool:
    """Return True while a torch profiler records in this process.

    Callers ask first, because opening a profiler range costs time even if nothing records. Torch
    2.11 to 2.15: ``torch.autograd.profiler._is_profiler_enabled``.
    """
    return torch.autograd.profiler._is_profiler_enabled


# ---- checkpoints ----


def stored_tensor(reader: Any, stream: Any, place: Any) -> tuple[torch.Tensor, int]:
    """Return a checkpoint file's tensor on the meta device, and the file offset of its storage.

    Public methods of ``FileSystemReader`` read the numbers into new memory; with the offset the
    caller can read them straight into a parameter. Torch 2.11 to 2.15: ``_slice_file`` of the
    reader, and ``UntypedStorage._checkpoint_offset``, set by a load to the meta device.

    Args:
        reader: torch's ``FileSystemReader`` of the checkpoint.
        stream: the file, opened.
        place: the tensor's entry in ``storage_data`` of the reader.
    """
    view = reader._slice_file(stream, place)
    tensor = torch.load(view, map_location="meta", weights_only=True)
    return tensor, place.offset + tensor.untyped_storage()._checkpoint_offset


def state_dict_stager(pin_memory: bool) -> Any:
    """Return torch's stager, which copies a state dict to CPU memory and reuses that memory.

    The public ``DefaultStager`` of 2.11 serves one save and raises KeyError at the next. Torch 2.11
    to 2.15: ``torch.distributed.checkpoint._state_dict_stager.StateDictStager(pin_memory,
    share_memory)``.

    Raises:
        ImportError: torch has no stager.
        TypeError: the stager takes other arguments.
    """
    from torch.distributed.checkpoint._state_dict_stager import StateDictStager

    return StateDictStager(pin_memory=pin_memory, share_memory=False)


def cache_plans_under(planner: Any, key: str) -> None:
    """Make a ``DefaultSavePlanner`` cache its save plans under ``key`` instead of its class's name.

    Torch 2.11 to 2.15: ``SavePlanner._cached_plans_key``, set by the constructor.
    """
    assert hasattr(planner, "_cached_plans_key"), (
        "torch's save planner has no key of its cached plans"
    )
    planner._cached_plans_key = key


def forget_cached_plans(key: str) -> None:
    """Drop the save plans that are cached under ``key``.

    Torch 2.11 to 2.15: ``SavePlanner`` has several dicts, all named ``_cached_...``, from such a
    key to plans.
    """
    from torch.distributed.checkpoint.planner import SavePlanner

    for name, cache in vars(SavePlanner).items():
        if name.startswith("_cached_"):
            cache.pop(key, None)
