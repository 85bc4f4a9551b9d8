"""Ranks that torchrun or srun started.

The module recognises them from the environment, and sends rank 0's configuration to the others.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from automoe.config.compose import Arguments
from automoe.config.convert import named_variables
from automoe.config.frozen import Device, dump_config, parse_config, resolved, save_config
from automoe.config.mesh_shape import MeshShape
from automoe.config.schema import Config
from automoe.errors import AutomoeError, ConfigError, LaunchError, in_words, say
from automoe.launch import run_dir as runs
from automoe.launch.hardware import check_backends, resolve_device, start_notes, visible_gpus
from automoe.launch.prepare import check, check_data, check_num_ranks, compose
from automoe.launch.ranks import prepare_process

if TYPE_CHECKING:
    from torch.distributed import Store

_RENDEZVOUS_S = 300  # nodes of a large job start minutes apart
_AGENT_S = 10.0  # time for torchrun's store to answer
_KEY = "automoe/config"

# Ranks find each other by these variables. If they are left over in a shell, they belong to a
# launch that is gone.
RENDEZVOUS_VARIABLES = (
    "RANK LOCAL_RANK GROUP_RANK ROLE_RANK ROLE_NAME WORLD_SIZE LOCAL_WORLD_SIZE GROUP_WORLD_SIZE ROLE_WORLD_SIZE "
    "MASTER_ADDR MASTER_PORT"
).split()
_TORCHRUN_SETS = "MASTER_ADDR MASTER_PORT RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE".split()
_AGENT_PREFIXES = ("TORCHELASTIC_", "PET_")


@dataclass(frozen=True)
class ExternalLaunch:
    """Rank and rendezvous of this process, which torchrun or srun started as one of several ranks.

    Attributes:
        launcher: torchrun or srun.
        rank, world_size: rank of this process, and number of all ranks.
        local_rank, local_world_size: rank among the ranks of this node, and their number.
        master_addr, master_port: address of the store where ranks meet.
        agent_store: True if the launcher serves this store, False if rank 0 shall do so.
    """

    launcher: str  # torchrun or srun
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int
    agent_store: bool  # True if the launcher itself serves the rendezvous, False if rank 0 does

    def __post_init__(self) -> None:
        """Raise ``LaunchError`` if ranks, sizes and port contradict each other.

        They must satisfy rank < world_size, local_rank < local_world_size <= world_size,
        local_rank <= rank and 0 < master_port < 65536.
        """
        if not (
            self.rank < self.world_size
            and self.local_rank < self.local_world_size <= self.world_size
            and self.local_rank <= self.rank
            and 0 < self.master_port < 65536
        ):
            raise LaunchError(
                f"the environment says {self.launcher} rank {self.rank} of {self.world_size}, {self.local_rank} of "
                f"{self.local_world_size} on this node, port {self.master_port}: these numbers contradict each other. "
                "Start with torchrun or srun"
            )


def detect_external(env: Mapping[str, str]) -> ExternalLaunch | None:
    """Read this process's rank from ``env`` if torchrun or srun started it, else return None.

    ``TORCHELASTIC_RUN_ID`` identifies torchrun, and a job step of several tasks identifies srun.
    ``RANK`` and ``WORLD_SIZE`` alone are not enough: exported ones outlive their launch.

    Raises:
        LaunchError: a variable that torchrun always sets is missing, a variable that must be a
            number is not one, or the numbers contradict each other.
    """
    if "TORCHELASTIC_RUN_ID" in env:
        if missing := [name for name in _TORCHRUN_SETS if not env.get(name)]:
            gone = sorted(env.keys() - without_rendezvous(env))
            raise LaunchError(
                f"TORCHELASTIC_RUN_ID={env['TORCHELASTIC_RUN_ID']} is set as torchrun sets it, but not "
                f"{', '.join(missing)}: variables of a launch that is gone. Run `unset {' '.join(gone)}`, or start "
                "with torchrun"
            )
        address, *names = _TORCHRUN_SETS
        return ExternalLaunch(
            "torchrun",
            master_addr=env[address],
            agent_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            **{name.lower(): _number(env, name) for name in names},
        )
    # A batch script and `salloc` have SLURM_NTASKS too; only a job step of srun has a step id.
    if "SLURM_STEP_ID" in env and (tasks := _number(env, "SLURM_STEP_NUM_TASKS", 1)) > 1:
        # For example "8(x3),4": three nodes have 8 tasks each, and one has 4.
        spread = env.get("SLURM_STEP_TASKS_PER_NODE", str(tasks))
        per_node = []
        for each, nodes in re.findall(r"(\d+)(?:\(x(\d+)\))?", spread):
            per_node += [each] * int(nodes or 1)
        here = per_node[_number(env, "SLURM_NODEID", 0) :]
        return ExternalLaunch(
            launcher="srun",
            rank=_number(env, "SLURM_PROCID"),
            world_size=tasks,
            local_rank=_number(env, "SLURM_LOCALID"),
            local_world_size=int(here[0]) if here else 0,
            master_addr=env.get("MASTER_ADDR") or first_host(env.get("SLURM_STEP_NODELIST", "")),
            # Every task must pick the same port, and two jobs on a node should not.
            master_port=_number(env, "MASTER_PORT", 0)
            or 20000 + _number(env, "SLURM_JOB_ID") % 20000,
            agent_store=False,
        )
    return None


def _number(env: Mapping[str, str], name: str, otherwise: int | None = None) -> int:
    """Return the variable ``name`` of ``env`` as an int; ``otherwise`` if it is unset or empty.

    Raises ``LaunchError`` if it is not a number, or is missing and ``otherwise`` is None.
    """
    text = env.get(name, "")
    if not text and otherwise is not None:
        return otherwise
    if not text.isdecimal():
        raise LaunchError(
            f"{name}={text!r} is not a number, which torchrun and srun would set. Start with one of them"
        )
    return int(text)


def first_host(node_list: str) -> str:
    """Return the first host of a Slurm node list: ``gpu[03-07,12],cpu1`` -> ``gpu03``.

    Raises:
        LaunchError: the list names no host.
    """
    match = re.match(r"(?:[^,\[]|\[[0-9][^\]]*\])+", node_list)
    if match is None:
        raise LaunchError(
            f"SLURM_STEP_NODELIST={node_list!r} names no host. Set MASTER_ADDR to the first node"
        )
    return re.sub(r"\[([0-9]+)[^\]]*\]", r"\1", match[0])


def left_over(env: Mapping[str, str]) -> list[str]:
    """Return the names of variables in ``env`` by which ranks find each other, such as ``RANK``."""
    return [name for name in RENDEZVOUS_VARIABLES if name in env]


def without_rendezvous(env: Mapping[str, str]) -> dict[str, str]:
    """Return a copy of ``env`` without variables by which ranks find each other, such as ``RANK``."""
    return {
        k: v
        for k, v in env.items()
        if k not in RENDEZVOUS_VARIABLES and not k.startswith(_AGENT_PREFIXES)
    }


def check_agent(launch: ExternalLaunch) -> None:
    """Check that torchrun's store answers, before torch is imported and waits minutes for it.

    Raises:
        LaunchError: nothing listens at the store's address, so the variables belong to a launch
            that is gone.
    """
    if not launch.agent_store:
        return
    deadline = time.monotonic() + _AGENT_S
    here = launch.master_addr in ("localhost", "127.0.0.1", socket.gethostname())
    while True:
        try:
            socket.create_connection((launch.master_addr, launch.master_port), _AGENT_S).close()
            return
        except OSError as error:
            if here or time.monotonic() > deadline:
                raise LaunchError(
                    f"the environment says torchrun rank {launch.rank} of {launch.world_size}, but nothing answers at "
                    f"MASTER_ADDR:MASTER_PORT = {launch.master_addr}:{launch.master_port} ({error}): variables of a "
                    "launch that is gone. Unset TORCHELASTIC_RUN_ID, RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, "
                    "or start with torchrun"
                ) from None
        time.sleep(0.5)


def run_external(args: Arguments, launch: ExternalLaunch) -> int:
    """Run this process as one rank that torchrun or srun started; return the rank's exit status.

    If the run cannot start, every rank returns 2, and rank 0 alone prints the reason.

    Args:
        args: arguments of the command line; only rank 0 composes the configuration from them.
        launch: rank and rendezvous of this process, from ``detect_external``.

    Raises:
        LaunchError: the launcher's store does not answer, or the ranks cannot meet.
    """
    prepare_process()
    check_agent(launch)
    if launch.rank != 0:
        store = _open_store(launch)
        message = _said_by_rank_0(store)
        store.add(f"{_KEY}/read", 1)
        return 2 if message["config"] is None else _run_as_rank(message, launch, store)
    with ExitStack() as held:
        try:
            if args.multirun:
                raise ConfigError(
                    "--multirun",
                    True,
                    f"a sweep starts its own ranks for every job, and {launch.launcher} has already started them",
                    f"Run the sweep without {launch.launcher}",
                )
            config = compose(args)
            check_num_ranks(
                config, args.overrides, launch.world_size, f"{launch.launcher} started WORLD_SIZE"
            )
            shape, device = check_external(config, launch)
            run_dir = Path(config.run_dir).absolute()
            frozen = resolved(config, shape, device)
            run_dir_lost = held.enter_context(runs.locked(run_dir))
            for note in start_notes(config) + runs.check_same_run(run_dir, frozen):
                say(note)
        except (AutomoeError, OSError) as error:
            return _refuse(error, launch)
        try:
            store = _open_store(launch)
        except LaunchError as error:
            runs.start_run(run_dir)
            runs.record_failure(run_dir, runs.error_report(error, launch.rank))
            raise
        try:
            if config.train.epochs:  # the others wait meanwhile
                from automoe.data.prepare import with_steps

                frozen = with_steps(frozen)
            runs.start_run(run_dir)
            save_config(frozen, run_dir)
        except (AutomoeError, OSError) as error:
            return _refuse(error, launch, store)
        text = dump_config(frozen)
        named = named_variables(text).intersection(os.environ)
        environment = {name: os.environ[name] for name in named}
        message = {"run_dir": str(run_dir), "config": text, "environment": environment}
        store.set(_KEY, json.dumps(message))
        code = _run_as_rank(message, launch, store, run_dir_lost=run_dir_lost)
        if config.observe.report:  # a rank that fails has written the report and left before this
            runs.show_report(run_dir)
        return code


def check_external(config: Config, launch: ExternalLaunch) -> tuple[MeshShape, Device]:
    """Check ``config`` for the ranks of torchrun or srun, and return its mesh and device.

    Raises:
        ConfigError: the configuration breaks a rule, or its mesh holds another number of ranks.
        CheckpointError: the folder that the run would export to has other content.
        LaunchError: this node has more CUDA ranks than GPUs.
        BackendError: this machine lacks a backend that the configuration names.
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
    shape = check(config, launch.world_size, device)
    if shape.world_size != launch.world_size:
        raise ConfigError(
            "mesh.dp_shard",
            config.mesh.dp_shard,
            f"{started}, and the mesh ({shape.describe('default')}) holds {shape.world_size}",
            f"Start {shape.world_size} ranks, or set mesh.dp_shard=-1 to use all of them",
        )
    if device == "cuda":
        check_gpus(launch, visible_gpus())
    check_backends(config, shape, device)
    check_data(config)
    return shape, device


