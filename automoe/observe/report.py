"""Report of a finished, running or failed run: ``report.html`` and ``plots/*.png``.

Imports no torch, so the launcher's parent process can write the report after all ranks have exited.
Command line: ``python -m automoe.observe.report RUN_DIR``.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from automoe.config.frozen import CONFIG_FILE, frozen_shape, load_config
from automoe.errors import AutomoeError, in_words, say
from automoe.observe.metrics import (
    ENVIRONMENT_FILE,
    LOAD_FILE,
    METRICS_FILE,
    SAMPLES_FILE,
    Record,
    StrPath,
    read_expert_load,
    read_jsonl,
    read_metrics,
    to_stderr,
)
from automoe.observe.page import MESH_CAPTION, picture, render
from automoe.observe.summary import describe_run, final_numbers
from automoe.storage.files import replace_file
from automoe.storage.sealed import read_json

REPORT_FILE = "report.html"
TEMPLATE_FILE = "report_template.html"
PLOTS_DIR = "plots"
STATUS_FILE = "status.json"
MAX_SAMPLES = 8  # largest number of steps whose samples the page shows
WIDE = ("loss", "expert_load", "expert_balance")  # plots that take the whole width of the page


def write_report(run_dir: StrPath) -> Path | None:
    """Write the report of ``run_dir`` and return its path; on an error print that and return None.

    So a report that fails after training does not hide the run's own error or exit status.
    ``build_report`` raises its errors instead.
    """
    try:
        return build_report(run_dir)
    except Exception as error:
        why = f"{type(error).__name__}: {in_words(error)}"
        to_stderr(f"no report for {run_dir}: {why}")
        return None


def build_report(run_dir: StrPath) -> Path:
    """Draw the plots and write ``report.html``, with all pictures embedded; return its path.

    Whatever a failed run did not write is left out.

    Raises:
        AutomoeError: ``run_dir`` is not a directory.
        OSError: a file cannot be written.
    """
    from automoe.observe.mesh_view import draw_mesh
    from automoe.observe.plot_style import save
    from automoe.observe.plots import draw_plots

    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise AutomoeError(f"{run_dir}: no such run directory. Give the run_dir of a training run")
    for name in (METRICS_FILE, LOAD_FILE, SAMPLES_FILE):
        read_jsonl(run_dir / name, to_stderr)
    records = read_metrics(run_dir)
    status = _read_json(run_dir / STATUS_FILE)
    config = mesh = None  # The report of a dead run needs neither.
    config_problem = ""
    try:
        config = load_config(run_dir)
        mesh = frozen_shape(config)
    except AutomoeError as problem:
        config, config_problem = None, str(problem)
    plots = run_dir / PLOTS_DIR
    plots.mkdir(exist_ok=True)
    drawn = draw_plots(records, read_expert_load(run_dir), plots, config) if records else []
    drawn_mesh = save(draw_mesh(mesh), plots / "mesh.png", crop=True) if mesh else None
    config_file = run_dir / CONFIG_FILE
    page = render(
        TEMPLATE_FILE,
        run_dir=run_dir.resolve(),
        state=status.get("state", "state unknown"),
        error=status.get("error"),
        steps_done=records[-1]["step"] if records else 0,
        numbers=final_numbers(records),
        pictures=[
            picture(path.read_bytes(), caption, path.stem in WIDE) for path, caption in drawn
        ],
        samples=_samples(run_dir),
        meshes=picture(drawn_mesh.read_bytes(), MESH_CAPTION) if drawn_mesh else None,
        config=config,
        config_problem=config_problem,
        config_text=config_file.read_text(errors="replace") if config_file.is_file() else "",
        facts=describe_run(config, mesh) if config and mesh else [],
        environment=_read_json(run_dir / ENVIRONMENT_FILE),
    )
    report = run_dir / REPORT_FILE
    replace_file(report, page)  # A browser that reloads never sees a partial page.
    return report


def _samples(run_dir: Path) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return the generated answers to show: (prompt, [(``step 1,000``, answer)]).

    They are read from ``samples.jsonl``: of at most ``MAX_SAMPLES`` evenly spaced steps, newest
    first, and only for prompts that were answered at the newest step.
    """
    records = read_jsonl(run_dir / SAMPLES_FILE)[::-1]
    answers = [
        (f"step {record['step']:,}", {pair["prompt"]: pair["text"] for pair in record["samples"]})
        for record in records[:: len(records) // MAX_SAMPLES + 1]
    ]
    return [
        (prompt, [(step, texts[prompt]) for step, texts in answers if prompt in texts])
        for prompt in (answers[0][1] if answers else ())
    ]


def _read_json(path: Path) -> Record:
    """Return the JSON object in ``path``; {} if it is missing, or with a warning if it is damaged."""
    try:
        return read_json(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        to_stderr(f"the report omits {path}: {error}")
        return {}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m automoe.observe.report",
        description="Write report.html and plots/*.png of a run directory.",
    )
    parser.add_argument("run_dir", help="the run_dir of a training run, finished or not")
    try:
        path = build_report(parser.parse_args(argv).run_dir)
    except (AutomoeError, OSError) as error:
        say(in_words(error))
        return 1
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
