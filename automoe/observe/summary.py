"""Texts about runs: descriptions, final numbers, tables of ranks in the meshes, and of sweeps."""

from __future__ import annotations

import math
import os
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from automoe.config.batch import plan_batch, rows_of_run
from automoe.config.convert import written
from automoe.config.mesh_shape import VIEWS, MeshShape
from automoe.config.metrics import perplexity
from automoe.config.schema import Config, tokenizer_of
from automoe.model.params import count_params
from automoe.observe.metrics import Records, series

Facts = list[tuple[str, str]]
MAX_GRID_RANKS = 64  # larger meshes are shown as groups, without a grid of ranks
MAX_COLUMNS = 16
OPTIMIZERS = {"adamw": "AdamW", "muon": "Muon and AdamW"}
SYNTHETIC = "SYNTHETIC random ids (data=benchmark): speed is measured, and nothing is learned"


def describe_run(config: Config, mesh: MeshShape) -> Facts:
    """Return a run's description as (heading, text) pairs: model, meshes, batch, data, optimizer."""
    model = config.model
    train = config.train
    optim = config.optim
    params = count_params(model)
    batch = plan_batch(config, mesh)
    ramp = train.rampup_batch_size
    source = config.data.kind
    if config.data.path:
        source += f" {written(config.data.path)}"
    source += f", {written(tokenizer_of(config))} tokenizer"
    shared = f" + {model.num_shared_experts} shared" if model.num_shared_experts else ""
    if model.shared_intermediate_size:
        shared = f" + one shared of width {model.shared_intermediate_size}"
    if zeros := model.router.num_zero_experts:
        shared += f" + {zeros} {model.router.zero_expert_type}"
    layers = ((model.num_dense_layers, "dense"), (model.num_layers - model.num_dense_layers, "MoE"))
    kinds = " + ".join(f"{count} {kind}" for count, kind in layers if count)
    modules = f", {model.num_mtp_layers} MTP" * bool(model.num_mtp_layers)
    in_8_bits = ", rows in 8 bits" * (config.moe.dispatch_dtype == "fp8")
    facts = {
        "model": f"{model.family}, {kinds} layers{modules}, hidden {model.hidden_size}, "
        f"{model.attention.kind.upper()} attention",
        "experts": f"{model.num_experts_per_token} of {model.num_experts}{shared}, width {model.moe_intermediate_size}",
        "parameters": f"{short_number(params.total)} total, {short_number(params.active)} active per token",
        "default mesh": _product(mesh, "default"),
        "moe mesh": _product(mesh, "moe"),
        "batch": f"{train.global_batch_size} rows x {train.seq_len} tokens = {batch.tokens_per_step:,} tokens a step: "
        f"{_count(mesh.dp, 'dp rank')} x {_count(batch.num_micro_batches, 'micro-batch', 'es')} x "
        f"{_count(train.micro_batch_size, 'row')}"
        + ("" if ramp is None else f", from {ramp[0]} rows by {ramp[1]} over {ramp[2]:,} rows"),
        "training": f"{train.steps:,} steps, {short_number(rows_of_run(train) * train.seq_len)} tokens, {train.dtype}",
        "optimizer": f"{OPTIMIZERS[optim.algorithm]}, lr {optim.lr:g}, {optim.schedule} after "
        f"{optim.warmup_steps} warm-up steps",
        "data": SYNTHETIC if config.data.is_synthetic else source,
        "MoE layer": f"{config.moe.dispatcher} dispatcher{in_8_bits}, {config.moe.experts} experts",
    }
    if not model.num_moe_layers:
        del facts["experts"], facts["MoE layer"]
    return list(facts.items())


def final_numbers(records: Records) -> Facts:
    """Return a run's results as (heading, text) pairs; [] without records.

    Args:
        records: step records (``read_metrics``).
    """
    if not records:
        return []
    last = records[-1]
    mfu = median(records, "mfu")
    load = last.get("expert_max_load")
    bits, memory, seconds = (
        series(records, key)[1]
        for key in ("val_bits_per_byte", "peak_memory_bytes", "step_seconds")
    )
    validated = next(
        (record for record in reversed(records) if record.get("val_loss") is not None), {}
    )
    has_perplexity = "val_perplexity" in validated
    averaged = validated.get("val_loss_ema")
    facts = {
        "training loss": number(last.get("loss"), 4),
        "validation loss": validated and number(validated["val_loss"], 4),
        "validation perplexity": has_perplexity and perplexity_text(validated["val_loss"]),
        "validation bits per byte": len(bits) and number(bits[-1], 3),
        "validation loss, EMA": averaged is not None and number(averaged, 4),
    }
    for name, loss in losses_by_source(validated):
        facts[f"validation loss of {name}"] = number(loss, 4) + (
            f", perplexity {perplexity_text(loss)}" if has_perplexity else ""
        )
    facts |= {
        "trained tokens": short_number(last.get("tokens")),
        "tokens per second, median": short_number(median(records, "tokens_per_second")),
        "MFU, median": mfu is not None and f"{100 * mfu:.1f}%",
        "peak memory per rank": len(memory) and bytes_text(memory.max()),
        "busiest / mean expert": load != 0 and number(load, 2),
        **_slowest_rank(records),
        "time in steps": len(seconds) and duration(float(seconds.sum())),
    }
    return [(name, text) for name, text in facts.items() if text]


