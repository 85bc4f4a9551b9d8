"""What a run is and how far it came, as short lines of text: shared by the console and the report."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from automoe.config.mesh_shape import MeshShape
from automoe.config.schema import Config
from automoe.cost.activations import plan_batch
from automoe.cost.params import count_params
from automoe.observe.metrics import series

Facts = list[tuple[str, str]]


def describe_run(config: Config, mesh: MeshShape) -> Facts:
    """(name, text) of model, parameters, meshes, batch arithmetic, data and optimizer."""
    model, train, optim = config.model, config.train, config.optim
    params, batch = count_params(model), plan_batch(config, mesh)
    shared = f" + {model.num_shared_experts} shared" if model.num_shared_experts else ""
    num_moe = model.num_layers - model.first_k_dense
    kinds = [f"{count} {kind}" for count, kind in ((model.first_k_dense, "dense"), (num_moe, "MoE")) if count]
    facts = [
        (
            "model",
            f"{model.family}, {' + '.join(kinds)} layers, hidden {model.hidden_size}, "
            f"{model.attention.kind.upper()} attention",
        ),
        (
            "experts",
            f"{model.num_experts_per_token} of {model.num_experts}{shared}, width {model.moe_intermediate_size}",
        ),
        ("parameters", f"{short_number(params.total)} total, {short_number(params.active)} active per token"),
        ("default mesh", _product(mesh, "default")),
        ("moe mesh", _product(mesh, "moe")),
        (
            "batch",
            f"{batch.rows_per_step} rows x {train.seq_len} tokens = {batch.tokens_per_step:,} tokens a step: "
            f"{mesh.dp} dp {_plural('rank', mesh.dp)} x {batch.num_micro_batches} "
            f"{_plural('micro-batch', batch.num_micro_batches)} x {_rows(train.micro_batch_size)}",
        ),
        (
            "training",
            f"{train.steps:,} steps, {short_number(train.steps * batch.tokens_per_step)} tokens, {train.dtype}",
        ),
        ("optimizer", f"AdamW, lr {optim.lr:g}, {optim.schedule} after {optim.warmup_steps} warm-up steps"),
        (
            "data",
            config.data.kind
            + (f" {config.data.path}" if config.data.path else "")
            + f", {config.data.tokenizer} tokenizer",
        ),
        ("MoE layer", f"{config.moe.dispatcher} dispatcher, {config.moe.experts} experts"),
    ]
    return facts if num_moe else [fact for fact in facts if fact[0] not in ("experts", "MoE layer")]


def final_numbers(records: list[dict[str, Any]]) -> Facts:
    """(name, text) of where a run stands after its last recorded step; [] before the first."""
    if not records:
        return []
    facts: Facts = [("training loss", number(records[-1].get("loss"), 4))]
    _, val_loss = series(records, "val_loss")
    _, bits = series(records, "val_bits_per_byte")
    if len(val_loss):
        facts.append(("validation loss", number(val_loss[-1], 4)))
    if len(bits):
        facts.append(("validation bits per byte", number(bits[-1], 3)))
    facts.append(("trained tokens", short_number(records[-1].get("tokens"))))
    facts.append(("tokens per second, median", short_number(_median(records, "tokens_per_second"))))
    if (mfu := _median(records, "mfu")) is not None:
        facts.append(("MFU, median", f"{100 * mfu:.1f}%"))
    _, memory = series(records, "peak_memory_bytes")
    if len(memory):
        facts.append(("peak memory per rank", bytes_text(memory.max())))
    if (load := records[-1].get("expert_max_load")) != 0:  # of a dense model
        facts.append(("busiest / mean expert", number(load, 2)))
    _, seconds = series(records, "step_seconds")
    if len(seconds):
        facts.append(("time in steps", duration(float(seconds.sum()))))
    return facts


def _median(records: list[dict[str, Any]], key: str) -> float | None:
    _, values = series(records, key)
    values = values[np.isfinite(values)]
    return float(np.median(values)) if len(values) else None


def number(value: Any, digits: int) -> str:
    """Fixed digits; ``nan``, ``inf``; ``-`` for None."""
    return "-" if value is None else f"{float(value):.{digits}f}"


def short_number(value: Any) -> str:
    """Three significant digits and a decimal suffix: 950, 1.23k, 45.6M, 671B."""
    if value is None:
        return "-"
    value = float(value)
    if not math.isfinite(value):
        return str(value)
    for unit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * unit:
            return _three_digits(value / unit) + suffix
    return _three_digits(value) if value % 1 else f"{value:.0f}"


def bytes_text(value: Any) -> str:
    """512 MiB, 1.50 GiB; ``-`` for None."""
    if value is None:
        return "-"
    value = float(value)
    for unit, suffix in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB")):
        if value >= 0.9995 * unit:
            return f"{_three_digits(value / unit)} {suffix}"
    return f"{value / 2**10:.0f} KiB"


def duration(seconds: float) -> str:
    """0:07, 12:34, 5:06:07, 3d 04h."""
    if not math.isfinite(seconds):
        return "-"
    whole = int(seconds + 0.5)
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24}d {hours % 24:02d}h"
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _three_digits(value: float) -> str:
    return f"{value:.{0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2}f}"


def _product(mesh: MeshShape, view: str) -> str:
    text = mesh.describe(view)
    return f"{text} = {mesh.world_size:,} ranks" if " x " in text else text


def _plural(word: str, count: int) -> str:
    return word if count == 1 else word + ("es" if word.endswith("ch") else "s")


def _rows(count: int) -> str:
    return f"{count} {_plural('row', count)}"
