"""Opening of a run's data and checkpoints, checked on all ranks before the model is built."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from typing import Any

import torch.distributed as dist

from automoe.checkpoint.store import CheckpointStore
from automoe.config.schema import Config
from automoe.data.loader import Loader
from automoe.errors import DataError
from automoe.parallel.mesh import Meshes
from automoe.training.context import RunContext


def open_data(config: Config, meshes: Meshes, pairs: bool = False) -> Loader:
    """Return this rank's data loader, after checking that all ranks have the same data. Collective.

    Args:
        pairs: True if the recipe trains on pairs of answers (preference data).

    Raises:
        DataError: the ranks have different data.
    """
    loader = Loader(config, meshes.dp_rank, meshes.shape.dp, pairs=pairs)
    same_on_all_ranks(loader.fingerprint(), "the training data")
    return loader


def open_store(
    config: Config, meshes: Meshes, context: RunContext, loader: Loader
) -> CheckpointStore:
    """Return the store of the run's checkpoints, checked before weights are read. Collective.

    Raises:
        CheckpointError: the checkpoint to resume from is damaged or of another model, or saving
            cannot work.
        DataError: the data changed since that checkpoint.
    """
    store = CheckpointStore(config, meshes.shape, context.run_dir)
    store.check(loader)
    return store


def same_on_all_ranks(value: Any, subject: str) -> None:
    """Raise unless ``value`` is equal on all ranks. Collective over the CPU backend.

    Each rank sends a hash of 16 characters.

    Args:
        value: plain JSON values.
        subject: subject of the error's sentence, for example "the corpus".

    Raises:
        DataError: values differ; raised on every rank. The message lists the ranks whose value
            differs from the most frequent one, or from rank 0's value if none is more frequent.
    """
    mine = hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
    digests = [""] * dist.get_world_size()
    dist.all_gather_object(digests, mine)
    usual = Counter(digests).most_common(1)[0][0]  # on a tie: the first one
    differing = [rank for rank, digest in enumerate(digests) if digest != usual]
    if differing:
        ranks = ", ".join(map(str, differing[:16])) + ", ..." * (len(differing) > 16)
        raise DataError(
            f"{subject} is not the same on all ranks: {len(differing)} of {len(digests)} differ from the others: "
            f"rank {ranks}. Give every node the same files, or a run_dir and data on a disk that all share"
        )
