"""verl's own workers over automoe's engine: losses, norms and log-probabilities are the session's.

``make test-verl`` makes the environment of verl and names its Python in ``VERL_PYTHON``.
"""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from automoe.launch.ranks import LOOPBACK
from tests.rl.small import SMALL

ROOT = Path(__file__).parents[2]


def spoken(program: str, axes: dict[str, int], *words: str, dies: bool = False) -> list[dict[str, Any]]:
    """What a program of verl's Python says on a mesh, by dp rank; nothing if it is killed."""
    number = math.prod(axes.values())
    mesh = [f"mesh.{axis}={size}" for axis, size in ({"dp_shard": 1} | axes).items()]
    command = [os.environ.get("VERL_PYTHON", sys.executable), str(Path(__file__).with_name(program))]
    environment = os.environ | LOOPBACK | {"PYTHONPATH": str(ROOT), "WORLD_SIZE": str(number), "OMP_NUM_THREADS": "1"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    started = [
        subprocess.Popen(
            [*command, *words, *SMALL, *mesh],
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(number)
    ]
    said = []
    for process in started:
        output, errors = process.communicate(timeout=300)
        assert process.returncode == (-signal.SIGKILL if dies else 0), errors[-3000:]
        said += [json.loads(line[5:]) for line in output.splitlines() if line.startswith("SAID ")]
    return said


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@pytest.mark.verl
@pytest.mark.parametrize("axes", [{}, {"dp_shard": 2}, {"cp": 2}, {"dp_shard": 2, "tp": 2}], ids=str)
def test_workers_of_verl_drive_a_session(tmp_path: Path, axes: dict[str, int]) -> None:
    by_rank = spoken("verl_drive.py", axes, str(tmp_path))
    assert len(by_rank) == axes.get("dp_shard", 1)
    for said in by_rank:
        for kind in ("ppo", "sft"):
            assert said[f"{kind} of verl"] == pytest.approx(said[f"{kind} of the session"], rel=1e-6)
        assert max(said["gap of log_probs"], said["gap of entropy"]) < 1e-6
        assert said["moved"] and said["resumed"]
        assert said["tinker"] == pytest.approx(said["ppo of the session"][1], rel=1e-6)
        assert said["learning rate"] == 1e-3


@pytest.mark.verl
@pytest.mark.parametrize("axes", [{}, {"dp_shard": 2}], ids=str)
def test_the_trainer_of_verl_is_killed_and_goes_on_to_the_bit(tmp_path: Path, axes: dict[str, int]) -> None:
    """At the last step of an epoch verl's loop leaves the next epoch out: its data loader has come to its end."""
    for whole in spoken("verl_sft.py", axes, str(tmp_path / "whole"), "0"):
        assert whole["losses"] == pytest.approx(whole["of the session"], rel=1e-6)
        assert whole["folders"] == ["global_step_8", "global_step_9"]
        names = ["checkpoint.save_contents", "checkpoint.async_save", "checkpoint.save_lora_only"]
        names += ["engine.optimizer_offload", "optim.lr_scheduler_type", "to=cuda"]
        assert [message.split("=")[0] for message in whole["refused"][:5]] == names[:5]
        assert whole["refused"][5].startswith(names[5]) and "has no checkpoint" in whole["refused"][6]
    for step, left_out in ((2, 0), (3, 3), (7, 0)):
        folder = str(tmp_path / f"killed {step}")
        assert spoken("verl_sft.py", axes, folder, str(step), dies=True) == []
        for said in spoken("verl_sft.py", axes, folder, "0"):
            assert said["first"] == step and len(said["losses"]) == 9 - step - left_out
            if not left_out:
                assert said["losses"] == whole["losses"][step:] and said["weights"] == whole["weights"]
