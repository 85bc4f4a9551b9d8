"""The pictures of a run, drawn from its record: ``plots/*.png``. Every one copes with no step, one, or NaN."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from automoe.observe.metrics import load_summary, read_metrics, series
from automoe.observe.plot_style import BLUE, GREEN, ORANGE, PALE_BLUE, RC, RED, SEQUENTIAL, new_figure, save, say_empty
from automoe.observe.summary import short_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Records = list[dict[str, Any]]
WIDE, NARROW = 9.0, 4.6  # inches
SWEEP_PLOT = "sweep.png"
MAX_LINES = 8  # layers drawn as lines of their own with a legend


def draw_plots(
    records: Records,
    load_steps: np.ndarray,
    load_counts: np.ndarray,
    directory: Path,
    *,
    grad_clip: float = 0.0,
    first_moe_layer: int = 0,
) -> list[tuple[Path, str]]:
    """Write every plot but the mesh to ``directory``; returns (path, caption) in reading order.

    Args:
        records: as ``read_metrics`` returns them.
        load_steps: [N] and ``load_counts`` [N, L, E]: as ``read_expert_load`` returns them.
        grad_clip: drawn as a line in the plot of the gradient norm; 0: none.
        first_moe_layer: model index of the first layer with experts, for the labels.
    """
    import matplotlib

    figures = [
        ("loss", "Cross-entropy per trained token; bits per byte of held-out text", lambda: _loss(records)),
        ("throughput", "Tokens per second over all ranks", lambda: _throughput(records)),
        ("grad_norm", "Global gradient norm before clipping", lambda: _grad_norm(records, grad_clip)),
        ("learning_rate", "Learning rate of the schedule", lambda: _learning_rate(records)),
    ]
    if balance_keys(records):
        figures.append(("balance_loss", "Balance losses, with their coefficients", lambda: _balance_losses(records)))
    dense = len(load_steps) > 0 and load_counts.shape[1] == 0
    if not dense:
        figures += [
            (
                "expert_load",
                "Load of every expert: 1 is an equal share of its layer's tokens",
                lambda: _load_heat_map(load_steps, load_counts, first_moe_layer),
            ),
            (
                "expert_balance",
                "Busiest expert over the mean expert, per layer: 1 is balanced",
                lambda: _load_over_time(records, load_steps, load_counts, first_moe_layer),
            ),
        ]
    directory.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(RC):
        return [(save(draw(), directory / f"{name}.png"), caption) for name, caption, draw in figures]


def balance_keys(records: Records) -> list[str]:
    """Balance losses that were ever on (the others are recorded as 0)."""
    return sorted({key for record in records for key in record if key.endswith("balance_loss") and record[key]})


def _loss(records: Records) -> Figure:
    bits = series(records, "val_bits_per_byte")
    has_bits = len(bits[0]) > 0
    ratios = [2, 1] if has_bits else [1]
    figure, axes = new_figure(WIDE, 3.7, columns=len(ratios), width_ratios=ratios)
    _line(axes[0], *series(records, "loss"), BLUE, "training", smooth=True)
    _points(axes[0], *series(records, "val_loss"), ORANGE, "validation")
    axes[0].set(title="Loss", xlabel="step", ylabel="nats per token")
    _legend(axes[0])
    _focus(axes[0], [series(records, "loss")[1], series(records, "val_loss")[1]])
    if has_bits:
        _points(axes[1], *bits, ORANGE, "validation")
        axes[1].set(title="Validation bits per byte", xlabel="step")
        _label_last(axes[1], *bits)
    return figure


def _throughput(records: Records) -> Figure:
    figure, (axis,) = new_figure(NARROW, 3.1)
    steps, values = series(records, "tokens_per_second")
    _line(axis, steps, values, BLUE, "per step")
    if np.isfinite(values).any():
        median = float(np.median(values[np.isfinite(values)]))
        label = f"median {short_number(median)}"
        _, mfu = series(records, "mfu")
        if np.isfinite(mfu).any():
            label += f", MFU {100 * np.median(mfu[np.isfinite(mfu)]):.1f}%"
        axis.axhline(median, color=ORANGE, linewidth=1.2, linestyle="--", label=label)
        axis.set_ylim(bottom=0)
        axis.yaxis.set_major_formatter(lambda value, _: f"{value / 1000:g}k" if value >= 1000 else f"{value:g}")
    axis.set(title="Throughput", xlabel="step", ylabel="tokens per second")
    _legend(axis)
    return figure


def _grad_norm(records: Records, grad_clip: float) -> Figure:
    figure, (axis,) = new_figure(NARROW, 3.1)
    steps, values = series(records, "grad_norm")
    _line(axis, steps, values, BLUE, "per step", smooth=True)
    finite = values[np.isfinite(values)]
    if len(finite) and finite.min() > 0 and finite.max() / finite.min() > 20:
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter("{x:g}")
    if grad_clip > 0 and len(finite) and grad_clip < 20 * finite.max():
        axis.axhline(grad_clip, color=ORANGE, linewidth=1.2, linestyle="--", label=f"clipped above {grad_clip:g}")
    axis.set(title="Gradient norm", xlabel="step")
    _legend(axis)
    return figure


def _learning_rate(records: Records) -> Figure:
    figure, (axis,) = new_figure(NARROW, 3.1)
    _line(axis, *series(records, "lr"), GREEN, "learning rate")
    axis.set(title="Learning rate", xlabel="step")
    axis.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3), useMathText=True)
    if len(records):
        axis.set_ylim(bottom=0)
    return figure


def _balance_losses(records: Records) -> Figure:
    figure, (axis,) = new_figure(NARROW, 3.1)
    for key, colour in zip(balance_keys(records), (BLUE, ORANGE, GREEN, RED), strict=False):
        _line(axis, *series(records, key), colour, key.removesuffix("_balance_loss").replace("_", " "))
    axis.set(title="Balance losses", xlabel="step", ylabel="added to the loss")
    axis.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3), useMathText=True)
    _legend(axis)
    return figure


def relative_load(counts: np.ndarray) -> np.ndarray:
    """Counts [..., L, E] over their layer's mean; NaN for a layer without tokens."""
    mean = counts.mean(axis=-1, keepdims=True)
    return np.divide(counts, mean, out=np.full_like(counts, np.nan), where=mean > 0)


