from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from launch_command import PATIENCE_S, ROOT, TORCHRUN, TWO_RANKS, Command, read_until

from automoe.config.frozen import load_config
from automoe.errors import LaunchError
from automoe.launch.run_dir import locked, read_status, start_run
from automoe.train import main
from automoe.verify.pool import RankPool

STALE = {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "1", "LOCAL_RANK": "3"}


def test_a_run_that_ends_well_leaves_status_config_and_logs_even_under_stale_variables(tmp_path: Path) -> None:
    command = Command(tmp_path / "run", env=STALE)
    code, out, err = command.run("recipe_answers", "train.steps=5", *TWO_RANKS)
    assert code == 0, err
    assert "hello from rank 0 of 2" in out and "rank 1" not in out
    assert "note: RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT in the environment" in err
    status = read_status(command.run_dir)
    assert status["state"] == "done" and status["objective"] == 15.0
    assert "hello from rank 0" in (command.run_dir / "logs" / "rank0.log").read_text()
    assert "hello from rank 1" in (command.run_dir / "logs" / "rank1.log").read_text()
    config = load_config(command.run_dir)
    assert (config.mesh.dp_shard, config.mesh.ep_shard) == (2, 2), "nothing is left to derive"
    assert config.train.steps == 5 and config.launch.num_ranks == 2
    assert command.pids() == []


def test_the_first_error_is_shown_once_and_peers_leave(command: Command) -> None:
    code, _, err = command.run("recipe_raises", *TWO_RANKS)
    assert code == 1
    assert err.count("ValueError: the seventh seal is broken") == 1
    assert "error: rank 1: ValueError" in err and "recipe_raises.py:9 in main" in err
    assert f"{command.run_dir}/logs" in err
    error = read_status(command.run_dir)["error"]
    assert (error["rank"], error["type"]) == (1, "ValueError")
    assert command.pids() == []


@pytest.mark.faults
def test_a_failure_that_no_rank_could_write_down_is_told_all_the_same(command: Command) -> None:
    code, _, err = command.run("recipe_raises_without_room", *TWO_RANKS)
    assert code == 1
    assert "ranks ended without a result: rank 0 with status 1, rank 1 with status 1; see above and logs" in err
    assert read_status(command.run_dir)["state"] == "failed"


@pytest.mark.faults
def test_a_rank_killed_by_a_signal_is_named_although_its_peers_complain_first(command: Command) -> None:
    code, _, err = command.run("recipe_killed", *TWO_RANKS)
    assert code == 1
    assert "error: rank 1: LaunchError: killed by SIGKILL" in err and "memory" in err
    assert read_status(command.run_dir)["error"]["rank"] == 1


@pytest.mark.faults
def test_a_run_without_a_result_is_not_done(command: Command) -> None:
    code, _, err = command.run("recipe_falls_back", *TWO_RANKS, "train.steps=1")
    assert code == 1 and "recipe_falls_back ended with nan, which is not a result" in err
    assert read_status(command.run_dir)["state"] == "failed"
    code, _, err = command.run("recipe_falls_back", *TWO_RANKS, "train.steps=2")
    assert code == 0, err
    status = read_status(command.run_dir)
    assert (status["state"], status["objective"], status["fell_back"]) == ("done", 2.0, ["went back to step 2"])


@pytest.mark.faults
def test_sigterm_reaches_the_ranks_and_a_second_run_is_refused_meanwhile(command: Command) -> None:
    process = command.start("recipe_until_stopped", *TWO_RANKS, "checkpoint.every=0")
    read_until(process, "stepping")
    assert command.listens_at() == {"127.0.0.1"}, "nobody outside of this machine can reach a rank"
    code, _, err = command.run("recipe_answers", *TWO_RANKS)
    assert code == 2
    assert f"run_dir={command.run_dir} is in use by another run, process {process.pid}." in err
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate()
    assert "SIGTERM: the ranks finish their step and leave without saving (checkpoint.every=0)" in err
    assert process.returncode == 128 + signal.SIGTERM
    assert read_status(command.run_dir)["state"] == "preempted"
    steps = [(command.run_dir / f"stopped{rank}").read_text() for rank in range(2)]
    assert steps[0] == steps[1], "both ranks left at the same step"
    assert command.pids() == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("processes", [2, 4], ids=["before the ranks are there", "before they listen"])
