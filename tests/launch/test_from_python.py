"""``automoe.train(...)``: what it takes, and how a run that fails or is stopped comes back."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import automoe
from automoe.config.compose import compose_config
from automoe.config.data_schema import SourceConfig
from automoe.config.schema import Config
from automoe.errors import ConfigError, LaunchError
from automoe.launch import from_python
from automoe.launch.from_python import composed

ROOT = Path(automoe.__file__).parents[1]


def test_a_dictionary_says_what_overrides_say() -> None:
    asked: dict[str, Any] = {"model": "small_mixtral", "mesh": {"pp": 1, "ep": 4}, "optim.lr": 1e-05}
    typed = ["model=small_mixtral", "mesh.pp=1", "mesh.ep=4", "optim.lr=1e-05"]
    assert composed(asked, "config", None) == compose_config(overrides=typed)  # run_dir too


TEXTS = [
    "it's",
    "a'b\\'c",
    "back\\",
    "\\'",
    'quote " here',
    "a b",
    "null",
    "5",
    "true",
    "",
    "ä=1",
    "[x]",
    "a,b",
    "/a/b.txt",
]


@pytest.mark.parametrize("text", TEXTS)
def test_every_text_arrives_as_it_is(text: str) -> None:
    assert composed({"observe": {"wandb_project": text, "run_tags": [text]}}, "config", None).observe.run_tags == [text]


def test_values_of_every_type_arrive() -> None:
    data = {
        "kind": "jsonl",
        "sources": [{"path": "/a b.jsonl", "weight": 0.5}, {"path": Path("/c.jsonl"), "name": "c"}],
    }
    data["chat"] = {"keys": {"messages": "my messages"}, "pack": False}
    found = composed(
        {"data": data, "parallel": {"layers_per_stage": None}, "optim": {"betas": (0.9, 0.99)}}, "config", None
    )
    assert found.data.sources == [SourceConfig(path="/a b.jsonl", weight=0.5), SourceConfig(path="/c.jsonl", name="c")]
    assert found.data.chat.keys == {"messages": "my messages"} and found.data.chat.pack is False
    assert found.optim.betas == (0.9, 0.99)


def test_a_whole_configuration_is_checked_as_strictly() -> None:
    config = Config()
    assert composed(config, "config", None) == config
    config.train.steps = "5"  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="train.steps=5: expected a whole number"):
        composed(config, "config", None)
    for wrong in ("mesh.ep=2", 5, ["mesh.ep=2", 3]):
        with pytest.raises(ConfigError, match="expected a list of overrides, a dictionary or a Config"):
            composed(wrong, "config", None)
    with pytest.raises(ConfigError, match="mesh has no 'epp'"):
        automoe.train({"mesh": {"epp": 2}})


def test_where_it_cannot_start_ranks_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[BaseException] = []

    def elsewhere() -> None:
        try:
            automoe.train()
        except LaunchError as error:
            errors.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert "main thread" in str(errors)
    under = {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for name, value in (under | {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError, match="torchrun has already started this process"):
        automoe.train()
    monkeypatch.undo()
    monkeypatch.setattr(from_python, "missing_hardware", lambda shape, device, asked: "32 GPUs")
    with pytest.raises(LaunchError, match="the configuration is valid; it cannot train here: 32 GPUs"):
        automoe.train()


@pytest.mark.parametrize(
    "first", ["import automoe", "import automoe.train", "from automoe import train", "import automoe.launch.local"]
)
def test_the_name_is_a_module_and_a_function_whatever_was_imported_first(first: str) -> None:
    then = "import automoe, automoe.train, sys; from automoe import train; assert train is automoe.train; "
    then += "assert callable(train) and train.main and 'torch' not in sys.modules; import inspect; "
    then += "assert list(inspect.signature(train).parameters) == ['config', 'config_name', 'config_dir']"
    subprocess.run([sys.executable, "-c", f"{first}; {then}"], check=True, cwd=ROOT)


SCRIPT = """
import os, signal, threading, time
import automoe
from automoe.errors import TrainingError

options = ["recipe=waits.py", "mesh.pp=1", "launch.num_ranks=2", "observe.report=false", "checkpoint.export_hf=false"]
try:
    automoe.train([*options, "recipe_args.fails=true", "run_dir=failed"])
except TrainingError as error:
    print("FAILED", error, error.run_dir)
try:
    automoe.train([*options, "recipe_args.leaves=true", "run_dir=left"])
except TrainingError as error:
    print("LEFT", error)

def interrupt():
    while not os.path.exists("stopped/began"):
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=interrupt).start()
try:
    automoe.train([*options, "run_dir=stopped"])
except KeyboardInterrupt:
    print("INTERRUPTED", automoe.train([*options, "run_dir=stopped"]).objective)
"""
WAITS = """
import os, signal, time
from dataclasses import dataclass

@dataclass
class Args:
    fails: bool = False
    leaves: bool = False

def main(config, shape, context):
    if config.recipe_args.fails:
        raise ZeroDivisionError("on purpose")
    began = context.run_dir / "began"
    if began.exists():  # the second start
        return 7.0
    context.any_rank_stops()
    began.touch()
    if config.recipe_args.leaves:  # as if somebody stopped the ranks and not the program
        os.kill(os.getpid(), signal.SIGTERM)
    while not context.any_rank_stops():
        time.sleep(0.05)
    context.preempted = True
"""


@pytest.mark.faults
def test_a_failure_and_ctrl_c_are_exceptions_and_the_program_goes_on(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(WAITS)
    (tmp_path / "script.py").write_text(SCRIPT)  # without `if __name__ == "__main__"`
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "ZeroDivisionError: on purpose" in done.stdout and "FAILED rank " in done.stdout
    assert str(tmp_path / "failed") in done.stdout and "INTERRUPTED 7.0" in done.stdout
    assert done.stdout.count("FAILED") == 1
    assert "LEFT stopped before the last step, by signal 15. The same call" in done.stdout
