from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from automoe.config.compose import compose_config
from automoe.config.convert import config_to_dict
from automoe.config.data_schema import DataConfig
from automoe.config.frozen import save_config
from automoe.config.schema import CheckpointConfig, Config, OptimConfig, TrainConfig
from automoe.config.shipped import load_recipe
from automoe.errors import ConfigError, DataError, LaunchError
from automoe.launch import run_dir as runs


@pytest.fixture
def started(tmp_path: Path) -> Path:
    runs.start_run(tmp_path)
    return tmp_path


def raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:
        return caught


def test_the_first_error_is_final(started: Path) -> None:
    assert runs.record_failure(started, runs.error_report(raised(ValueError("first")), 3))
    assert not runs.record_failure(started, runs.error_report(raised(RuntimeError("connection closed by peer")), 0))
    runs.write_status(started, "done", objective=1.0)
    status = runs.read_status(started)
    assert status["state"] == "failed"
    assert (status["error"]["rank"], status["error"]["message"]) == (3, "first")
    shown = runs.describe_error(status["error"])
    assert shown.startswith("rank 3: ValueError: first\n") and "raise error" in shown


def test_a_failure_while_another_rank_writes_its_status_is_final(
    started: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank fails after another has seen no error, and before that one says that the run is running."""
    replace = runs.replace_json

    def fail_first(path: Path, content: dict[str, Any]) -> None:
        if content["state"] == "running":
            assert runs.record_failure(started, runs.error_report(raised(ValueError("first")), 1))
        replace(path, content)

    monkeypatch.setattr(runs, "replace_json", fail_first)
    runs.write_status(started, "running", pid=1)
    status = runs.read_status(started)
    assert (status["state"], status["error"]["message"]) == ("failed", "first")


def test_an_error_meant_for_a_person_is_shown_without_a_traceback(started: Path) -> None:
    runs.record_failure(started, runs.error_report(raised(DataError("a.jsonl line 3: no JSON")), 0))
    assert runs.describe_error(runs.read_status(started)["error"]) == "rank 0: DataError: a.jsonl line 3: no JSON"


@pytest.mark.parametrize(
    "code, says",
    [
        ("import os\ndef main(config)\n    return 1", "SyntaxError: expected ':'\n    {file}:2: def main(config)"),
        ("import os\nimport nothing", "No module named 'nothing'\n    {file}:2 in <module>: import nothing"),
        (
            "import my_helper",
            "KeyError: 'x'\n    {file}:1 in <module>: import my_helper\n    {helper}:1 in <module>: {}['x']",
        ),
        (
            "def main():\n    f(9)\ndef f(n):\n    f(n - 1) if n else 1 / 0",
            "\n    {file}:2 in main: f(9)\n    {file}:4 in f: ",
        ),
    ],
)
def test_an_error_in_a_recipe_shows_its_own_lines_alone(
    code: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", sys.path[:])
    file, helper = tmp_path / "mine.py", tmp_path / "my_helper.py"
    file.write_text(code)
    helper.write_text("{}['x']")
    with pytest.raises((Exception, SyntaxError)) as raised_there:
        load_recipe(str(file)).main()
    # The frame of this test is the one of a rank's worker.
    error = raised_there.value.with_traceback(raised_there.tb.tb_next)
    shown = runs.describe_error(runs.error_report(error, 1))
    assert says.replace("{file}", str(file)).replace("{helper}", str(helper)) in shown
    assert "importlib" not in shown and "shipped.py" not in shown


def test_a_new_run_forgets_the_old_outcome_and_keeps_its_files(started: Path) -> None:
    runs.record_failure(started, runs.error_report(raised(ValueError("old")), 1))
    (started / runs.STUCK_FILE).touch()
    (started / "metrics.jsonl").write_text("{}\n")
    runs.start_run(started)
    assert runs.read_status(started)["state"] == "starting"
    runs.write_status(started, "done", objective=2.0)
    assert runs.read_status(started)["objective"] == 2.0
    assert not (started / runs.STUCK_FILE).exists() and (started / "metrics.jsonl").exists()


def test_the_lock_names_its_holder_and_ends_with_it(tmp_path: Path) -> None:
    with runs.locked(tmp_path):
        with pytest.raises(LaunchError, match=f"in use by another run, process {os.getpid()}"):
            with runs.locked(tmp_path):
                raise AssertionError("two runs in one directory")
        # A child that outlives the run must not keep its directory locked.
        command = [sys.executable, "-c", "print('ready', flush=True); input()"]
        pipe = subprocess.PIPE
        child = subprocess.Popen(command, stdin=pipe, stdout=pipe, close_fds=False)
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
    try:
        with runs.locked(tmp_path):
            pass
    finally:
        child.communicate(b"\n")


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("...")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to("../thesis.tex")
    with pytest.raises(ConfigError, match=r"a lock file that is a link is not followed: remove it \(.*\.lock\)"):
        with runs.locked(tmp_path / "run"):
            raise AssertionError("a link was followed")
    assert (tmp_path / "thesis.tex").read_text() == "..."
    (tmp_path / "run" / ".lock").unlink()
    os.mkfifo(tmp_path / "run" / ".lock")
    with pytest.raises(ConfigError, match="it is a FIFO, where a file belongs"):
        with runs.locked(tmp_path / "run"):
            raise AssertionError("a FIFO was locked")


def left_by(run_dir: Path, state: runs.State, saved: bool) -> None:
    """What a run of the default configuration left."""
    runs.start_run(run_dir)
    save_config(Config(), run_dir)
    (run_dir / "metrics.jsonl").write_text('{"step": 2}\n')
    if saved:
        (run_dir / "checkpoints" / "step-2").mkdir(parents=True)
    runs.write_status(run_dir, state)


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("state", ["done", "preempted"])
def test_another_configuration_is_refused_in_a_used_folder(tmp_path: Path, state: runs.State, saved: bool) -> None:
    left_by(tmp_path, state, saved)
    assert runs.check_same_run(tmp_path, Config(run_dir=str(tmp_path))) == []
    other = Config(optim=OptimConfig(lr=0.5), train=TrainConfig(seed=3, steps=100))
    with pytest.raises(ConfigError) as caught:
        runs.check_same_run(tmp_path, other)
    said = str(caught.value)
    assert "train.steps was 200, is 100; train.seed was 0, is 3; optim.lr was 0.003, is 0.5" in said
    other.checkpoint.resume = "never"
    assert runs.check_same_run(tmp_path, other) == []


@pytest.mark.parametrize("step", ["", "checkpoints/step-5"])
@pytest.mark.parametrize("kinds", [("stdlib_chat", "preference"), ("preference", "chat"), ("text", "stdlib_chat")])
def test_the_checkpoint_of_a_run_on_other_data_is_refused_before_the_data_is_read(
    tmp_path: Path, kinds: tuple[str, str], step: str
) -> None:
    left_by(tmp_path, "done", saved=True)
    then, now = (compose_config(overrides=[f"data.kind={kind}", "data.path=x"]) for kind in kinds)
    manifest = {"config": config_to_dict(then)}
    (tmp_path / "checkpoints" / "step-5").mkdir(exist_ok=True)
    (tmp_path / "checkpoints" / "step-5" / "manifest.json").write_text(json.dumps(manifest))
    now.checkpoint.resume = then.checkpoint.resume = str(tmp_path / step)
    with pytest.raises(ConfigError, match=rf"data.kind is {kinds[0]} and not {kinds[1]}. Begin from its weights"):
        runs.check_same_run(tmp_path / "other", now)
    assert runs.check_same_run(tmp_path / "other", then) == []


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("state", ["done", "preempted"])
def test_what_a_run_may_go_on_with_is_said(tmp_path: Path, state: runs.State, saved: bool) -> None:
    left_by(tmp_path, state, saved)
    longer = Config(train=TrainConfig(steps=300), data=DataConfig(path="moved"))
    if state == "done" and not saved:  # its results would be replaced
        with pytest.raises(
            ConfigError, match="holds a finished run and no checkpoint of it: train.steps was 200, is 300"
        ):
            runs.check_same_run(tmp_path, longer)
        return
    (note,) = runs.check_same_run(tmp_path, longer)
    assert "train.steps was 200, is 300; data.path was None, is moved" in note


def test_checkpoints_of_another_run_are_not_those_of_a_start_over_that_came_to_nothing(tmp_path: Path) -> None:
    left_by(tmp_path, "done", saved=True)
    manifest = tmp_path / "checkpoints" / "step-2" / "manifest.json"
    manifest.write_text(json.dumps({"config": config_to_dict(Config())}))
    other = Config(optim=OptimConfig(lr=0.5), checkpoint=CheckpointConfig(resume="never"))
    assert runs.check_same_run(tmp_path, other) == []
    runs.start_run(tmp_path)  # and stopped before a rank has set the checkpoints aside
    save_config(other, tmp_path)
    other.checkpoint.resume = "auto"
    with pytest.raises(ConfigError, match=r"optim\.lr was 0\.003, is 0\.5"):
        runs.check_same_run(tmp_path, other)
    for damaged in ("", "[]", '{"config": 3}'):
        manifest.write_text(damaged)
        assert runs.check_same_run(tmp_path, other) == [], "resuming says what is wrong with it"


def test_a_folder_in_which_nothing_was_trained_takes_any_run(tmp_path: Path) -> None:
    runs.start_run(tmp_path)
    save_config(Config(), tmp_path)
    runs.record_failure(tmp_path, runs.error_report(raised(DataError("no such file")), 0))
    assert runs.check_same_run(tmp_path, Config(train=TrainConfig(seed=3))) == []


@pytest.mark.parametrize("content", [b"", b"[1]", b"a: [", b"\xff\x00", None])
def test_a_run_whose_configuration_cannot_be_read_is_not_overwritten(tmp_path: Path, content: bytes | None) -> None:
    left_by(tmp_path, "done", saved=True)
    path = tmp_path / "config.yaml"
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(ConfigError, match="config.yaml does not say whether it is this one"):
        runs.check_same_run(tmp_path, Config())


@pytest.mark.parametrize("content", ["", "[1]", "3", '{"state": "do', '{"state": "done", "crc32": 3}'])
def test_a_damaged_status_is_an_error_for_its_readers_and_no_hindrance_to_a_run(tmp_path: Path, content: str) -> None:
    left_by(tmp_path, "preempted", saved=True)
    (tmp_path / runs.STATUS_FILE).write_text(content)
    with pytest.raises(ValueError):
        runs.read_status(tmp_path)
    assert runs.check_same_run(tmp_path, Config()) == []
    runs.start_run(tmp_path)
    assert runs.read_status(tmp_path)["state"] == "starting"


@pytest.mark.parametrize("name", ["status.json", "config.yaml", "first_error.json", "logs/rank0.log"])
def test_a_folder_where_a_file_belongs_is_named_before_anything_is_changed(tmp_path: Path, name: str) -> None:
    left_by(tmp_path, "preempted", saved=True)
    (tmp_path / "logs" / "rank1.log").touch()
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).mkdir()
    there = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError, match=f"{name} is a folder, where a file belongs"):
        runs.start_run(tmp_path)
    assert sorted(tmp_path.rglob("*")) == there


def test_logs_that_are_a_file_are_named(tmp_path: Path) -> None:
    (tmp_path / "logs").touch()
    with pytest.raises(ConfigError, match="logs is a file, where a folder belongs"):
        runs.start_run(tmp_path)


def test_a_run_in_the_folder_of_a_sweep_is_refused(tmp_path: Path) -> None:
    (tmp_path / runs.SWEEP_FILE).write_text("{}")
    with pytest.raises(ConfigError, match="holds a sweep"):
        runs.check_same_run(tmp_path, Config())
