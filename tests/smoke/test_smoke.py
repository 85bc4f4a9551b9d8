"""What a user does with a run, by the commands: start on a pipeline, kill, resume on another mesh, export, reload.

``make smoke-floor`` and ``make smoke-latest`` run it with the oldest and the newest torch and transformers.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from automoe.observe.metrics import read_metrics
from tests.support.command import PATIENCE_S, TINY, TrainCommand, kill

STEPS = 20
JOB = (
    *TINY,
    "model.num_layers=4",
    f"train.steps={STEPS}",
    "train.val_every=10",
    "train.val_batches=1",
    "checkpoint.every=4",
)
PIPELINE = ("mesh.pp=2", "mesh.dp_shard=2", "mesh.ep=2")
INTERLEAVED = (*PIPELINE, "parallel.schedule=Interleaved1F1B", "parallel.stages_per_rank=2")
NO_PIPELINE = ("mesh.pp=1", "mesh.dp_shard=4", "mesh.ep=4")


def job(run_dir: Path, *overrides: str) -> TrainCommand:
    return TrainCommand(run_dir, (*JOB, *overrides), {"XDG_CACHE_HOME": str(run_dir.parent / "cache")})


def finish(command: TrainCommand) -> list[float]:
    """Run to the end and return the losses of all steps, those of an earlier start included."""
    code, out, err = command.run()
    assert code == 0, out + err
    return [record["loss"] for record in read_metrics(command.run_dir)]


def kill_after_a_save(command: TrainCommand) -> None:
    """SIGKILL all processes of a run once its first checkpoint is there."""
    process = command.start()
    deadline = time.monotonic() + PATIENCE_S
    while "LATEST=step-4" not in command.checkpoints():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.02)
    while pids := command.pids():  # again, as some may have started others meanwhile
        for pid in pids:
            kill(pid)
    process.communicate()


@pytest.mark.parametrize(
    "device, tolerance",
    [pytest.param("cpu", 1e-6, marks=pytest.mark.smoke), pytest.param("cuda", 1e-4, marks=pytest.mark.gpus)],
)
def test_a_killed_pipeline_goes_on_elsewhere_and_is_exported(tmp_path: Path, device: str, tolerance: float) -> None:
    on = (f"launch.device={device}", "cluster.peak_flops=1e15")
    expected = finish(job(tmp_path / "straight", *INTERLEAVED, *on))
    assert len(expected) == STEPS and expected[-1] < expected[0] - 0.05

    run = tmp_path / "run"
    kill_after_a_save(job(run, *PIPELINE, *on))
    assert 4 <= len(read_metrics(run)) < STEPS, "the kill came after the last step"
    losses = finish(job(run, *NO_PIPELINE, *on))
    assert losses == pytest.approx(expected, rel=tolerance)

    subprocess.run([sys.executable, "-m", "automoe.export", run, "--out", tmp_path / "hf"], check=True)
    model, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    ids = torch.frombuffer(bytearray(Path(__file__).read_bytes()[:512]), dtype=torch.uint8).long().view(4, -1)
    assert model(ids, labels=ids).loss < expected[0] - 0.05
