"""Fit ``automoe/planner/constants.toml`` to published training runs, and say how well that goes.

python -m benchmarks.fit_time                 compare: from priors alone, with the values that ship
python -m benchmarks.fit_time --fit           fit, leave each model out once, write the values and the result

A value is moved away from its prior only as far as runs ask for it: the squared logarithm of predicted over published
tokens per second, large errors counted less, plus the squared distance to the prior over its tolerance.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from math import log
from pathlib import Path
from statistics import fmean, median

import numpy as np

from automoe.planner.machine import Constants
from automoe.planner.time import BAND
from benchmarks.measuring import commit
from benchmarks.published import Run, mean_error, ordered, parted, runs, winners

CONSTANTS = Path(__file__).parents[1] / "automoe" / "planner" / "constants.toml"
RESULT = Path(__file__).parent / "results" / "published_runs.json"
# What runs can tell, and how far (in logarithm) a prior may be off. The rest stays as it is.
TOLERANCE = {
    "gemm": 0.15,
    "grouped": 0.15,
    "attention": 0.25,
    "memory": 0.25,
    "fp8": 0.40,
    "on_node": 0.25,
    "off_node": 0.25,
    "overlap": 0.25,
    "latency": 0.50,
    "host_layer": 0.60,
}
AT_MOST = {"gemm": 1.0, "grouped": 1.0, "attention": 1.0, "memory": 0.95, "fp8": 1.0, "off_node": 1.0, "overlap": 1.0}
NOISE = 0.10  # logarithm of tokens per second that a right model may be off
LARGE = 0.15  # errors beyond count less
STEPS = 8


def moved(prior: Constants, at: np.ndarray) -> Constants:
    """``prior`` with the constants of TOLERANCE multiplied by exp(``at``)."""
    values = {name: getattr(prior, name) * float(np.exp(x)) for name, x in zip(TOLERANCE, at, strict=True)}
    return replace(prior, **{name: min(value, AT_MOST.get(name, value)) for name, value in values.items()})


def residuals(chosen: Sequence[Run], prior: Constants, at: np.ndarray) -> np.ndarray:
    """Logarithms of predicted over published tokens per second."""
    constants = moved(prior, at)
    return np.array([log(1 + run.error(constants)) for run in chosen])


def fit(chosen: Sequence[Run], prior: Constants) -> Constants:
    """The constants that explain ``chosen`` best without going far from ``prior``: damped Gauss-Newton."""
    at = np.zeros(len(TOLERANCE))
    tolerance = np.array(list(TOLERANCE.values()))
    for _ in range(STEPS):
        now = residuals(chosen, prior, at)
        slopes = np.stack(
            [(residuals(chosen, prior, at + 0.02 * unit) - now) / 0.02 for unit in np.eye(len(at))], axis=1
        )
        weights = 1 / np.maximum(1, np.abs(now) / LARGE) / NOISE**2
        normal = slopes.T @ (weights[:, None] * slopes) + np.diag(tolerance**-2.0)
        step = np.linalg.solve(normal, slopes.T @ (weights * now) + at / tolerance**2)
        at = at - 0.7 * np.clip(step, -0.3, 0.3)
    return moved(prior, at)


def left_out(chosen: Sequence[Run], prior: Constants) -> dict[str, float]:
    """Mean absolute error of each model's runs under constants fitted to the other models."""
    errors = {}
    for model in sorted({run.model for run in chosen}):
        constants = fit([run for run in chosen if run.model != model], prior)
        errors[model] = mean_error([run for run in chosen if run.model == model], constants)
    return errors


def summary(constants: Constants) -> dict[str, object]:
    """Errors, orders and winners of all runs under ``constants``."""
    fitted, held, others = parted()
    errors = [abs(run.error(constants)) for run in held]
    return {
        "mean_absolute_error": mean_error(fitted, constants),
        "pairs_ordered_rightly": ordered(fitted, constants),
        "winners": winners(fitted, constants),
        "runs not fitted to": {
            "mean_absolute_error": fmean(errors),
            "median_absolute_error": median(errors),
            "within_the_band": [sum(error < BAND for error in errors), len(errors)],
            "pairs_ordered_rightly": ordered([*fitted, *held], constants),
        },
        "other_gpus_mean_absolute_error": mean_error(others, constants),
        "errors": {f"{run.model}: {run.name}": run.error(constants) for run in runs()},
    }


def write_values(constants: Constants) -> None:
    """Replace every ``value`` of the data file."""
    text = CONSTANTS.read_text()
    for name, value in asdict(constants).items():
        text = re.sub(rf"(\[{name}\]\nprior = .*\nvalue = ).*", rf"\g<1>{value:.3g}", text)
    CONSTANTS.write_text(text)


def main() -> int:
    prior = Constants.load("prior")
    result: dict[str, object] = {"commit": commit("../automoe", "../conf", "published_runs.toml")}
    result["priors alone"] = summary(prior)
    if "--fit" in sys.argv:
        chosen = [run for run in runs() if run.fit]
        write_values(fit(chosen, prior))
        Constants.load.cache_clear()
        models = left_out(chosen, prior)
        by_run = [models[run.model] for run in chosen]
        result["leave one model out"] = {"mean_absolute_error": fmean(by_run), "by_model": models}
    result["fitted"] = summary(Constants.load())
    if "--fit" in sys.argv:
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    print(CONSTANTS.read_text() if "--fit" in sys.argv else "")
    return 0


if __name__ == "__main__":
    sys.exit(main())
