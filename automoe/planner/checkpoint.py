"""Predicted cost of checkpoints: bytes, files, seconds, and disk space of a run. No torch.

A checkpoint (``automoe.checkpoint``) stores every trained parameter once, with its moments and its
weight average, whatever the mesh. It also stores frozen parameters unless ``model.hf_path`` has
them. Each rank writes one file; the rank that has written least writes a shard that several ranks
hold. Torch's file format adds bytes per shard.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, inf, lcm

from automoe.config.mesh_shape import MeshShape, stage_layers
from automoe.config.pipeline import stages_of_ranks
from automoe.config.schema import Config, has_token_table
from automoe.model.params import Param, stage_params
from automoe.model.trainable import as_stored, with_adapters
from automoe.planner.step_memory import Sizes, gathered_numel, local_numel, rows_of

# Bytes that torch's format (2.13) adds: per shard in its file, per shard in the index, per tensor
# in the index. Then the bytes of the manifest, mostly the configuration, and of the manifest's line
# about each file.
SHARD_BYTES = 1575
SHARD_INDEX_BYTES = 177
TENSOR_INDEX_BYTES = 147
MANIFEST_BYTES = 7600
FILE_LINE_BYTES = 145
# Bytes of the states of torch's, Python's and NumPy's random generators, of which each rank stores
# its own; and of a GPU's generator.
GENERATOR_BYTES = (5056, 5016, 5016)
GPU_GENERATOR_BYTES = 16
HISTORY_BYTES = 3 * 16 * 4  # bytes of a matrix's scale history with train.fp8=delayed
# Bytes per second, assumed if the cluster file has no value: from one node to its storage; from a
# GPU to CPU memory (half of the 32 GB/s of 16 PCIe 4 lanes); and hashed (XXH3, measured on one
# core at 9.1 to 9.7 GB/s) by one rank while it writes.
STORAGE_BANDWIDTH = 2e9
HOST_BANDWIDTH = 16e9
HASH_BANDWIDTH = 9e9


@dataclass(frozen=True)
class CheckpointCost:
    """Predicted cost of one checkpoint, and of all checkpoints of a run.

    Attributes:
        bytes, rank_bytes, metadata_bytes: bytes of all ranks' files together, of the largest of
            these files, and of index and manifest.
        staged_bytes: CPU memory per rank for ``checkpoint.async_save``.
        num_tensors, num_shards, num_files: tensors, stored shards of tensors, and files.
        write_seconds: time to write everything, limited by hashing, by ``node_bandwidth``, or by
            ``cluster.storage_limit``, whichever is slowest.
        blocked_seconds: time in which a save stops training: the whole write, or with
            ``checkpoint.async_save`` the copy to CPU memory.
        node_bandwidth: bytes/s from a node to storage; ``assumed``: True if it is a default, not
            from the cluster file.
        interval_seconds: time between two saves; None: no saves.
        most_kept: largest number of complete checkpoints on disk at a time.
        disk_bytes: disk space of these, and of the one that is being written.
    """

    bytes: float  # bytes of all ranks' files together
    # Bytes of the largest file, if ranks that hold the same tensors share them evenly.
    rank_bytes: float
    staged_bytes: float  # bytes of CPU memory per rank for checkpoint.async_save
    metadata_bytes: float  # bytes of the index and the manifest
    num_tensors: int
    num_shards: int
    num_files: int
    write_seconds: float  # seconds of the whole write at ``node_bandwidth``
    # Seconds that training stands still: for the copy to CPU memory, or for the whole write.
    blocked_seconds: float
    node_bandwidth: float
    assumed: bool  # True if ``node_bandwidth`` is a default, not from the cluster file
    interval_seconds: float | None  # seconds between two saves; None: no saves
    most_kept: int  # most complete checkpoints on disk at once, without the one being written
    disk_bytes: float

    @property
    def blocked_share(self) -> float:
        """Share of a run's time in which training stands still for checkpoints."""
        return self.blocked_seconds / self.interval_seconds if self.interval_seconds else 0.0


@dataclass(frozen=True)
class _Tensor:
    name: str
    bytes: float  # bytes of the full (unsharded) tensor
    local: float  # bytes on the first rank that holds a shard
    shards: int
    copies: int  # number of ranks that hold each shard


