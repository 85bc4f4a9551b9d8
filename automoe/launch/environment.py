"""Who started this process: a person, or an outer launcher (torchrun, srun) that already made the ranks."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass

from automoe.errors import LaunchError

# Variables by which ranks find each other; left over in a shell, they belong to a launch that is gone.
RENDEZVOUS_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "ROLE_RANK",
    "ROLE_NAME",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
_AGENT_PREFIXES = ("TORCHELASTIC_", "PET_")


@dataclass(frozen=True)
class ExternalLaunch:
    """This process's place among ranks that an outer launcher started."""

    launcher: str  # torchrun or srun
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int
    agent_store: bool  # the launcher itself serves the rendezvous; otherwise rank 0 does

    def variables(self) -> dict[str, str]:
        """What torch's ``env://`` rendezvous reads."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }


def detect_external(env: Mapping[str, str]) -> ExternalLaunch | None:
    """The outer launch that ``env`` describes, or None where this process is to start the ranks.

    torchrun is known by ``TORCHELASTIC_RUN_ID``, srun by a step of several tasks. Bare ``RANK`` and
    ``WORLD_SIZE`` are not enough: they outlive the shell session that exported them.

    Raises:
        LaunchError: a torchrun environment without the variables that torchrun always sets.
    """
    if "TORCHELASTIC_RUN_ID" in env:
        needed = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        missing = [name for name in needed if not env.get(name)]
        if missing:
            raise LaunchError(
                f"TORCHELASTIC_RUN_ID={env['TORCHELASTIC_RUN_ID']} is set as torchrun sets it, but not "
                f"{', '.join(missing)}: variables of a launch that is gone. {_unset_hint(env)}"
            )
        return ExternalLaunch(
            launcher="torchrun",
            rank=int(env["RANK"]),
            world_size=int(env["WORLD_SIZE"]),
            local_rank=int(env["LOCAL_RANK"]),
            local_world_size=int(env["LOCAL_WORLD_SIZE"]),
            master_addr=env["MASTER_ADDR"],
            master_port=int(env["MASTER_PORT"]),
            agent_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )
    # A batch script and `salloc` have SLURM_NTASKS too; only a job step of srun has a step id.
    if "SLURM_STEP_ID" in env and int(env.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        tasks_here = re.split(r"[^0-9]", env.get("SLURM_STEP_TASKS_PER_NODE", env["SLURM_STEP_NUM_TASKS"]))[0]
        return ExternalLaunch(
            launcher="srun",
            rank=int(env["SLURM_PROCID"]),
            world_size=int(env["SLURM_STEP_NUM_TASKS"]),
            local_rank=int(env["SLURM_LOCALID"]),
            local_world_size=int(tasks_here),
            master_addr=env.get("MASTER_ADDR") or first_host(env["SLURM_STEP_NODELIST"]),
            # Every task must pick the same port, and two jobs on a node should not.
            master_port=int(env.get("MASTER_PORT") or 20000 + int(env["SLURM_JOB_ID"]) % 20000),
            agent_store=False,
        )
    return None


def first_host(node_list: str) -> str:
    """First host of a Slurm node list: ``gpu[03-07,12],cpu1`` -> ``gpu03``."""
    match = re.match(r"([^,\[]+)(?:\[([0-9]+)[^\]]*\]([^,]*))?", node_list)
    if match is None:
        raise LaunchError(f"SLURM_STEP_NODELIST={node_list!r} names no host. Set MASTER_ADDR to the first node")
    head, number, tail = match.groups()
    return head + (number or "") + (tail or "")


def left_over(env: Mapping[str, str]) -> list[str]:
    """Rendezvous variables in ``env`` that no outer launcher of this process stands behind."""
    return [name for name in RENDEZVOUS_VARIABLES if name in env]


def clean(env: Mapping[str, str]) -> dict[str, str]:
    """``env`` without anything that ties a process to another launch's rendezvous."""
    return {k: v for k, v in env.items() if k not in RENDEZVOUS_VARIABLES and not k.startswith(_AGENT_PREFIXES)}


def check_agent(launch: ExternalLaunch, timeout_s: float = 10.0) -> None:
    """Make sure that the launcher's store answers, before torch is imported and waits for minutes.

    Raises:
        LaunchError: nothing listens there: the variables belong to a launch that is gone.
    """
    if not launch.agent_store:
        return
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((launch.master_addr, launch.master_port), timeout=timeout_s).close()
            return
        except ConnectionRefusedError as error:
            reason: OSError = error
            if time.monotonic() > deadline or launch.master_addr in (
                "localhost",
                "127.0.0.1",
                socket.gethostname(),
            ):
                break
            time.sleep(0.5)
        except OSError as error:
            reason = error
            break
    raise LaunchError(
        f"the environment says torchrun rank {launch.rank} of {launch.world_size}, but nothing answers at "
        f"MASTER_ADDR:MASTER_PORT = {launch.master_addr}:{launch.master_port} ({reason}): variables of a launch "
        "that is gone. Unset TORCHELASTIC_RUN_ID, RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or start with torchrun"
    )


def _unset_hint(env: Mapping[str, str]) -> str:
    names = [k for k in env if k in RENDEZVOUS_VARIABLES or k.startswith(_AGENT_PREFIXES)]
    return f"Run `unset {' '.join(sorted(names))}`, or start with torchrun"