def test_a_request_to_stop_while_ranks_start_is_not_lost(command: Command, processes: int) -> None:
    process = command.start("recipe_until_stopped", *TWO_RANKS, "checkpoint.every=5")
    while len(command.pids()) < processes or not (command.run_dir / "config.yaml").exists():
        assert process.poll() is None
    time.sleep(0.2)  # until the launching process listens
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate()
    assert "SIGTERM: the ranks finish their step and save" in err
    assert process.returncode == 128 + signal.SIGTERM
    assert read_status(command.run_dir)["state"] == "preempted"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("ranks", [[0, 1], [1]], ids=["every rank", "one rank"])
def test_a_run_whose_ranks_are_asked_to_stop_was_preempted(command: Command, ranks: list[int]) -> None:
    process = command.start("recipe_until_stopped", *TWO_RANKS, "checkpoint.every=5")
    read_until(process, "stepping")
    for pid in [command.rank_pids()[rank] for rank in ranks]:
        os.kill(pid, signal.SIGTERM)
    process.communicate()
    assert process.returncode == 128 + signal.SIGTERM and read_status(command.run_dir)["state"] == "preempted"


@pytest.mark.exhaustive
def test_a_second_ctrl_c_ends_ranks_that_do_not_listen(command: Command) -> None:
    process = command.start("recipe_deaf", *TWO_RANKS)
    read_until(process, "sleeping")
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    while "SIGINT: the ranks finish their step" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate()
    assert process.returncode == 128 + signal.SIGINT
    command.wait_until_gone()


@pytest.mark.faults
def test_ranks_that_do_not_leave_within_the_grace_period_are_killed(command: Command) -> None:
    process = command.start("recipe_deaf", *TWO_RANKS, "launch.grace_s=1")
    read_until(process, "sleeping")
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM
    assert "the ranks have not left in launch.grace_s=1 s and are killed" in err
    assert read_status(command.run_dir)["state"] == "preempted"
    command.wait_until_gone()