def _load_heat_map(steps: np.ndarray, counts: np.ndarray, first_moe_layer: int) -> Figure:
    num_layers, num_experts = counts.shape[1:] if len(counts) else (0, 0)
    height = min(7.5, 1.9 + 0.24 * max(num_layers, 6))
    both = len(steps) > 1
    figure, axes = new_figure(WIDE if both else NARROW, height, columns=2 if both else 1)
    if not num_layers:
        say_empty(axes[0], "no expert load recorded")
        return figure
    load_NLE = relative_load(counts)
    finite_N = np.isfinite(load_NLE)
    mean_LE = np.where(finite_N, load_NLE, 0).sum(axis=0) / np.maximum(finite_N.sum(axis=0), 1)
    # colours are about balance: 1 in the middle, the same distance up and down in ratio
    limit = 2.0 if np.nanmax(load_NLE[-1], initial=1.0) <= 2.0 else 4.0
    titles = (f"Step {steps[-1]}", f"Mean of {len(steps)} steps from {steps[0]} to {steps[-1]}")
    for axis, load_LE, title in zip(axes, (load_NLE[-1], mean_LE), titles, strict=False):
        axis.imshow(
            np.log2(np.clip(load_LE, 1 / limit, limit)),
            aspect="auto",
            interpolation="nearest",
            cmap=_balance_colours(),
            vmin=-np.log2(limit),
            vmax=np.log2(limit),
        )
        axis.set(title=title, xlabel="expert")
        axis.grid(False)
        axis.set_yticks(*_ticks(num_layers, first_moe_layer, at_most=20))
        axis.set_xticks(*_ticks(num_experts, 0, at_most=9 if both else 16))
        if num_experts <= 16 and num_layers <= 16:
            decimals = 2 if num_experts <= 8 else 1
            for layer, expert in np.ndindex(load_LE.shape):
                load = load_LE[layer, expert]
                text = f"{load:.{decimals}f}" if np.isfinite(load) else "–"
                axis.text(expert, layer, text, ha="center", va="center", fontsize=7.5)
    axes[0].set_ylabel("layer")
    bar = figure.colorbar(axes[0].images[0], ax=axes, pad=0.01, aspect=30)
    marks = [1 / limit, 1 / limit**0.5, 1, limit**0.5, limit]
    bar.set_ticks([np.log2(mark) for mark in marks], labels=[f"{mark:.2g}" for mark in marks])
    bar.ax.set_yticklabels([f"≤ {1 / limit:.2g}", *[f"{mark:.2g}" for mark in marks[1:-1]], f"≥ {limit:g}"])
    bar.set_label("load over equal share")
    bar.outline.set_visible(False)
    return figure


