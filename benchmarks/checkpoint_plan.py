"""Planning a checkpoint of DeepSeek-V3 at 1,024 ranks, on one core: what rank 0 does while all others wait for it.

Every rank's state is that of the flagship's configuration on its mesh, built with torch's fake process group; one rank of
each pipeline stage is built, and the others of the stage have its tensors at places of their own. Timed is what
``automoe.checkpoint`` asks of torch's planner: a save without a cache, and the first and the second with one. Pickles are
what ranks send rank 0 and get back over gloo. No tensor is written.

    python benchmarks/checkpoint_plan.py                  # writes benchmarks/results/checkpoint_plan.json
    python benchmarks/checkpoint_plan.py --quick          # a small model on 16 ranks: checks the script itself
"""

from __future__ import annotations

import argparse
import json
import pickle
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from provenance import commit, cpu_model
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from automoe.checkpoint.generators import rng_state
from automoe.checkpoint.planner import CachedPlanner
from automoe.checkpoint.train_state import TrainState
from automoe.config.compose import compose_config
from automoe.config.mesh_shape import MeshShape, resolve_mesh
from automoe.config.schema import Config
from automoe.optim.adamw import build_optimizer
from automoe.parallel.fake_world import fake_world
from automoe.parallel.mesh import build_meshes
from automoe.parallel.parallelize import build_parts

HERE = Path(__file__).resolve().parent


def state_of(config: Config, shape: MeshShape, rank: int) -> dict[str, tuple[Any, ...]]:
    """Name -> what one rank's tensor is, without its place: shape, dtype, and of a DTensor axes and placements."""
    with fake_world(rank, shape.world_size):
        parts = build_parts(config, build_meshes(shape, torch.device("cpu")))
        state = TrainState(parts, build_optimizer(parts.values(), config.optim))
        found: dict[str, tuple[Any, ...]] = {}
        for name, tensor in state.tensors().items():
            cut = isinstance(tensor, DTensor)
            properties = TensorProperties.create_from_tensor(tensor.to_local() if cut else tensor)
            mesh = tensor.device_mesh if cut else None
            placed = (mesh.mesh_dim_names, tuple(mesh.shape), tensor.placements) if mesh else (None, (), ())
            found[name] = (tensor.shape, properties, *placed)
    return found


def plan_of(rank: int, tensors: dict[str, tuple[Any, ...]], on: MeshShape) -> SavePlan:
    """The local plan of ``rank``, which has its part of ``tensors``."""
    at = on.coordinates(rank, "default") | on.coordinates(rank, "moe")
    at["fsdp"] = at["dp_shard"] * on.cp + at["cp"]
    items, places = [], {}
    for name, (shape, properties, axes, mesh, placements) in tensors.items():
        if axes is None:
            sizes, offsets, kind = shape, torch.Size([0] * len(shape)), WriteItemType.TENSOR
        else:
            key = shape, placements, axes
            if key not in places:
                found = _compute_local_shape_and_global_offset(shape, mesh, [at[axis] for axis in axes], placements)
                places[key] = tuple(map(torch.Size, found))
            (sizes, offsets), kind = places[key], WriteItemType.SHARD
        data = TensorWriteData(ChunkStorageMetadata(offsets, sizes), properties, shape)
        items.append(WriteItem(MetadataIndex(name, offsets), kind, tensor_data=data))
    for name, tensor in rng_state().items():
        data = TensorWriteData(
            ChunkStorageMetadata(torch.Size([0]), tensor.shape),
            TensorProperties.create_from_tensor(tensor),
            tensor.shape,
        )
        index = MetadataIndex(f"generators.{rank}.{name}", torch.Size([0]))
        items.append(WriteItem(index, WriteItemType.TENSOR, tensor_data=data))
    return SavePlan(items, planner_data={item.index.fqn: (item.index.fqn,) for item in items})


def timed(action: Callable[[], Any]) -> tuple[float, Any]:
    began = time.process_time()  # of one thread: other work on the machine does not count
    result = action()
    return round(time.process_time() - began, 3), result


def save(planner: DefaultSavePlanner, plans: list[SavePlan]) -> tuple[dict[str, float], list[SavePlan], Metadata]:
    """CPU seconds and bytes of rank 0's part: read what ranks sent, plan, send each its plan."""
    sent = [pickle.dumps(plan) for plan in plans]
    read_s, plans = timed(lambda: [pickle.loads(one) for one in sent])
    plan_s, (answers, metadata) = timed(lambda: planner.create_global_plan(plans))
    write_s, back = timed(lambda: [pickle.dumps(answer) for answer in answers])
    facts = {"seconds": round(read_s + plan_s + write_s, 3), "plan_seconds": plan_s, "pickle_seconds": read_s + write_s}
    facts |= {"bytes_to_rank_0": sum(map(len, sent)), "bytes_from_rank_0": sum(map(len, back))}
    return facts, answers, metadata


def index_bytes(plans: list[SavePlan], metadata: Metadata) -> int:
    """Size of ``.metadata``, with a place in a file for each item."""
    places = {
        item.index: _StorageInfo(f"__{rank}_0.distcp", 0, 1 << 20)
        for rank, plan in enumerate(plans)
        for item in plan.items
    }
    metadata.storage_data = places
    return len(pickle.dumps(metadata))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, help="where the JSON goes (default: results, and nowhere with --quick)")
    args = parser.parse_args()
    small = ["model=small_dsv3", "mesh.pp=2", "mesh.dp_shard=8", "mesh.ep=4", "mesh.ep_shard=-1"]
    name, overrides = ("config", small) if args.quick else ("dsv3_671b", ["data=benchmark"])
    config = compose_config(name, overrides)
    shape = resolve_mesh(config.mesh, None)
    per_stage = shape.world_size // shape.pp
    stages = [state_of(config, shape, stage * per_stage) for stage in range(shape.pp)]
    local_s, plans = timed(
        lambda: [plan_of(rank, stages[rank // per_stage], shape) for rank in range(shape.world_size)]
    )
    first, answers, metadata = save(DefaultSavePlanner(), plans)
    cached = CachedPlanner("benchmark")
    cached_first, _, _ = save(cached, plans)
    unchanged = [SavePlan([], usable=False) for _ in plans]  # what ranks send whose plan is the one of the save before
    cached_again, _, cached_metadata = save(cached, unchanged)
    assert cached_metadata.state_dict_metadata == metadata.state_dict_metadata
    written = [plan for plan in answers if plan.items]
    result = {
        "commit": commit(),
        "cpu": cpu_model(),
        "torch": version("torch"),
        "config": name,
        "ranks": shape.world_size,
        "mesh": {view: shape.describe(view) for view in ("default", "moe")},
        "tensors": len(metadata.state_dict_metadata),
        "items_planned": sum(len(plan.items) for plan in plans),
        "items_written": sum(len(plan.items) for plan in answers),
        "files": len(written) + 2,  # the index and the manifest
        "index_bytes": index_bytes(answers, metadata),
        "local_plans_seconds_per_rank": round(local_s / shape.world_size, 5),
        "every_save_without_cache": first,
        "first_save_cached": cached_first,
        "second_save_cached": cached_again,
    }
    print(json.dumps(result, indent=1))
    if args.out or not args.quick:
        out = args.out or HERE / "results" / "checkpoint_plan.json"
        out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
