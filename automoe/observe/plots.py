"""Plots of a run, drawn from its record: ``plots/*.png``.

Every plot works with no step, a single step, and NaN.
"""

from __future__ import annotations

import math
import textwrap
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, ListedColormap, LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator, MultipleLocator

from automoe.config.schema import Config
from automoe.observe.metrics import Curve, Records, read_metrics, series
from automoe.observe.plot_style import (
    BLUE,
    GREEN,
    MUTED,
    ORANGE,
    PALE_BLUE,
    RC,
    RED,
    SEQUENTIAL,
    new_figure,
    save,
    say_empty,
)
from automoe.observe.summary import COMPARED, median, short_number

# figure widths in inches
WIDE = 9.0
NARROW = 4.6
SWEEP_PLOT = "sweep.png"
THRESHOLD: dict[str, Any] = {"color": ORANGE, "linewidth": 1.2, "linestyle": "--"}
SCIENTIFIC: dict[str, Any] = {"style": "sci", "scilimits": (-2, 3), "useMathText": True}
ANSWERS = (
    ("reward", "Mean reward of the sampled answers", ""),
    ("answer_tokens", "Mean length of the answers", "tokens"),
    ("ref_kl", "Distance from the first weights (k3)", "nats per token"),
    ("teacher_kl", "Distance from the teacher", "nats per token"),
    ("engine_gap", "Mean gap of engine and trainer", "nats"),
    ("routes_differ", "Share of the engine's choices that the router would not make", ""),
)
MAX_LINES = 8  # up to this many layers have lines with legend entries
# Colours of loads from below to above an equal share; grey for a layer without tokens.
BALANCE = LinearSegmentedColormap.from_list(
    "balance", ["#5b93c9", "#a9c9e6", "#f6f7f8", "#f3bd94", "#dd7a3c"]
)
BALANCE = BALANCE.with_extremes(bad="#d7dbe0")


@rc_context(RC)
def draw_plots(
    records: Records, load: Curve, directory: Path, config: Config | None = None
) -> list[tuple[Path, str]]:
    """Write all plots of a run, except the mesh, to ``directory``.

    Args:
        records: result of ``read_metrics``.
        load: result of ``read_expert_load``.
        config: source of the first MoE layer's number and of the gradient clipping threshold; None:
            0, and no threshold line.

    Returns:
        (path, caption) of each plot in reading order.
    """
    grad_clip = config.train.grad_clip if config else 0.0
    first_moe_layer = config.model.first_k_dense if config else 0
    figures = [
        ("loss", "Cross-entropy per trained token; bits per byte of held-out text", _loss(records)),
        ("throughput", "Tokens per second over all ranks", _throughput(records)),
        ("grad_norm", "Global gradient norm before clipping", _grad_norm(records, grad_clip)),
        ("learning_rate", "Learning rate of the schedule", _learning_rate(records)),
    ]
    # What recipes/grpo.py records
    for key, title, unit in ANSWERS:
        if len(curve := series(records, key)[0]):
            figure, axis = _small(title, unit)
            _line(axis, series(records, key), BLUE, title.lower(), smooth=len(curve) > 20)
            figures.append((key, title, figure))
    # A balance loss that is off is recorded as 0: plot only losses that were ever on.
    balance = {
        key for record in records for key in record if key.endswith("balance_loss") and record[key]
    }
    if balance:
        figure = _balance_losses(records, sorted(balance))
        figures.append(("balance_loss", "Balance losses, with their coefficients", figure))
    steps, counts = load
    if not len(steps) or counts.shape[1]:  # no dense model
        caption = "Load of every expert: 1 is an equal share of its layer's tokens"
        figures.append(("expert_load", caption, _load_heat_map(steps, counts, first_moe_layer)))
        caption = "Busiest expert over the mean expert, per layer: 1 is balanced"
        figure = _load_over_time(records, steps, counts, first_moe_layer)
        figures.append(("expert_balance", caption, figure))
    return [(save(figure, directory / f"{name}.png"), caption) for name, caption, figure in figures]


def _over_steps(axis: Axes, title: str, ylabel: str = "") -> None:
    """Label a plot over the steps, whose ticks are whole numbers."""
    axis.set(title=title, xlabel="step", ylabel=ylabel)
    axis.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))
    axis.margins(x=0.02)


def _small(title: str, ylabel: str = "") -> tuple[Figure, Axes]:
    """Return a figure over the steps, of half the page's width."""
    figure, (axis,) = new_figure(NARROW, 3.1, plain=True)
    _over_steps(axis, title, ylabel)
    return figure, axis


