"""Experiment trackers: Weights & Biases, TensorBoard and MLflow, one module each.

A run may have several trackers or none. During training, a failing service or network costs only a
warning, because ``metrics.jsonl`` always has everything that trackers show: when the run is
resumed, steps that a tracker lacks are sent again. A missing package is an error before ranks start
(``automoe.launch.hardware``). ``run_dir/trackers.json`` has each tracker's own id of the run, with
which a resumed run continues there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from automoe.config.convert import config_to_dict
from automoe.config.schema import Config
from automoe.errors import AutomoeError
from automoe.observe.metrics import SAMPLES_FILE, Warn, read_jsonl, read_metrics, to_stderr
from automoe.observe.trackers.base import WITHOUT, About, Outcome, Texts, Tracker, one_line
from automoe.storage.sealed import read_json, replace_json

IDS_FILE = "trackers.json"
# A sweep's folder has this file; the folder of each job is inside the sweep's folder.
SWEEP_FILE = "sweep.json"


class Trackers:
    """All experiment trackers of a run (such as W&B) as one object, on rank 0.

    If a tracker raises an error, a warning is printed and the run continues without it.

    Attributes:
        places: name -> web page or folder where the user finds the results.
    """

    def __init__(self, opened: dict[str, Tracker], config: Config, warn: Warn) -> None:
        self._open = opened
        self._config = config
        self._warn = warn
        self.places: dict[str, str] = {}
        for tracker in opened.values():
            self.places |= tracker.places

    def log(self, record: Mapping[str, Any]) -> None:
        """Send the numbers of a step's record (keys of ``metrics.jsonl``) to all trackers."""
        self._each(lambda tracker: tracker.log(record["step"], _numbers(record)))

    def catch_up(self, run_dir: Path) -> None:
        """Send to each tracker the recorded steps that it lacks, e.g. after a kill, with samples.

        A step that it has with another loss is sent again.

        Args:
            run_dir: run directory with ``metrics.jsonl`` and ``samples.jsonl``.
        """
        samples = {entry["step"]: entry["samples"] for entry in read_jsonl(run_dir / SAMPLES_FILE)}
        records = read_metrics(run_dir)

        def send(tracker: Tracker) -> None:
            held = tracker.held()
            for record in records:
                step = record["step"]
                loss = held.get(step, math.nan)
                ours = float(record["loss"])
                if step in held and (
                    loss is None
                    or math.isclose(ours, loss, rel_tol=1e-6)  # TensorBoard keeps float32
                    or (math.isnan(ours) and math.isnan(loss))
                ):
                    continue
                tracker.log(step, _numbers(record))
                if rows := samples.get(step):
                    tracker.texts(step, "samples", rows)

        self._each(send)

    def texts(self, step: int, name: str, rows: Texts) -> None:
        """Send a table of texts to all trackers, such as answers to ``observe.samples``.

        Args:
            step: step to which the texts belong.
            name: name of the table.
            rows: rows of the table, each {column: text}.
        """
        self._each(lambda tracker: tracker.texts(step, name, rows))

    def rewind(self, step: int) -> None:
        """Tell all trackers that training goes back to the end of ``step`` and repeats later steps."""
        self._each(lambda tracker: tracker.rewind(step))

    def finish(self, outcome: Outcome) -> None:
        """Close all trackers; later calls of any method do nothing.

        Args:
            outcome: how the run ended: ``done``, ``preempted`` or ``failed``.
        """
        self._each(lambda tracker: tracker.finish(outcome))
        self._open.clear()

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._open.items()):
            try:
                call(tracker)
            except Exception as error:  # A dead service or a full disk must not stop training.
                self._warn(f"{name} stopped working ({one_line(error, self._config)}); {WITHOUT}")
                del self._open[name]


def make_trackers(
    config: Config, run_dir: Path, resume_step: int | None = None, warn: Warn = to_stderr
) -> Trackers:
    """Open the experiment trackers that ``config.observe`` selects.

    Steps that an earlier start has recorded, and a tracker lacks, are sent to the tracker. The
    trackers' own ids of the run are written to ``run_dir/trackers.json``.

    Args:
        run_dir: the run directory.
        resume_step: last step whose record is kept from an earlier start; None: a new run, which
            the trackers record as a new one, too.
        warn: function that shows one line to the user.

    Raises:
        BackendError: a tracker's package cannot be imported. Other errors of its library become
            warnings.
    """
    ids = {}  # Without a readable file of ids, trackers start new runs.
    if resume_step is not None:
        with suppress(OSError, ValueError):
            ids = {name: str(id_) for name, id_ in read_json(run_dir / IDS_FILE).items()}
    observe = config.observe
    selected = {
        "W&B": ("wandb", observe.wandb != "off"),
        "TensorBoard": ("tensorboard", observe.tensorboard),
        "MLflow": ("mlflow", observe.mlflow),
    }
    absolute = run_dir.resolve()
    sweep = absolute.parent
    group = observe.run_group or (sweep.name if (sweep / SWEEP_FILE).is_file() else "")
    opened = {}
    for name, (module, is_selected) in selected.items():
        if not is_selected:
            continue
        about = About(
            name=observe.run_name or absolute.name,
            group=group,
            tags=observe.run_tags,
            config=config_to_dict(config),
            run_dir=run_dir,
            resume_step=resume_step,
            earlier=ids.get(name, ""),
            warn=warn,
        )
        try:
            opened[name] = import_module(f"automoe.observe.trackers.{module}").start(config, about)
        except AutomoeError:
            raise
        except Exception as error:  # for example no service, no login, or a full disk
            warn(f"{name} does not work ({one_line(error, config)}); {WITHOUT}")
    ids |= {name: tracker.id for name, tracker in opened.items() if tracker.id}
    if ids:
        replace_json(run_dir / IDS_FILE, ids)
    else:  # Remove the ids of an earlier run in this directory.
        (run_dir / IDS_FILE).unlink(missing_ok=True)
    trackers = Trackers(opened, config, warn)
    if opened and resume_step is not None:
        trackers.catch_up(run_dir)
    return trackers


def _numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """Return {key: float} of the numbers in a step's record but ``step``; "NaN" is a number too."""
    names = ("NaN", "Infinity", "-Infinity")
    return {
        key: float(value)
        for key, value in record.items()
        if key != "step" and (isinstance(value, (int, float)) or value in names)
    }
