"""``report.html`` and ``plots/*.png`` of a run, from what its directory holds: finished, going on or dead.

Needs no torch, so the parent process can write it after every rank is gone.
Command line: ``python -m automoe.observe.report RUN_DIR``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from automoe.config.frozen import CONFIG_FILE, frozen_shape, load_config
from automoe.config.mesh_shape import MeshShape
from automoe.config.schema import Config
from automoe.errors import AutomoeError
from automoe.observe.metrics import ENVIRONMENT_FILE, read_expert_load, read_metrics
from automoe.observe.report_page import Page, render_page
from automoe.observe.summary import describe_run, final_numbers

REPORT_FILE = "report.html"
PLOTS_DIR = "plots"
STATUS_FILE = "status.json"


def write_report(run_dir: str | os.PathLike[str]) -> Path | None:
    """Write the report of ``run_dir``; on any failure print one line and return None.

    A picture is never worth a run: training has ended or died by now, and its exit status and first
    error must not be replaced by an error of the report. Call ``build_report`` to see that error.
    """
    try:
        return build_report(run_dir)
    except Exception as error:
        print(f"automoe: no report for {run_dir}: {type(error).__name__}: {error}", file=sys.stderr)
        return None


def build_report(run_dir: str | os.PathLike[str]) -> Path:
    """Draw the plots and write ``report.html``, one file with every picture inside; returns its path.

    Raises:
        AutomoeError: ``run_dir`` is not a directory.
        OSError: it cannot be written.
    """
    from automoe.observe.mesh_view import draw_mesh
    from automoe.observe.plot_style import save
    from automoe.observe.plots import draw_plots

    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise AutomoeError(f"{run_dir}: no such run directory. Give the run_dir of a training run")
    records = read_metrics(run_dir)
    config, mesh, config_problem = _read_config(run_dir)
    plots_dir = run_dir / PLOTS_DIR
    plots_dir.mkdir(exist_ok=True)
    figures = []
    if records:
        figures = draw_plots(
            records,
            *read_expert_load(run_dir),
            plots_dir,
            grad_clip=config.train.grad_clip if config else 0.0,
            first_moe_layer=config.model.first_k_dense if config else 0,
        )
    mesh_figure = save(draw_mesh(mesh), plots_dir / "mesh.png", crop=True) if mesh else None
    status = _read_json(run_dir / STATUS_FILE)
    page = Page(
        run_dir=run_dir.resolve(),
        steps_done=records[-1]["step"] if records else 0,
        steps_planned=config.train.steps if config else None,
        status=status,
        numbers=final_numbers(records),
        facts=describe_run(config, mesh) if config and mesh else [],
        figures=figures,
        mesh_figure=mesh_figure,
        config_text=(run_dir / CONFIG_FILE).read_text() if (run_dir / CONFIG_FILE).is_file() else "",
        config_problem=config_problem,
        environment=_read_json(run_dir / ENVIRONMENT_FILE),
    )
    path = run_dir / REPORT_FILE
    scratch = path.with_name(f".{REPORT_FILE}.{os.getpid()}")
    scratch.write_text(render_page(page), encoding="utf-8")
    os.replace(scratch, path)  # a browser that reloads never sees half a page
    return path


def _read_config(run_dir: Path) -> tuple[Config | None, MeshShape | None, str]:
    """The run's configuration and mesh, or why there is none: a report of a dead run needs neither."""
    try:
        config = load_config(run_dir)
        return config, frozen_shape(config), ""
    except AutomoeError as error:
        return None, None, str(error)


def _read_json(path: Path) -> dict[str, Any]:
    """The object in ``path``; {} when it is missing, or half written by a process that died."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text())
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m automoe.observe.report", description="Write report.html and plots/*.png of a run directory."
    )
    parser.add_argument("run_dir", help="the run_dir of a training run, finished or not")
    try:
        path = build_report(parser.parse_args(argv).run_dir)
    except (AutomoeError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
