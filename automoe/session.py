"""Training sessions for reinforcement learning, opened from a script's own process.

    from automoe.session import Sample, losses, open_session

The script runs as one process or as the ranks of torchrun. Recipes, whose ranks automoe starts,
call ``Session.open`` in their ``main`` instead.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from copy import copy
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from automoe.checkpoint.store import CheckpointStore
from automoe.comm.agreement import Ranks
from automoe.config.compose import DEFAULT_PRIMARY
from automoe.config.frozen import save_first_config
from automoe.config.mesh_shape import MeshShape
from automoe.config.schema import Config
from automoe.errors import AutomoeError, CheckpointError, LaunchError
from automoe.launch.external import detect_external
from automoe.launch.from_python import composed
from automoe.launch.hardware import resolve_device
from automoe.launch.prepare import check
from automoe.launch.ranks import close_ranks, init_ranks
from automoe.launch.run_dir import locked
from automoe.rl import losses as losses
from automoe.rl.batch import Sample as Sample
from automoe.rl.session import Counts as Counts
from automoe.rl.session import LogProbs as LogProbs
from automoe.rl.session import Outcome as Outcome
from automoe.rl.session import Session as Session
from automoe.storage.files import set_aside
from automoe.training.context import RunContext

__all__ = ["Counts", "LogProbs", "Outcome", "Sample", "Session", "close", "losses", "open_session"]
DATA = "benchmark"  # samples come from the caller
_opened = False  # True if this module opened the process group
_locks: dict[Path, ExitStack] = {}  # by the run directories of this process's sessions


def open_session(
    config: Sequence[str] | Mapping[str, object] | Config = (),
    *,
    config_name: str = DEFAULT_PRIMARY,
    config_dir: str | os.PathLike[str] | None = None,
    auxiliary_losses: bool = False,
) -> Session:
    """Open a training session in this process, alone or as one of several ranks. Collective.

    Ranks of torchrun and srun are recognised by their environment, and an existing process group is
    used. If there is none, one is made, which ``close`` destroys. ``run_dir`` is made, and locked
    against other processes until ``close``; checkpoints come with ``config.yaml`` for the commands.

    Args:
        config: a list of overrides such as ``"mesh.ep=4"``, a dictionary such as ``{"mesh.ep": 4}``
            (both begin from ``data=benchmark``), or a whole ``Config``.
        config_name: primary configuration file to which overrides apply.
        config_dir: further directory of configuration files, besides the built-in one.
        auxiliary_losses: False turns off balance losses, updates of expert biases and losses of
            modules for multi-token prediction.

    Raises:
        ConfigError: a setting is invalid.
        LaunchError: the mesh needs another number of ranks than there are, an existing process
            group has no CPU backend, or another process uses ``run_dir``.
    """
    rank, world_size, local_rank = 0, 1, 0
    if (place := detect_external(os.environ)) is not None:
        rank, world_size, local_rank = place.rank, place.world_size, place.local_rank
    elif dist.is_initialized():
        rank, world_size = dist.get_rank(), dist.get_world_size()
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
    checked, shape = resolved(config, world_size, config_name, config_dir)
    run_dir = Path(checked.run_dir).absolute()
    run_dir.mkdir(parents=True, exist_ok=True)
    device = checked.launch.device
    if dist.is_initialized():
        if "cpu:" not in (backends := dist.get_backend_config()):
            raise LaunchError(
                f"the process group has {backends} alone, and a session also sends tensors of the CPU (progress of saves, "
                'errors). Open it with init_process_group("cpu:gloo,cuda:nccl")'
            )
        on = torch.device(device, torch.cuda.current_device() if device == "cuda" else None)
    else:
        store = None if world_size > 1 else dist.HashStore()
        on = init_ranks(checked.launch, rank, world_size, local_rank, store)
        global _opened
        _opened = True
    if (refused := Ranks().lead(lambda: _lock(run_dir), again=False)) is not None:
        raise refused
    context = RunContext(rank, world_size, local_rank, on, run_dir)
    return Session.open(checked, shape, context, auxiliary_losses)


def resolved(
    config: Sequence[str] | Mapping[str, object] | Config,
    world_size: int,
    config_name: str = DEFAULT_PRIMARY,
    config_dir: str | os.PathLike[str] | None = None,
) -> tuple[Config, MeshShape]:
    """Return a session's checked configuration, with the device filled in, and its mesh.

    Args:
        config: a list of overrides (``"mesh.ep=4"``) or a dictionary, either applied after
            ``data=benchmark``; or a whole ``Config``.
        world_size: number of ranks.
        config_name: primary configuration file to which overrides apply.
        config_dir: further directory of configuration files, besides the built-in one.

    Raises:
        ConfigError: a setting is invalid.
        LaunchError: the mesh needs another number of ranks.
    """
    if isinstance(config, Mapping):
        config = {"data": DATA, **config}
    elif not isinstance(config, Config):
        config = [f"data={DATA}", *map(str, config)]
    checked = composed(config, config_name, config_dir)
    device = resolve_device(checked)
    shape = check(checked, world_size, device)
    if shape.world_size != world_size:
        raise LaunchError(
            f"the mesh holds {shape.world_size} ranks, and this session has {world_size}. Start the script under "
            f"torchrun with {shape.world_size} processes, or set another mesh"
        )
    return replace(checked, launch=replace(checked.launch, device=device)), shape


def store_at(session: Session, folder: Path) -> CheckpointStore:
    """Return a copy of the session's checkpoint store whose run directory is ``folder``.

    This function first waits until a background save of the session has ended.
    """
    session.store.poll(wait=True)  # the copy would report the same background save again
    store = copy(session.store)
    store.forget_newest()
    store.run_dir = folder.absolute()
    store.folder = store.run_dir / session.store.folder.name
    # resume=never would set the folder's checkpoints aside
    checkpoint = replace(store.config.checkpoint, resume="auto")
    store.config = replace(store.config, checkpoint=checkpoint)
    return store


def save_at(session: Session, folder: Path) -> None:
    """Save a checkpoint of the session in ``folder`` instead of the run directory. Collective.

    If ``folder`` already has a checkpoint of this step, the old one is renamed to ``diverged-...``.
    """
    store, step = store_at(session, folder), f"step-{session.state.step}"

    def prepare() -> None:
        set_aside(store.folder / step, f"diverged-{step}")
        save_first_config(session.store.config, store.run_dir)

    store.ranks.lead(prepare, again=False)
    store.save(session.state, stopping=True)


def load_from(session: Session, folder: Path) -> None:
    """Load the newest checkpoint in ``folder`` into the session; clear its gradients. Collective.

    Raises:
        CheckpointError: ``folder`` has no checkpoint.
    """
    if store_at(session, folder).load_latest(session.state) is None:
        raise CheckpointError(f"{folder} has no checkpoint of a session. Correct the path")
    session.zero_grad()


def _lock(run_dir: Path) -> AutomoeError | None:
    """Keep other processes from ``run_dir`` until ``close`` or the end of this one; return why it fails."""
    if run_dir not in _locks:
        held = ExitStack()
        try:
            held.enter_context(locked(run_dir))
        except AutomoeError as error:
            return error
        _locks[run_dir] = held
    return None


def close() -> None:
    """Destroy the process group that ``open_session`` made, and release the run directories.

    Every rank calls this at the end. An existing process group that the session only used is left
    alone.
    """
    global _opened
    while _locks:
        _locks.popitem()[1].close()
    if _opened:
        _opened = False
        close_ranks()
