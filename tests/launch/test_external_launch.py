from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from launch_command import PATIENCE_S, TORCHRUN, Command, read_until

from automoe.config.frozen import load_config
from automoe.errors import LaunchError
from automoe.launch import external
from automoe.launch.external import check_agent, detect_external, first_host, left_over, without_rendezvous
from automoe.launch.run_dir import read_status
from tests.support.chat import a_row_each

AGENT = {
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
SRUN = {
    "SLURM_JOB_ID": "12345",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2",
    "SLURM_STEP_NODELIST": "localhost",
}


def test_rank_0_composes_and_every_rank_runs_the_same(command: Command) -> None:
    data = a_row_each(command.run_dir.parent / "chats.jsonl", 28)
    length = ("train.epochs=4", "train.val_every=0")
    overrides = ("mesh=fsdp", *data, *length, "launch.device=cpu", "observe.report=true")
    code, out, err = command.run("recipe_answers", *overrides, before=TORCHRUN)
    assert code == 0, err
    assert "hello from rank 0 of 2" in out
    assert read_status(command.run_dir)["objective"] == 21.0, "7 steps of 16 rows, 3 times each"
    assert load_config(command.run_dir).mesh.dp_shard == 2, "the derived axis follows WORLD_SIZE"
    assert "hello from rank 1" in (command.run_dir / "logs" / "rank1.log").read_text()
    assert (command.run_dir / "plots" / "mesh.png").exists()
    assert '<span class="badge done">done</span>' in (command.run_dir / "report.html").read_text()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (("mesh=fsdp", "mesh.dp_shard=4"), "torchrun started WORLD_SIZE=2 ranks, and the mesh (dp_shard4) holds 4"),
        pytest.param(("-m", "mesh.ep=1,2"), "a sweep starts its own ranks for every job, and torchrun has already"),
        pytest.param(("launch.max_restarts=1",), "torchrun started the ranks, so only it can start them again"),
    ],
    ids=["wrong world size", "multirun", "restarts"],
)
def test_torchrun_is_refused_once_with_the_reason(command: Command, overrides: tuple[str, ...], says: str) -> None:
    code, _, err = command.run("recipe_answers", *overrides, before=TORCHRUN)
    assert code != 0
    assert err.count(says) == 1
    assert not command.run_dir.exists(), "refused before anything was written"
    assert command.pids() == []


@pytest.mark.faults
def test_an_error_under_torchrun_reaches_the_terminal_and_the_status(command: Command) -> None:
    code, _, err = command.run("recipe_raises", "mesh=fsdp", "launch.device=cpu", before=TORCHRUN)
    assert code != 0
    assert err.count("error: rank 1: ValueError: the seventh seal is broken") == 1
    assert read_status(command.run_dir)["error"]["rank"] == 1
    assert not (command.run_dir / "report.html").exists(), "none is wanted"


def free_port() -> int:
    """Below those that the system gives to whoever asks for any: tests that run beside this one do so all the time."""
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            port = random.randrange(20_000, 30_000)
            probe.bind(("", port))
            return port


@pytest.mark.exhaustive
def test_srun_tasks_meet_at_rank_0(command: Command) -> None:
    port = str(free_port())
    tasks: list[subprocess.Popen[str]] = []
    for rank in range(2):
        command.env |= SRUN | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "MASTER_PORT": port}
        tasks.append(command.start("recipe_answers", "mesh=fsdp", "train.steps=2", "launch.device=cpu"))
    errors = [task.communicate(timeout=PATIENCE_S)[1] for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], errors
    assert read_status(command.run_dir)["objective"] == 6.0
    assert not (command.run_dir / "report.html").exists(), "none is wanted"


HOSTS = """
import sys, time
from datetime import timedelta
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(2.5)
store.set(sys.argv[1], '{"config": null}')
sys.stdin.read()
"""


def test_ranks_wait_while_rank_0_tokenises_and_see_it_end() -> None:
    """For longer than they would wait for one another; the store is rank 0's own under srun."""
    from torch.distributed import TCPStore

    for key in (external._KEY, "another"):
        with subprocess.Popen(
            [sys.executable, "-c", HOSTS, key], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as host:
            assert host.stdout is not None
            store = TCPStore("127.0.0.1", int(host.stdout.readline()), timeout=timedelta(seconds=1))
            if key == external._KEY:
                assert external._said_by_rank_0(store) == {"config": None}
            host.kill()
        if key != external._KEY:
            with pytest.raises(LaunchError, match="rank 0 ended before it sent the settings"):
                external._said_by_rank_0(store)


@pytest.mark.exhaustive
@pytest.mark.parametrize("length", [(), ("train.epochs=4", "train.val_every=0")])
def test_a_port_that_is_taken_is_named(length: tuple[str, ...], tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("", 0))
        holder.listen()
        port = holder.getsockname()[1]
        task = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "MASTER_PORT": str(port)}
        command = Command(tmp_path / "run", env=SRUN | task)
        code, _, err = command.run("recipe_answers", "mesh=fsdp", "launch.device=cpu", *length)
    assert code == 2 and err.count("error: ") == 1
    assert f"MASTER_ADDR:MASTER_PORT = localhost:{port}" in err and "address already in use" in err
    assert "Set MASTER_PORT to a free port" in err
    assert read_status(command.run_dir)["state"] == "failed"


