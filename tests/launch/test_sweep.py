from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from launch_command import PATIENCE_S, QUICK, TWO_RANKS, Command, TrainCommand, read_until
from omegaconf import OmegaConf

from automoe.config.compose import check_overrides, check_swept_values, register_base
from automoe.config.mesh_shape import MeshShape
from automoe.config.schema import Config, MeshConfig
from automoe.config.shipped import shipped_folder
from automoe.errors import ConfigError
from automoe.launch import sweep
from automoe.launch.run_dir import locked, read_status
from automoe.launch.sweep import check_alone, side_by_side

Run = Callable[..., tuple[int, str, str]]
ONE_RANK = ("mesh=fsdp", "launch.num_ranks=1", "launch.device=cpu")


def journal(command: TrainCommand) -> list[dict[str, Any]]:
    return json.loads((command.run_dir / "sweep.json").read_text())["jobs"]


@pytest.mark.exhaustive
def test_a_sweep_skips_impossible_shapes_tabulates_and_resumes(command: Command, run: Run, tmp_path: Path) -> None:
    own = tmp_path / "it's mine"  # a primary of a shipped name, and an option of a shipped group
    (own / "optim").mkdir(parents=True)
    (own / "config.yaml").write_text(
        "defaults: [base, model: small_dsv3, data: stdlib, mesh: fsdp, optim: adamw, checkpoint: none, _self_]\ntrain: {seed: 7}"
    )
    (own / "optim" / "house.yaml").write_text("lr: 0.5")
    sweep = ("-m", "--config-dir", str(own), "mesh.ep=1,2", *ONE_RANK, "optim=house", "train.steps=2,3")
    code, out, err = run("recipe_answers", *sweep)
    assert code == 0, err
    jobs = journal(command)
    assert [(job["name"], job["state"], job["objective"]) for job in jobs] == [
        ("ep1-steps2", "done", 2.0),
        ("ep1-steps3", "done", 3.0),
        ("ep2-steps2", "skipped", None),
        ("ep2-steps3", "skipped", None),
    ]
    assert "mesh.ep=2" in jobs[2]["reason"] and "1*1*1*1 = 1 must equal" in jobs[2]["reason"]
    table = out[out.index("tokens/s") :]
    assert "ep=1 steps=3  done        3.0000" in table and "ep=2 steps=2 skipped: mesh.ep=2" in table
    assert max(map(len, table.partition("\n\n")[0].splitlines())) <= 80
    ran = OmegaConf.load(command.run_dir / "ep1-steps2" / "config.yaml")
    assert (ran.train.seed, ran.optim.lr) == (7, 0.5)
    assert not (command.run_dir / "ep2-steps2").exists()

    (command.run_dir / "jobs" / "ep1-steps3.json").write_text("{")
    code, out, err = run("recipe_answers", *sweep, "launch.timeout_s=500")
    assert code == 0, err
    assert out.count("done in an earlier run of this sweep") == 2
    assert "hello from rank" not in out, "nothing ran again"
    assert [job["objective"] for job in journal(command)] == [2.0, 3.0, None, None]

    # What was not asked for then was not made then.
    path = command.run_dir / "ep1-steps2" / "config.yaml"
    path.write_text(path.read_text().replace("export_hf: true", "export_hf: false"))
    code, out, err = run("recipe_answers", *sweep)
    assert code == 0, err
    assert out.count("done in an earlier run of this sweep") == 1 and "hello from rank" in out

    # Another sweep would show the first one's losses under its own values.
    code, out, err = run("recipe_answers", "-m", *sweep[1:-1], "train.steps=7,8")
    assert code == 2 and "job 0" not in out
    assert "it has train.steps=2,3 where this has train.steps=7,8" in err
    code, _, err = run("recipe_answers", *ONE_RANK)
    assert code == 2 and "holds a sweep" in err


def test_a_sweep_in_which_no_job_can_run_fails(command: Command, run: Run) -> None:
    code, _, err = run("recipe_answers", "-m", "mesh.ep=2,3", *ONE_RANK)
    assert code == 2
    assert "error: none of the 2 jobs could run" in err
    assert [job["state"] for job in journal(command)] == ["skipped", "skipped"]


