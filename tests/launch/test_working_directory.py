"""A folder that somebody downloaded and entered runs none of its files; what the user names is found there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import automoe
from automoe.config.shipped import find_recipe, load_recipe, named_recipe
from automoe.errors import ConfigError
from automoe.launch.trial_runs import TrialError, train
from tests.support.hf_models import save_small_hf

ROOT = Path(automoe.__file__).parents[1]
# Modules that the commands import early, late, only if they are installed, or never.
NAMES = "tokenizers fractions random numpy hydra yaml rich wandb transformers recipes statistics colorsys".split()
NAMES += "typing enum re copyreg json signal threading subprocess".split()
RUN = (
    "data=benchmark train.steps=1 train.seq_len=32 train.global_batch_size=2 train.micro_batch_size=1 mesh.pp=1 "
    "mesh.ep=1 launch.num_ranks=1 observe.report=false checkpoint=none run_dir=run"
).split()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint whose folder holds modules that leave a mark when they are imported."""
    save_small_hf("qwen3_moe", tmp_path)
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'MARK')!r}, 'a').write({name!r})")
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "pretrain.py").write_text(f"open({str(tmp_path / 'MARK')!r}, 'a').write('recipe')")
    return tmp_path


def ended(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, *command], cwd=folder, env=env, capture_output=True, text=True, timeout=300)


SCRIPT = ("-P", "-c", "import sys; from automoe.cli import main; sys.exit(main())")  # the console script


COMMANDS = [
    (("train", "model.hf_path=.", *RUN), 0),
    (("plan", "model.hf_path=.", "data=benchmark"), 0),
    (("convert", ".", "--out", "out"), 0),
    (("generate", ".", "--text", "a"), 2),  # it has no tokenizer
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("command", "status", "start"),
    [(*command, start) for start in ("script", "module") for command in COMMANDS],
    ids=map(
        lambda case: f"{case[0][0]}--{case[2]}",
        [(*command, start) for start in ("script", "module") for command in COMMANDS],
    ),
)
def test_nothing_of_the_folder_is_imported(command: tuple[str, ...], status: int, start: str, folder: Path) -> None:
    words = (*SCRIPT, *command) if start == "script" else ("-m", f"automoe.{command[0]}", *command[1:])
    done = ended(folder, *words)
    assert done.returncode == status, done.stdout + done.stderr
    assert not (folder / "MARK").exists(), (folder / "MARK").read_text()


@pytest.mark.exhaustive
def test_a_module_name_may_be_joined_to_its_flag(folder: Path) -> None:
    done = ended(folder, "-umautomoe.plan", "model.hf_path=.", "data=benchmark")
    assert done.returncode == 0 and not (folder / "MARK").exists(), done.stderr


@pytest.mark.parametrize("start", ["typing", "enum", "re", "copyreg", "__future__"])
def test_the_package_leaves_the_folder_before_it_imports(start: str, tmp_path: Path) -> None:
    (tmp_path / f"{start}.py").write_text("open('MARK', 'w').close()")
    done = ended(tmp_path, "-m", "automoe.plan", "--help")
    assert done.returncode == 0 and not (tmp_path / "MARK").exists(), done.stderr


def test_runs_that_a_command_starts_import_nothing_of_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name in ("types", "warnings", "contextlib", "automoe"):  # Python imports these before any code of ours
        (tmp_path / f"{name}.py").write_text("open('MARK', 'w').close()\nraise ImportError")
    with pytest.raises(TrialError, match="unknown key"):
        train(tmp_path / "run", ["no.such=1"])
    assert not (tmp_path / "MARK").exists()


def test_modules_that_are_named_are_found_behind_what_is_installed(tmp_path: Path) -> None:
    (tmp_path / "house.py").write_text("import helper\n")
    (tmp_path / "helper.py").write_text("open('MARK', 'a').write('helper')")
    (tmp_path / "colorsys.py").write_text("open('MARK', 'a').write('colorsys')")
    for plugin, mark in (("house", "helper"), ("colorsys", "")):
        (tmp_path / "MARK").write_text("")
        done = ended(tmp_path, *SCRIPT, "plan", "data=benchmark", f"plugins=[{plugin}]")
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "MARK").read_text() == mark


@pytest.mark.exhaustive
def test_a_recipe_of_the_folder_runs_where_the_user_names_it_and_is_told(folder: Path) -> None:
    own = "def main(config, shape, context):\n    print('mine')\n"
    (folder / "recipes" / "pretrain.py").write_text(own)
    done = ended(folder, *SCRIPT, "train", "recipe=pretrain", *RUN)
    assert done.returncode == 0 and "mine" in done.stdout, done.stderr
    assert f"note: recipe=pretrain is {folder}/recipes/pretrain.py" in done.stderr
    done = ended(folder, *SCRIPT, "train", "-m", "recipe=pretrain", *RUN[:-1], "hydra.sweep.dir=sweep")
    assert done.returncode == 0 and "mine" in done.stdout, done.stdout + str(list((folder / "sweep").rglob("*")))
    done = ended(folder, *SCRIPT, "train", *RUN[:-1], "run_dir=shipped")
    assert done.returncode == 0 and "mine" not in done.stdout and "note: recipe" not in done.stderr
    assert json.loads((folder / "shipped" / "metrics.jsonl").read_text())["step"] == 1


def test_only_a_name_that_is_typed_means_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert named_recipe("pretrain") == "pretrain"
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "pretrain.py").write_text("main = 3")
    assert named_recipe("pretrain") == str(tmp_path / "recipes" / "pretrain.py")
    assert find_recipe("pretrain") != Path(named_recipe("pretrain"))
    (tmp_path / "own_loop.py").write_text("main = 4")
    before = list(sys.path)
    assert load_recipe("own_loop").main == 4
    assert sys.path == [*before, str(tmp_path)]
    sys.path.remove(str(tmp_path))
    with pytest.raises(ConfigError, match="no such recipe"):
        load_recipe("no_loop")
    assert sys.path == before