def _loss(records: Records) -> Figure:
    training = series(records, "loss")
    validation = series(records, "val_loss")
    bits = series(records, "val_bits_per_byte")
    ratios = [2, 1] if len(bits[0]) else [1]
    figure, axes = new_figure(WIDE, 3.7, columns=len(ratios), plain=True, width_ratios=ratios)
    _over_steps(axes[0], "Loss", "nats per token")
    _line(axes[0], training, BLUE, "training", smooth=True)
    _points(axes[0], validation, "validation")
    _legend(axes[0])
    finite = np.concatenate([training[1], validation[1]])
    finite = finite[np.isfinite(finite)]
    if len(finite) >= 20:
        low = finite.min()
        high = max(np.percentile(finite, 99.5), finite[0])
        if finite.max() > high + 2 * (high - low):  # The top of a spike would flatten the rest.
            axes[0].set_ylim(low - 0.05 * (high - low), high + 0.3 * (high - low))
    if len(bits[0]):
        _over_steps(axes[1], "Validation bits per byte")
        _points(axes[1], bits, "validation")
    return figure


def _throughput(records: Records) -> Figure:
    figure, axis = _small("Throughput", "tokens per second")
    _line(axis, series(records, "tokens_per_second"), BLUE, "per step")
    if (middle := median(records, "tokens_per_second")) is not None:
        label = f"median {short_number(middle)}"
        if (mfu := median(records, "mfu")) is not None:
            label += f", MFU {100 * mfu:.1f}%"
        axis.axhline(middle, label=label, **THRESHOLD)
        axis.set_ylim(bottom=0)
        axis.yaxis.set_major_formatter(EngFormatter(sep=""))
    _legend(axis)
    return figure


def _grad_norm(records: Records, grad_clip: float) -> Figure:
    figure, axis = _small("Gradient norm")
    _, values = norms = series(records, "grad_norm")
    _line(axis, norms, BLUE, "per step", smooth=True)
    finite = values[np.isfinite(values)]
    if len(finite) and finite.min() > 0 and finite.max() / finite.min() > 20:
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter("{x:g}")
    if grad_clip > 0 and len(finite) and grad_clip < 20 * finite.max():
        axis.axhline(grad_clip, label=f"clipped above {grad_clip:g}", **THRESHOLD)
    _legend(axis)
    return figure


def _learning_rate(records: Records) -> Figure:
    figure, axis = _small("Learning rate")
    _line(axis, series(records, "lr"), GREEN, "learning rate")
    axis.ticklabel_format(axis="y", **SCIENTIFIC)
    if records:
        axis.set_ylim(bottom=0)
    return figure


def _balance_losses(records: Records, keys: list[str]) -> Figure:
    figure, axis = _small("Balance losses", "added to the loss")
    for key, colour in zip(keys, (BLUE, ORANGE, GREEN, RED), strict=False):
        label = key.removesuffix("_balance_loss").replace("_", " ")
        _line(axis, series(records, key), colour, label)
    axis.ticklabel_format(axis="y", **SCIENTIFIC)
    _legend(axis)
    return figure


def relative_load(counts: np.ndarray) -> np.ndarray:
    """Divide counts [..., L, E] by the mean of their layer; NaN for a layer without tokens."""
    mean = counts.mean(axis=-1, keepdims=True)
    return np.divide(counts, mean, out=np.full_like(counts, np.nan), where=mean > 0)