@pytest.mark.exhaustive
def test_a_job_that_a_person_must_mend_is_not_skipped(command: Command, run: Run) -> None:
    code, _, err = run("recipe_answers", "-m", *ONE_RANK, "data.kind=text", "data.path=gone,away")
    assert code == 1 and "data.path=gone: nothing there" in err
    assert [job["state"] for job in journal(command)] == ["failed", "failed"]


@pytest.mark.exhaustive
def test_a_failing_job_does_not_end_the_sweep(command: Command, run: Run) -> None:
    sweep = ("-m", "mesh=fsdp", "launch.num_ranks=1,2", "launch.device=cpu")
    code, out, err = run("recipe_raises", *sweep)
    assert code == 1
    jobs = journal(command)
    assert [job["state"] for job in jobs] == ["done", "failed"], "rank 1 raises where there is one"
    assert "the seventh seal is broken" in jobs[1]["reason"]


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["mesh.epp=1,2"], "mesh.epp=1,2: unknown key"),
        (["mesh.ep=1,two"], "mesh.ep=two: expected a whole number, got str 'two'"),
        (["model=small_mixtral,small_mixtrall"], "model=small_mixtrall: no such option"),
        (["mesh.ep=1,2", "train.steps=many"], "train.steps=many: expected a whole number"),
        (["optim.lr=1,2", "hydra.sweeper.params.mesh.ep='choice(1,two)'"], "mesh.ep=two: expected a whole number"),
        (["optim.lr=1e-3,-1"], "optim.lr=-1.0: must be at least 0"),
        (["run_dir=a,b"], "a sweep has one directory"),
    ],
)
def test_what_no_job_could_use_is_an_error_before_the_first_job(
    command: Command, run: Run, overrides: list[str], says: str
) -> None:
    code, out, err = run("recipe_answers", "-m", *overrides)
    assert code == 2
    assert says in err
    assert "job 0" not in out and not command.run_dir.exists()


def test_a_directory_with_a_run_or_with_another_process_is_refused(command: Command, run: Run) -> None:
    sweep = ("-m", "mesh.ep=1,2", *ONE_RANK)
    with locked(command.run_dir):
        code, _, err = run("recipe_answers", *sweep)
    assert code == 2 and f"in use by another run, process {os.getpid()}" in err
    (command.run_dir / "config.yaml").write_text("")
    code, _, err = run("recipe_answers", *sweep)
    assert code == 2 and "holds a run (config.yaml)" in err


@pytest.mark.faults
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_sweep_goes_on(command: Command, tmp_path: Path, signum: int) -> None:
    (tmp_path / "recipe_once.py").write_text(f"""
import time
from pathlib import Path
def main(config, shape, context):
    print("stepping", flush=True)
    stepping = config.train.steps == 3 and not Path({str(tmp_path / "go")!r}).exists()
    while stepping and not context.any_rank_stops():
        time.sleep(0.02)
    context.preempted = stepping
    return float(config.train.steps)
""")
    recipe, sweep = str(tmp_path / "recipe_once.py"), ("-m", "train.steps=2,3,4", *ONE_RANK)
    process = command.start(recipe, *sweep)
    read_until(process, "job 1: ")
    read_until(process, "stepping")
    process.send_signal(signum)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 128 + signum and "the same command goes on" in err
    assert [(job["name"], job["state"]) for job in journal(command)] == [("steps2", "done"), ("steps3", "preempted")]
    (tmp_path / "go").touch()
    code, out, err = command.run(recipe, *sweep)
    assert code == 0, err
    assert out.count("done in an earlier run") == 1
    assert [(job["objective"], job["state"]) for job in journal(command)] == [(float(n), "done") for n in (2, 3, 4)]


SHAPES = "fsdp ep2 pp2_ep2 cp2_ep4 tuned_dsv3_671b tp_ep_dp fsdp_ep hsdp2_ep2".split()