def _slowest_rank(records: Records) -> dict[str, str]:
    """Return heading -> text about the rank that was slowest most often; {} if none was timed.

    The ranks time an equal matrix product every ``launch.probe_every`` steps.
    """
    timed = [record for record in records if record.get("slowest_rank") is not None]
    if not timed:
        return {}
    who = Counter((record["slowest_rank"], record["slowest_host"]) for record in timed)
    [((rank, host), times)] = who.most_common(1)
    behind = [
        record["probe_seconds_max"] / record["probe_seconds_median"]
        for record in timed
        if (record["slowest_rank"], record["slowest_host"]) == (rank, host)
    ]
    return {
        f"slowest rank, on {host}": str(rank),
        f"slowest in timings, of {len(timed)}": str(times),
        "its time / median rank": f"{np.median(behind):.2f}",
    }


def from_here(text: str) -> str:
    """Return ``text`` with absolute paths in the working directory replaced by relative ones."""
    try:
        here = Path.cwd()
    except OSError:  # it was removed
        return text
    return text.replace(f"{here}{os.sep}", "") if here != here.parent else text


def fact_lines(facts: Facts, width: int) -> list[tuple[str, str]]:
    """Wrap (heading, text) pairs to terminal lines of at most ``width`` columns.

    Each result is (heading padded to the width of all headings, part of the text); continuation
    lines have a blank heading. Long words such as paths are never broken.
    """
    names = max((len(name) for name, _ in facts), default=0) + 4
    lines = []
    for name, text in facts:
        parts = textwrap.wrap(
            text, max(width - names, 20), break_long_words=False, break_on_hyphens=False
        ) or [""]
        lines += [
            (f"  {name if i == 0 else '':<{names - 2}}", part) for i, part in enumerate(parts)
        ]
    return lines


def losses_by_source(record: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Return (data source, validation loss) pairs of a step's record; [] with one source or no validation."""
    prefix = "val_loss."
    return [
        (key.removeprefix(prefix), value) for key, value in record.items() if key.startswith(prefix)
    ]


def median(records: Records, key: str) -> float | None:
    """Return the median of the finite values of ``key`` in the records; None if there are none."""
    _, values = series(records, key)
    values = values[np.isfinite(values)]
    return float(np.median(values)) if len(values) else None


def number(value: Any, digits: int) -> str:
    """Format a number with ``digits`` decimals; NaN and infinity become nan and inf, None ``-``."""
    return "-" if value is None else f"{float(value):.{digits}f}"


def perplexity_text(loss: Any) -> str:
    """Format the perplexity exp(``loss``): 12.34, 1.23e+04, inf."""
    value = perplexity(loss)
    return f"{value:.3g}" if value >= 999.995 else f"{value:.2f}"


def short_number(value: Any) -> str:
    """Format a number with three significant digits and a suffix: 950, 1.23k, 45.6M, 671B; None: ``-``."""
    if value is None:
        return "-"
    value = float(value)
    if not math.isfinite(value):
        return str(value)
    plain = _three_digits(value) if value % 1 else f"{value:.0f}"
    return _scaled(value, {"T": 1e12, "B": 1e9, "M": 1e6, "k": 1e3}) or plain


def bytes_text(value: Any) -> str:
    """Format a number of bytes: 512 MiB, 1.50 GiB; ``-`` for None."""
    if value is None:
        return "-"
    value = float(value)
    units = {" TiB": 2.0**40, " GiB": 2.0**30, " MiB": 2.0**20}
    return _scaled(value, units) or f"{value / 2**10:.0f} KiB"


def _scaled(value: float, units: dict[str, float]) -> str:
    """Format ``value`` in the first unit that it reaches; "" if it reaches none.

    Args:
        units: suffix -> size of the unit, the largest first.
    """
    for suffix, unit in units.items():
        if abs(value) >= 0.9995 * unit:
            return _three_digits(value / unit) + suffix
    return ""


def duration(seconds: float) -> str:
    """Format seconds as a duration: 0:07, 12:34, 5:06:07, 3d 04h; ``-`` if not finite."""
    if not math.isfinite(seconds):
        return "-"
    whole = int(seconds + 0.5)
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24}d {hours % 24:02d}h"
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _three_digits(value: float) -> str:
    digits = 2 - (abs(value) >= 9.995) - (abs(value) >= 99.95)
    return f"{value:.{digits}f}"


def _product(mesh: MeshShape, view: str) -> str:
    text = mesh.describe(view)
    return f"{text} = {mesh.world_size:,} ranks" if " x " in text else text


def _count(count: int, word: str, ending: str = "s") -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}{ending}"


