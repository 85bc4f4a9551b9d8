"""Whole runs of the recipe against torchtitan's own trainer: losses, gradient norms and the weights at the end.

Dense: torchtitan multiplies experts in bfloat16 whatever the model's dtype. Collected under torch 2.14 and later.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from automoe.config.data_schema import DataConfig
from automoe.config.mesh_shape import resolve_mesh
from automoe.config.schema import CheckpointConfig, Config, MeshConfig, ObserveConfig, OptimConfig, TrainConfig
from automoe.data.loader import Loader
from automoe.hf.families.registry import model_config_from_hf
from automoe.training.context import RunContext
from recipes import pretrain
from tests.support.gpu import one_rank
from tests.support.hf_models import save_small_hf

SCRIPT = Path(__file__).with_name("torchtitan_training.py")
STEPS, ROWS, SEQ = 6, 4, 48
ADAMW = dict(lr=0.01, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.0)  # torchtitan lets norms decay too
GRAD_CLIP = 1.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the recipe and one of torchtitan, from the same weights and rows, in one folder."""
    folder = tmp_path_factory.mktemp("torchtitan")
    corpus = folder / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": f"{n} and {n * n}, then {n**3}. " * 3}) + "\n" for n in range(80)))
    save_small_hf("llama", folder / "first", other_sizes={"vocab_size": 264, "num_hidden_layers": 3})
    config = Config(
        run_dir=str(folder / "run"),
        mesh=MeshConfig(dp_shard=1),
        model=replace(model_config_from_hf(folder / "first"), hf_path=str(folder / "first")),
        train=TrainConfig(
            steps=STEPS, seq_len=SEQ, global_batch_size=ROWS, micro_batch_size=2, val_every=0, grad_clip=GRAD_CLIP
        ),
        optim=OptimConfig(schedule="constant", warmup_steps=0, **ADAMW),
        data=DataConfig(kind="jsonl", path=str(corpus), tokenizer="byte", document_mask=False),
        checkpoint=CheckpointConfig(export_hf=True),
        observe=ObserveConfig(report=False),
    )
    Path(config.run_dir).mkdir()
    with mock.patch.dict(os.environ, XDG_CACHE_HOME=str(folder)), one_rank("cpu"):
        loader = Loader(config, 0, 1)
        batches = [loader.next_step() for _ in range(STEPS)]
        context = RunContext(0, 1, 0, torch.device("cpu"), folder / "run")
        pretrain.main(config, resolve_mesh(config.mesh, 1), context)
    tokens, labels = (torch.stack([getattr(batch, name) for batch in batches]) for name in ("tokens", "labels"))
    torch.save({"tokens": tokens, "labels": labels, "adamw": ADAMW, "grad_clip": GRAD_CLIP}, folder / "rows.pt")
    done = subprocess.run([sys.executable, str(SCRIPT), str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def test_losses_and_gradient_norms_are_torchtitans(folder: Path) -> None:
    ours = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    theirs = json.loads((folder / "torchtitan.json").read_text())
    assert len(ours) == len(theirs) == STEPS
    assert theirs[-1]["loss"] < theirs[0]["loss"] and max(step["grad_norm"] for step in theirs) > GRAD_CLIP
    for record, step in zip(ours, theirs, strict=True):
        assert record["loss"] == pytest.approx(step["loss"], rel=2e-6)
        assert record["grad_norm"] == pytest.approx(step["grad_norm"], rel=2e-5)


def test_weights_at_the_end_are_torchtitans(folder: Path) -> None:
    ours, theirs = load_file(folder / "run" / "hf" / "model.safetensors"), torch.load(folder / "torchtitan.pt")
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert (ours[name] - tensor).abs().max() < 1e-3 * ADAMW["lr"], name
