"""Whole runs of the recipe against training written down a second time (``plain_loop``), which shares nothing with it.

Meshes are compared with one rank elsewhere, by code that both have in common; here one rank is compared with
``transformers`` and torch's AdamW, from the same checkpoint and the same text: losses, gradient norms, learning rates,
counts, balance state, validation, and at the end every weight of the exported checkpoint.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from plain_loop import PlainRun, Plan, Seen, sigmoid_shares, softmax_shares

from automoe.checkpoint.manifest import read_manifest
from automoe.config.data_schema import DataConfig
from automoe.config.mesh_shape import resolve_mesh
from automoe.config.schema import (
    CheckpointConfig,
    Config,
    MeshConfig,
    MoEConfig,
    ObserveConfig,
    OptimConfig,
    TrainConfig,
)
from automoe.hf.families.registry import model_config_from_hf
from automoe.training.context import RunContext
from recipes import pretrain
from tests.support.gpu import one_rank
from tests.support.hf_models import save_small_hf

SIZES = {"vocab_size": 264, "num_hidden_layers": 2}


def half_cosine(done: float, lowest: float) -> float:
    return lowest + (1 - lowest) * (1 + math.cos(math.pi * done)) / 2


@dataclass(frozen=True)
class Case:
    """A run: the model, the settings, and the learning rates by step as fractions of ``lr``."""

    model: str
    rates: list[float]
    optim: dict[str, Any]
    train: dict[str, Any]
    moe: dict[str, Any]
    document_mask: bool = True
    sizes: dict[str, Any] | None = None
    tolerance: float = 1e-6
    lr: float = 0.02


CASES = {
    # Warm-up, then a cosine whose last step takes the minimum; clipped; two rows a micro-batch; all balance losses.
    "qwen3_moe": Case(
        "qwen3_moe",
        [1 / 2, 1, half_cosine(1 / 4, 0.2), half_cosine(1 / 2, 0.2), half_cosine(3 / 4, 0.2), 0.2],
        dict(schedule="cosine", warmup_steps=2, min_lr_ratio=0.2, weight_decay=0.3),
        dict(micro_batch_size=2, grad_clip=0.3, dtype="float32"),
        dict(seq_balance_coef=0.05, global_balance_coef=0.04, micro_batch_balance_coef=0.03, z_loss_coef=1e-3),
        tolerance=1e-4,
    ),
    # Groups, expert bias, steps that are skipped as spikes, a linear decay at the end.
    "dsv3": Case(
        "dsv3_groups_yarn",
        [1 / 3, 2 / 3, 1, 1, 0.75, 0.5, 0.25],
        dict(schedule="wsd", warmup_steps=3, decay_steps=3, min_lr_ratio=0.25, weight_decay=0.1),
        dict(micro_batch_size=1, grad_clip=0.0, spike_factor=0.2, spike_window=2, seed=2),
        dict(seq_balance_coef=0.05, global_balance_coef=0.1, bias_update_rate=0.03),
        sizes={"num_hidden_layers": 3},
        lr=1e-4,  # so little that some batches have a larger loss than those before
        tolerance=1e-5,
    ),
    # Biased experts, sinks, a sliding window on the first of the layers; no warm-up and no decay; strong weight decay.
    "gpt_oss": Case(
        "gpt_oss",
        [1] * 4,
        dict(schedule="constant", warmup_steps=0, weight_decay=2.0),
        dict(micro_batch_size=4, grad_clip=1.0),
        dict(seq_balance_coef=0.02),
    ),
    # Dense, the head tied to the embedding; a cosine to nothing; the default betas and epsilon.
    "llama": Case(
        "llama_odd",
        [1, half_cosine(1 / 3, 0), half_cosine(2 / 3, 0), 0],
        dict(schedule="cosine", warmup_steps=0, min_lr_ratio=0.0, weight_decay=0.1),
        dict(micro_batch_size=8, grad_clip=1.0, seed=3),
        {},
    ),
    # A recurrent layer, a gated shared expert, zero-centred norms; documents of a row see each other.
    "qwen3_next": Case(
        "qwen3_next",
        [1 / 2, 1, 0.9, 0.8],
        dict(schedule="wsd", warmup_steps=2, decay_steps=5, min_lr_ratio=0.8, weight_decay=0.5),
        dict(micro_batch_size=8, grad_clip=0.5),
        dict(micro_batch_balance_coef=0.05),
        document_mask=False,
        sizes={"layer_types": ["linear_attention", "full_attention"]},
        tolerance=1e-5,  # transformers' delta rule is in float32
    ),
}
BETAS, EPS, ROWS, SEQ, VAL_EVERY = (0.8, 0.9), 1e-3, 8, 32, 3


def texts() -> list[str]:
    """Documents shorter and longer than a row, fewer than a run has room for."""
    return ["".join(f"{n} and {n * i} " for n in range(i % 7 + 1)) + "é" * (i % 3) for i in range(1, 25)]


@dataclass
class Both:
    case: Case
    records: list[dict[str, Any]]
    loads: list[dict[str, Any]]
    expected: list[Seen]
    validated: tuple[float, float]
    plain: PlainRun
    exported: Any
    checkpoints: list[Path]


def run_recipe(config: Config) -> None:
    run_dir = Path(config.run_dir)
    run_dir.mkdir()
    context = RunContext(0, 1, 0, torch.device("cpu"), run_dir)
    with mock.patch.dict(os.environ, XDG_CACHE_HOME=str(run_dir.parent)), one_rank("cpu"):
        pretrain.main(config, resolve_mesh(config.mesh, 1), context)


def run_both(folder: Path, case: Case) -> Both:
    from transformers import AutoModelForCausalLM

    corpus = folder / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts()))
    hf = save_small_hf(case.model, folder / "first", other_sizes=SIZES | (case.sizes or {}))
    model = replace(model_config_from_hf(folder / "first"), hf_path=str(folder / "first"))
    train = {"dtype": "float64", "seed": 0} | case.train
    config = Config(
        run_dir=str(folder / "run"),
        mesh=MeshConfig(dp_shard=1),
        model=model,
        moe=MoEConfig(experts="loop" if train["dtype"] == "float64" else "grouped_mm", **case.moe),
        train=TrainConfig(
            steps=len(case.rates), seq_len=SEQ, global_batch_size=ROWS, val_every=VAL_EVERY, val_batches=2, **train
        ),
        optim=OptimConfig(lr=case.lr, betas=BETAS, eps=EPS, **case.optim),
        data=DataConfig("jsonl", str(corpus), tokenizer="byte", val_fraction=0.4, document_mask=case.document_mask),
        checkpoint=CheckpointConfig(export_hf=True, every=3),
        observe=ObserveConfig(report=False),
    )
    run_recipe(config)
    plan = Plan(
        rates=[case.lr * rate for rate in case.rates],
        betas=BETAS,
        eps=EPS,
        weight_decay=case.optim["weight_decay"],
        grad_clip=case.train["grad_clip"],
        rows=ROWS,
        rows_per_micro_batch=case.train["micro_batch_size"],
        seq_len=SEQ,
        seed=train["seed"],
        val_fraction=0.4,
        val_batches=2,
        document_mask=case.document_mask,
        seq_balance=case.moe.get("seq_balance_coef", 0.0),
        global_balance=case.moe.get("global_balance_coef", 0.0),
        micro_batch_balance=case.moe.get("micro_batch_balance_coef", 0.0),
        z_loss=case.moe.get("z_loss_coef", 0.0),
        bias_update_rate=case.moe.get("bias_update_rate", 0.0),
        spike_factor=case.train.get("spike_factor", 0.0),
        spike_window=case.train.get("spike_window", 0),
    )
    shares = sigmoid_shares if "dsv3" in case.model else softmax_shares
    plain = PlainRun(hf.double(), texts(), plan, getattr(hf.config, "num_experts_per_tok", 0), shares)
    expected = [plain.step(number) for number in range(len(case.rates))]
    lines = {name: (folder / "run" / f"{name}.jsonl").read_text().splitlines() for name in ("metrics", "expert_load")}
    return Both(
        case,
        [json.loads(line) for line in lines["metrics"]],
        [json.loads(line) for line in lines["expert_load"]],
        expected,
        plain.validate(),
        plain,
        AutoModelForCausalLM.from_pretrained(folder / "run" / "hf", dtype=torch.float64),
        list((folder / "run" / "checkpoints").glob("step-*")),
    )


@pytest.fixture(scope="module", params=CASES)
def both(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Both:
    return run_both(tmp_path_factory.mktemp(request.param), CASES[request.param])


KEYS = ("loss", "grad_norm", "seq_balance_loss", "global_balance_loss", "micro_batch_balance_loss", "z_loss")


@pytest.mark.one_in(6)
def test_every_recorded_number_is_the_plain_loops(both: Both) -> None:
    assert len(both.records) == len(both.case.rates)
    for record, seen in zip(both.records, both.expected, strict=True):
        for key in KEYS:
            assert record[key] == pytest.approx(getattr(seen, key), rel=both.case.tolerance, abs=1e-12), (record, key)
        assert record["lr"] == pytest.approx(seen.lr, rel=1e-12, abs=1e-15)
        assert (record["tokens"], record["skipped"]) == (seen.tokens, seen.skipped)


@pytest.mark.one_in(5)
def test_tokens_of_every_expert_are_counted_without_padding(both: Both) -> None:
    assert [load["counts"] for load in both.loads] == [seen.counts for seen in both.expected]


@pytest.mark.one_in(20)
def test_validation_is_a_mean_over_tokens(both: Both) -> None:
    """Every third step, and the last; a checkpoint keeps the loss of its step, and is of a step that was taken."""
    steps = len(both.records)
    validated = [record["step"] for record in both.records if "val_loss" in record]
    assert validated == sorted({*range(VAL_EVERY, steps + 1, VAL_EVERY), steps})
    manifests = [read_manifest(path)[0] for path in both.checkpoints]
    taken = [record["step"] for record in both.records if not record["skipped"]]
    saved = sorted({next((step for step in taken if step >= due), steps) for due in validated})[-2:]
    assert {m["step"]: m["val_loss"] for m in manifests} == {s: both.records[s - 1].get("val_loss") for s in saved}
    nats, bits = both.validated
    assert both.records[-1]["val_loss"] == pytest.approx(nats, rel=both.case.tolerance)
    assert both.records[-1]["val_bits_per_byte"] == pytest.approx(bits, rel=both.case.tolerance)


def test_every_weight_of_the_exported_checkpoint_is_the_plain_loops(both: Both) -> None:
    theirs = both.exported.state_dict()
    first = dict(both.plain.model.state_dict())
    assert theirs.keys() == first.keys()
    for name, tensor in first.items():
        difference = (theirs[name] - tensor).abs().max()
        assert difference <= 100 * both.case.tolerance * both.case.lr, (name, float(difference))


def test_the_runs_meet_what_they_are_there_for(both: Both) -> None:
    """Two epochs, padding, clipping, skipped steps, unequal numbers of labels: or the tests above say little."""
    plan, expected = both.plain.plan, both.expected
    tokens = [seen.tokens for seen in expected]
    assert len(set(b - a for a, b in zip([0, *tokens], tokens, strict=False))) > 1
    assert len({seen.loss for seen in expected}) == len(expected)
    if plan.grad_clip:
        assert max(seen.grad_norm for seen in expected) > plan.grad_clip
    if plan.spike_factor:
        skipped = [seen.skipped > 0 for seen in expected]
        assert (True, False) in list(zip(skipped, skipped[1:], strict=False)), [seen.loss for seen in expected]
