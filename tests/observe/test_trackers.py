"""Weights & Biases as it really behaves, each case in a process of its own, with no login from outside."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
from pathlib import Path
from automoe.config.schema import Config
from automoe.observe.trackers import make_tracker

config = Config()
config.observe.wandb = sys.argv[1]
tracker = make_tracker(config, Path(sys.argv[2]))
started = tracker._run is not None
for step in (1, 2, 3):
    tracker.log({"step": step, "loss": 5.0 / step, "mfu": None})
    if sys.argv[3:] == ["kill-service"] and step == 1:
        import psutil
        for child in psutil.Process().children(recursive=True):
            child.kill()
            child.wait()
tracker.finish()
print("trained to step", step, "with", "W&B" if started else "nothing", "wandb" in sys.modules)
print(*tracker.places.values())
"""


def run(tmp_path: Path, mode: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    clean |= {"HOME": str(tmp_path / "home"), "NETRC": str(tmp_path / "netrc"), **environment}
    (tmp_path / "home").mkdir(exist_ok=True)
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, mode, str(tmp_path), *arguments],
        env=clean,
        capture_output=True,
        text=True,
        timeout=180,
        stdin=subprocess.DEVNULL,
    )


def recorded(directory: Path) -> list[Path]:
    return [path for path in directory.glob("wandb/offline-run-*/run-*.wandb") if path.stat().st_size > 0]


def test_off_does_not_import_wandb(tmp_path):
    done = run(tmp_path, "off")
    assert done.stdout == "trained to step 3 with nothing False\n\n", done.stderr


def test_offline_records_the_steps(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    done = run(tmp_path, "offline", WANDB_DIR=str(tmp_path / "elsewhere"))
    assert "with W&B" in done.stdout, done.stderr
    assert done.stderr == ""
    (path,) = recorded(tmp_path / "elsewhere")
    assert done.stdout.splitlines()[1] == str(path.parent)
    content = path.read_bytes()
    assert content.count(b"loss") >= 3 and b"mfu" not in content.split(b"_step")[1]


def test_online_without_a_login_records_offline_after_one_warning(tmp_path):
    done = run(tmp_path, "online")
    assert "trained to step 3 with W&B" in done.stdout, done.stderr
    assert done.stderr.count("\n") == 1 and "no login" in done.stderr and "wandb sync" in done.stderr
    assert len(recorded(tmp_path)) == 1


@pytest.mark.faults
def test_online_without_a_network_records_offline_after_one_warning(tmp_path):
    nowhere = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "0" * 40, "WANDB_INIT_TIMEOUT": "5"}
    done = run(tmp_path, "online", **nowhere)
    assert "trained to step 3" in done.stdout, done.stderr
    assert "W&B does not work online" in done.stderr and "wandb sync" in done.stderr
    assert len(recorded(tmp_path)) == 1


def test_training_outlives_the_service_process(tmp_path):
    done = run(tmp_path, "offline", "kill-service")
    assert done.returncode == 0, done.stderr
    assert "trained to step 3" in done.stdout
    assert done.stderr.count("W&B stopped working") == 1