def check_gpus(launch: ExternalLaunch, visible: int) -> None:
    """Raise ``LaunchError`` if this node has fewer GPUs than ranks; one GPU under srun is taken for the rank's own.

    Args:
        visible: number of GPUs that this rank sees: all GPUs of the node, or only its own under
            ``srun --gpus-per-task=1``.
    """
    one_gpu = launch.launcher == "srun" and visible == 1
    if launch.local_world_size > visible and not one_gpu:
        raise LaunchError(
            f"{launch.launcher} started WORLD_SIZE={launch.world_size} ranks, {launch.local_world_size} of them on "
            f"this node, which has {visible} GPUs. Start one rank per GPU, or set launch.device=cpu"
        )


def _run_as_rank(
    message: dict[str, Any], launch: ExternalLaunch, store: Store, **options: Any
) -> int:
    from automoe.launch.worker import run_rank

    config = parse_config(message["config"], plugins=True, environment=message["environment"])
    run_dir = Path(message["run_dir"])
    # Nodes need not share a disk, so this node may not have rank 0's folder.
    (run_dir / runs.LOG_FOLDER).mkdir(parents=True, exist_ok=True)
    return run_rank(
        run_dir, launch.rank, launch.world_size, launch.local_rank, config, store, **options
    )


def _refuse(error: Exception, launch: ExternalLaunch, store: Store | None = None) -> int:
    """Print why the run cannot start, tell the other ranks that it does not, and return 2.

    Args:
        store: where the ranks meet, if it is open.
    """
    # Printed first, because telling the others imports torch.
    say(f"error: {in_words(error)}")
    store = store or _open_store(launch)
    store.set(_KEY, json.dumps({"config": None}))
    # Wait until all ranks have read the message.
    deadline = time.monotonic() + _RENDEZVOUS_S
    others = launch.world_size - 1
    while store.add(f"{_KEY}/read", 0) < others and time.monotonic() < deadline:
        time.sleep(0.1)
    return 2


