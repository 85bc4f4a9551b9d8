from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import automoe
from automoe import cli
from automoe.cli import bash_completion
from automoe.config.shipped import find_recipe, named_recipe, shipped_folder


def test_without_a_command_it_says_which_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    for command in ("train", "plan", "verify", "export", "convert", "recipe", "completion"):
        assert f"\n  {command}" in shown


def test_help_fits_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["train"], ["train", "mesh"], ["plan"], ["verify"], ["recipe"]):
        assert cli.main([*words[:1], "--help", *words[1:]]) == 0
        shown = capsys.readouterr().out
        assert shown and [line for line in shown.splitlines() if len(line) > 80] == [], words


def test_an_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trian"]) == 2
    assert "no command 'trian'. Did you mean automoe train?" in capsys.readouterr().err


def test_version_and_the_package_as_a_command() -> None:
    done = subprocess.run([sys.executable, "-m", "automoe", "--version"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, f"automoe {automoe.__version__}\n")


def test_a_command_gets_the_rest_of_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "train.stepz=3"]) == 2
    assert "error: train.stepz=3: unknown key" in capsys.readouterr().err
    assert cli.main(["train", "--print-config", "train.steps=17"]) == 0
    assert "steps: 17" in capsys.readouterr().out


INTERRUPTED = """
import os, runpy, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell have it ignored
command, module = sys.argv[1:3]
class CtrlC:
    def find_spec(name, path=None, target=None):
        if name == module.removesuffix("!"):
            try:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(5)
            except KeyboardInterrupt:
                if module.endswith("!"):  # a library makes an error of its own of it
                    raise ImportError("half imported") from None
                raise
sys.meta_path.insert(0, CtrlC)
del sys.argv[1:3]
runpy.run_module(command, run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    "command, module, words",
    [
        ("automoe", "automoe.train", ["train"]),
        ("automoe.train", "automoe.config.compose", []),
        ("automoe.train", "automoe.launch.local", ["run_dir=/nowhere"]),
        ("automoe", "automoe.cli", []),
        ("automoe.plan", "automoe.config.compose", []),
        ("automoe", "automoe.planner.plan!", ["plan"]),
        ("automoe.verify", "automoe.verify.run", []),
        ("automoe.export", "automoe.config.frozen", ["a", "--out", "b"]),
        ("automoe.convert", "automoe.hf.families.registry", [".", "--out", "b"]),
    ],
)
def test_ctrl_c_during_an_import_is_quiet(command: str, module: str, words: list[str]) -> None:
    program = [sys.executable, "-c", INTERRUPTED, command, module, *words]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_the_entry_imports_nothing_heavy() -> None:
    code = "import sys, automoe.cli; sys.exit(any(m in sys.modules for m in ('torch', 'hydra', 'yaml')))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("automoe tr", "train"),
        ("automoe train --config-name dsv", "dsv3_671b"),
        ("automoe train --config-name=dsv", "dsv3_671b"),
        ("automoe train model=small_mix", "small_mixtral"),
        ("automoe train train.steps=5 mesh.ep_s", "mesh.ep_shard="),
        ("automoe train recipe=pre", "pretrain"),
        ("automoe rec", "recipe"),
        ("automoe recipe c", "copy"),
        ("automoe recipe copy pre", "pretrain"),
    ],
)
def test_bash_completes(line: str, expected: str) -> None:
    # Bash itself sets these and allows compopt only while completing, which needs a terminal.
    situation = f"compopt() {{ :; }}; COMP_LINE='{line}'; COMP_POINT={len(line)}"
    script = f'{bash_completion()}\n{situation}; _automoe; echo "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == [expected], done.stderr


def test_a_recipe_is_listed_and_copied_and_nothing_is_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["recipe", "list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert "pretrain" in listed and "finetune" not in listed, "one recipe is listed under one name"
    assert find_recipe("finetune") == find_recipe("pretrain") == shipped_folder("recipes") / "pretrain.py"
    shipped = (shipped_folder("recipes") / "pretrain.py").read_text()
    for words, path, name in (
        (["pretrain"], Path("recipes/pretrain.py"), "pretrain"),
        (["pretrain", "own/loop.py"], Path("own/loop.py"), "own/loop.py"),
        (["finetune"], Path("recipes/finetune.py"), "finetune"),
    ):
        assert cli.main(["recipe", "copy", *words]) == 0
        assert f"copied to {path}; run it with: automoe train recipe={name}\n" == capsys.readouterr().out
        assert path.read_text() == shipped
        path.write_text("mine")
        assert cli.main(["recipe", "copy", *words]) == 2
        assert f"recipe={path}: this file exists" in capsys.readouterr().err
        assert path.read_text() == "mine"
    assert named_recipe("finetune") == str(tmp_path / "recipes" / "finetune.py")
    assert cli.main(["recipe", "copy", "pretrian"]) == 2
    assert "recipe=pretrian: no such shipped recipe. Available: " in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["list", "more"], ["copy"], ["copy", "a", "b", "c"], ["move", "pretrain"]])
def test_a_wrong_recipe_command_shows_the_right_ones(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["recipe", *words]) == 2
    assert "automoe recipe copy NAME [FILE]" in capsys.readouterr().err
    assert cli.main(["recipe", "--help"]) == 0
    assert "automoe recipe copy NAME [FILE]" in capsys.readouterr().out
