"""verl's own workers over automoe's engine: losses, norms and log-probabilities are the session's.

``make test-verl`` makes the environment of verl and names its Python in ``VERL_PYTHON``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from automoe.launch.ranks import LOOPBACK
from tests.rl.small import SMALL

ROOT = Path(__file__).parents[2]


@pytest.mark.verl
@pytest.mark.parametrize("axes", [{}, {"dp_shard": 2}, {"cp": 2}, {"dp_shard": 2, "tp": 2}], ids=str)
def test_workers_of_verl_drive_a_session(tmp_path: Path, axes: dict[str, int]) -> None:
    number = 1
    for size in axes.values():
        number *= size
    mesh = [f"mesh.{axis}={size}" for axis, size in ({"dp_shard": 1} | axes).items()]
    command = [os.environ.get("VERL_PYTHON", sys.executable), str(Path(__file__).with_name("verl_drive.py"))]
    environment = os.environ | LOOPBACK | {"PYTHONPATH": str(ROOT), "WORLD_SIZE": str(number), "OMP_NUM_THREADS": "1"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(20000 + os.getpid() % 20000)}
    started = [
        subprocess.Popen(
            [*command, str(tmp_path), *SMALL, *mesh],
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(number)
    ]
    spoken = []
    for process in started:
        output, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors[-3000:]
        spoken += [json.loads(line[5:]) for line in output.splitlines() if line.startswith("SAID ")]
    assert len(spoken) == axes.get("dp_shard", 1)
    for said in spoken:
        for kind in ("ppo", "sft"):
            assert said[f"{kind} of verl"] == pytest.approx(said[f"{kind} of the session"], rel=1e-6)
        assert max(said["gap of log_probs"], said["gap of entropy"]) < 1e-6
        assert said["moved"] and said["resumed"]
        assert said["tinker"] == pytest.approx(said["ppo of the session"][1], rel=1e-6)
        assert said["learning rate"] == 1e-3