def _balance_colours() -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    steps = ["#5b93c9", "#a9c9e6", "#f6f7f8", "#f3bd94", "#dd7a3c"]
    return LinearSegmentedColormap.from_list("balance", steps).with_extremes(bad="#d7dbe0")


def _load_over_time(records: Records, steps: np.ndarray, counts: np.ndarray, first_moe_layer: int) -> Figure:
    import matplotlib

    figure, (axis,) = new_figure(WIDE, 3.6)
    _line(axis, *series(records, "expert_max_load"), "#d5dbe1", "worst layer", width=5.0)
    num_layers = counts.shape[1] if len(counts) else 0
    if num_layers:
        load_NL = np.array([load_summary(snapshot).max_over_mean for snapshot in counts])
        colours = matplotlib.colormaps[SEQUENTIAL](np.linspace(0.0, 0.9, num_layers))
        marker = "o" if len(steps) < 3 else None
        for layer in range(num_layers):
            label = f"layer {first_moe_layer + layer}" if num_layers <= MAX_LINES else None
            axis.plot(
                steps, load_NL[:, layer], color=colours[layer], linewidth=1.4, label=label, marker=marker, markersize=4
            )
        if num_layers > MAX_LINES:
            from matplotlib.cm import ScalarMappable
            from matplotlib.colors import ListedColormap, Normalize

            scale = Normalize(first_moe_layer, first_moe_layer + num_layers - 1)
            bar = figure.colorbar(
                ScalarMappable(scale, ListedColormap(colours)), ax=axis, pad=0.01, aspect=30, label="layer"
            )
            bar.outline.set_visible(False)
        axis.axhline(1.0, color=GREEN, linewidth=1.0, linestyle="--", label="balanced")
        if load_NL.max() > 8:
            axis.set_yscale("log", base=2)
            axis.yaxis.set_major_formatter("{x:g}")
        axis.set_ylim(bottom=0.9)
    axis.set(title="Balance over time", xlabel="step", ylabel="busiest / mean expert")
    _legend(axis, outside=num_layers <= MAX_LINES)
    return figure


def _ticks(size: int, first: int, at_most: int) -> tuple[list[int], list[str]]:
    stride = 1
    while size > at_most * stride:
        stride *= 2
    places = list(range(0, size, stride))
    return places, [str(first + place) for place in places]


def _line(
    axis: Axes,
    steps: np.ndarray,
    values: np.ndarray,
    colour: str,
    label: str,
    *,
    smooth: bool = False,
    width: float = 1.6,
) -> None:
    """A line with gaps at NaN, dots when it is short, marks where a value was not finite, its trend when long."""
    finite = np.isfinite(values)
    if not len(steps):
        say_empty(axis, "no step finished yet")
        return
    shown = np.where(finite, values, np.nan)
    short = len(steps) < 3
    trend = _trend(shown) if smooth and finite.sum() >= 60 else None
    axis.plot(
        steps,
        shown,
        color=colour if trend is None else PALE_BLUE,
        linewidth=width if trend is None else 0.9,
        marker="o" if short else None,
        label=label,
    )
    if trend is not None:
        axis.plot(
            steps, trend, color=colour, linewidth=1.9, label=f"{label}, smoothed" if label != "per step" else "smoothed"
        )
    if not finite.all():
        axis.plot(
            steps[~finite],
            np.full((~finite).sum(), 0.02),
            linestyle="none",
            marker="x",
            color=RED,
            clip_on=False,
            transform=axis.get_xaxis_transform(),
            label="not finite",
        )
    axis.margins(x=0.02)
    _whole_steps(axis, steps)


def _points(axis: Axes, steps: np.ndarray, values: np.ndarray, colour: str, label: str) -> None:
    finite = np.isfinite(values)
    if finite.any():
        axis.plot(steps[finite], values[finite], color=colour, marker="o", markersize=4.5, linewidth=1.2, label=label)
        _whole_steps(axis, steps)