def test_variables_of_a_torchrun_that_is_gone(tmp_path: Path) -> None:
    port = free_port()
    command = Command(tmp_path / "run", env=AGENT | {"MASTER_PORT": str(port)})
    code, _, err = command.run("recipe_answers")
    assert code == 2
    assert "torchrun rank 1 of 4" in err and f"nothing answers at MASTER_ADDR:MASTER_PORT = 127.0.0.1:{port}" in err
    assert "Unset TORCHELASTIC_RUN_ID" in err


def test_detection() -> None:
    launch = detect_external(AGENT)
    assert launch is not None
    assert (launch.launcher, launch.rank, launch.world_size, launch.local_rank) == ("torchrun", 1, 4, 1)
    assert detect_external({k: v for k, v in AGENT.items() if "TORCHELASTIC" not in k}) is None
    task = detect_external(SRUN | {"SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_STEP_NODELIST": "a[07-09],b"})
    assert task is not None
    assert (task.launcher, task.rank, task.world_size, task.master_addr) == ("srun", 1, 2, "a07")
    batch_script = {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}
    assert detect_external(batch_script) is None, "a batch script is not a task"
    assert detect_external(SRUN | {"SLURM_STEP_NUM_TASKS": "1"}) is None, "an interactive shell under srun"


def test_tasks_of_a_node_are_those_of_its_own_and_not_of_the_first() -> None:
    places = {"SLURM_STEP_NUM_TASKS": "9", "SLURM_STEP_TASKS_PER_NODE": "1(x2),3,4"}
    for node, (rank, local, tasks) in enumerate([(0, 0, 1), (1, 0, 1), (4, 2, 3), (8, 3, 4)]):
        task = {"SLURM_NODEID": str(node), "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(local)}
        launch = detect_external(SRUN | places | task)
        assert launch is not None and launch.local_world_size == tasks


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (AGENT | {"RANK": "one"}, "RANK='one' is not a number"),
        (AGENT | {"RANK": "4"}, "torchrun rank 4 of 4"),
        (AGENT | {"LOCAL_RANK": "2"}, "2 of 2 on this node"),
        (AGENT | {"MASTER_PORT": "65536"}, "port 65536"),
        (SRUN | {"SLURM_LOCALID": "0"}, "SLURM_PROCID='' is not a number"),
        (SRUN | {"SLURM_PROCID": "2", "SLURM_LOCALID": "0"}, "srun rank 2 of 2"),
        (SRUN | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "4"}, "0 of 4 on this node"),
        (SRUN | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NODELIST": ""}, "names no host"),
        (SRUN | {"SLURM_STEP_NUM_TASKS": "two"}, "SLURM_STEP_NUM_TASKS='two' is not a number"),
    ],
)
def test_numbers_of_no_launch_are_refused(wrong: dict[str, str], says: str) -> None:
    with pytest.raises(LaunchError, match=re.escape(says)):
        detect_external(wrong)


def test_half_a_torchrun_environment_is_refused_with_what_to_unset() -> None:
    with pytest.raises(LaunchError, match="but not RANK, .*unset .*MASTER_PORT TORCHELASTIC_RUN_ID"):
        detect_external({"TORCHELASTIC_RUN_ID": "x", "MASTER_PORT": "1", "MASTER_ADDR": "h"})


def test_an_agent_that_answers_passes() -> None:
    with socket.socket() as agent:
        agent.bind(("127.0.0.1", 0))
        agent.listen()
        launch = detect_external(AGENT | {"MASTER_PORT": str(agent.getsockname()[1])})
        assert launch is not None
        check_agent(launch)


def test_ranks_inherit_no_other_launch() -> None:
    env = AGENT | {"HOME": "/root", "PET_RDZV_ID": "1"}
    assert without_rendezvous(env) == {"HOME": "/root"}
    assert left_over({"RANK": "0", "PATH": "/bin"}) == ["RANK"]


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("n1", "n1"), ("gpu[03-07,12],cpu1", "gpu03"), ("a,b", "a"), ("rack[1-2]-ib", "rack1-ib"), ("x-y[9]", "x-y9")]
    + [("rack[1-2]node[3-4],a", "rack1node3")],
)
def test_first_host_of_a_slurm_list(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


@pytest.mark.exhaustive
def test_a_stop_that_reaches_another_rank_is_everybodys(command: Command) -> None:
    process = command.start("recipe_until_stopped", "mesh=fsdp", "launch.device=cpu", before=TORCHRUN)
    read_until(process, "stepping")
    os.kill(int((command.run_dir / "logs" / "rank1.pid").read_text()), signal.SIGTERM)
    process.communicate(timeout=PATIENCE_S)
    assert read_status(command.run_dir)["state"] == "preempted", "and not done, as rank 0 alone would say"
    steps = {(command.run_dir / f"stopped{rank}").read_text() for rank in (0, 1)}
    assert len(steps) == 1