def _said_by_rank_0(store: Store) -> dict[str, Any]:
    """Return rank 0's message, which may come after hours: rank 0 may have to tokenise a corpus."""
    import torch.distributed as dist

    try:
        store.wait([_KEY], timedelta(days=7))
        message: dict[str, Any] = json.loads(store.get(_KEY))
    except dist.DistError as error:
        raise LaunchError(
            f"rank 0 ended before it sent the settings ({str(error).splitlines()[0]}). Its output says why"
        ) from None
    return message


def _open_store(launch: ExternalLaunch) -> Store:
    import torch.distributed as dist

    # Torch's rendezvous and other libraries read these variables.
    os.environ.update({name: str(getattr(launch, name.lower())) for name in _TORCHRUN_SETS})
    try:
        wait = timedelta(seconds=_RENDEZVOUS_S)
        store, _, _ = next(dist.rendezvous("env://", launch.rank, launch.world_size, timeout=wait))
    except dist.DistError as error:
        raise LaunchError(
            f"rank {launch.rank} cannot meet the others at MASTER_ADDR:MASTER_PORT = "
            f"{launch.master_addr}:{launch.master_port}: {str(error).splitlines()[0]}. "
            "Set MASTER_PORT to a free port on the first node, the same for every rank"
        ) from None
    # torchrun keeps its store when it restarts ranks; no rank may read an earlier attempt's keys.
    return dist.PrefixStore(f"automoe/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
