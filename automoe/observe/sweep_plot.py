"""One picture of a sweep: what each job learned, and how fast."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from automoe.observe.metrics import read_metrics, series
from automoe.observe.plot_style import RC, new_figure, save, say_empty

SWEEP_PLOT = "sweep.png"


def draw_sweep(directory: Path, jobs: list[dict[str, Any]]) -> Path:
    """Write ``sweep.png``: training loss of every job over each other, and median tokens per second.

    Meshes of one configuration train alike, so their curves should be one; what differs is the speed.

    Args:
        directory: of the sweep; job N ran in ``directory/N``.
        jobs: journal records: ``job``, ``overrides``, ``state``.
    """
    from matplotlib import rc_context

    with rc_context(RC):
        return _draw(directory, jobs)


def _draw(directory: Path, jobs: list[dict[str, Any]]) -> Path:
    shown = [job for job in jobs if (directory / str(job["job"])).is_dir()]
    runs = [(job, read_metrics(directory / str(job["job"]))) for job in shown]
    runs = [(job, records) for job, records in runs if records]
    figure, (loss, speed) = new_figure(11, max(3.6, 1.6 + 0.42 * len(runs)), columns=2)
    loss.set(title="Training loss", xlabel="step", ylabel="nats per token")
    speed.set(title="Tokens per second, median of a job", xlabel="tokens per second")
    if not runs:
        say_empty(loss, "no job trained a step")
        say_empty(speed, "")
        return save(figure, directory / SWEEP_PLOT)
    names, medians = [], []
    for i, (job, records) in enumerate(runs):
        name = f"{job['job']}: {' '.join(job['overrides']) or 'as configured'}"
        steps, losses = series(records, "loss")
        # Thinner from job to job, so that curves which lie on each other can all be seen.
        loss.plot(steps, losses, label=name, linewidth=max(1.0, 4.5 - 0.6 * i), alpha=0.8)
        names.append(name)
        medians.append(float(np.nanmedian(series(records, "tokens_per_second")[1])))
    places = np.arange(len(names))
    bars = speed.barh(places, medians, height=0.6)
    speed.bar_label(bars, labels=[f"{value:,.0f}" for value in medians], padding=4)
    speed.set(yticks=places, yticklabels=names, xlim=(0, max(medians) * 1.18))
    speed.invert_yaxis()
    speed.grid(axis="y", visible=False)
    loss.legend()
    return save(figure, directory / SWEEP_PLOT)