def render_mesh_text(mesh: MeshShape, *, grid: bool = True, groups: bool = True) -> str:
    """Return the default and the MoE mesh as text: for each a grid of ranks and a table of groups.

    The grid has a column of ranks for each position on the inner axes, which is written above it,
    and a row for each position on the outer axes, which is written at its left. Meshes of more than
    64 ranks, or with too many columns for a terminal, get only the table. For one rank the
    text is a sentence.

    Args:
        grid: False omits the grid.
        groups: False omits the table where there is a grid.
    """
    if mesh.world_size == 1:
        return "one rank: both meshes are the same single cell\n"
    lines = []
    for view in VIEWS:
        lines.append(f"{view} mesh: {_product(mesh, view)}")
        axes = mesh.active_axes(view)
        has_grid = grid and mesh.world_size <= MAX_GRID_RANKS and axes[-1][1] <= MAX_COLUMNS
        if has_grid:
            lines += [f"  {line}" for line in _grid(mesh, view)]
        if groups or not has_grid:
            lines += [""] * has_grid
            lines.append(f"  {'axis':<14}{'size':>5}{'groups':>8}   ranks of the first group")
            for axis, size in axes:
                ranks = list(map(str, mesh.groups(view, axis)[0]))
                if len(ranks) > 8:
                    ranks[6:-1] = ["..."]
                count = mesh.world_size // size
                lines.append(f"  {axis:<14}{size:>5}{count:>8}   {' '.join(ranks)}")
        lines.append("")
    return "\n".join(lines)


def _grid(mesh: MeshShape, view: str) -> list[str]:
    """Return the lines of the grid of one mesh's ranks: outer axes downwards, inner axes across.

    Args:
        view: which mesh, ``default`` or ``moe``.
    """
    axes = mesh.active_axes(view)
    # pp stays at the left even if all ranks fit in one row, so that a row is a stage in both views.
    # Otherwise as many inner axes run along a row as fit, at least the innermost.
    split = 1 if axes[0][0] == "pp" else 0
    while split < len(axes) - 1 and math.prod(size for _, size in axes[split:]) > MAX_COLUMNS:
        split += 1
    inner = [axis for axis, _ in axes[split:]]
    columns = math.prod(size for _, size in axes[split:])
    places = [mesh.coordinates(rank, view) for rank in range(mesh.world_size)]
    labels = [
        "  ".join(f"{axis} {place[axis]}" for axis, _ in axes[:split]) or "rank"
        for place in places[::columns]
    ]
    width = max(map(len, [*labels, *inner]))
    cell = len(str(mesh.world_size - 1)) + 2
    lines = []
    for axis in inner:
        lines.append(
            f"{axis:>{width}} :" + "".join(f"{place[axis]:>{cell}}" for place in places[:columns])
        )
    if inner:
        lines.append(" " * (width + 2) + "-" * (cell * columns))
    for row, label in enumerate(labels):
        ranks = range(row * columns, (row + 1) * columns)
        lines.append(f"{label:>{width}} |" + "".join(f"{rank:>{cell}}" for rank in ranks))
    return lines


# Numbers of a job that are both predicted and measured: key in the record -> heading, formatter.
COMPARED = {
    "tokens_per_second": ("tokens/s", short_number),
    "mfu": ("MFU", lambda value: "-" if value is None else f"{100 * value:.1f}%"),
    "memory": ("peak memory", bytes_text),
    "balance": ("busiest rank", lambda value: number(value, 2)),
}


def new_table(texts: Sequence[str], numbers: Sequence[str]) -> Any:
    """Return an empty table of the package rich.

    Args:
        texts: headings of the first columns, whose cells wrap.
        numbers: headings of the other columns, whose cells are right-aligned.
    """
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in texts:
        table.add_column(heading, overflow="fold")
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def print_sweep(jobs: Records) -> None:
    """Print a sweep as a table with one line per job, and why jobs were skipped or failed.

    Args:
        jobs: one record per job, with ``label``, ``state`` and, where known, ``objective`` (the
            final loss), ``tokens_per_second``, ``seconds``, ``reason`` (of a skip or failure), and
            the meshes ``default`` and ``moe`` as texts.
    """
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    table = new_table(("job", "state"), ("objective", "tokens/s", "seconds"))
    meshes = ("default", "moe") if console.width >= 110 else ()
    for heading in meshes:
        table.add_column(heading)
    forms = {"objective": ".4f", "tokens_per_second": ",.0f", "seconds": ".1f"}
    for job in jobs:
        cells = [
            "-" if job.get(key) is None else f"{job[key]:{form}}" for key, form in forms.items()
        ]
        table.add_row(job["label"], job["state"], *cells, *(job.get(mesh, "-") for mesh in meshes))
    console.print()
    console.print(table)
    for job in jobs:
        if job.get("reason") and job["state"] != "done":
            console.print(f"\n{job['label']} {job['state']}: {job['reason']}", soft_wrap=True)