@pytest.mark.faults
def test_a_sweep_of_mesh_shapes_killed_in_the_middle_says_what_became_of_each(tmp_path: Path) -> None:
    command = TrainCommand(
        tmp_path / "run", (*QUICK, "train.steps=3", "train.val_every=0", "checkpoint.export_hf=false")
    )
    sweep = ("-m", f"mesh={','.join(SHAPES)}", "launch.num_ranks=4", "launch.device=cpu")
    process = command.start(*sweep)
    read_until(process, "job 3: ")
    read_until(process, "starting 4 ranks")
    process.kill()
    process.wait(timeout=PATIENCE_S)
    command.wait_until_gone()
    then = {path.stem: json.loads(path.read_text())["state"] for path in (command.run_dir / "jobs").glob("*.json")}
    assert sorted(then.values()) == ["done", "done", "done", "running"]
    code, out, err = command.run(*sweep)
    assert code == 0, err
    assert out.count("done in an earlier run of this sweep") == 3
    jobs = {job["label"].removeprefix("mesh="): job for job in journal(command)}
    assert list(jobs) == SHAPES, "in the order in which they were asked for"
    assert {name for name, job in jobs.items() if job["state"] != "done"} == {"tuned_dsv3_671b"}
    assert jobs["tuned_dsv3_671b"]["state"] == "skipped" and "mesh=tuned_dsv3_671b skipped: " in out
    for name in set(SHAPES) - {"tuned_dsv3_671b"}:
        sides = jobs[name]["predicted"], jobs[name]["measured"]
        assert all(side[key] > 0 for side in sides for key in ("tokens_per_second", "memory", "balance")), name
    losses = [job["objective"] for job in jobs.values() if job["objective"]]
    assert max(losses) - min(losses) < 0.02, "one configuration trains alike on every mesh"
    assert (command.run_dir / "sweep.png").stat().st_size > 10_000


PLUGINS = {"joblib": ("sweep.parallel=2",), "submitit": ("hydra/launcher=submitit_local",)}


@pytest.mark.faults
@pytest.mark.parametrize("plugin", PLUGINS)
def test_jobs_in_other_processes_are_collected(command: Command, plugin: str) -> None:
    # The same values twice, at once, as Optuna may draw them: one job, whose result both have.
    sweep = ("-m", *ONE_RANK, "train.steps=2,2,3", *PLUGINS[plugin])
    code, out, err = command.run("recipe_answers", *sweep)
    assert code == 0, err
    if plugin == "joblib":  # submitit's jobs have files of their own for what they print
        assert "of this sweep" in out and "in use by another run" not in out + err
    jobs = journal(command)
    assert {job["state"] for job in jobs} == {"done"} and "tokens/s" in out
    assert all(job["objective"] == float(job["label"].removeprefix("steps=")) for job in jobs)
    assert [job["label"] for job in jobs] == ["steps=2", "steps=3"]


def wait_for_two_jobs(command: Command, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while len(list(command.run_dir.glob("*/logs/rank1.pid"))) < 2:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.faults
@pytest.mark.parametrize("steps", ["2,3", "2,3,4"])  # as many jobs as processes, and one that waits
@pytest.mark.parametrize("processes", [2, 5])  # of which three have no job
def test_no_job_outlives_a_sweep_that_is_killed(command: Command, steps: str, processes: int) -> None:
    process = command.start("recipe_deaf", "-m", *TWO_RANKS, f"train.steps={steps}", f"sweep.parallel={processes}")
    wait_for_two_jobs(command, process)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    killed_at = time.monotonic()
    command.wait_until_gone()
    assert time.monotonic() - killed_at < 60, "joblib ends processes without a job after five minutes"


@pytest.mark.faults
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("to", ["group", "launcher"])
def test_jobs_side_by_side_are_stopped_as_one_alone(command: Command, signum: int, to: str) -> None:
    """A scheduler signals the whole group: every job ends its step, none begins, and nothing is left."""
    sweep = ("-m", *TWO_RANKS, "train.steps=2,3,4", "sweep.parallel=2")
    process = command.start("recipe_until_stopped", *sweep, group=True)
    wait_for_two_jobs(command, process)
    os.killpg(process.pid, signum) if to == "group" else process.send_signal(signum)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 128 + signum and "the same command goes on" in err, err
    assert [(job["name"], job["state"]) for job in journal(command)] == [(f"steps{n}", "preempted") for n in (2, 3)]
    assert len(list(command.run_dir.glob("*/stopped[01]"))) == 4, (out, err)
    command.wait_until_gone()


@pytest.mark.faults
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_a_run_whose_group_is_signalled_is_preempted(command: Command, signum: int) -> None:
    process = command.start("recipe_until_stopped", *TWO_RANKS, group=True)
    read_until(process, "stepping")
    os.killpg(process.pid, signum)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 128 + signum and "error" not in err, err
    assert read_status(command.run_dir)["state"] == "preempted"
    command.wait_until_gone()


def test_the_busiest_rank_is_found_without_zero_experts(tmp_path: Path) -> None:
    """Columns of zero experts (LongCat-Flash) follow those of experts, and belong to no rank."""
    counts = [[4, 0, 0, 0, 100]]
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 1.0}) + "\n")
    (tmp_path / "expert_load.jsonl").write_text(json.dumps({"step": 1, "counts": counts}) + "\n")
    config = Config(run_dir=str(tmp_path), model=replace(Config().model, num_experts=4))
    assert sweep._measured(config, MeshShape.of(MeshConfig(ep=2, dp_shard=2)))["balance"] == 2.0


