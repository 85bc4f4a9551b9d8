"""``report.html`` and ``plots/*.png`` of a run, from what its directory holds: finished, going on or dead.

Needs no torch, so the parent process can write it after every rank is gone.
Command line: ``python -m automoe.observe.report RUN_DIR``.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import sys
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from automoe.config.frozen import CONFIG_FILE, frozen_shape, load_config
from automoe.config.mesh_shape import MeshShape
from automoe.config.schema import Config
from automoe.errors import AutomoeError
from automoe.observe.metrics import ENVIRONMENT_FILE, read_expert_load, read_metrics
from automoe.observe.summary import Facts, describe_run, final_numbers

REPORT_FILE = "report.html"
PLOTS_DIR = "plots"
STATUS_FILE = "status.json"
# States of status.json: the badge's colour.
KINDS = {"done": "good", "failed": "bad", "preempted": "wait", "running": "wait", "starting": "wait"}
WIDE = ("loss", "expert_load", "expert_balance", "mesh")  # pictures that take the page's whole width

STYLE = """
:root { --ink: #1f2933; --muted: #66727f; --line: #e1e6ea; --paper: #ffffff; --back: #f4f6f8;
        --good: #1f7a57; --bad: #b32f2f; --wait: #9a6200; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--ink); line-height: 1.5;
       font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans", sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 28px 20px 60px; }
header { display: flex; flex-wrap: wrap; gap: 6px 14px; align-items: baseline; margin-bottom: 4px; }
h1 { font-size: 26px; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 34px 0 12px; }
.path { color: var(--muted); font-size: 13.5px; overflow-wrap: anywhere; margin: 0 0 18px; }
.badge { font-size: 13.5px; font-weight: 600; border-radius: 999px; padding: 2px 12px; color: #fff;
         background: var(--muted); }
.badge.good { background: var(--good); } .badge.bad { background: var(--bad); } .badge.wait { background: var(--wait); }
.steps { color: var(--muted); font-size: 15px; }
.card { background: var(--paper); border: 1px solid var(--line); border-radius: 10px; padding: 16px 18px; }
.numbers { display: grid; grid-template-columns: repeat(4, minmax(0, 1fr)); gap: 12px; margin: 0; }
.numbers div { background: var(--paper); border: 1px solid var(--line); border-radius: 10px; padding: 12px 14px; }
.numbers dt { color: var(--muted); font-size: 13px; line-height: 1.3; }
.numbers dd { margin: 4px 0 0; font-size: 22px; font-weight: 600; font-variant-numeric: tabular-nums; }
.error { border-color: #e3b3b3; background: #fdf4f4; margin: 0 0 18px; }
.error details { margin-top: 12px; font-size: 14px; } .error h2 { margin: 0 0 8px; color: var(--bad); }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0;
      font: 13px/1.5 ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
.figures { display: grid; grid-template-columns: repeat(6, minmax(0, 1fr)); gap: 16px; }
figure { margin: 0; } .wide { grid-column: 1 / -1; } .half { grid-column: span 3; } .third { grid-column: span 2; }
figure img { width: min(100%, var(--natural)); height: auto; display: block; margin: 0 auto; }
figcaption { color: var(--muted); font-size: 13.5px; margin-top: 8px; }
table { border-collapse: collapse; width: 100%; font-size: 14.5px; }
td { padding: 6px 0; border-top: 1px solid var(--line); vertical-align: top; overflow-wrap: anywhere; }
tr:first-child td { border-top: 0; }
td:first-child { color: var(--muted); width: 190px; padding-right: 14px; overflow-wrap: normal; }
.columns { display: grid; grid-template-columns: 1.6fr 1fr; gap: 16px; align-items: start; }
details > summary { cursor: pointer; font-weight: 600; } details pre { margin-top: 12px; }
.empty { color: var(--muted); margin: 0; }
@media (max-width: 720px) {
  main { padding: 18px 12px 40px; } h1 { font-size: 21px; } .numbers dd { font-size: 18px; }
  .numbers { grid-template-columns: repeat(2, minmax(0, 1fr)); }
  .figures, .columns { grid-template-columns: minmax(0, 1fr); } .half, .third { grid-column: 1 / -1; }
  .card { padding: 12px; }
  figure.wide { overflow-x: auto; } figure.wide img { width: min(640px, var(--natural)); margin: 0; }
  td:first-child { width: 118px; font-size: 13.5px; }
}
@media print { body { background: #fff; } .card, .numbers div { break-inside: avoid; } }
"""


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


@dataclass
class Page:
    """Everything the page shows; what a run that died early lacks is empty or None."""

    run_dir: Path
    steps_done: int
    steps_planned: int | None
    status: dict[str, Any]  # status.json
    numbers: Facts
    facts: Facts
    figures: list[tuple[Path, str]]  # PNG and caption
    mesh_figure: Path | None
    config_text: str
    config_problem: str  # why there is no configuration
    environment: dict[str, Any]


def render_page(page: Page) -> str:
    state, kind = run_state(page)
    title = escape(page.run_dir.name)
    of = f" of {page.steps_planned:,}" if page.steps_planned is not None else ""
    parts = [
        "<header>",
        f"<h1>{title}</h1>",
        f'<span class="badge {kind}">{escape(state)}</span>',
        f'<span class="steps">step {page.steps_done:,}{of}</span>',
        "</header>",
        f'<p class="path">{escape(str(page.run_dir))}</p>',
        _error(page),
        _numbers(page),
        _figures(page),
        _mesh(page),
        _setup(page),
        _config(page),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title} · automoe</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(part for part in parts if part)
        + "\n</main>\n</body>\n</html>\n"
    )


def run_state(page: Page) -> tuple[str, str]:
    """The state as ``status.json`` names it, and the badge's kind: good, bad, wait, or '' for an unknown one."""
    state = str(page.status.get("state", "state unknown"))
    return state, KINDS.get(state, "")


def _error(page: Page) -> str:
    error = page.status.get("error")
    if not error:
        return ""
    if not isinstance(error, dict):
        error = {"message": error}
    rank = f" on rank {error['rank']}" if error.get("rank") is not None else ""
    name = f"{error['type']}: " if error.get("type") else ""
    frames = error.get("traceback") or []
    where = "\n".join(frames) if isinstance(frames, list) else str(frames)
    details = f"<details><summary>where it was raised</summary><pre>{escape(where)}</pre></details>" if where else ""
    return (
        f'<section class="card error"><h2>First error{rank}</h2>'
        f"<pre>{escape(name + str(error.get('message', '')))}</pre>{details}</section>"
    )


def _numbers(page: Page) -> str:
    if not page.numbers:
        return '<section class="card"><p class="empty">No step finished, so there are no numbers to show.</p></section>'
    cells = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>" for name, text in page.numbers)
    return f'<dl class="numbers">{cells}</dl>'


def _figures(page: Page) -> str:
    if not page.figures:
        return ""
    narrow = [path.stem for path, _ in page.figures if path.stem not in WIDE]
    kinds = dict.fromkeys(narrow, "third" if len(narrow) == 3 else "half")  # rows without a hole
    shown = "".join(_figure(path, text, kinds.get(path.stem, "wide")) for path, text in page.figures)
    return f'<h2>Training</h2><div class="figures">{shown}</div>'


def _figure(path: Path, caption: str, kind: str) -> str:
    png = path.read_bytes()
    # One scale for all pictures, so that their text is of one size: the PNG header's width in CSS pixels.
    natural = int.from_bytes(png[16:20], "big") / 1.4
    return (
        f'<figure class="card {kind}"><img alt="{escape(caption, quote=True)}" style="--natural: {natural:.0f}px" '
        f'src="data:image/png;base64,{base64.b64encode(png).decode()}">'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def _mesh(page: Page) -> str:
    if page.mesh_figure is None:
        return ""
    caption = "The same ranks in both views: each keeps its place, and the colours show who works with whom"
    return f"<h2>Meshes</h2>{_figure(page.mesh_figure, caption, 'wide')}"


def _setup(page: Page) -> str:
    setup = _table(page.facts) if page.facts else f'<p class="empty">{escape(page.config_problem)}</p>'
    environment = [(name, str(value)) for name, value in page.environment.items()]
    shown = (
        _table(environment)
        if environment
        else '<p class="empty">Not recorded: the run ended before its first step.</p>'
    )
    return (
        f'<div class="columns"><section><h2>Set-up</h2><div class="card">{setup}</div></section>'
        f'<section><h2>Environment</h2><div class="card">{shown}</div></section></div>'
    )


def _table(facts: Facts) -> str:
    return "<table>" + "".join(f"<tr><td>{escape(n)}</td><td>{escape(t)}</td></tr>" for n, t in facts) + "</table>"


def _config(page: Page) -> str:
    if not page.config_text:
        return ""
    return (
        '<h2>Configuration</h2><section class="card"><details><summary>config.yaml, every value resolved</summary>'
        f"<pre>{escape(page.config_text)}</pre></details></section>"
    )


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
