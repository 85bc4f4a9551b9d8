"""A run's data and checkpoints, opened and checked on all ranks before anything is built."""

from __future__ import annotations

from automoe.checkpoint.store import CheckpointStore
from automoe.config.schema import Config
from automoe.data.loader import Loader
from automoe.parallel.mesh import Meshes
from automoe.training.context import RunContext
from automoe.training.stats import same_on_all_ranks


def open_data(config: Config, meshes: Meshes, pairs: bool = False) -> Loader:
    """Return this rank's loader, after all ranks have found the same data. Collective.

    Args:
        pairs: True if the recipe compares pairs of answers.
    """
    loader = Loader(config, meshes.dp_rank, meshes.shape.dp, pairs=pairs)
    same_on_all_ranks(loader.fingerprint(), "the training data")
    return loader


def open_store(
    config: Config, meshes: Meshes, context: RunContext, loader: Loader
) -> CheckpointStore:
    """Return the store of the run's checkpoints. Collective.

    What would stop a resume or the first save is found here, before the weights are read.
    """
    store = CheckpointStore(config, meshes.shape, context.run_dir)
    store.check(loader)
    return store
