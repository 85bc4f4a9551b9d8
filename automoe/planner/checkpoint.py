"""What a checkpoint costs: bytes, files, seconds, and the disk that those of a run need. No torch.

A checkpoint (``automoe.checkpoint``) has every trained number with its moments and average once, whatever the mesh, and
what is frozen unless ``model.hf_path`` holds it. Each rank writes one file; a tensor that several ranks have is written
by the one that has written least. Beside the numbers stands what torch's format takes for each shard.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, inf, lcm

from automoe.config.mesh_shape import MeshShape, split_layers, stage_of_rank
from automoe.config.schema import Config
from automoe.model.adapters import as_stored, with_adapters
from automoe.model.params import Param, stage_params
from automoe.planner.step_memory import Sizes, local_numel

# Bytes of torch's format (torch 2.13): of a shard beside its numbers, and in the index; of a tensor in the index; of
# the manifest, the configuration above all, and of each file's line in it.
SHARD_BYTES, SHARD_INDEX_BYTES, TENSOR_INDEX_BYTES = 1575, 177, 147
MANIFEST_BYTES, FILE_LINE_BYTES = 4980, 145
# States of torch's, Python's and NumPy's random generators, which each rank has of its own; and of a GPU's.
GENERATOR_BYTES, GPU_GENERATOR_BYTES = (5056, 5016, 5016), 16
HISTORY_BYTES = 3 * 16 * 4  # of a matrix's scales under train.fp8=delayed
# Assumed where the cluster's file says nothing: one node to its storage, a GPU to CPU memory (PCIe 4, half of 16 lanes'
# 32 GB/s); and what one rank hashes (SHA-256) while it writes.
STORAGE_BANDWIDTH, HOST_BANDWIDTH, HASH_BANDWIDTH = 2e9, 16e9, 2e9


@dataclass(frozen=True)
class CheckpointCost:
    """Of one checkpoint, and of those of a run. Bytes and seconds."""

    bytes: float  # of all ranks' files
    rank_bytes: float  # of the largest file, where ranks with the same share out tensors evenly
    staged_bytes: float  # of CPU memory on each rank, with checkpoint.async_save
    metadata_bytes: float  # the index and the manifest
    num_tensors: int
    num_shards: int
    num_files: int
    write_seconds: float  # from the first byte to the last, at ``node_bandwidth``
    blocked_seconds: float  # that training stands still: the copy to CPU memory, or the write
    node_bandwidth: float
    assumed: bool  # that bandwidth: the cluster's file has none
    interval_seconds: float | None  # between two saves; None: none are made
    most_kept: int  # at one time; the one that is being written comes on top
    disk_bytes: float

    @property
    def blocked_share(self) -> float:
        """Of a run's time."""
        return self.blocked_seconds / self.interval_seconds if self.interval_seconds else 0.0


@dataclass(frozen=True)
class _Tensor:
    name: str
    bytes: float  # whole
    local: float  # on the first rank that has a part
    shards: int
    copies: int  # ranks that have each shard


def checkpoint_cost(config: Config, mesh: MeshShape, step_seconds: float) -> CheckpointCost:
    """Of a run of ``config`` whose steps take ``step_seconds``."""
    cluster, saves = config.cluster, config.checkpoint
    on_cpu = cluster.gpu == "cpu"
    own = (*GENERATOR_BYTES, *([] if on_cpu else [GPU_GENERATOR_BYTES]))
    mine = sum(own) + SHARD_BYTES * len(own)
    found: dict[str, _Tensor] = {}
    largest = staged = 0.0
    layers = split_layers(
        config.model.num_layers,
        mesh.pp * config.parallel.stages_per_rank,
        config.parallel.layers_per_stage,
    )
    for stages in stage_of_rank(mesh.pp, config.parallel.stages_per_rank):
        held = {one.name: one for stage in stages for one in _tensors(config, mesh, layers, stage)}
        found |= held
        largest = max(largest, sum((one.local + SHARD_BYTES) / one.copies for one in held.values()))
        staged = max(staged, sum(one.local for one in held.values()))
    shards = sum(one.shards for one in found.values()) + len(own) * mesh.world_size
    tensors = len(found) + len(own) * mesh.world_size
    total = (
        sum(one.bytes + SHARD_BYTES * one.shards for one in found.values()) + mine * mesh.world_size
    )
    files = mesh.world_size + 2
    bandwidth = cluster.storage_bandwidth or STORAGE_BANDWIDTH
    per_node = total / ceil(mesh.world_size / cluster.gpus_per_node)
    write = max(
        (largest + mine) / HASH_BANDWIDTH,
        per_node / bandwidth,
        total / (cluster.storage_limit or inf),
    )
    copy = staged / (
        cluster.memory_bandwidth or HOST_BANDWIDTH
        if on_cpu
        else cluster.host_bandwidth or HOST_BANDWIDTH
    )
    interval = min(saves.every * step_seconds or inf, 60 * saves.every_minutes or inf)
    kept = most_kept(config, interval / step_seconds)
    return CheckpointCost(
        bytes=total,
        rank_bytes=largest + mine,
        staged_bytes=staged,
        metadata_bytes=SHARD_INDEX_BYTES * shards + TENSOR_INDEX_BYTES * tensors + MANIFEST_BYTES
        + FILE_LINE_BYTES * (files - 1),
        num_tensors=tensors,
        num_shards=shards,
        num_files=files,
        write_seconds=write,
        blocked_seconds=copy if saves.async_save else write,
        node_bandwidth=bandwidth,
        assumed=not cluster.storage_bandwidth,
        interval_seconds=interval if interval < inf else None,
        most_kept=kept,
        disk_bytes=(kept + 1) * total if kept else 0.0,
    )  # fmt: skip