def _trend(values: np.ndarray) -> np.ndarray:
    """Running mean over a twentieth of the run, of the finite values, centred."""
    half = max(2, len(values) // 40)
    known = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, values, 0.0))])
    number = np.concatenate([[0], np.cumsum(known)])
    places = np.arange(len(values))
    low, high = np.maximum(places - half, 0), np.minimum(places + half + 1, len(values))
    return (sums[high] - sums[low]) / np.maximum(number[high] - number[low], 1)


def _whole_steps(axis: Axes, steps: np.ndarray) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))
    low, high = axis.dataLim.intervalx  # of all that the axis shows, not of the last series alone
    if len(steps) and low == high:
        axis.set_xlim(low - 1, high + 1)
    elif len(steps):
        axis.autoscale(axis="x")


def _focus(axis: Axes, values: list[np.ndarray]) -> None:
    """Cut a spike's top off the view, so that the rest of the curve can be read."""
    finite = np.concatenate([v[np.isfinite(v)] for v in values])
    if len(finite) < 20:
        return
    low, high, start = finite.min(), np.percentile(finite, 99.5), finite[0]
    high = max(high, min(start, finite.max()))
    if finite.max() > high + 2 * (high - low):
        axis.set_ylim(low - 0.05 * (high - low), high + 0.3 * (high - low))


def _label_last(axis: Axes, steps: np.ndarray, values: np.ndarray) -> None:
    """Write the last value on the side of its point that the curve does not come from."""
    known = np.flatnonzero(np.isfinite(values))
    if not len(known):
        return
    last, before = known[-1], known[-2:][0]
    falling = values[last] < values[before]
    axis.annotate(
        f"{values[last]:.3f}",
        (steps[last], values[last]),
        (0, -7 if falling else 7),
        textcoords="offset points",
        ha="right",
        va="top" if falling else "bottom",
    )
    axis.margins(y=0.14)


def _legend(axis: Axes, *, outside: bool = False) -> None:
    """A legend where it covers no line, or at the right of the axes."""
    if axis.get_legend_handles_labels()[1]:
        if outside:
            axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
        else:
            axis.legend(loc="best")


def draw_sweep(directory: Path, jobs: list[dict[str, Any]]) -> Path:
    """Write ``sweep.png``: training loss of every job over each other, and median tokens per second.

    Meshes of one configuration train alike, so their curves should be one; what differs is the speed.

    Args:
        directory: of the sweep; job N ran in ``directory/N``.
        jobs: journal records: ``job``, ``overrides``, ``state``.
    """
    from matplotlib import rc_context

    with rc_context(RC):
        return _draw_sweep(directory, jobs)


def _draw_sweep(directory: Path, jobs: list[dict[str, Any]]) -> Path:
    shown = [job for job in jobs if (directory / str(job["job"])).is_dir()]
    runs = [(job, read_metrics(directory / str(job["job"]))) for job in shown]
    runs = [(job, records) for job, records in runs if records]
    figure, (loss, speed) = new_figure(11, max(3.6, 1.6 + 0.42 * len(runs)), columns=2)
    loss.set(title="Training loss", xlabel="step", ylabel="nats per token")
    speed.set(title="Tokens per second, median of a job", xlabel="tokens per second")
    if not runs:
        say_empty(loss, "no job trained a step")
        say_empty(speed, "")
        return save(figure, directory / SWEEP_PLOT)
    names, medians = [], []
    for i, (job, records) in enumerate(runs):
        name = f"{job['job']}: {' '.join(job['overrides']) or 'as configured'}"
        steps, losses = series(records, "loss")
        # Thinner from job to job, so that curves which lie on each other can all be seen.
        loss.plot(steps, losses, label=name, linewidth=max(1.0, 4.5 - 0.6 * i), alpha=0.8)
        names.append(name)
        medians.append(float(np.nanmedian(series(records, "tokens_per_second")[1])))
    places = np.arange(len(names))
    bars = speed.barh(places, medians, height=0.6)
    speed.bar_label(bars, labels=[f"{value:,.0f}" for value in medians], padding=4)
    speed.set(yticks=places, yticklabels=names, xlim=(0, max(medians) * 1.18))
    speed.invert_yaxis()
    speed.grid(axis="y", visible=False)
    loss.legend()
    return save(figure, directory / SWEEP_PLOT)