def _load_heat_map(steps: np.ndarray, counts: np.ndarray, first_moe_layer: int) -> Figure:
    num_layers, num_experts = counts.shape[1:] if len(counts) else (0, 0)
    height = min(7.5, 1.9 + 0.24 * max(num_layers, 6))
    both = len(steps) > 1
    figure, axes = new_figure(WIDE if both else NARROW, height, columns=1 + both)
    if not num_layers:
        say_empty(axes[0], "no expert load recorded")
        return figure
    load_NLE = relative_load(counts)
    finite_N = np.isfinite(load_NLE)
    mean_LE = np.where(finite_N, load_NLE, 0).sum(axis=0) / np.maximum(finite_N.sum(axis=0), 1)
    # The colour scale is logarithmic around 1: twice and half the equal share are equally far away.
    limit = 2.0 if np.nanmax(load_NLE[-1], initial=1.0) <= 2.0 else 4.0
    titles = (f"Step {steps[-1]}", f"Mean of {len(steps)} steps from {steps[0]} to {steps[-1]}")
    for axis, load_LE, title in zip(axes, (load_NLE[-1], mean_LE), titles, strict=False):
        last = first_moe_layer + num_layers - 0.5
        axis.imshow(
            np.clip(load_LE, 1 / limit, limit),
            aspect="auto",
            interpolation="nearest",
            norm=LogNorm(1 / limit, limit),
            cmap=BALANCE,
            extent=(-0.5, num_experts - 0.5, last, first_moe_layer - 0.5),
        )
        axis.set(title=title, xlabel="expert")
        axis.grid(False)
        sizes = (axis.xaxis, num_experts, 9 if both else 16), (axis.yaxis, num_layers, 20)
        for ticks, size, most in sizes:  # at most that many, at multiples of a power of two
            stride = 2 ** max(0, math.ceil(math.log2(size / most)))
            ticks.set_major_locator(MultipleLocator(stride))
        if num_experts <= 16 and num_layers <= 16:
            decimals = 2 if num_experts <= 8 else 1
            for (layer, expert), load in np.ndenumerate(load_LE):
                text = f"{load:.{decimals}f}" if np.isfinite(load) else "–"
                place = expert, first_moe_layer + layer
                axis.text(*place, text, ha="center", va="center", fontsize=7.5)
    axes[0].set_ylabel("layer")
    bar = figure.colorbar(axes[0].images[0], ax=axes, pad=0.01, aspect=30)
    marks = {limit**power: f"{limit**power:.2g}" for power in (-1, -0.5, 0, 0.5, 1)}
    marks |= {1 / limit: f"≤ {1 / limit:.2g}", limit: f"≥ {limit:g}"}
    bar.set_ticks(list(marks), labels=marks.values())
    bar.minorticks_off()
    bar.set_label("load over equal share")
    bar.outline.set_visible(False)
    return figure


def _load_over_time(
    records: Records, steps: np.ndarray, counts: np.ndarray, first_moe_layer: int
) -> Figure:
    figure, (axis,) = new_figure(WIDE, 3.6)
    _over_steps(axis, "Balance over time", "busiest / mean expert")
    _line(axis, series(records, "expert_max_load"), "#d5dbe1", "worst layer", width=5.0)
    num_layers = counts.shape[1] if len(counts) else 0
    if num_layers:
        load_NL = np.nan_to_num(relative_load(counts).max(axis=-1))
        colours = matplotlib.colormaps[SEQUENTIAL](np.linspace(0.0, 0.9, num_layers))
        lines = axis.plot(
            steps, load_NL, linewidth=1.4, marker="o" if len(steps) < 3 else None, markersize=4
        )
        for layer, (line, colour) in enumerate(zip(lines, colours, strict=True), first_moe_layer):
            line.set(color=colour, label=f"layer {layer}" if num_layers <= MAX_LINES else None)
        if num_layers > MAX_LINES:
            layers = Normalize(first_moe_layer, first_moe_layer + num_layers - 1)
            scale = ScalarMappable(layers, ListedColormap(colours))
            bar = figure.colorbar(scale, ax=axis, pad=0.01, aspect=30, label="layer")
            bar.outline.set_visible(False)
        axis.axhline(1.0, color=GREEN, linewidth=1.0, linestyle="--", label="balanced")
        if load_NL.max() > 8:
            axis.set_yscale("log", base=2)
            axis.yaxis.set_major_formatter("{x:g}")
        axis.set_ylim(bottom=0.9)
    _legend(axis, outside=num_layers <= MAX_LINES)
    return figure


def _line(
    axis: Axes, curve: Curve, colour: str, label: str, *, smooth: bool = False, width: float = 1.6
) -> None:
    """Draw a curve with gaps at NaN, and with crosses where a value was not finite.

    A short curve has dots; a long smooth curve also shows its trend.
    """
    steps, values = curve
    if not len(steps):
        say_empty(axis, "no step finished yet")
        return
    finite = np.isfinite(values)
    shown = np.where(finite, values, np.nan)
    marker = "o" if len(steps) < 3 else None
    if smooth and finite.sum() >= 60:
        axis.plot(steps, shown, color=PALE_BLUE, linewidth=0.9, label=label)
        label = f"{label}, smoothed" if label != "per step" else "smoothed"
        shown, width = _trend(shown), 1.9
    axis.plot(steps, shown, color=colour, linewidth=width, marker=marker, label=label)
    if not finite.all():
        axis.plot(
            steps[~finite],
            np.full((~finite).sum(), 0.02),  # near the bottom of the axes
            "x",
            transform=axis.get_xaxis_transform(),
            color=RED,
            clip_on=False,
            label="not finite",
        )


