"""Checkpoints that other programs write are read: llm-compressor, mergekit, ms-swift, and peft's, merged or not.

``make test-writers`` makes their environments and names their Pythons in ``WRITERS_PYTHON`` and ``SWIFT_PYTHON``.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

import automoe
from automoe.config.compose import Arguments
from automoe.config.mesh_shape import resolve_mesh
from automoe.launch.prepare import compose
from automoe.model.causal_lm import CausalLM
from automoe.parallel.mesh import build_meshes
from automoe.parallel.parallelize import build_parts
from automoe.run.weights import load_or_initialize
from automoe.verify.pool import RankPool

NUM_TOKENS = 30
pytestmark = pytest.mark.writers


def logits(model: CausalLM) -> np.ndarray:
    with torch.no_grad():
        return model.double().eval()(torch.arange(1, NUM_TOKENS + 1)[None]).double().numpy()


def trained_further(adapter: Path) -> np.ndarray:
    """Logits with which a run of LoRA begins that goes on from a folder of peft."""
    lora = ["lora.rank=8", "lora.alpha=32", "lora.targets=[attention]"]
    mesh = ["mesh=fsdp", "launch.num_ranks=1", "launch.device=cpu", "moe.experts=loop"]
    config = compose(Arguments(overrides=[f"model.hf_path={adapter}", "data=stdlib", *lora, *mesh]))
    cpu = torch.device("cpu")
    parts = build_parts(config, build_meshes(resolve_mesh(config.mesh, 1), cpu))
    load_or_initialize(parts, config, cpu)
    return logits(parts[0])


@pytest.mark.parametrize(("python", "script", "number"), [("WRITERS", "writers", 17), ("SWIFT", "swift", 3)])
def test_logits_are_those_of_the_writers_own_readers(
    python: str, script: str, number: int, tmp_path: Path, ranks: RankPool
) -> None:
    """Weights are equal as bfloat16 numbers; the products of the two models round float32 numbers otherwise."""
    program = [os.environ[f"{python}_PYTHON"], "-W", "ignore", Path(__file__).with_name(f"{script}_make.py")]
    subprocess.run([*program, tmp_path, str(NUM_TOKENS)], check=True)
    off = {}
    for file in sorted(tmp_path.glob("*.npy")):
        theirs, folder = np.load(file), file.with_suffix("")
        if (folder / "adapter_config.json").exists():
            [ours] = ranks.run(trained_further, 1, folder)
        else:
            ours = logits(automoe.from_hf(folder, dtype=torch.bfloat16))
        off[file.stem] = np.abs(ours - theirs).max() / np.abs(theirs).max()
    assert len(off) == number
    assert max(off.values()) < 1e-5, off
