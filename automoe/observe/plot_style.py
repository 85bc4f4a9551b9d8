"""Common style of all pictures: palette, figure factory, PNG writer."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from automoe.storage.files import replace_file

INK = "#1f2933"  # colour of text
MUTED = "#66727f"  # colour of axis labels and notes
GRID = "#e4e8ec"
BLUE = "#2563a8"
ORANGE = "#d9722e"
GREEN = "#2f8f6b"
RED = "#c23b3b"
PALE_BLUE = "#a9c6e5"
# Cell colours are light enough for dark text, and different enough for neighbouring cells.
CELLS = ("#bcd5ef", "#f8d3b0", "#c3e3cf", "#e3c9e6", "#f7e6a6", "#f4c2c6", "#c9dbdb", "#d8d0c4")
SEQUENTIAL = "cividis"  # This colour map is readable in grey and for colour-blind readers.
DPI = 150

RC: dict[Any, Any] = {
    "font.family": "sans-serif",
    # matplotlib ships this font, so every machine draws the same picture.
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.5,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": "#b8c0c8",
    "axes.titlesize": 11.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 1.6,
    "figure.facecolor": "white",
    "svg.fonttype": "none",
}


def new_figure(
    width: float, height: float, rows: int = 1, columns: int = 1, **grid: Any
) -> tuple[Figure, list[Axes]]:
    """Return a matplotlib figure and its axes in reading order, without pyplot's global state.

    Args:
        width, height: size in inches.
        rows, columns: number of axes.
        grid: further options of ``Figure.subplots``.
    """
    layout = ConstrainedLayoutEngine(w_pad=0.14, h_pad=0.12)
    figure = Figure(figsize=(width, height), layout=layout)
    return figure, list(figure.subplots(rows, columns, squeeze=False, **grid).flat)


def save(figure: Figure, path: Path, *, crop: bool = False) -> Path:
    """Write ``figure`` as a PNG and return its path; ``crop`` cuts off empty margins."""
    drawn = io.BytesIO()
    figure.savefig(
        drawn,
        format="png",
        dpi=DPI,
        bbox_inches="tight" if crop else None,
        pad_inches=0.14,
        # of an axis' label, matplotlib 3.9 by itself keeps only what is within the axes' width
        bbox_extra_artists=[part for axes in figure.axes for part in axes.get_children()],
    )
    replace_file(path, drawn.getvalue())
    return path