def test_jobs_side_by_side_are_those_of_joblib() -> None:
    own = ["mesh.ep=1,2", "hydra.sweeper.n_trials=20"]
    for swept, most in (("mesh.ep=1,2", 2), ("train.steps=range(1,9,3)", 3), ("mesh.ep=1,2 optim.lr=1e-3,2e-3", 4)):
        found = side_by_side([*swept.split(), "train.seed=1", "sweep.parallel=9"])
        assert found[-1] == f"hydra.launcher.n_jobs={most}", "no process without a job"
    assert side_by_side(["data=glob(*)", "sweep.parallel=9"])[-1] == "hydra.launcher.n_jobs=9"
    assert side_by_side([*own, "sweep.parallel=3"]) == [*own, "hydra/launcher=joblib", "hydra.launcher.n_jobs=3"]
    assert side_by_side(own) == side_by_side([*own, "sweep.parallel=1"]) == own
    for value in ("0", "-1", "two", "1,2", "", "1.5"):
        with pytest.raises(ConfigError, match=r"^sweep.parallel.*side by side: one number, 1 or more"):
            side_by_side([f"sweep.parallel={value}"])
    for launcher in ("hydra/launcher=submitit_slurm", "hydra.launcher.n_jobs=4"):
        with pytest.raises(ConfigError, match=f"{launcher} also chooses or sets a launcher"):
            side_by_side(["sweep.parallel=2", launcher])
    with pytest.raises(ConfigError, match="only a sweep runs jobs side by side.*Add -m"):
        check_overrides(["sweep.parallel=2"])
    with pytest.raises(ConfigError, match="the same GPUs"):
        check_alone("cuda", 2)
    check_alone("cuda", 1)
    check_alone("cpu", 2)


SLURM = ("hydra/launcher=submitit_slurm", "hydra.launcher.partition=gpu", "hydra.launcher.gpus_per_node=8")


def test_the_slurm_launcher_composes_with_a_sweep_of_meshes() -> None:
    from hydra import compose, initialize_config_dir  # a GPU machine may lack it, and collects this file
    from hydra.utils import get_class

    overrides = [*SLURM, "hydra.launcher.timeout_min=240", "mesh.ep=1,2"]
    check_overrides(overrides, sweep=True)
    check_swept_values("config", overrides, None)
    register_base()
    with initialize_config_dir(str(shipped_folder("conf")), version_base="1.3"):
        composed = compose("config", overrides[:-1], return_hydra_config=True)
    launcher = composed.hydra.launcher
    assert launcher._target_.endswith("SlurmLauncher") and get_class(launcher._target_)
    assert (launcher.partition, launcher.gpus_per_node, launcher.timeout_min, launcher.tasks_per_node) == (
        "gpu",
        8,
        240,
        1,
    )
