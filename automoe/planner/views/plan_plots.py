"""Plots of a plan: time and traffic of a step, memory per pipeline rank, pipeline schedule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

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
from automoe.planner.memory import RankMemory
from automoe.planner.plan import Plan, gib
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
# A rank's first stage has the pale colour; its last stage is halfway to the full colour.
FORWARD = (CELLS[0], BLUE)
BACKWARD = (CELLS[2], GREEN)
AGAIN = (CELLS[1], ORANGE)
WEIGHTS = ("#d9ece3", "#8fc7ad")  # weight gradients, the half of a backward pass that may run later
IDLE = "#eceff2"
WHOLE = 72  # With at most this many actions per rank, the whole step is drawn.
LONGEST = 64  # Otherwise the drawn first and last parts have at most this many actions each.
# Inches of margin and per digit that an action needs to show its micro-batch number.
MARGIN = 0.06
DIGIT = 0.05


@rc_context(RC)
def draw_time(plan: Plan) -> Figure:
    """Draw the seconds of a step by part, and the bytes that a rank sends by axis, if any."""
    time = plan.time
    parts = [(name, seconds) for name, seconds in time.parts.items() if seconds > 0]
    sent = {axis: num_bytes for axis, num_bytes in time.traffic.items() if num_bytes}
    rows = max(len(parts), len(sent))
    figure, axes = new_figure(WIDE, 1.2 + 0.34 * rows, columns=1 + bool(sent))
    colours = {"computing": BLUE, "bubble": "#b8c0c8", "other": "#8b95a1"}
    labels = [f"{seconds:.3g} s, {seconds / time.seconds:.1%}" for _, seconds in parts]
    _bars(axes[0], parts, [colours.get(name, ORANGE) for name, _ in parts], labels)
    axes[0].set(
        title="Where a step's time goes", xlabel="seconds; orange: communication that nothing hides"
    )
    if sent:
        unit, name = _unit(max(sent.values()))
        bars = [(axis, num_bytes / unit) for axis, num_bytes in sent.items()]
        labels = [
            f"{gib(num_bytes)}, {time.off_node[axis] / num_bytes:.0%} off node"
            for axis, num_bytes in sent.items()
        ]
        _bars(axes[1], bars, [PALE_BLUE] * len(sent), labels)
        axes[1].barh(
            range(len(sent)),
            [time.off_node[axis] / unit for axis in sent],
            height=0.62,
            color=ORANGE,
        )
        axes[1].set(title="What a rank sends in a step", xlabel=f"{name}; orange: to other nodes")
    return figure


def _unit(most: float) -> tuple[int, str]:
    return (2**30, "GiB") if most >= 2**30 else (2**20, "MiB")


def _bars(
    axis: Axes, parts: Sequence[tuple[str, float]], colours: list[str], labels: list[str]
) -> None:
    most = max(value for _, value in parts)
    axis.barh(range(len(parts)), [value for _, value in parts], height=0.62, color=colours)
    for row, ((_, value), label) in enumerate(zip(parts, labels, strict=True)):
        axis.text(value + 0.015 * most, row, label, va="center", fontsize=9, color=INK)
    axis.set_yticks(range(len(parts)), [name for name, _ in parts], color=INK)
    axis.set(xlim=(0, 1.5 * most), ylim=(len(parts) - 0.4, -0.6))
    axis.grid(axis="y", visible=False)


@rc_context(RC)
def draw_memory(config: Config, plan: Plan) -> Figure:
    """Draw the memory of each pipeline rank at even and twice even expert load, and the limit."""
    pairs = list(zip(plan.ranks, plan.uneven_ranks, strict=True))
    limit = config.cluster.memory_bytes
    step = max(0.16, min(0.5, 5.4 / len(pairs)))
    figure, (axis,) = new_figure(WIDE, 1.5 + step * len(pairs))
    most = max(plan.needed, plan.uneven_needed)
    unit, name = _unit(max(most, limit or 0))
    colours = [*MEMORY, ("reserve", (), "#c3cad1")]

    def stacked(rank: RankMemory) -> list[float]:
        parts = [sum(rank.parts[field] for field in fields) for _, fields, _ in MEMORY]
        return [*parts, reserve(config, plan.mesh, rank).total]

    stacks = [[stacked(rank) for rank in pair] for pair in pairs]
    for row, pair in enumerate(stacks):
        for place, stack in zip((-0.2, 0.2), pair, strict=True):
            left = 0.0
            for num_bytes, (*_, colour) in zip(stack, colours, strict=True):
                axis.barh(row + place, num_bytes / unit, left=left, height=0.36, color=colour)
                left += num_bytes / unit
            if len(pairs) <= 16:
                small = 6.5 if step < 0.45 else 8
                axis.text(left, row + place, f" {left:.1f}", va="center", fontsize=small, color=INK)
    seen = [any(stack[index] for pair in stacks for stack in pair) for index in range(len(colours))]
    handles = [
        Patch(color=colour, label=text)
        for (text, _, colour), some in zip(colours, seen, strict=True)
        if some
    ]
    if limit:
        axis.axvline(limit / unit, color=RED, linewidth=1.4)
        handles.append(
            Patch(facecolor="none", edgecolor=RED, label=f"the GPU's {limit / unit:.1f} {name}")
        )
    axis.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    ticks = range(0, len(pairs), -(-len(pairs) // 40))
    axis.set_yticks(
        ticks, [f"pp {row}" if len(pairs) > 1 else "each rank" for row in ticks], color=INK
    )
    axis.set(
        title="Memory at the fullest moment",
        xlabel=f"{name} a rank; above at even load of experts, below at twice",
    )
    axis.set(ylim=(len(pairs) - 0.4, -0.6), xlim=(0, 1.06 * max(most, limit or 0) / unit))
    axis.grid(axis="y", visible=False)
    return figure


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
    for axis, (low, high) in zip(axes, windows, strict=True):
        inches = (WIDE - 1.2) / sum(ratios)  # inches per second
        axis.axvspan(low, high, color=IDLE, zorder=0)
        for rank in range(pp):
            mine = [
                span for span in spans if span.rank == rank and span.start < high and span.end > low
            ]
            cells = [cell for span in mine for cell in _cells(span, again[span.stage], turns, pp)]
            style = {
                "facecolors": [colour for *_, colour in cells],
                "edgecolor": "white",
                "linewidth": 0.4,
            }
            axis.broken_barh(
                [(start, seconds) for start, seconds, _ in cells], (rank - 0.42, 0.84), **style
            )
            for span in mine:
                middle = (span.start + span.end) / 2
                number = str(span.micro_batch)
                room = (span.end - span.start) * inches >= MARGIN + DIGIT * len(number)
                if room and row >= 0.18 and low < middle < high:
                    axis.text(middle, rank, number, ha="center", va="center", fontsize=6, color=INK)
        axis.set(xlim=(low, high), ylim=(pp - 0.5, -0.5), xlabel="seconds")
        axis.grid(visible=False)
        axis.spines[:].set_visible(False)
        axis.tick_params(axis="y", length=0)
    every = -(-pp // 32)
    axes[0].set_yticks(
        range(0, pp, every), [f"pp {rank}" for rank in range(0, pp, every)], color=INK
    )
    kinds = [
        ("forward", FORWARD),
        ("backward", BACKWARD),
        ("gradients of weights", WEIGHTS),
        ("recomputation", AGAIN),
        ("idle", (IDLE,)),
    ]
    halves = any(span.kind == "W" for span in spans)
    handles = [
        Patch(color=colour[0], label=name)
        for name, colour in kinds
        if {"recomputation": any(again), "gradients of weights": halves}.get(name, True)
    ]
    figure.legend(handles=handles, loc="outside upper left", ncols=len(handles))
    darker = "; darker: later stages of a rank" if turns > 1 else ""
    return figure, f"{said}, with the micro-batches' numbers where there is room{darker}"


def _ends(spans: list[Span], pp: int, end: float) -> tuple[float, float]:
    """Return when the first drawn part of a long step ends, and when the last one starts.

    Returns (``end``, 0) if the whole step is drawn. Times are in seconds.
    """
    if len(spans) <= WHOLE * pp:
        return end, 0.0
    # The first part ends once every rank has run a backward; the last part starts once a rank has
    # run its last forward.
    backwards = [
        min(s.end for s in spans if s.rank == rank and s.kind != "F") for rank in range(pp)
    ]
    forwards = [
        max(s.start for s in spans if s.rank == rank and s.kind == "F") for rank in range(pp)
    ]
    longest = LONGEST * median(span.end - span.start for span in spans)
    return min(1.1 * max(backwards), longest), max(end - 1.1 * (end - min(forwards)), end - longest)


def _cells(span: Span, again: float, turns: int, pp: int) -> Iterator[tuple[float, float, str]]:
    """Yield (start, seconds, colour) of an action's parts: recomputation, then the pass."""
    strong = 0.5 * (span.stage // pp) / max(1, turns - 1)

    def colour(pair: tuple[str, str]) -> str:
        pale, full = map(to_rgb, pair)
        return to_hex(
            [(1 - strong) * part + strong * other for part, other in zip(pale, full, strict=True)]
        )

    first = again * (span.end - span.start) * (span.kind == "B")
    pair = {"F": FORWARD, "W": WEIGHTS}.get(span.kind, BACKWARD)
    if first:
        yield span.start, first, colour(AGAIN)
    yield span.start + first, span.end - span.start - first, colour(pair)
