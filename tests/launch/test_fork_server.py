"""The process that ranks are forked from: what makes forking it safe, and that one serves one attempt after another."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from launch_command import PATIENCE_S, ROOT, TWO_RANKS, Command

from automoe.launch.fork_server import ForkServer, Job
from automoe.launch.worker import run_rank

ASKS_NO_DEVICE = """
import os, threading, torch

def refuse(*args, **kwargs):
    raise AssertionError("a device was asked for: a fork of this process could not use it")

for module, names in {torch.cuda: "is_available device_count init _lazy_init current_device get_device_properties",
                      torch.accelerator: "is_available device_count current_accelerator"}.items():
    for name in names.split():
        setattr(module, name, refuse)
from automoe.launch import fork_server
error = fork_server._import_all().error
assert error is None, error
assert threading.active_count() == 1 and len(os.listdir("/proc/self/task")) == 1
"""
RECIPE = """
import os, random
from pathlib import Path
import numpy as np

def main(config, shape, context):
    drawn = f"{random.random()} {np.random.rand()}"
    Path(context.run_dir, f"drawn{context.rank}").write_text(f"{os.getppid()} {drawn}")
    return 1.0
"""


@pytest.mark.exhaustive
def test_what_the_server_imports_starts_no_thread_and_asks_for_no_device() -> None:
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", ASKS_NO_DEVICE], env=env, check=True, timeout=PATIENCE_S)


@pytest.mark.exhaustive
def test_jobs_of_a_sweep_share_a_server_and_no_random_numbers(tmp_path: Path) -> None:
    (tmp_path / "recipe_draws.py").write_text(RECIPE)
    command = Command(tmp_path / "sweep")
    command.env["PYTHONPATH"] += f"{os.pathsep}{tmp_path}"
    code, _, err = command.run("recipe_draws", "-m", "mesh.ep=1,2", *TWO_RANKS)
    assert code == 0, err
    drawn = [path.read_text().split() for path in sorted(command.run_dir.glob("*/drawn*"))]
    servers, python_numbers, numpy_numbers = zip(*drawn, strict=True)
    assert len(drawn) == 4 and len(set(servers)) == 1
    assert len(set(python_numbers)) == len(set(numpy_numbers)) == 4
    assert command.pids() == []


def test_another_environment_or_folder_is_another_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env = dict(os.environ)
    server = ForkServer(env)
    try:
        assert server.serves(dict(env)) and not server.serves(env | {"OMP_NUM_THREADS": "3"})
        monkeypatch.chdir(tmp_path)
        assert not server.serves(env), "ranks would look for their files elsewhere"
        monkeypatch.undo()
        server.process.kill()
        server.process.wait()
        killed, job = server.process.pid, Job(run_rank, 2, {"run_dir": tmp_path}, [])
        ranks = server.start(job, stdout=1)
        assert server.process.pid != killed and [rank.poll() for rank in ranks] == [None, None]
        ranks[1].kill()  # which is not there yet
        server.process.wait()
        assert [rank.poll() for rank in ranks] == [-9, -9]
    finally:
        server.close()
