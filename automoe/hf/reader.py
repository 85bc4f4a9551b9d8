"""HuggingFace safetensors straight into the shards of a model on any mesh.

Headers are parsed once, on rank 0, where the whole checkpoint is checked against the model; every
rank then reads the ranges it owns, in file order, and ranges that several ranks of a machine need are read by one
of them and sent on. No rank ever holds a whole tensor that it owns a part of, and nothing is initialised first.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from automoe.config.schema import ModelConfig
from automoe.errors import CheckpointError
from automoe.hf.catalog import Catalog, open_catalog, without_collection
from automoe.hf.progress import reading
from automoe.hf.shards import Parts, as_parts, is_first_rank, local_shards, raise_everywhere
from automoe.hf.strips import Read, Unit, plan_strips, plan_units, rectangles
from automoe.hf.transfer import Counts, Transfer, Use
from automoe.model.decoder import Decoder
from automoe.model.init import reset_buffers


@dataclass(frozen=True)
class Loaded:
    """What a load moved, over all ranks.

    Attributes:
        bytes_read: from files.
        bytes_owned: stored bytes of all ranks' shards; more than bytes_read where ranks have copies.
        seconds: of the slowest rank.
        counts: of this rank.
    """

    path: Path
    bytes_read: int
    bytes_owned: int
    seconds: float
    counts: Counts

    def __str__(self) -> str:
        rate = self.bytes_read / max(self.seconds, 1e-9) / 1e9
        return f"{self.path}: read {self.bytes_read / 1e9:,.3g} GB in {self.seconds:,.1f} s ({rate:,.2g} GB/s)"


def load_hf(
    parts: Parts | Decoder, path: str | Path, catalog: Catalog | None = None, *, progress: bool = False
) -> Loaded:
    """Fill a model, or this rank's pipeline stages of one, from a checkpoint directory.

    Collective, unless ``catalog`` (of the same directory) is given.

    Parameters may be DTensors on either mesh and need storage (``to_empty``) but no values; buffers
    that a checkpoint does not hold get their first values. Numbers are converted to each parameter's
    dtype; block-FP8 and MXFP4, as config.json's quantization_config declares them, are dequantized on the way.

    Args:
        progress: show a bar, on rank 0 and on a terminal.

    Raises:
        CheckpointError: on every rank alike: a file missing, truncated or a Git LFS pointer, keys
            missing or unexpected, another shape or number of experts, FP8 without scales.
    """
    started = time.perf_counter()
    parts = as_parts(parts)
    for part in parts.values():
        reset_buffers(part)

    def fill(read: Read, source: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(source)

    collective = catalog is None
    counts, failure = Counts(), None
    try:
        with torch.no_grad():
            catalog = catalog or open_catalog(path, config_of(parts))
            shown = progress and is_first_rank()
            counts = visit(parts, catalog, fill, shared=collective, direct=True, progress=shown)
    except CheckpointError as error:
        failure = error
    if not collective:
        if failure is not None:
            raise failure
        return Loaded(Path(path), counts.read, counts.owned, time.perf_counter() - started, counts)
    raise_everywhere(failure)
    totals = [(counts.read, counts.owned, time.perf_counter() - started)]
    if dist.is_initialized():
        everyone: list[tuple[int, int, float]] = [totals[0]] * dist.get_world_size()
        dist.all_gather_object(everyone, totals[0])
        totals = everyone
    read, owned, seconds = zip(*totals, strict=True)
    return Loaded(Path(path), sum(read), sum(owned), max(seconds), counts)


def visit(
    parts: Parts,
    catalog: Catalog,
    use: Use,
    *,
    shared: bool = True,
    direct: bool = False,
    progress: bool = False,
) -> Counts:
    """Call ``use(read, stored range, place in the shard)`` for all that this rank owns, in file order.

    Both tensors have the same shape; the first is on the CPU in the checkpoint's dtype (float32 where that is
    quantized) and may be changed or dropped.

    Args:
        shared: collective: what several ranks of a machine need, one of them reads and sends on.
        direct: ``use`` does nothing but copy; it is then not called where bytes can go straight to their place.

    Raises:
        CheckpointError: a file that was there when its header was read cannot be read any more.
    """
    with without_collection():
        strips = plan_strips(local_shards(parts), catalog)
        mine = rectangles(strips)
    if not (shared and dist.is_initialized()):
        units = plan_units(strips, [mine], [0], 0)
        return _run(Transfer(catalog, 0, None, use, direct=direct), units, progress)
    with _machine() as (ranks, group):
        everyone = [mine] * len(ranks)
        dist.all_gather_object(everyone, mine, group=group)
        rank = dist.get_rank()
        with without_collection():
            units = plan_units(strips, everyone, ranks, rank)
        return _run(Transfer(catalog, rank, group, use, direct=direct), units, progress)


def _run(transfer: Transfer, units: list[Unit], progress: bool) -> Counts:
    with reading(transfer.catalog.folder.name, lambda: transfer.stored_bytes(units), progress) as advance:
        transfer.advance = advance
        return transfer.run(units)


@contextmanager
def _machine() -> Iterator[tuple[list[int], dist.ProcessGroup | None]]:
    """Ranks of this machine and a group of them that carries CPU tensors; None: the default one."""
    names: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(names, _machine_name())
    ranks = [rank for rank, name in enumerate(names) if name == names[dist.get_rank()]]
    if len(ranks) == len(names) and "gloo" in dist.get_backend_config():
        yield ranks, None
        return
    group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    try:
        yield ranks, group
    finally:
        dist.destroy_process_group(group)


def _machine_name() -> str:
    """Equal on ranks that see one another's loopback, different on two that do not."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return socket.gethostname() + (boot.read_text() if boot.is_file() else "")


def config_of(parts: Parts) -> ModelConfig:
    """The whole model's configuration, which every part carries."""
    return next(iter(parts.values())).config