def most_kept(config: Config, steps_between: float) -> int:
    """Checkpoints that are there at once, at most: ``automoe.checkpoint.folder.superfluous``; of none, none."""
    saves, steps = config.checkpoint, config.train.steps
    if not saves.saves:
        return 0
    by_step = steps // lcm(saves.keep_every, saves.every or 1) if saves.keep_every else 0
    return min(
        max(saves.keep, 1) + saves.keep_best + by_step,
        max(1, ceil(steps / max(1.0, steps_between))),
    )


def _tensors(config: Config, mesh: MeshShape, layers: list[range], stage: int) -> Iterator[_Tensor]:
    """What a pipeline stage has, one rank's part and all of it."""
    model, optim, sizes = config.model, config.optim, Sizes(config, mesh)
    ranks = mesh.world_size // mesh.pp
    left_out = (
        model.hf_path is not None
        and not model.upcycle
        and bool(config.lora.rank or config.train.freeze)
    )
    for param in as_stored(with_adapters(stage_params(model, layers, stage), config), config):
        if not (param.trained or left_out):
            yield _sharded(
                f"model.{param.name}", param, mesh, param.bytes_each(sizes.weights_each(param))
            )
        elif param.trained:
            yield _sharded(f"model.{param.name}", param, mesh, sizes.weights_each(param))
            for name in ("exp_avg", "exp_avg_sq"):
                yield _sharded(
                    f"optimizer.{name}.{param.name}", param, mesh, sizes.moments_each(param)
                )
            if optim.ema_decay:
                yield _sharded(f"optimizer.ema.{param.name}", param, mesh, sizes.wide)
            yield _Tensor(f"optimizer.step.{param.name}", 4, 4, 1, ranks)
        matrix = (
            param.part in ("attention", "dense_ffn", "shared_experts", "routed_experts")
            and param.multiplies
        )
        if config.train.fp8 == "delayed" and matrix:
            yield _Tensor(f"model.{param.name}.history", HISTORY_BYTES, HISTORY_BYTES, 1, ranks)
    for layer in layers[stage]:
        if layer >= model.first_k_dense:
            buffers = {"load_fractions": 8} | (
                {"expert_bias": 4} if model.router.expert_bias else {}
            )
            for name, size in buffers.items():
                numbers = size * model.num_experts
                yield _Tensor(f"model.layers.{layer}.mlp.router.{name}", numbers, numbers, 1, ranks)


def _sharded(name: str, param: Param, mesh: MeshShape, size: int) -> _Tensor:
    ranks = mesh.world_size // mesh.pp
    if param.expert:
        shards = mesh.ep_shard * mesh.ep * (1 if param.whole_over_etp else mesh.etp)
        return _Tensor(
            name, size * param.numel, size * local_numel(param, mesh), shards, ranks // shards
        )
    cuts = 1 if param.tp_dim(mesh.tp) is None else mesh.tp
    rows = param.shape[0] // (mesh.tp if param.tp_dim(mesh.tp) == 0 else 1)
    chunk = ceil(rows / mesh.fsdp)
    # Where rows are fewer than chunks, the empty ones behind the last row are one shard more.
    filled = ceil(rows / chunk)
    shards = cuts * (filled + (filled < mesh.fsdp))
    return _Tensor(
        name,
        size * param.numel,
        size * local_numel(param, mesh),
        shards,
        ranks // (cuts * mesh.fsdp),
    )
