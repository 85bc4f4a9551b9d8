"""Plots of a run, drawn from its step records and written to ``plots/*.png``.

Every plot can be drawn for a run of a single step, and for values that are NaN.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, ListedColormap, LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from automoe.config.schema import Config
from automoe.observe.metrics import Curve, Records, read_metrics, series
from automoe.observe.plot_style import BLUE, GREEN, ORANGE, RC, RED, SEQUENTIAL, new_figure, save
from automoe.observe.summary import COMPARED, median, short_number

# figure widths in inches
WIDE = 9.0
NARROW = 4.6
SWEEP_PLOT = "sweep.png"
COLOURS = (BLUE, ORANGE, GREEN, RED)
ANSWERS = (
    ("reward", "Mean reward of the sampled answers", ""),
    ("answer_tokens", "Mean length of the answers", "tokens"),
    ("ref_kl", "Distance from the first weights (k3)", "nats per token"),
    ("teacher_kl", "Distance from the teacher", "nats per token"),
    ("engine_gap", "Mean gap of engine and trainer", "nats"),
    ("routes_differ", "Share of the engine's choices that the router would not make", ""),
)
# Colours of loads from below to above an equal share; grey for a layer without tokens.
BALANCE = LinearSegmentedColormap.from_list(
    "balance", ["#5b93c9", "#a9c9e6", "#f6f7f8", "#f3bd94", "#dd7a3c"]
)
BALANCE = BALANCE.with_extremes(bad="#d7dbe0")


@rc_context(RC)
def draw_plots(
    records: Records, load: Curve, directory: Path, config: Config | None = None
) -> list[tuple[Path, str]]:
    """Write all plots of a run except the drawing of its meshes to ``directory``.

    Args:
        records: step records (``read_metrics``).
        load: (steps [N], tokens per expert [N, L, E]), as ``read_expert_load`` returns them.
        config: the run's configuration, for the layers with experts, the number of experts with
            weights and the gradient clipping threshold. None: layers count from 0, all experts have
            weights, and the threshold is not drawn.

    Returns:
        (path, caption) of each plot in reading order.
    """
    grad_clip = config.train.grad_clip if config else 0.0
    speed = median(records, "tokens_per_second")
    speed_label = f"median {short_number(speed)}"
    if (mfu := median(records, "mfu")) is not None:
        speed_label += f", MFU {100 * mfu:.1f}%"
    speeds = _curves(
        records,
        "Throughput",
        "tokens per second",
        {"tokens_per_second": "per step"},
        level=(speed, speed_label),
    )
    norms = _curves(
        records,
        "Gradient norm",
        "",
        {"grad_norm": "per step"},
        level=(grad_clip or None, f"clipped above {grad_clip:g}"),
        logarithmic=True,
    )
    rates = _curves(records, "Learning rate", "", {"lr": "learning rate"}, smooth=False)
    figures = [
        ("loss", "Cross-entropy per trained token; bits per byte of held-out text", _loss(records)),
        ("throughput", "Tokens per second over all ranks", speeds),
        ("grad_norm", "Global gradient norm before clipping", norms),
        ("learning_rate", "Learning rate of the schedule", rates),
    ]
    # What recipes/grpo.py records
    for key, title, unit in ANSWERS:
        if any(record.get(key) is not None for record in records):
            figures.append((key, title, _curves(records, title, unit, {key: title.lower()})))
    # A balance loss that is off is recorded as 0: plot only losses that were ever on.
    balance = {
        key: key.removesuffix("_balance_loss").replace("_", " ")
        for record in records
        for key in sorted(record)
        if key.endswith("balance_loss") and record[key]
    }
    if balance:
        figure = _curves(records, "Balance losses", "added to the loss", balance)
        figures.append(("balance_loss", "Balance losses, with their coefficients", figure))
    steps, counts = load
    if counts.size:  # not of a dense model
        caption = "Load of every expert: 1 is an equal share of its layer's tokens"
        layers = config.model.moe_layers if config else range(counts.shape[1])
        figures.append(("expert_load", caption, _load_heat_map(steps, counts, layers)))
        caption = "Busiest expert over the mean expert, per layer: 1 is balanced"
        computing = counts[..., : config.model.num_experts] if config else counts
        figure = _load_over_time(records, steps, computing, layers)
        figures.append(("expert_balance", caption, figure))
    return [(save(figure, directory / f"{name}.png"), caption) for name, caption, figure in figures]


def _over_steps(axis: Axes, title: str, ylabel: str = "") -> None:
    """Set the title and labels of a plot whose x axis is the step, with whole numbers as ticks.

    Args:
        ylabel: label of the y axis.
    """
    axis.set(title=title, xlabel="step", ylabel=ylabel)
    axis.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))
    axis.margins(x=0.02)


def _loss(records: Records) -> Figure:
    training = series(records, "loss")
    validation = series(records, "val_loss")
    bits = series(records, "val_bits_per_byte")
    ratios = [2, 1] if len(bits[0]) else [1]
    figure, axes = new_figure(WIDE, 3.7, columns=len(ratios), width_ratios=ratios)
    _over_steps(axes[0], "Loss", "nats per token")
    _line(axes[0], training, BLUE, "training")
    for axis, curve in zip(axes, (validation, bits), strict=False):
        if len(curve[0]):
            axis.plot(*curve, "o-", color=ORANGE, label="validation", markersize=4.5)
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
    return figure


def _curves(
    records: Records,
    title: str,
    unit: str,
    labels: dict[str, str],
    level: tuple[float | None, str] = (None, ""),
    logarithmic: bool = False,
    smooth: bool = True,
) -> Figure:
    """Draw one or several metrics over the steps, at half the page's width.

    Args:
        title: title of the plot; ``unit``: label of the y axis.
        labels: key in the record -> label in the legend.
        level: (height, label) of a dashed horizontal line; not drawn if the height is None, or at
            least 20 times the largest value.
        logarithmic: use a logarithmic y axis if the values span more than a factor of 20.
        smooth: show the trend of a curve with at least 60 finite values.
    """
    figure, (axis,) = new_figure(NARROW, 3.1)
    _over_steps(axis, title, unit)
    values = np.zeros(0)
    for (key, label), colour in zip(labels.items(), COLOURS, strict=False):
        curve = series(records, key)
        _line(axis, curve, colour, label, smooth)
        values = np.append(values, curve[1][np.isfinite(curve[1])])
    if logarithmic and len(values) and 0 < 20 * values.min() < values.max():
        axis.set_yscale("log")
    height, level_label = level
    if height is not None and len(values) and height < 20 * values.max():
        axis.axhline(height, label=level_label, color=ORANGE, linewidth=1.2, linestyle="--")
    _legend(axis)
    return figure


def relative_load(counts: np.ndarray) -> np.ndarray:
    """Divide token counts [..., L, E] by the mean over the E experts; NaN for a layer without tokens."""
    mean = counts.mean(axis=-1, keepdims=True)
    return np.divide(counts, mean, out=np.full_like(counts, np.nan), where=mean > 0)


def _ends(layers: range) -> tuple[float, float]:
    """Return where an axis begins and ends on which ``layers`` are the middles of its parts."""
    return layers.start - layers.step / 2, layers[-1] + layers.step / 2


def _load_heat_map(steps: np.ndarray, counts: np.ndarray, layers: range) -> Figure:
    num_layers, num_experts = counts.shape[1:]
    height = min(7.5, 1.9 + 0.24 * max(num_layers, 6))
    both = len(steps) > 1
    figure, axes = new_figure(WIDE if both else NARROW, height, columns=1 + both)
    load_NLE = relative_load(counts)
    mean_LE = relative_load(counts.sum(axis=0))
    # The colour scale is logarithmic around 1: twice and half the equal share are equally far away.
    limit = 2.0 if np.nanmax(load_NLE[-1], initial=1.0) <= 2.0 else 4.0
    titles = (f"Step {steps[-1]}", f"Mean of {len(steps)} steps from {steps[0]} to {steps[-1]}")
    for axis, load_LE, title in zip(axes, (load_NLE[-1], mean_LE), titles, strict=False):
        axis.imshow(
            np.maximum(load_LE, 1e-9),  # A logarithmic scale would show 0 as a missing value.
            aspect="auto",
            interpolation="nearest",
            norm=LogNorm(1 / limit, limit),
            cmap=BALANCE,
            extent=(-0.5, num_experts - 0.5, *_ends(layers)[::-1]),
        )
        axis.set(title=title, xlabel="expert")
        axis.grid(False)
        for ticks in (axis.xaxis, axis.yaxis):
            ticks.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 4, 8]))
        if num_experts <= 16 and num_layers <= 16:
            for (layer, expert), load in np.ndenumerate(load_LE):
                place = expert, layers[layer]
                axis.text(*place, f"{load:.1f}", ha="center", va="center", fontsize=7.5)
    axes[0].set_ylabel("layer")
    bar = figure.colorbar(axes[0].images[0], ax=axes, pad=0.01, aspect=30, extend="both")
    bar.set_ticks([1 / limit, 1, limit], labels=[f"{1 / limit:g}", "1", f"{limit:g}"])
    bar.minorticks_off()
    bar.set_label("load over equal share")
    return figure


def _load_over_time(
    records: Records, steps: np.ndarray, counts: np.ndarray, layers: range
) -> Figure:
    figure, (axis,) = new_figure(WIDE, 3.6)
    _over_steps(axis, "Balance over time", "busiest / mean expert")
    axis.plot(*series(records, "expert_max_load"), color="#d5dbe1", label="worst layer", lw=5)
    num_layers = counts.shape[1]
    load_NL = np.nan_to_num(relative_load(counts).max(axis=-1))
    colours = matplotlib.colormaps[SEQUENTIAL](np.linspace(0.0, 0.9, num_layers))
    axis.set_prop_cycle(color=colours)
    axis.plot(steps, load_NL, linewidth=1.4, marker=_marker(steps))
    # Each layer has a part of the bar, whose middle is the layer's number.
    scale = ScalarMappable(Normalize(*_ends(layers)), ListedColormap(colours))
    bar = figure.colorbar(scale, ax=axis, pad=0.01, aspect=30, label="layer")
    bar.locator = MaxNLocator("auto", integer=True)
    axis.axhline(1.0, color=GREEN, linewidth=1.0, linestyle="--", label="balanced")
    if load_NL.max() > 8:
        axis.set_yscale("log", base=2)
        axis.yaxis.set_major_formatter("{x:g}")
    axis.set_ylim(bottom=0.9)
    _legend(axis)
    return figure


def _line(axis: Axes, curve: Curve, colour: str, label: str, smooth: bool = True) -> None:
    """Draw a curve with gaps at NaN, and with crosses at the bottom where a value was not finite.

    A curve of one or two points has dots. If ``smooth``, one with at least 60 finite values is
    pale, with its trend on top: means over 40 parts.

    Args:
        curve: (steps [n], values [n]).
        label: text of the curve in the legend.
    """
    steps, values = curve
    finite = np.isfinite(values)
    steps_shown, shown = steps, np.where(finite, values, np.nan)
    if smooth and finite.sum() >= 60:
        axis.plot(steps, shown, color=colour, alpha=0.35, linewidth=0.9)
        label = f"{label}, smoothed"
        parts = np.array_split(np.flatnonzero(finite), 40)
        steps_shown = [steps[part].mean() for part in parts]
        shown = np.array([values[part].mean() for part in parts])
    axis.plot(steps_shown, shown, color=colour, marker=_marker(steps), label=label)
    if not finite.all():
        bottom = np.full((~finite).sum(), 0.02)
        place = axis.get_xaxis_transform()
        axis.plot(steps[~finite], bottom, "x", transform=place, color=RED, label="not finite")


def _marker(steps: np.ndarray) -> str | None:
    return "o" if len(steps) < 3 else None


def _legend(axis: Axes) -> None:
    """Add a legend to a plot, unless it has no labelled curve."""
    if axis.get_legend_handles_labels()[1]:
        axis.legend()


@rc_context(RC)
def draw_sweep(directory: Path, jobs: Records) -> Path:
    """Write ``sweep.png``: training losses of all jobs of a sweep, and their measured and predicted
    tokens/s, MFU, peak memory and balance of ranks.

    Jobs that differ only in their mesh should have the same loss curve.

    Args:
        directory: the sweep's directory; each job has a folder in it, called by its ``name``.
        jobs: one record per job, with its ``name``, its ``label`` in the plot, and results by name
            in ``measured`` and ``predicted``.
    """
    runs = [(job, records) for job in jobs if (records := read_metrics(directory / job["name"]))]
    measured = [
        {"tokens_per_second": job.get("tokens_per_second")} | (job.get("measured") or {})
        for job, _ in runs
    ]
    predicted = [job.get("predicted") or {} for job, _ in runs]
    keys = [key for key in COMPARED if any(job.get(key) is not None for job in measured)]
    height = max(3.8, 1.2 + 0.5 * len(runs))
    columns = 1 + len(keys)
    figure, (loss, *bars) = new_figure(
        7 + 2.2 * len(keys), height, columns=columns, width_ratios=[5] + [2] * len(keys)
    )
    _over_steps(loss, "Training loss", "nats per token")
    if not runs:
        loss.set_title("No job trained a step")
        return save(figure, directory / SWEEP_PLOT)
    colours = matplotlib.colormaps["turbo"](np.linspace(0.05, 0.95, len(runs)))
    for i, ((_, records), colour) in enumerate(zip(runs, colours, strict=True)):
        # Later jobs have thinner lines, so that coinciding curves are all visible.
        loss.plot(*series(records, "loss"), color=colour, linewidth=max(1.0, 4.5 - 0.5 * i))
    rows = np.arange(len(runs))
    for axis, key in zip(bars, keys, strict=True):
        heading, write = COMPARED[key]
        values = [job.get(key) for job in measured]
        drawn = axis.barh(rows, [value or 0.0 for value in values], color=colours)
        axis.bar_label(drawn, map(write, values), padding=3, fontsize=8.5)
        axis.plot([job.get(key, np.nan) for job in predicted], rows, "k|", markersize=16)
        axis.set(title=heading, xticks=[], yticks=[], ylim=(len(runs) - 0.5, -0.5))
        axis.margins(x=0.5)
        axis.grid(False)
    for axis in bars[:1]:
        labels = [textwrap.fill(job["label"], 40) for job, _ in runs]
        axis.set_yticks(rows, labels, fontsize=8.5)
        if any(predicted):
            axis.set_xlabel("black: predicted")
    return save(figure, directory / SWEEP_PLOT)
