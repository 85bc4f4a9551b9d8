"""Drawing of both mesh views: each rank has the same cell in both, coloured by its group.

Imports matplotlib; ``automoe.observe.summary`` writes the views as text.
"""

from __future__ import annotations

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

from automoe.config.mesh_shape import VIEWS, MeshShape, largest_divisor
from automoe.observe.plot_style import CELLS, INK, MUTED, RC, new_figure
from automoe.observe.summary import MAX_COLUMNS, MAX_GRID_RANKS

FRAME = "#3d4a57"
STAGE_GAP = 0.3  # gap between pipeline stages, in cells
MAX_ROWS = 12
MAX_STRIP_CELLS = 8  # largest number of parts that the schematic draws for an axis
CENTRED = {"ha": "center", "va": "center"}
# Axis names that fit in a cell.
SHORT = {"dp_replicate": "rep", "dp_shard": "dp", "ep_replicate": "rep", "ep_shard": "shard"}


@rc_context(RC)
def draw_mesh(mesh: MeshShape) -> Figure:
    """Draw both mesh views; above ``MAX_GRID_RANKS`` ranks, draw a schematic of nested axes."""
    per_stage = mesh.world_size // mesh.pp
    columns = largest_divisor(per_stage, MAX_COLUMNS)
    # Stages are always stacked: short stages side by side would hide that pp is the outermost axis.
    rows = mesh.pp * (per_stage // columns)
    if mesh.world_size > MAX_GRID_RANKS or rows > MAX_ROWS:
        # Each view is a column of strips, one per axis; the first part of a strip opens into the next.
        strips = max(len(mesh.active_axes(view)) for view in VIEWS)
        figure, axes = new_figure(11.5, 1.0 + 1.15 * strips, columns=2)
        for axis, view in zip(axes, VIEWS, strict=True):
            for level, (name, size) in enumerate(mesh.active_axes(view)):
                _draw_strip(axis, 1.5 * level, name, size, mesh.stride(view, name))
            axis.set(xlim=(-0.24, 1.01), ylim=(strips * 1.5 - 0.35, -0.1))
            axis.axis("off")
            _title(axis, mesh, view)
        return figure
    height_cells = rows + STAGE_GAP * (mesh.pp - 1)
    cell = max(0.42, min(0.85, 5.4 / columns, 5.6 / height_cells))
    width = max(4.3, columns * cell + 1.0)
    height = height_cells * cell + 1.6
    if width > 5.6:  # Two wide views are drawn one above the other.
        figure, axes = new_figure(width, 2 * height, rows=2)
    else:
        figure, axes = new_figure(2 * width, height, columns=2)
    # Ranks that read the same rows, and ranks that exchange tokens.
    readers = mesh.cp * mesh.tp
    expert_group = mesh.ep * mesh.etp
    read_by = [rank % per_stage // readers for rank in range(mesh.world_size)]
    experts_of = [rank % expert_group // mesh.etp for rank in range(mesh.world_size)]
    default_note, moe_note = _notes(mesh)
    _draw_view(axes[0], mesh, "default", read_by, mesh.dp_shard * readers, default_note)
    _draw_view(axes[1], mesh, "moe", experts_of, expert_group, moe_note)
    return figure


def _notes(mesh: MeshShape) -> tuple[str, str]:
    """Return the notes under the default and the moe view, which explain colours and frames."""
    if mesh.world_size == 1:
        return "one rank reads every row and holds all weights", "and all experts"
    rows = "all ranks read the same rows"
    weights = "one whole copy of its stage's weights"
    experts = "every rank computes all experts of its layers"
    tokens = "no tokens are exchanged"
    repeats = f" (the {2 * len(CELLS)} colours repeat)"
    if mesh.dp > 1:
        rows = f"one colour: ranks that read the same rows{repeats * (mesh.dp > 2 * len(CELLS))}"
    if mesh.fsdp > 1:
        weights = "ranks that share one copy of their stage's weights (FSDP)"
    if mesh.ep > 1:
        experts = f"one colour: ranks with the same experts{repeats * (mesh.ep > 2 * len(CELLS))}"
    if mesh.ep * mesh.etp > 1:
        tokens = "one frame: ranks that exchange tokens (expert-parallel group)"
    return f"{rows}\none frame: {weights}", f"{experts}\n{tokens}"


def _draw_view(
    axis: Axes, mesh: MeshShape, view: str, groups: list[int], frame: int, note: str
) -> None:
    """Draw one mesh view.

    Args:
        groups: colour index of every rank.
        frame: number of consecutive ranks in each frame.
        note: text under the view.
    """
    per_stage = mesh.world_size // mesh.pp
    columns = largest_divisor(per_stage, MAX_COLUMNS)
    rows = per_stage // columns  # rows of one stage

    def place(rank: int) -> tuple[int, float]:
        stage, within = divmod(rank, per_stage)
        return within % columns, within // columns + stage * (rows + STAGE_GAP)

    small = columns > 8 or mesh.world_size > 32
    names = [] if small else [name for name, _ in mesh.active_axes(view) if name != "pp"]
    for rank, group in enumerate(groups):
        x, y = place(rank)
        repeats, entry = divmod(group, len(CELLS))  # Every second repeat is darker.
        colour = np.multiply(to_rgb(CELLS[entry]), 0.8 if repeats % 2 else 1.0)
        axis.add_patch(
            Rectangle((x + 0.03, y + 0.03), 0.94, 0.94, facecolor=colour, edgecolor="none")
        )
        middle = y + 0.30 + 0.04 * (2 - min(len(names), 2)) if names else y + 0.5
        axis.text(
            x + 0.5, middle, str(rank), fontweight="bold", fontsize=8 if small else 11, **CENTRED
        )
        position = mesh.coordinates(rank, view)
        for line, name in enumerate(names[:3]):
            axis.text(
                x + 0.5,
                y + 0.56 + 0.15 * line,
                f"{SHORT.get(name, name)} {position[name]}",
                fontsize=6.4,
                color=FRAME,
                **CENTRED,
            )
    # Otherwise groups and rows end at different ranks, and only colours show the groups.
    if max(frame, columns) % min(frame, columns) == 0:
        size = min(frame, columns) - 0.08, max(1, frame // columns) - 0.08
        for x, y in map(place, range(0, mesh.world_size, frame)):
            axis.add_patch(
                FancyBboxPatch(
                    (x + 0.04, y + 0.04),
                    *size,
                    boxstyle="round,pad=0,rounding_size=0.08",
                    facecolor="none",
                    edgecolor=FRAME,
                    linewidth=1.4,
                )
            )
    if mesh.pp > 1:
        for stage in range(mesh.pp):
            middle = stage * (rows + STAGE_GAP) + rows / 2
            axis.text(
                -0.18, middle, f"pp {stage}", ha="right", va="center", color=MUTED, fontsize=9
            )
    total = mesh.pp * rows + STAGE_GAP * (mesh.pp - 1)
    left = -0.9 if mesh.pp > 1 else -0.1
    axis.set(xlim=(left, columns + 0.1), ylim=(total + 0.1, -0.1), aspect="equal", anchor="N")
    axis.axis("off")
    _title(axis, mesh, view)
    axis.text(
        0.0,
        -0.02,
        note,
        fontsize=8.5,
        color=MUTED,
        linespacing=1.5,
        transform=axis.transAxes,
        va="top",
        ha="left",
    )


def _title(axis: Axes, mesh: MeshShape, view: str) -> None:
    axis.set_title(f"{view} mesh", color=INK, pad=24)
    product = mesh.describe(view).replace(" x ", " × ")
    if mesh.world_size > 1:
        product += f"  =  {mesh.world_size:,} ranks"
    axis.annotate(
        product,
        (0, 1),
        (0, 9),
        "axes fraction",
        textcoords="offset points",
        color=MUTED,
        fontsize=9,
    )


def _draw_strip(axis: Axes, top: float, name: str, size: int, stride: int) -> None:
    """Draw the parts of one mesh axis, and a funnel from the first part to a strip below."""
    drawn = list(range(size))
    if size > MAX_STRIP_CELLS:
        drawn[MAX_STRIP_CELLS - 2 : -1] = [None]
    width = 1.0 / len(drawn)
    for place, position in enumerate(drawn):
        left = place * width + 0.004
        middle = (place + 0.5) * width
        if position is None:
            axis.text(middle, top + 0.5, "…", color=MUTED, fontsize=13, **CENTRED)
            continue
        colour = CELLS[position % len(CELLS)]
        axis.add_patch(
            Rectangle(
                (left, top), width - 0.008, 1.0, facecolor=colour, edgecolor=FRAME, linewidth=0.8
            )
        )
        first = position * stride
        ranks = str(first) if stride == 1 else f"{first}–{first + stride - 1}"
        axis.text(middle, top + 0.36, str(position), fontweight="bold", **CENTRED)
        axis.text(middle, top + 0.72, ranks, fontsize=6.2, color=FRAME, **CENTRED)
    label = {"ha": "right", "va": "center"}
    axis.text(-0.02, top + 0.38, name, color=INK, fontsize=9.5, fontweight="bold", **label)
    parts = f"{size} × {stride}" if stride > 1 else f"{size} ranks"
    axis.text(-0.02, top + 0.72, parts, color=MUTED, fontsize=8, **label)
    if stride > 1:
        right = (width - 0.004, 0.996)
        axis.fill_betweenx((top + 1.0, top + 1.5), 0.004, right, color="#e9edf1", linewidth=0)
