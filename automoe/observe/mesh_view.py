"""Drawing of a run's two device meshes: the default one, and the one that MoE layers use.

Each rank has the same cell in both drawings. Ranks that read the same rows have one colour in the
first, ranks with the same experts in the second. This module imports matplotlib;
``automoe.observe.summary`` writes the meshes as text.
"""

from __future__ import annotations

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from automoe.config.mesh_shape import MeshShape, largest_divisor
from automoe.observe.plot_style import CELLS, INK, MUTED, RC, new_figure
from automoe.observe.summary import MAX_COLUMNS, MAX_GRID_RANKS, render_mesh_text

FRAME = "#3d4a57"
MAX_ROWS = 12
# Axis names that fit in a cell.
SHORT = {"dp_replicate": "rep", "dp_shard": "dp", "ep_replicate": "rep", "ep_shard": "shard"}
DEFAULT_NOTE = """one colour: ranks that read the same rows
one frame: ranks that share one copy of their stage's weights (FSDP)"""
MOE_NOTE = """one colour: ranks with the same experts
one frame: ranks that exchange tokens (expert-parallel group)"""


@rc_context(RC)
def draw_mesh(mesh: MeshShape) -> Figure:
    """Draw the default mesh, coloured by the rows that ranks read, and the MoE mesh, by their experts.

    For more than 64 ranks, or if ranks fill more than 12 table rows, the figure lists the groups of
    each axis as text.
    """
    columns = largest_divisor(mesh.world_size // mesh.pp, MAX_COLUMNS)
    rows = mesh.world_size // columns
    if mesh.world_size > MAX_GRID_RANKS or rows > MAX_ROWS:
        figure, [axis] = new_figure(9.0, 3.6)
        axis.axis("off")
        text = render_mesh_text(mesh, grid=False)
        axis.text(0, 1, text, va="top", family="monospace", transform=axis.transAxes)
        return figure
    cell = max(0.42, min(0.85, 5.4 / columns, 5.6 / rows))
    width = max(4.3, columns * cell + 1.0)
    height = rows * cell + 1.6
    if width > 5.6:  # Two wide views are drawn one above the other.
        figure, axes = new_figure(width, 2 * height, rows=2)
    else:
        figure, axes = new_figure(2 * width, height, columns=2)
    # Ranks that read the same rows, and ranks that exchange tokens.
    per_stage = mesh.world_size // mesh.pp
    readers = mesh.cp * mesh.tp
    expert_group = mesh.ep * mesh.etp
    read_by = [rank % per_stage // readers for rank in range(mesh.world_size)]
    experts_of = [rank % expert_group // mesh.etp for rank in range(mesh.world_size)]
    _draw_view(axes[0], mesh, "default", read_by, mesh.dp_shard * readers, DEFAULT_NOTE)
    _draw_view(axes[1], mesh, "moe", experts_of, expert_group, MOE_NOTE)
    return figure


def _draw_view(
    axis: Axes, mesh: MeshShape, view: str, groups: list[int], frame: int, note: str
) -> None:
    """Draw one mesh as a table of ranks on ``axis``; each pipeline stage begins a new table row.

    Args:
        view: which mesh, ``default`` or ``moe``.
        groups: for each rank the index of its colour.
        frame: number of consecutive ranks around which a frame is drawn.
        note: text under the table.
    """
    per_stage = mesh.world_size // mesh.pp
    columns = largest_divisor(per_stage, MAX_COLUMNS)
    rows = mesh.world_size // columns
    small = columns > 8 or mesh.world_size > 32
    names = [] if small else [name for name, _ in mesh.active_axes(view) if name != "pp"]
    texts = []
    colours = []
    for rank, group in enumerate(groups):
        position = mesh.coordinates(rank, view)
        lines = [f"{SHORT.get(name, name)} {position[name]}" for name in names]
        texts.append("\n".join([str(rank), *lines]))
        repeats, entry = divmod(group, len(CELLS))  # Every second repeat is darker.
        colours.append(np.multiply(to_rgb(CELLS[entry]), 0.8 if repeats % 2 else 1.0))
    stages = [f"pp {rank // per_stage} " for rank in range(0, mesh.world_size, columns)]
    table = axis.table(
        np.reshape(texts, (rows, columns)).tolist(),
        np.reshape(colours, (rows, columns, 3)).tolist(),
        cellLoc="center",
        rowLabels=stages if mesh.pp > 1 else None,
        bbox=(0, 0, 1, 1),
    )
    for cell in table.get_celld().values():
        cell.set(edgecolor="white", linewidth=3)
    # Otherwise groups and rows end at different ranks, and only colours show the groups.
    if max(frame, columns) % min(frame, columns) == 0:
        size = min(frame, columns) - 0.08, max(1, frame // columns) - 0.08
        for first in range(0, mesh.world_size, frame):
            corner = first % columns + 0.04, first // columns + 0.04
            box = Rectangle(corner, *size, fill=False, edgecolor=FRAME, linewidth=1.4, zorder=3)
            axis.add_patch(box)
    axis.set(xlim=(0, columns), ylim=(rows, 0), aspect="equal", anchor="N", xticks=[], yticks=[])
    axis.spines[:].set_visible(False)
    axis.set_title(f"{view} mesh: {mesh.describe(view)}", color=INK)
    axis.set_xlabel(note, loc="left", size=8.5, color=MUTED, linespacing=1.5)
