"""Both views of the ranks as text for a terminal. The drawing for the report is in ``mesh_plot``."""

from __future__ import annotations

from math import prod

from automoe.config.mesh_shape import MeshShape

VIEWS = ("default", "moe")
MAX_GRID_RANKS = 64  # more ranks are described by their groups alone
MAX_COLUMNS = 16


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
