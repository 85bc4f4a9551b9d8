"""Plots of a plan: time and traffic of a step, memory per pipeline rank, pipeline schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from automoe.config.schema import Config
from automoe.observe.plot_style import (
    BLUE,
    CELLS,
    GREEN,
    INK,
    ORANGE,
    PALE_BLUE,
    RC,
    RED,
    new_figure,
)
from automoe.planner.plan import Plan
from automoe.planner.remedies import gib
from automoe.planner.reserve import reserve
from automoe.planner.schedule import Span
from automoe.planner.time import step_spans

WIDE = 10.5  # figure width in inches
# Parts of the memory bars: (name, fields of RankMemory, colour).
MEMORY = (
    ("weights", ("weights", "averages"), "#7fa8d1"),
    ("moments", ("moments",), CELLS[0]),
    ("gathered weights", ("gathered_weights", "widened"), CELLS[1]),
    ("gradients", ("gradients", "unsharded_gradients"), "#e8a877"),
    ("activations", ("inputs", "receive_buffers", "activations"), CELLS[2]),
    ("recomputation", ("recompute",), "#86bf9b"),
    ("cross-entropy", ("head",), CELLS[4]),
    ("temporaries", ("temporaries",), CELLS[3]),
)
# Colours of a schedule. The weights' half of a backward pass may run later than the inputs' half.
PASSES = {"F": "forward", "W": "gradients of weights"}  # by kind of action; others are backward
COLOURS = {
    "forward": BLUE,
    "backward": GREEN,
    "gradients of weights": "#8b6fb0",
    "recomputation": ORANGE,
}
IDLE = "#eceff2"
WHOLE = 72  # With at most this many actions per rank, the whole step is drawn.
LONGEST = 64  # Otherwise the drawn first and last parts have at most this many actions each.


@rc_context(RC)
def draw_time(plan: Plan) -> Figure:
    """Draw the seconds of a step by part, and the bytes that a rank sends by mesh axis, if any."""
    time = plan.time
    parts = {name: seconds for name, seconds in time.parts.items() if seconds > 0}
    sent = {axis: num_bytes / 2**30 for axis, num_bytes in time.traffic.items() if num_bytes}
    rows = max(len(parts), len(sent))
    figure, axes = new_figure(WIDE, 1.2 + 0.34 * rows, columns=1 + bool(sent))
    colours = {"computing": BLUE, "bubble": "#b8c0c8", "other": "#8b95a1"}
    labels = [f"{seconds:.3g} s, {seconds / time.seconds:.1%}" for seconds in parts.values()]
    _bars(axes[0], parts, labels, [colours.get(name, ORANGE) for name in parts])
    axes[0].set(
        title="Where a step's time goes", xlabel="seconds; orange: communication that nothing hides"
    )
    if sent:
        away = {axis: time.off_node[axis] / 2**30 for axis in sent}
        labels = [
            f"{gib(size * 2**30)}, {away[axis] / size:.0%} off node" for axis, size in sent.items()
        ]
        _bars(axes[1], sent, labels, [PALE_BLUE] * len(sent))
        axes[1].barh([*away], [*away.values()], height=0.62, color=ORANGE)
        axes[1].set(title="What a rank sends in a step", xlabel="GiB; orange: to other nodes")
    return figure


def _bars(
    axis: Axes, sizes: Mapping[str, float], labels: Sequence[str], colours: Sequence[str]
) -> None:
    bars = axis.barh([*sizes], [*sizes.values()], height=0.62, color=colours)
    axis.bar_label(bars, labels, padding=4, fontsize=9, color=INK)
    axis.set(xlim=(0, 1.5 * max(sizes.values())), ylim=(len(sizes) - 0.4, -0.6))
    axis.grid(axis="y", visible=False)


@rc_context(RC)
def draw_memory(config: Config, plan: Plan) -> Figure:
    """Draw the memory of each pipeline rank, at even and at twice even expert load.

    A line marks the memory of the GPU.
    """
    num_ranks = len(plan.ranks)
    height = max(0.16, min(0.5, 5.4 / num_ranks))
    figure, (axis,) = new_figure(WIDE, 1.5 + height * num_ranks)
    ranks = [*plan.ranks, *plan.uneven_ranks]
    rows = [row + place for place in (-0.2, 0.2) for row in range(num_ranks)]
    left = np.zeros(len(ranks))
    for name, fields, colour in (*MEMORY, ("reserve", (), "#c3cad1")):
        sizes = np.array([sum(rank.parts[field] for field in fields) for rank in ranks])
        if not fields:
            sizes = np.array([reserve(config, plan.mesh, rank).total for rank in ranks])
        sizes = sizes / 2**30
        bars = axis.barh(
            rows, sizes, left=left, height=0.36, color=colour, label=name * bool(sizes.any())
        )
        left += sizes
    if num_ranks <= 16:
        labels = [f"{size:.3g}" for size in left]
        axis.bar_label(bars, labels, padding=2, fontsize=6.5, color=INK)
    if limit := (config.cluster.memory_bytes or 0) / 2**30:
        axis.axvline(limit, color=RED, linewidth=1.4, label=f"the GPU's {limit:.1f} GiB")
    axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    _name_ranks(axis)
    axis.set(
        title="Memory at the fullest moment",
        xlabel="GiB a rank; above at even load of experts, below at twice",
        ylim=(num_ranks - 0.4, -0.6),
        xlim=(0, 1.06 * max(limit, *left)),
    )
    axis.grid(axis="y", visible=False)
    return figure


def _name_ranks(axis: Axes) -> None:
    axis.yaxis.set_major_locator(MaxNLocator(40, integer=True))
    axis.yaxis.set_major_formatter("pp {x:.0f}")


@rc_context(RC)
def draw_schedule(config: Config, plan: Plan) -> tuple[Figure, str]:
    """Draw the actions of every pipeline rank over time; return the figure and its caption.

    The caption says which part of the step is drawn.
    """
    spans, again = step_spans(config, plan.mesh)
    pp = plan.mesh.pp
    end = max(span.end for span in spans)
    first, last = _ends(spans, pp, end)
    windows = [(0.0, end)]
    said = "The whole step"
    if first < last:
        windows = [(0.0, first), (last, end)]
        said = f"Its first {first:.3g} s and its last {end - last:.3g} s; {last - first:.3g} s between them are left out"
    row = max(0.12, min(0.36, 5.5 / pp))
    ratios = [high - low for low, high in windows]
    figure, axes = new_figure(
        WIDE, 1.5 + row * pp, columns=len(windows), width_ratios=ratios, sharey=True
    )
    turns = max(span.stage for span in spans) // pp + 1
    drawn = set()
    for axis, (low, high) in zip(axes, windows, strict=True):
        axis.axvspan(low, high, color=IDLE, zorder=0)
        for span in spans:
            if span.start >= high or span.end <= low:
                continue
            seconds = span.end - span.start
            # A backward pass begins with what it recomputes.
            middle = span.start + seconds * again[span.stage] * (span.kind == "B")
            cells = [("recomputation", span.start, middle)] * (middle > span.start)
            cells.append((PASSES.get(span.kind, "backward"), middle, span.end))
            strength = 0.35 + 0.3 * (span.stage // pp) / turns
            for name, start, stop in cells:
                drawn.add(name)
                axis.broken_barh(
                    [(start, stop - start)], (span.rank - 0.42, 0.84),
                    facecolor=(COLOURS[name], strength), edgecolor="white", linewidth=0.4,
                )  # fmt: skip
        axis.set(xlim=(low, high), ylim=(pp - 0.5, -0.5), xlabel="seconds")
        axis.grid(visible=False)
        axis.spines[:].set_visible(False)
        axis.tick_params(axis="y", length=0)
    _name_ranks(axes[0])
    legend = {name: colour for name, colour in COLOURS.items() if name in drawn} | {"idle": IDLE}
    handles = [Patch(color=colour, label=name) for name, colour in legend.items()]
    figure.legend(handles=handles, loc="outside upper left", ncols=len(handles))
    return figure, f"{said}; darker: later stages of a rank" if turns > 1 else said


def _ends(spans: list[Span], pp: int, end: float) -> tuple[float, float]:
    """Return (start, end) of the seconds that the plot of a long step leaves out.

    Drawn are the time until every rank has ended its first backward pass, and the time from the
    first start of a rank's last forward pass; each part is cut to ``LONGEST`` actions of median length.
    (``end``, 0) means that the whole step is drawn.

    Args:
        spans: actions of all pipeline ranks.
        pp: number of pipeline ranks.
        end: seconds of the step.
    """
    if len(spans) <= WHOLE * pp:
        return end, 0.0
    backwards = {span.rank: span.end for span in reversed(spans) if span.kind != "F"}
    forwards = {span.rank: span.start for span in spans if span.kind == "F"}
    longest = LONGEST * median(span.end - span.start for span in spans)
    first = min(1.1 * max(backwards.values()), longest)
    return first, end - min(1.1 * (end - min(forwards.values())), longest)
