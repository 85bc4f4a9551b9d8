"""What a user hands over: names that steer a terminal, files that are not UTF-8, folders that may not be entered."""

from __future__ import annotations

import ctypes
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from automoe import cli
from automoe.config.mesh_shape import resolve_mesh
from automoe.config.schema import Config, MeshConfig
from automoe.errors import show_everything
from automoe.launch.local import RunResult
from automoe.launch.worker import Outlet
from automoe.observe.console import Console
from tests.support.hf_models import save_small_hf

STEERS = "a\x1b[2Jb\x1b]0;mine\x1b\\c\u202ed"
SHOWN = "a\\x1b[2Jb\\x1b]0;mine\\x1b\\c\\u202ed"


def test_names_in_a_plan_and_in_results_move_no_cursor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_small_hf("mixtral", tmp_path / f"in{STEERS}")
    words = {
        "plan": ["plan", "cluster=a100_sxm", f"cluster.gpu='{STEERS}'"],
        "convert": ["convert", str(tmp_path / f"in{STEERS}"), "--out", str(tmp_path / f"out{STEERS}")],
        "unknown": ["convert", "in", "--out", "out", f"--{STEERS}"],
    }
    for name, command in words.items():
        try:
            status = cli.main(command)
        except SystemExit as ended:
            status = ended.code
        written = "".join(capsys.readouterr())
        assert status == (2 if name == "unknown" else 0), written
        assert "\\x1b[2Jb" in written and "\x1b" not in written and "\u202e" not in written, name


def test_the_table_of_a_run_moves_no_cursor(capfd: pytest.CaptureFixture[str]) -> None:
    config = Config(run_dir=f"runs/{STEERS}", mesh=MeshConfig(dp_shard=1))
    config.data.kind, config.data.path = "text", f"{STEERS}.txt"
    with open(os.dup(1), "w") as terminal:
        console = Console(config, resolve_mesh(config.mesh, 1), file=Outlet(terminal))  # type: ignore[arg-type]
        console.start()
        console.note(f"saved {STEERS}")
    out = capfd.readouterr().out
    assert out.count(SHOWN) >= 3 and "\x1b" not in out and "\u202e" not in out


@pytest.mark.parametrize(
    "command",
    [
        "plan --config-dir {} cluster=odd",
        "train --config-dir {} --config-name mine",
        "train -m --config-dir {} --config-name mine train.steps=1,2",
        "train data=chat data.chat.template=plain data.path={}/odd.jsonl",
        "train data=text data.path={}/odd.txt",
        "train data=chat data.path={}/fine.jsonl data.chat.template={}/odd.jinja",
        "train observe.samples={}/odd.txt",
    ],
)
def test_text_that_is_not_utf8_is_an_error(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cluster").mkdir()
    for name in ("cluster/odd.yaml", "mine.yaml", "odd.jsonl", "odd.txt", "odd.jinja"):
        (tmp_path / name).write_bytes("gpu: café\n".encode("latin1") * 50)
    (tmp_path / "fine.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    assert cli.main([word.format(tmp_path, tmp_path) for word in command.split()]) == 2
    said = capsys.readouterr().err
    assert str(tmp_path) in said and ("UTF-8" in said or "utf-8" in said)


def _ordinary() -> None:
    """Put down root's powers over files (``CAP_DAC_OVERRIDE``, ``CAP_DAC_READ_SEARCH``) before a program starts."""
    for power in (1, 2):
        ctypes.CDLL(None).prctl(24, power, 0, 0, 0)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "command",
    ["generate locked Who?", "export locked/run --out out", "plan --config-dir locked", "plan model.hf_path=locked",
     "train data=text data.path=locked/a.txt", "train run_dir=locked/run", "convert locked --out out",
     "train checkpoint.resume=locked/run", "train plugins=[locked/a.py]"],
)  # fmt: skip
def test_a_folder_that_may_not_be_entered_is_an_error(command: str, tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0)
    done = subprocess.run(
        [sys.executable, "-Pm", "automoe", *command.split()],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
        preexec_fn=_ordinary, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert "locked" in done.stderr and ("ermission" in done.stderr), done.stderr


def test_ranks_that_were_asked_to_stop_were_preempted() -> None:
    assert RunResult("preempted", None, None).exit_code == 143
    assert RunResult("preempted", None, None, 2).exit_code == 130 and RunResult("failed", None, None).exit_code == 1


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # the second under LC_ALL=C PYTHONUTF8=0
def test_a_stream_without_the_characters_of_a_row_shows_their_numbers(errors: str) -> None:
    stream = io.TextIOWrapper(raw := io.BytesIO(), encoding="ascii", errors=errors)
    print("caf\u00e9 \u23ce \udcff", file=show_everything(stream), flush=True)
    assert raw.getvalue() == b"caf\\xe9 \\u23ce \\udcff\n"
