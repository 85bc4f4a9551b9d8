"""Draws both views of the ranks: every rank a cell at the same place in both, coloured by its group."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from automoe.config.mesh_shape import MeshShape
from automoe.observe.mesh_view import MAX_GRID_RANKS, active_axes, axis_stride, columns_per_row
from automoe.observe.plot_style import CELLS, INK, MUTED, RC, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FRAME = "#3d4a57"
STAGE_GAP = 0.3  # between pipeline stages, in cells
MAX_ROWS = 12
MAX_STRIP_CELLS = 8  # parts of an axis drawn one by one in the schematic


def draw_mesh(mesh: MeshShape) -> Figure:
    """Both mesh views as one figure; a schematic of nested axes above ``MAX_GRID_RANKS`` ranks."""
    import matplotlib

    with matplotlib.rc_context(RC):
        return _draw_cells(mesh) if _fits(mesh) else _draw_schematic(mesh)


def _fits(mesh: MeshShape) -> bool:
    per_stage = mesh.world_size // mesh.pp
    return mesh.world_size <= MAX_GRID_RANKS and mesh.pp * per_stage // columns_per_row(per_stage) <= MAX_ROWS


def _draw_cells(mesh: MeshShape) -> Figure:
    per_stage = mesh.world_size // mesh.pp
    columns = columns_per_row(per_stage)
    # short stages side by side would hide that pp is outermost: stages are always stacked
    rows = mesh.pp * (per_stage // columns)
    height_cells = rows + STAGE_GAP * (mesh.pp - 1)
    cell = max(0.42, min(0.85, 5.4 / columns, 5.6 / height_cells))
    panel = max(4.3, columns * cell + 1.0)
    stacked = panel > 5.6  # two wide views read better above each other
    height = height_cells * cell + 1.6
    size = (panel, 2 * height) if stacked else (2 * panel, height)
    figure, axes = new_figure(*size, rows=2 if stacked else 1, columns=1 if stacked else 2)
    expert_group = mesh.ep * mesh.etp
    data_group = mesh.cp * mesh.tp
    _draw_view(
        axes[0],
        mesh,
        "default",
        colour_of=lambda rank: (rank % per_stage) // data_group,
        frame=mesh.dp_shard * data_group,
        note=_default_note(mesh),
    )
    _draw_view(
        axes[1],
        mesh,
        "moe",
        colour_of=lambda rank: (rank % expert_group) // mesh.etp,
        frame=expert_group,
        note=_moe_note(mesh),
    )
    return figure


def _default_note(mesh: MeshShape) -> str:
    if mesh.world_size == 1:
        return "one rank reads every row and holds all weights"
    rows = (
        f"one colour: ranks that read the same rows{_repeats(mesh.dp)}"
        if mesh.dp > 1
        else "all ranks read the same rows"
    )
    shard = (
        "ranks that share one copy of their stage's weights (FSDP)"
        if mesh.fsdp > 1
        else "one whole copy of its stage's weights"
    )
    return f"{rows}\none frame: {shard}"


def _moe_note(mesh: MeshShape) -> str:
    if mesh.world_size == 1:
        return "and all experts"
    experts = (
        f"one colour: ranks with the same experts{_repeats(mesh.ep)}"
        if mesh.ep > 1
        else "every rank computes all experts of its layers"
    )
    group = (
        "one frame: ranks that exchange tokens (expert-parallel group)"
        if mesh.ep * mesh.etp > 1
        else "no tokens are exchanged"
    )
    return f"{experts}\n{group}"


def _repeats(num_groups: int) -> str:
    return "" if num_groups <= 2 * len(CELLS) else f" (the {2 * len(CELLS)} colours repeat)"


def _colour(group: int) -> tuple[float, float, float]:
    from matplotlib.colors import to_rgb

    shade = 1.0 if group % (2 * len(CELLS)) < len(CELLS) else 0.8
    red, green, blue = to_rgb(CELLS[group % len(CELLS)])
    return (shade * red, shade * green, shade * blue)


def _draw_view(axis: Axes, mesh: MeshShape, view: str, colour_of: Callable[[int], int], frame: int, note: str) -> None:
    from matplotlib.patches import FancyBboxPatch, Rectangle

    per_stage = mesh.world_size // mesh.pp
    columns = columns_per_row(per_stage)
    rows_per_stage = per_stage // columns
    shown = [name for name, _ in active_axes(mesh, view) if name != "pp"]
    small = columns > 8 or mesh.world_size > 32
    for rank in range(mesh.world_size):
        stage, within = divmod(rank, per_stage)
        x, y = within % columns, within // columns + stage * (rows_per_stage + STAGE_GAP)
        colour = _colour(colour_of(rank))
        axis.add_patch(Rectangle((x + 0.03, y + 0.03), 0.94, 0.94, facecolor=colour, edgecolor="none"))
        position = mesh.coordinates(rank, view)
        labels = [f"{_short(name)} {position[name]}" for name in shown]
        number_y = y + 0.5 if small or not labels else y + 0.30 + 0.04 * (2 - min(len(labels), 2))
        axis.text(
            x + 0.5,
            number_y,
            str(rank),
            ha="center",
            va="center",
            fontweight="bold",
            fontsize=8 if small else 11,
        )
        if not small:
            for line, label in enumerate(labels[:3]):
                axis.text(
                    x + 0.5,
                    y + 0.56 + 0.15 * line,
                    label,
                    ha="center",
                    va="center",
                    fontsize=6.4,
                    color=FRAME,
                )
    for start in range(0, mesh.world_size, frame):
        stage, within = divmod(start, per_stage)
        if max(frame, columns) % min(frame, columns):
            break  # the groups do not end where rows do; colours alone show them
        x, y = within % columns, within // columns + stage * (rows_per_stage + STAGE_GAP)
        width, height = min(frame, columns), max(1, frame // columns)
        axis.add_patch(
            FancyBboxPatch(
                (x + 0.04, y + 0.04),
                width - 0.08,
                height - 0.08,
                boxstyle="round,pad=0,rounding_size=0.08",
                facecolor="none",
                edgecolor=FRAME,
                linewidth=1.4,
            )
        )
    if mesh.pp > 1:
        for stage in range(mesh.pp):
            middle = stage * (rows_per_stage + STAGE_GAP) + rows_per_stage / 2
            axis.text(-0.18, middle, f"pp {stage}", ha="right", va="center", color=MUTED, fontsize=9)
    total = mesh.pp * rows_per_stage + STAGE_GAP * (mesh.pp - 1)
    axis.set_xlim(-0.9 if mesh.pp > 1 else -0.1, columns + 0.1)
    axis.set_ylim(total + 0.1, -0.1)
    axis.set_aspect("equal")
    axis.set_anchor("N")
    axis.axis("off")
    _title(axis, mesh, view)
    axis.text(
        0.0,
        -0.02,
        note,
        transform=axis.transAxes,
        va="top",
        ha="left",
        fontsize=8.5,
        color=MUTED,
        linespacing=1.5,
    )


def _title(axis: Axes, mesh: MeshShape, view: str) -> None:
    axis.set_title(f"{view} mesh", color=INK, pad=24)
    product = mesh.describe(view).replace(" x ", " × ")
    if mesh.world_size > 1:
        product += f"  =  {mesh.world_size:,} ranks"
    axis.annotate(product, (0, 1), (0, 9), "axes fraction", textcoords="offset points", color=MUTED, fontsize=9)


def _short(axis: str) -> str:
    return {"dp_replicate": "rep", "dp_shard": "dp", "ep_replicate": "rep", "ep_shard": "shard"}.get(axis, axis)


def _draw_schematic(mesh: MeshShape) -> Figure:
    """Nested axes: each strip is one axis, and its first part opens into the strip below."""
    strips = max(len(active_axes(mesh, "default")), len(active_axes(mesh, "moe")))
    figure, axes = new_figure(11.5, 1.0 + 1.15 * strips, columns=2)
    for axis, view in zip(axes, ("default", "moe"), strict=True):
        _draw_strips(axis, mesh, view, strips)
    return figure


def _draw_strips(axis: Axes, mesh: MeshShape, view: str, strips: int) -> None:
    from matplotlib.patches import Polygon, Rectangle

    names = active_axes(mesh, view)
    for level, (name, size) in enumerate(names):
        top = level * 1.5
        stride = axis_stride(mesh, view, name)
        drawn = list(range(size)) if size <= MAX_STRIP_CELLS else [*range(MAX_STRIP_CELLS - 2), None, size - 1]
        width = 1.0 / len(drawn)
        for place, position in enumerate(drawn):
            if position is None:
                axis.text((place + 0.5) * width, top + 0.5, "…", ha="center", va="center", color=MUTED, fontsize=13)
                continue
            colour = CELLS[position % len(CELLS)]
            axis.add_patch(
                Rectangle(
                    (place * width + 0.004, top),
                    width - 0.008,
                    1.0,
                    facecolor=colour,
                    edgecolor=FRAME,
                    linewidth=0.8,
                )
            )
            first = position * stride
            ranks = str(first) if stride == 1 else f"{first}–{first + stride - 1}"
            axis.text((place + 0.5) * width, top + 0.36, str(position), ha="center", va="center", fontweight="bold")
            axis.text((place + 0.5) * width, top + 0.72, ranks, ha="center", va="center", fontsize=6.2, color=FRAME)
        axis.text(-0.02, top + 0.38, name, ha="right", va="center", color=INK, fontsize=9.5, fontweight="bold")
        axis.text(
            -0.02,
            top + 0.72,
            f"{size} × {stride}" if stride > 1 else f"{size} ranks",
            ha="right",
            va="center",
            color=MUTED,
            fontsize=8,
        )
        if level + 1 < len(names):
            funnel = [(0.004, top + 1.0), (width - 0.004, top + 1.0), (0.996, top + 1.5), (0.004, top + 1.5)]
            axis.add_patch(Polygon(funnel, facecolor="#e9edf1", edgecolor="none"))
    axis.set_xlim(-0.24, 1.01)
    axis.set_ylim(strips * 1.5 - 0.35, -0.1)
    axis.axis("off")
    _title(axis, mesh, view)
