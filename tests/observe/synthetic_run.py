"""Writes the record of a run that never happened, with the shapes and the noise of a real one."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path

import numpy as np
import yaml

from automoe.config.schema import Config, MeshConfig
from automoe.observe.metrics import MetricsLog


def small_config(run_dir: Path, steps: int = 200) -> Config:
    config = Config(run_dir=str(run_dir), mesh=MeshConfig(pp=2, dp_shard=2, ep=2, ep_shard=1))
    config.train.steps = steps
    config.train.val_every = 25
    config.model.first_k_dense = 1
    config.moe.seq_balance_coef = 1e-3
    return config


def record_of(step: int, config: Config, rng: np.random.Generator) -> dict[str, object]:
    tokens_per_step = config.train.global_batch_size * config.train.seq_len
    seconds = 0.8 * float(np.exp(rng.normal(0, 0.04))) * (3.0 if step == 1 else 1.0)
    loss = 1.6 + 4.0 * math.exp(-step / 45) + float(rng.normal(0, 0.05))
    record: dict[str, object] = {
        "step": step,
        "loss": loss,
        "grad_norm": 0.5 + 3.0 * math.exp(-step / 20) * float(np.exp(rng.normal(0, 0.3))),
        "lr": config.optim.lr * min(1.0, step / config.optim.warmup_steps),
        "tokens": step * tokens_per_step,
        "tokens_per_second": tokens_per_step / seconds,
        "mfu": None,
        "peak_memory_bytes": 650_000_000 + 1000 * step,
        "seq_balance_loss": 1.0e-3 * (1 + math.exp(-step / 60)),
        "step_seconds": seconds,
    }
    if config.train.val_every and step % config.train.val_every == 0:
        record["val_loss"] = loss + 0.1
        record["val_bits_per_byte"] = (loss + 0.1) / math.log(2)
    return record


def counts_of(step: int, num_layers: int, num_experts: int, tokens: int, rng: np.random.Generator) -> np.ndarray:
    """[L, E]: unbalanced at first, nearly balanced later, with a favourite expert in the middle layer."""
    spread = 0.15 + 1.0 * math.exp(-step / 60)
    if not num_layers:  # a dense model
        return np.zeros((0, num_experts))
    preference_LE = np.random.default_rng(7).normal(0, spread, (num_layers, num_experts))
    preference_LE[num_layers // 2, num_experts // 3] += 2 * spread
    shares_LE = np.exp(preference_LE + rng.normal(0, 0.03, preference_LE.shape))
    shares_LE /= shares_LE.sum(axis=1, keepdims=True)
    return np.stack([rng.multinomial(tokens, share) for share in shares_LE])


def write_run(
    run_dir: Path,
    steps: int,
    *,
    config: Config | None = None,
    num_layers: int = 3,
    num_experts: int = 8,
    status: dict[str, object] | None = None,
    nan_steps: tuple[int, ...] = (),
) -> Config:
    """Fill ``run_dir`` as a run of ``steps`` would; NaN loss and gradient norm at ``nan_steps``."""
    from automoe.observe.metrics import load_summary

    run_dir.mkdir(parents=True, exist_ok=True)
    config = config or small_config(run_dir)
    (run_dir / "config.yaml").write_text(yaml.safe_dump(json.loads(json.dumps(asdict(config))), sort_keys=False))
    rng = np.random.default_rng(0)
    with MetricsLog(run_dir) as log:
        for step in range(1, steps + 1):
            record = record_of(step, config, rng)
            counts_LE = counts_of(step, num_layers, num_experts, 8192, rng)
            record["expert_max_load"] = load_summary(counts_LE)["expert_max_load"]
            if step in nan_steps:
                record |= {"loss": math.nan, "grad_norm": math.inf}
            log.write(record, counts_LE)
    if status is not None:
        (run_dir / "status.json").write_text(json.dumps(status))
    return config
