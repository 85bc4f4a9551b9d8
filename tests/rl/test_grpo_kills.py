"""Whole runs of reinforcement learning, killed at drawn moments with all their processes, and resumed to the bit.

python tests/rl/test_grpo_kills.py 20 benchmarks/results/grpo_kills.json
python tests/rl/test_grpo_kills.py 20 benchmarks/results/grpo_kills_vllm.json PYTHON    # the Python of a vLLM
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.support.command import PATIENCE_S, TrainCommand

TINY = (
    *("--config-name", "grpo_small", "train.seq_len=32", "train.global_batch_size=8", "train.micro_batch_size=2"),
    *("model.hidden_size=16", "model.num_layers=2", "model.num_experts=4", "model.num_experts_per_token=2"),
    *("model.moe_intermediate_size=8", "model.attention.num_heads=2", "model.attention.num_kv_heads=1"),
    *("model.attention.head_dim=8", "checkpoint.every=2", "checkpoint.async_save=true", "checkpoint.keep=1"),
    *("observe.report=false", "observe.sample_tokens=6", "train.val_every=100", "launch.device=cpu"),
    # An update of these falls between two checkpoints, and a checkpoint between the updates of a rollout.
    *("recipe_args.prompts=2", "recipe_args.samples=4", "recipe_args.iterations=3", "recipe_args.kl=0.01"),
)

# Sizes that vLLM's kernels for CPUs take; its process is killed with the others.
FOR_VLLM = (
    *("model.hidden_size=64", "model.moe_intermediate_size=32", "model.attention.head_dim=32"),
    *("recipe_args.sampler=vllm", "train.dtype=float32"),
)


def left_by(command: TrainCommand) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    """The record, and every tensor of the exported model."""
    files = sorted((command.run_dir / "hf").glob("*.safetensors"))
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert tensors
    return command.record(), {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


def killed(command: TrainCommand, draw: random.Random) -> dict[str, Any] | None:
    """Start the run, and kill every process of it some time after its first sign of training; None: it was done."""
    process = command.start()
    folder, at_first = command.run_dir / "rollouts", signs(command)
    deadline = time.monotonic() + PATIENCE_S
    while process.poll() is None and signs(command) == at_first:
        assert time.monotonic() < deadline, "the run does nothing"
        time.sleep(0.02)
    time.sleep(draw.uniform(0.0, 1.5))
    if process.poll() is not None:
        assert process.returncode == 0, process.communicate()
        return None
    for pid in command.pids():
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.communicate(timeout=PATIENCE_S)
    command.wait_until_gone()
    return {"recorded_steps": len(command.record()), "kept": sorted(path.name for path in folder.glob("*.json"))}


def signs(command: TrainCommand) -> list[int]:
    """What a run writes while it trains: names by time of change."""
    paths = [command.run_dir / "metrics.jsonl", *(command.run_dir / "rollouts").glob("*.json")]
    return [path.stat().st_mtime_ns for path in paths if path.exists()]


def kill_and_compare(
    folder: Path, kills: int, seed: int, steps: int, settings: Sequence[str] = TINY
) -> list[dict[str, Any]]:
    """The moments of the kills, after which the run ended as one that nothing disturbed."""
    overrides = (*settings, f"train.steps={steps}")
    straight, hit = (TrainCommand(folder / name, overrides) for name in ("straight", "hit"))
    code, _, err = straight.run()
    assert code == 0, err
    draw, moments = random.Random(seed), []
    while len(moments) < kills:
        moment = killed(hit, draw)
        assert moment is not None, f"the run ended after {len(moments)} kills: give it more steps"
        moments.append(moment)
    code, _, err = hit.run()
    assert code == 0, err
    assert left_by(hit) == left_by(straight)
    return moments


@pytest.mark.faults
def test_a_run_that_is_killed_at_any_moment_ends_in_the_same_bits(tmp_path: Path) -> None:
    moments = kill_and_compare(tmp_path, 4, random.randrange(1 << 30), 40)
    assert moments[-1]["recorded_steps"] < 40


if __name__ == "__main__":
    number, out, *engine = int(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:]
    settings = (*TINY, *FOR_VLLM) if engine else TINY
    with tempfile.TemporaryDirectory() as name:
        words = (*settings, *(f"recipe_args.engine={python}" for python in engine))
        made = kill_and_compare(Path(name), number, 1, 10 * number, words)
    report = {
        "commit": subprocess.check_output(["git", "rev-parse", "HEAD"], text=True).strip(),
        "command": f"python tests/rl/test_grpo_kills.py {number} {out}" + (" PYTHON" if engine else ""),
        "what": "whole runs of recipes/grpo.py killed by SIGKILL; record and exported weights equal those of a run left alone",
        "overrides": settings,
        "kills": number,
        "moments": made,
    }
    out.write_text(json.dumps(report, indent=1) + "\n")