def _points(axis: Axes, curve: Curve, label: str) -> None:
    """Draw the finite values of a validation's curve as connected dots."""
    steps, values = curve
    finite = np.isfinite(values)
    if finite.any():
        style = {"color": ORANGE, "markersize": 4.5, "linewidth": 1.2}
        axis.plot(steps[finite], values[finite], "o-", label=label, **style)


def _trend(values: np.ndarray) -> np.ndarray:
    """Return the centred running mean of the finite values over a twentieth of the run."""
    half = max(2, len(values) // 40)
    known = np.isfinite(values)
    places = np.arange(len(values))
    low = np.maximum(places - half, 0)
    high = np.minimum(places + half + 1, len(values))
    sums = np.cumsum([np.where(known, values, 0.0), known], axis=1)
    sums = np.insert(sums, 0, 0.0, axis=1)
    total, count = sums[:, high] - sums[:, low]
    return total / np.maximum(count, 1)


def _legend(axis: Axes, *, outside: bool = False) -> None:
    """Add a legend if there are labels: over the plot, or to the right of it (``outside``)."""
    if axis.get_legend_handles_labels()[1]:
        axis.legend(
            loc="upper left" if outside else "best", bbox_to_anchor=(1.0, 1.0) if outside else None
        )


@rc_context(RC)
def draw_sweep(directory: Path, jobs: Records) -> Path:
    """Write ``sweep.png``: the training loss of all jobs, and their measured and predicted numbers.

    Meshes of one configuration train alike, so their loss curves should coincide; only speeds
    differ.

    Args:
        directory: the sweep's directory; the folder of a job has the job's ``name``.
        jobs: records of ``automoe.launch.sweep``.
    """
    runs = [(job, records) for job in jobs if (records := read_metrics(directory / job["name"]))]
    labels = [textwrap.wrap(job["label"], 72) for job, _ in runs]
    measured = [
        {"tokens_per_second": job.get("tokens_per_second")} | (job.get("measured") or {})
        for job, _ in runs
    ]
    keys = [
        key
        for key in COMPARED
        if key == "tokens_per_second" or any(job.get(key) is not None for job in measured)
    ]
    height = max(3.8, 1.2 + 0.3 * len(runs) + 0.19 * sum(map(len, labels)))
    widths = [5, 5] + [2] * (len(keys) - 1)
    figure, (loss, *bars) = new_figure(
        1.1 * sum(widths), height, columns=len(widths), width_ratios=widths
    )
    speed = bars[0]
    loss.set(title="Training loss", xlabel="step", ylabel="nats per token")
    speed.set(title="Tokens per second, median of a job", xlabel="tokens per second")
    if not runs:
        say_empty(loss, "no job trained a step")
        say_empty(speed, "")
        return save(figure, directory / SWEEP_PLOT)
    colours = matplotlib.colormaps["tab10" if len(runs) <= 10 else "turbo"]
    panels = dict(zip(keys, bars, strict=True))
    place = 0.0
    for i, ((job, records), lines) in enumerate(zip(runs, labels, strict=True)):
        colour = colours(i if len(runs) <= 10 else i / (len(runs) - 1))
        # Later jobs have thinner lines, so that coinciding curves are all visible.
        loss.plot(
            *series(records, "loss"), color=colour, linewidth=max(1.0, 4.5 - 0.5 * i), alpha=0.8
        )
        # The label above the bar uses the whole width; bar and curve have the same colour.
        speed.text(0, place, "\n".join(lines), va="top", fontsize=8.5)
        place += 0.62 * len(lines) + 0.28
        for key, axis in panels.items():
            value = measured[i].get(key)
            predicted = (job.get("predicted") or {}).get(key)
            axis.barh(place, value or 0.0, height=0.44, color=colour)
            text = f"{value or 0.0:,.0f}" if axis is speed else COMPARED[key][1](value)
            axis.text(value or 0.0, place, f" {text}", va="center", fontsize=8.5, color=MUTED)
            if predicted is not None:
                marks = [place - 0.34, place + 0.34]
                axis.plot([predicted] * 2, marks, color="black", linewidth=1.6)
        place += 0.6
    for key, axis in panels.items():
        most = axis.dataLim.x1  # the longest bar or mark
        axis.set(
            yticks=[], ylim=(place, -0.2), xlim=(0, (1.2 if axis is speed else 1.6) * most or 1.0)
        )
        axis.grid(axis="y", visible=False)
        if axis is not speed:
            axis.set(title=COMPARED[key][0], xticks=[])
    if any(job.get("predicted") for job, _ in runs):
        speed.set(xlabel="tokens per second; black: predicted")
    loss.margins(x=0.02)
    return save(figure, directory / SWEEP_PLOT)