def checkpoint_cost(config: Config, mesh: MeshShape, step_seconds: float) -> CheckpointCost:
    """Return the predicted cost of the checkpoints of a run of ``config`` on ``mesh``.

    Args:
        step_seconds: seconds of one training step.
    """
    cluster = config.cluster
    saves = config.checkpoint
    on_cpu = cluster.on_cpu
    of_rank = (*GENERATOR_BYTES, *([] if on_cpu else [GPU_GENERATOR_BYTES]))
    mine = sum(of_rank) + SHARD_BYTES * len(of_rank)
    by_name: dict[str, _Tensor] = {}
    largest = staged = 0.0
    layers = stage_layers(config, mesh)
    parallel = config.parallel
    for stages in stages_of_ranks(mesh.pp, parallel.stages_per_rank, parallel.schedule):
        held = {
            tensor.name: tensor
            for stage in stages
            for tensor in _tensors(config, mesh, layers, stage)
        }
        by_name |= held
        largest = max(
            largest, sum((tensor.local + SHARD_BYTES) / tensor.copies for tensor in held.values())
        )
        staged = max(staged, sum(tensor.local for tensor in held.values()))
    shards = sum(tensor.shards for tensor in by_name.values()) + len(of_rank) * mesh.world_size
    tensors = len(by_name) + len(of_rank) * mesh.world_size
    total = (
        sum(tensor.bytes + SHARD_BYTES * tensor.shards for tensor in by_name.values())
        + mine * mesh.world_size
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
    num_steps = most_kept(config, interval / step_seconds)
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
        most_kept=num_steps,
        disk_bytes=(num_steps + 1) * total if num_steps else 0.0,
    )  # fmt: skip


def most_kept(config: Config, steps_between: float) -> int:
    """Return the largest number of complete checkpoints on disk at a time; 0 if none is saved.

    Args:
        steps_between: training steps between two saves.
    """
    saves = config.checkpoint
    steps = config.train.steps
    if not saves.saves:
        return 0
    by_step = steps // lcm(saves.keep_every, saves.every or 1) if saves.keep_every else 0
    return min(
        max(saves.keep, 1) + saves.keep_best + by_step,
        max(1, ceil(steps / max(1.0, steps_between))),
    )


def _tensors(config: Config, mesh: MeshShape, layers: list[range], stage: int) -> Iterator[_Tensor]:
    model = config.model
    sizes = Sizes(config, mesh)
    ranks = mesh.world_size // mesh.pp
    left_out = (
        model.hf_path is not None
        and not model.upcycle
        and bool(config.lora.rank or config.train.freeze)
    )
    for param in as_stored(with_adapters(stage_params(model, layers, stage), config), config):
        num_bytes: dict[str, int] = {}
        if param.trained or not left_out:
            num_bytes["model"] = param.bytes_each(sizes.weights_each(param))
        if param.trained:
            moment = sizes.moments_each(param)
            names = (
                ("exp_avg", "exp_avg_sq") if sizes.num_moments(param) == 2 else ("momentum_buffer",)
            )
            num_bytes |= {f"optimizer.{name}": moment for name in names}
            if config.optim.ema_decay:
                num_bytes["optimizer.ema"] = sizes.wide
        for name, size in num_bytes.items():
            yield _sharded(f"{name}.{param.name}", param, mesh, size)
        if param.trained and sizes.num_moments(param) == 2:
            yield _Tensor(f"optimizer.step.{param.name}", 4, 4, 1, ranks)
        if config.train.fp8 == "delayed" and param.spec.fp8:
            yield _Tensor(f"model.{param.name}.history", HISTORY_BYTES, HISTORY_BYTES, 1, ranks)
    for layer in layers[stage]:
        if layer in model.moe_layers:
            buffers = {"load_fractions": 8 * model.num_scored_experts}
            if has_token_table(model, layer):
                buffers["tid2eid"] = 8 * model.vocab_size * model.num_experts_per_token
            elif model.router.expert_bias:
                buffers["expert_bias"] = 4 * model.num_scored_experts
            for name, numbers in buffers.items():
                yield _Tensor(f"model.layers.{layer}.mlp.router.{name}", numbers, numbers, 1, ranks)


def _sharded(name: str, param: Param, mesh: MeshShape, size: int) -> _Tensor:
    cuts = param.numel // gathered_numel(param, mesh)
    spread = shards = cuts * (mesh.ep_shard if param.expert else mesh.fsdp)
    if not param.expert:
        rows = rows_of(param, mesh)
        # With fewer rows than chunks, the empty chunks after the last row count as one more shard.
        filled = ceil(rows / ceil(rows / mesh.fsdp))
        shards = cuts * (filled + (filled < mesh.fsdp))
    local = size * local_numel(param, mesh)
    copies = mesh.world_size // mesh.pp // spread
    return _Tensor(name, size * param.numel, local, shards, copies)
