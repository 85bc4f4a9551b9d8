"""Both views of the ranks: as text for a terminal, and as a drawing for the report.

In the drawing every rank is a cell at the same place in both views, coloured by its group.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING

from automoe.config.mesh_shape import MeshShape
from automoe.observe.plot_style import CELLS, INK, MUTED, RC, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

VIEWS = ("default", "moe")
MAX_GRID_RANKS = 64  # more ranks are described by their groups alone
MAX_COLUMNS = 16
FRAME = "#3d4a57"
STAGE_GAP = 0.3  # between pipeline stages, in cells
MAX_ROWS = 12
MAX_STRIP_CELLS = 8  # parts of an axis drawn one by one in the schematic


def active_axes(mesh: MeshShape, view: str) -> list[tuple[str, int]]:
    """(axis, size) of the axes larger than one, outermost first."""
    return [(a, n) for a, n in zip(mesh.axes(view), mesh.sizes(view), strict=True) if n > 1]


def columns_per_row(num_ranks: int) -> int:
    """Ranks side by side when ``num_ranks`` consecutive ones are laid out: the largest divisor that fits."""
    return max(n for n in range(1, MAX_COLUMNS + 1) if num_ranks % n == 0)


def axis_stride(mesh: MeshShape, view: str, axis: str) -> int:
    """How far apart in rank number two neighbours on ``axis`` are."""
    return prod(mesh.sizes(view)[mesh.axes(view).index(axis) + 1 :])


def shorten_ranks(ranks: list[int], show: int = 8) -> str:
    """``0 1 2 3`` or ``0 8 16 ... 56``."""
    if len(ranks) <= show:
        return " ".join(map(str, ranks))
    return " ".join(map(str, ranks[: show - 2])) + f" ... {ranks[-1]}"


def render_mesh_text(mesh: MeshShape, *, groups: bool = True) -> str:
    """Both views as text under 100 columns: a grid of rank numbers, and a table of every axis' groups.

    A grid has one column of ranks for each position on the inner axes, named above it, and one row
    for each position on the outer axes, named at its left. Above 64 ranks there is only the table;
    ``groups=False`` leaves it out below.
    """
    if mesh.world_size == 1:
        return "one rank: both meshes are the same single cell\n"
    return "\n".join(_render_view(mesh, view, groups) for view in VIEWS)


def _render_view(mesh: MeshShape, view: str, groups: bool) -> str:
    product = mesh.describe(view)
    lines = [f"{view} mesh: {product} = {mesh.world_size} ranks" if " x " in product else f"{view} mesh: {product}"]
    if mesh.world_size <= MAX_GRID_RANKS and active_axes(mesh, view)[-1][1] <= MAX_COLUMNS:
        lines += ["  " + line for line in _grid(mesh, view)]
        if not groups:
            return "\n".join(lines) + "\n"
        lines.append("")
    lines.append(f"  {'axis':<14}{'size':>5}{'groups':>8}   ranks of the first group")
    for axis, size in active_axes(mesh, view):
        group = mesh.groups(view, axis)[0]
        lines.append(f"  {axis:<14}{size:>5}{mesh.world_size // size:>8}   {shorten_ranks(group)}")
    return "\n".join(lines) + "\n"


def _grid(mesh: MeshShape, view: str) -> list[str]:
    """Rows of rank numbers with the coordinates of the outer axes at the left and of the inner ones above."""
    axes = active_axes(mesh, view)
    split = len(axes) - 1  # the innermost axis always runs along a row, more of them while they fit
    while split > 1 and prod(size for _, size in axes[split - 1 :]) <= MAX_COLUMNS:
        split -= 1
    # pp stays at the left even when all fits one row: a row is then a stage in both views
    if split == 1 and axes[0][0] != "pp" and prod(size for _, size in axes) <= MAX_COLUMNS:
        split = 0
    if axes[0][0] == "pp" and len(axes) == 1:
        split = 1
    outer, inner = axes[:split], axes[split:]
    columns = prod(size for _, size in inner)
    labels = [_row_label(mesh, view, outer, row * columns) or "rank" for row in range(mesh.world_size // columns)]
    width = max(len(text) for text in [*labels, *(axis for axis, _ in inner)])
    cell = len(str(mesh.world_size - 1)) + 2
    lines = []
    for axis, _ in inner:
        positions = [mesh.coordinates(rank, view)[axis] for rank in range(columns)]
        lines.append(f"{axis:>{width}} :" + "".join(f"{p:>{cell}}" for p in positions))
    if inner:
        lines.append(" " * (width + 2) + "-" * (cell * columns))
    for row, label in enumerate(labels):
        ranks = range(row * columns, (row + 1) * columns)
        lines.append(f"{label:>{width}} |" + "".join(f"{rank:>{cell}}" for rank in ranks))
    return lines


def _row_label(mesh: MeshShape, view: str, outer: list[tuple[str, int]], rank: int) -> str:
    position = mesh.coordinates(rank, view)
    return "  ".join(f"{axis} {position[axis]}" for axis, _ in outer)


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
    per_stage = mesh.world_size // mesh.pp
    columns = columns_per_row(per_stage)
    rows_per_stage = per_stage // columns

    def place(rank: int) -> tuple[int, float]:
        stage, within = divmod(rank, per_stage)
        return within % columns, within // columns + stage * (rows_per_stage + STAGE_GAP)

    small = columns > 8 or mesh.world_size > 32
    for rank in range(mesh.world_size):
        _draw_rank(axis, mesh, view, rank, *place(rank), _colour(colour_of(rank)), small)
    if max(frame, columns) % min(frame, columns) == 0:  # else groups do not end where rows do; colours alone show them
        for start in range(0, mesh.world_size, frame):
            _draw_frame(axis, *place(start), min(frame, columns), max(1, frame // columns))
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
    where = {"transform": axis.transAxes, "va": "top", "ha": "left"}
    axis.text(0.0, -0.02, note, fontsize=8.5, color=MUTED, linespacing=1.5, **where)


def _draw_rank(
    axis: Axes,
    mesh: MeshShape,
    view: str,
    rank: int,
    x: float,
    y: float,
    colour: tuple[float, float, float],
    small: bool,
) -> None:
    """One cell: the rank's number, and its coordinates but for pp unless cells are ``small``."""
    from matplotlib.patches import Rectangle

    axis.add_patch(Rectangle((x + 0.03, y + 0.03), 0.94, 0.94, facecolor=colour, edgecolor="none"))
    position, names = mesh.coordinates(rank, view), [name for name, _ in active_axes(mesh, view) if name != "pp"]
    labels = [] if small else [f"{_short(name)} {position[name]}" for name in names]
    middle, centred = (
        y + 0.30 + 0.04 * (2 - min(len(labels), 2)) if labels else y + 0.5,
        {"ha": "center", "va": "center"},
    )
    axis.text(x + 0.5, middle, str(rank), fontweight="bold", fontsize=8 if small else 11, **centred)
    for line, label in enumerate(labels[:3]):
        axis.text(x + 0.5, y + 0.56 + 0.15 * line, label, fontsize=6.4, color=FRAME, **centred)


def _draw_frame(axis: Axes, x: float, y: float, width: int, height: int) -> None:
    from matplotlib.patches import FancyBboxPatch

    corners = "round,pad=0,rounding_size=0.08"
    lines = {"facecolor": "none", "edgecolor": FRAME, "linewidth": 1.4}
    axis.add_patch(FancyBboxPatch((x + 0.04, y + 0.04), width - 0.08, height - 0.08, boxstyle=corners, **lines))


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
                    (place * width + 0.004, top), width - 0.008, 1.0, facecolor=colour, edgecolor=FRAME, linewidth=0.8
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
