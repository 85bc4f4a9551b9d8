"""HTML page of a plan, with numbers and plots, for people who decide about GPUs."""

from __future__ import annotations

import io
import shlex
from pathlib import Path
from typing import Any

from rich.table import Table

from automoe.config.compose import Arguments
from automoe.config.frozen import dump_config
from automoe.config.schema import Config
from automoe.errors import ConfigError
from automoe.observe.page import MESH_CAPTION, picture, render
from automoe.planner.plan import Plan
from automoe.planner.views.plan_view import RESULTS, plan_tables
from automoe.storage.files import replace_file, wrong_kind

TEMPLATE_FILE = "plan_template.html"
MARK = '<meta name="generator" content="automoe plan">'


def check_page(path: Path) -> None:
    """Raise ``ConfigError`` if the file at ``path`` is not an earlier HTML page of a plan.

    The page would replace it. No file at ``path`` is fine.
    """
    if kind := wrong_kind(path):
        rule = f"it is {kind}, and a page is a file"
    elif path.exists() and MARK not in path.read_text(encoding="utf-8", errors="replace")[:1000]:
        rule = "it exists and is not a page of a plan"
    else:
        return
    raise ConfigError("html", str(path), rule, "Remove it, or give another name")


def write_plan_page(config: Config, plan: Plan, path: Path, args: Arguments) -> None:
    """Write a plan's HTML page to ``path``, and replace any file there.

    Args:
        args: command line of the plan, which the page shows.

    Raises:
        ConfigError: the file cannot be written.
    """
    summary, *tables = plan_tables(config, plan)
    from automoe.observe.mesh_view import draw_mesh
    from automoe.observe.plot_style import DPI
    from automoe.planner.views.plan_plots import draw_memory, draw_schedule, draw_time

    figures = [
        ("Time", draw_time(plan), "Of the busiest pipeline rank"),
        (
            "Memory",
            draw_memory(config, plan),
            "Bytes of a rank by component, at the moment of a step when they are most",
        ),
    ]
    if plan.mesh.pp > 1:
        figures.append(("Pipeline", *draw_schedule(config, plan)))
    figures.append(("Meshes", draw_mesh(plan.mesh), MESH_CAPTION))
    made = []
    for heading, figure, caption in figures:
        png = io.BytesIO()
        figure.savefig(png, dpi=DPI, bbox_inches="tight", pad_inches=0.14)
        made.append((heading, picture(png.getvalue(), caption)))
    page = render(
        TEMPLATE_FILE,
        name=args.config_name,
        command=shlex.join(
            ["automoe", "plan", "--config-name", args.config_name]
            + (["--config-dir", str(args.config_dir)] if args.config_dir else [])
            + [*args.overrides]
        ),
        ranks=plan.mesh.world_size,
        gpu=config.cluster.gpu,
        verdict=_verdict(config, plan),
        warnings=plan.warnings,
        numbers=[
            (f"{name}, {meaning}", figure)
            for table in tables
            for name, figure, *_, meaning in _rows(table)
            if name in RESULTS
        ],
        pictures=made,
        facts=_rows(summary),
        tables=[_as_data(table) for table in tables],
        config_text=dump_config(config),
    )
    try:
        replace_file(path, page)
    except OSError as error:
        raise ConfigError(
            "html", str(path), f"it cannot be written: {error.strerror}", "Give another name"
        ) from error


def _verdict(config: Config, plan: Plan) -> tuple[str, str]:
    """Return (CSS class, sentence for the page) on whether the memory of a GPU suffices.

    The class is ``failed``, ``running`` (fits only at even expert load), ``done``, or "" if the
    memory is unknown.
    """
    limit = config.cluster.memory_bytes
    if not limit:
        return "", f"{config.cluster.name} has no limit of memory"
    if plan.needed > limit:
        return "failed", "does not fit"
    if plan.uneven_needed > limit:
        return "running", "fits only at even load"
    return "done", "fits"


def _as_data(table: Table) -> dict[str, Any]:
    columns = [(str(column.header), column.justify == "right") for column in table.columns]
    return {"title": table.title, "columns": columns, "rows": _rows(table), "note": table.caption}


def _rows(table: Table) -> list[tuple[str, ...]]:
    return list(zip(*(map(str, column.cells) for column in table.columns), strict=True))