@pytest.mark.faults
def test_sighup_saves_though_the_terminal_and_the_logs_are_gone(command: Command) -> None:
    """A terminal that is closed takes the reader of the output with it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it would be ignored, by the run too
    process = command.start("recipe_until_stopped", *TWO_RANKS)
    signal.signal(signal.SIGHUP, before)
    read_until(process, "stepping")
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    process.stderr.close()
    shutil.rmtree(command.run_dir / "logs")
    time.sleep(0.5)  # some steps that nobody reads of
    process.send_signal(signal.SIGHUP)
    assert process.wait(PATIENCE_S) == 128 + signal.SIGHUP
    assert read_status(command.run_dir)["state"] == "preempted"
    steps = [(command.run_dir / f"stopped{rank}").read_text() for rank in range(2)]
    assert steps[0] == steps[1] and int(steps[0]) > 1
    command.wait_until_gone()


@pytest.mark.faults
@pytest.mark.parametrize("closed", [">&-", "2>&-", ">/dev/full 2>/dev/full"])
def test_a_run_needs_no_standard_streams(command: Command, closed: str) -> None:
    words = [sys.executable, *command.arguments("recipe=recipe_answers", *TWO_RANKS, "train.steps=5")]
    done = subprocess.run(["sh", "-c", f'exec "$@" {closed}', "sh", *words], env=command.env, timeout=PATIENCE_S)
    assert done.returncode == 0
    assert read_status(command.run_dir)["objective"] == 15.0
    assert "hello from rank 0" in (command.run_dir / "logs" / "rank0.log").read_text()


@pytest.mark.faults
def test_a_rank_that_is_killed_while_all_are_asked_to_stop_is_a_failure(command: Command) -> None:
    process = command.start("recipe_deaf", *TWO_RANKS)
    read_until(process, "sleeping")
    process.send_signal(signal.SIGTERM)
    os.kill(command.rank_pids()[1], signal.SIGKILL)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert "killed by SIGKILL" in err and read_status(command.run_dir)["state"] == "failed"


@pytest.mark.faults
@pytest.mark.parametrize("before", [(), TORCHRUN], ids=["here", "torchrun"])
def test_a_run_directory_that_vanishes_is_an_error(command: Command, before: tuple[str, ...]) -> None:
    """Another one of the same name, made meanwhile, takes what is written; it does not hold the run."""
    ranks = () if before else ("launch.num_ranks=2",)
    code, _, err = command.run("recipe_vanishes", "mesh=fsdp", "launch.device=cpu", *ranks, before=before)
    assert code not in (0, 143)
    assert f"run_dir={command.run_dir} was removed or replaced while the run was under way" in err
    assert command.pids() == []


def test_no_rank_outlives_a_parent_that_is_killed(command: Command) -> None:
    process = command.start("recipe_deaf", *TWO_RANKS)
    read_until(process, "sleeping")
    assert len(command.pids()) == 4, "parent, fork server and two ranks"
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    command.wait_until_gone()
    # The kernel has released the lock with the process, so the directory can be used again.
    assert json.loads((command.run_dir / "status.json").read_text())["state"] == "running"
    with locked(command.run_dir):
        start_run(command.run_dir)
    assert read_status(command.run_dir)["state"] == "starting"


def test_a_fork_server_whose_launcher_died_while_it_started_leaves() -> None:
    """Adopted by another process before it could ask the kernel to end it with its parent."""
    command = [sys.executable, "-m", "automoe.launch.fork_server", str(os.getppid()), "0"]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=PATIENCE_S, capture_output=True)
    assert (done.returncode, done.stderr) == (1, b"")


def test_a_torch_that_cannot_be_imported_is_the_error_of_a_rank(command: Command, tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "torch.py").write_text("raise OSError('libmissing.so: no such file')")
    command.env["PYTHONPATH"] = f"{tmp_path / 'broken'}{os.pathsep}{command.env['PYTHONPATH']}"
    code, _, err = command.run("recipe_answers", *TWO_RANKS)
    assert code == 1
    assert err.count("OSError: libmissing.so: no such file") == 1 and "Traceback" not in err
    for rank in range(2):
        assert "torch.py" in (command.run_dir / "logs" / f"rank{rank}.log").read_text()


@pytest.mark.faults
def test_what_is_said_while_torch_is_imported_is_in_every_log(command: Command) -> None:
    command.env["PYTHONPROFILEIMPORTTIME"] = "1"
    code, _, err = command.run("recipe_answers", *TWO_RANKS)
    assert code == 0 and " torch._C" not in err
    for rank in range(2):
        log = (command.run_dir / "logs" / f"rank{rank}.log").read_text()
        assert "import time:" in log and " torch._C" in log


@pytest.mark.faults
def test_a_killed_fork_server_ends_the_attempt_and_its_ranks(command: Command) -> None:
    process = command.start("recipe_deaf", *TWO_RANKS, "launch.max_restarts=1")
    for _ in range(2):
        read_until(process, "sleeping")
        (server,) = set(command.pids()) - {process.pid, *command.rank_pids()}
        os.kill(server, signal.SIGKILL)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert "attempt 1 failed: rank 0: LaunchError: killed by SIGKILL" in err and "restart 1 of at most 1" in err
    assert "launch.max_restarts=1 is used up" in err and read_status(command.run_dir)["state"] == "failed"
    assert command.pids() == []


def test_another_system_than_linux_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert main([*TWO_RANKS, f"run_dir={tmp_path / 'run'}"]) == 2
    assert "ranks run on Linux, and this is darwin" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run").exists()
    with pytest.raises(LaunchError, match="ranks run on Linux"):
        RankPool(1)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["no_such_recipe", "recipes.no_such"])
def test_a_recipe_that_does_not_exist(run: Callable[..., tuple[int, str, str]], name: str) -> None:
    code, _, err = run(name)
    assert code == 2
    assert f"recipe={name}: no such recipe (looked from " in err and "pretrain" in err
