"""Checkpoints that other programs write are read: llm-compressor, mergekit, and peft's merged models.

``make test-writers`` makes their environment and names its Python in ``WRITERS_PYTHON``.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

import automoe

NUM_TOKENS = 30
pytestmark = pytest.mark.writers


def test_logits_are_those_of_the_writers_own_readers(tmp_path: Path) -> None:
    """Weights are equal as bfloat16 numbers; the products of the two models round float32 numbers otherwise."""
    script = Path(__file__).with_name("writers_make.py")
    subprocess.run([os.environ["WRITERS_PYTHON"], "-W", "ignore", script, tmp_path, str(NUM_TOKENS)], check=True)
    off = {}
    for file in sorted(tmp_path.glob("*.npy")):
        theirs = np.load(file)
        model = automoe.from_hf(file.with_suffix(""), dtype=torch.bfloat16).double()
        with torch.no_grad():
            ours = model(torch.arange(1, NUM_TOKENS + 1)[None]).double().numpy()
        off[file.stem] = np.abs(ours - theirs).max() / np.abs(theirs).max()
    assert len(off) == 17
    assert max(off.values()) < 1e-5, off
