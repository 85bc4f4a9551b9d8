"""Ranks that torchrun or srun started: rank 0 composes the configuration, the others receive it."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from automoe.config.frozen import Device, dump_config, parse_config, resolved, save_config
from automoe.config.mesh_shape import DEFAULT_AXES, MeshShape
from automoe.config.schema import Config
from automoe.config.validate import validate
from automoe.errors import AutomoeError, ConfigError, LaunchError
from automoe.launch import run_dir as runs
from automoe.launch.environment import ExternalLaunch, check_agent
from automoe.launch.hardware import check_backends, cpu_note, resolve_device, visible_gpus

if TYPE_CHECKING:
    from torch.distributed import Store

_MEET_S = 300  # nodes of a large job start minutes apart
_KEY = "automoe/config"


def run_external(compose: Callable[[], Config], launch: ExternalLaunch) -> int:
    """Become one rank of an outer launch; returns the rank's exit status.

    Args:
        compose: makes the configuration; called on rank 0 alone.
        launch: this process's place, from ``detect_external``.

    Raises:
        ConfigError, LaunchError: on rank 0, what keeps the run from starting. The others exit with
            status 2 and say nothing, so that the reason is printed once.
    """
    check_agent(launch)
    if launch.rank != 0:
        store = _open_store(launch)
        message = json.loads(store.get(_KEY))
        store.add(f"{_KEY}/read", 1)
        return 2 if message["config"] is None else _become_rank(message, launch, store)
    with contextlib.ExitStack() as held:
        try:
            config = compose()
            shape, device = check_external(config, launch)
            note = cpu_note(config)
            if note is not None:
                print(note, file=sys.stderr, flush=True)
            run_dir = Path(config.run_dir).absolute()
            held.enter_context(runs.locked(run_dir))
        except AutomoeError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)  # now: torch must be imported to tell the others
            _call_off(launch)
            return 2
        runs.start_run(run_dir)
        frozen = resolved(config, shape, device)
        save_config(frozen, run_dir)
        message = {"run_dir": str(run_dir), "config": dump_config(frozen)}
        try:
            store = _open_store(launch)
        except LaunchError as error:
            runs.report_error(run_dir, error, launch.rank)
            raise
        store.set(_KEY, json.dumps(message))
        code = _become_rank(message, launch, store)
        if config.observe.report:  # a rank that fails leaves before this, and writes it as it goes
            from automoe.observe.report import write_report

            write_report(run_dir)
        return code


def check_external(config: Config, launch: ExternalLaunch) -> tuple[MeshShape, Device]:
    """The mesh and the device of a run whose number of ranks is given from outside.

    Raises:
        ConfigError: a configuration that is wrong, or a mesh that holds another number of ranks.
        LaunchError: more CUDA ranks on this node than it has GPUs.
        BackendError: a backend that this machine does not have.
    """
    if config.launch.max_restarts:
        raise ConfigError(
            "launch.max_restarts",
            config.launch.max_restarts,
            f"{launch.launcher} started the ranks, so only it can start them again",
            "Set launch.max_restarts=0 and use torchrun --max-restarts, or srun in a job that is requeued",
        )
    device = resolve_device(config)
    started = f"{launch.launcher} started WORLD_SIZE={launch.world_size} ranks"
    try:
        shape = validate(config, launch.world_size, device)
    except ConfigError as error:
        if not error.key.startswith("mesh."):
            raise
        remedy = error.remedy.replace("launch.num_ranks", "WORLD_SIZE")
        raise ConfigError(error.key, error.value, f"{started}; {error.rule}", remedy) from None
    if shape.world_size != launch.world_size:
        sizes = "*".join(str(size) for size in shape.sizes("default"))
        raise ConfigError(
            "mesh.dp_shard",
            config.mesh.dp_shard,
            f"{started}, and the mesh holds {'*'.join(DEFAULT_AXES)} = {sizes} = {shape.world_size}",
            f"Start {shape.world_size} ranks, or set mesh.dp_shard=-1 to fill those there are",
        )
    if device == "cuda":
        check_gpus(launch, visible_gpus())
    check_backends(config, shape, device)
    return shape, device


def check_gpus(launch: ExternalLaunch, visible: int) -> None:
    """Raise ``LaunchError`` where the ranks on this node do not have a GPU each.

    Args:
        visible: GPUs that this rank sees: all of the node's, or under ``srun --gpus-per-task=1`` its own
            alone (see ``automoe.launch.ranks.device_index``).
    """
    own = launch.launcher == "srun" and visible == 1
    if launch.local_world_size > visible and not own:
        raise LaunchError(
            f"{launch.launcher} started WORLD_SIZE={launch.world_size} ranks, {launch.local_world_size} of them on "
            f"this node, which has {visible} GPUs. Start one rank per GPU, or set launch.device=cpu"
        )


def _become_rank(message: dict[str, Any], launch: ExternalLaunch, store: Store) -> int:
    from automoe.launch.worker import run_rank

    config = parse_config(message["config"], plugins=True)
    run_dir = Path(message["run_dir"])
    (run_dir / runs.LOG_FOLDER).mkdir(parents=True, exist_ok=True)  # another node may not share rank 0's disk
    return run_rank(run_dir, launch.rank, launch.world_size, launch.local_rank, config, store)


def _open_store(launch: ExternalLaunch) -> Store:
    import torch.distributed as dist

    os.environ.update(launch.variables())
    try:
        rendezvous = dist.rendezvous("env://", launch.rank, launch.world_size, timeout=timedelta(seconds=_MEET_S))
        store, _, _ = next(iter(rendezvous))
    except dist.DistError as error:
        raise LaunchError(
            f"rank {launch.rank} cannot meet the others at MASTER_ADDR:MASTER_PORT = "
            f"{launch.master_addr}:{launch.master_port}: {str(error).splitlines()[0]}. "
            "Set MASTER_PORT to a free port on the first node, the same for every rank"
        ) from None
    # A restart by torchrun keeps its store: what an earlier attempt wrote there must not be read.
    return dist.PrefixStore(f"automoe/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _call_off(launch: ExternalLaunch) -> None:
    """Tell the waiting ranks that there will be no run, and stay until they have heard."""
    store = _open_store(launch)
    store.set(_KEY, json.dumps({"config": None}))
    deadline = time.monotonic() + _MEET_S
    while store.add(f"{_KEY}/read", 0) < launch.world_size - 1 and time.monotonic() < deadline:
        time.sleep(0.1)
