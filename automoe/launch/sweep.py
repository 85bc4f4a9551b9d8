"""Hydra's multirun: one process tree per job, impossible shapes skipped with the reason, one table and plot at the end.

``sweep.json`` in the sweep's directory is the journal. The same sweep started again skips every job
that is done, which Hydra itself cannot.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

from automoe.config.compose import Arguments, check_overrides, check_primary, register_base
from automoe.config.convert import config_from_dict
from automoe.config.frozen import CONFIG_FILE, dump_config, resolved
from automoe.config.plugins import load_plugins
from automoe.config.schema import Config
from automoe.errors import AutomoeError, ConfigError
from automoe.launch import run_dir as runs
from automoe.launch.hardware import missing_hardware
from automoe.launch.local import train_here
from automoe.launch.prepare import check_here, with_checkpoint_model
from automoe.shipped import shipped_folder

DEFAULT_DIRECTORY = "runs/sweep"
JOURNAL = "sweep.json"


def run_sweep(args: Arguments) -> int:
    """Run every combination of the comma-separated overrides; returns the exit status.

    0: at least one job ran and none failed; 1: a job failed; 2: no job could run; 130: stopped.

    The objective of a job (final validation loss, else training loss; infinity where there is none) is
    what the job function returns, so Hydra sweepers such as Optuna minimise it.

    Raises:
        ConfigError: an override that no job could use.
    """
    check_primary(args.config_name, args.config_dir)
    check_overrides(args.overrides, args.config_dir, sweep=True)
    directory, overrides = _split_directory(args.overrides)
    jobs: list[dict[str, Any]] = []
    try:
        _multirun(args, directory, overrides, jobs)
    except KeyboardInterrupt:
        print("\nsweep stopped; the same command goes on where it left off", file=sys.stderr)
        _show(jobs, directory)
        return 130
    _show(jobs, directory)
    if all(record["state"] == "skipped" for record in jobs):
        print(f"error: none of the {len(jobs)} jobs could run", file=sys.stderr)
        return 2
    return 1 if any(record["state"] == "failed" for record in jobs) else 0


def _multirun(args: Arguments, directory: str, overrides: list[str], jobs: list[dict[str, Any]]) -> None:
    """Let Hydra's sweeper run every job and add it to ``jobs``. Raises ``KeyboardInterrupt`` when a job was stopped."""
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import DictConfig, OmegaConf

    def job(composed: DictConfig) -> float:
        mine = HydraConfig.get()
        record = {"job": mine.job.num, "overrides": list(mine.overrides.task), "state": "skipped", "objective": None}
        jobs.append(record)
        started = time.monotonic()
        print(f"\njob {record['job']}: {' '.join(record['overrides'])}", flush=True)
        raw: Any = OmegaConf.to_container(composed, resolve=True)
        raw["run_dir"] = mine.runtime.output_dir
        record.update(_run_job(raw, record["overrides"]))
        record["seconds"] = round(time.monotonic() - started, 1)
        Path(directory).mkdir(parents=True, exist_ok=True)
        (Path(directory) / JOURNAL).write_text(json.dumps(jobs, indent=1) + "\n")
        if record["state"] == "preempted":  # the person or the scheduler wants the sweep to end, not one job
            raise KeyboardInterrupt
        return math.inf if record["objective"] is None else record["objective"]

    register_base()
    options = ["--multirun", f"--config-name={args.config_name}"]
    if args.config_dir is not None:
        options.append(f"--config-dir={Path(args.config_dir).absolute()}")
    options += [f"hydra.sweep.dir={_quoted(directory)}", "hydra.sweep.subdir=${hydra.job.num}"]
    options += ["hydra.output_subdir=null", "hydra/job_logging=none", "hydra/hydra_logging=none"]
    saved, sys.argv = sys.argv, ["automoe", *options, *overrides]
    try:
        hydra.main(version_base="1.3", config_path=str(shipped_folder("conf")), config_name=args.config_name)(job)()
    finally:
        sys.argv = saved


def _show(jobs: list[dict[str, Any]], directory: str) -> None:
    from automoe.observe.plots import draw_sweep

    print(_table(jobs))
    if jobs:
        print(f"\nplot {draw_sweep(Path(directory), jobs)}")


def _run_job(raw: dict[str, Any], overrides: list[str]) -> dict[str, Any]:
    """One job in its own process tree; whatever goes wrong is this job's result and not the sweep's end."""
    try:
        load_plugins(raw["plugins"])
        config = with_checkpoint_model(config_from_dict(raw), overrides)
        shape, device = check_here(config)
        meshes = {"default": shape.describe("default"), "moe": shape.describe("moe")}
        missing = missing_hardware(shape, device)
        if missing is not None:
            raise ConfigError("mesh", meshes["default"], missing, "Run this job where there are as many")
        earlier = _finished(resolved(config, shape, device))
        if earlier is not None:
            print("done in an earlier run of this sweep")
            return {"state": "done", "objective": earlier.get("objective"), **meshes}
    except ConfigError as error:
        print(f"skipped: {error}")
        return {"reason": str(error)}
    try:
        result = train_here(config, shape, device)
    except AutomoeError as error:
        print(f"error: {error}", file=sys.stderr)
        return {"state": "failed", "reason": str(error), **meshes}
    reason = {"reason": runs.describe_error(result.error)} if result.error else {}
    return {"state": result.state, "objective": result.objective, **meshes, **reason}


def _finished(config: Config) -> dict[str, Any] | None:
    """Status of an earlier, completed run of exactly this configuration in this directory."""
    path = Path(config.run_dir) / CONFIG_FILE
    status = runs.read_status(config.run_dir)
    done = status.get("state") == "done" and path.is_file() and path.read_text() == dump_config(config)
    return status if done else None


def _split_directory(overrides: list[str]) -> tuple[str, list[str]]:
    """``run_dir=`` of the command line is the sweep's directory; each job has a numbered one in it."""
    given = [text for text in overrides if text.startswith("run_dir=")]
    rest = [text for text in overrides if not text.startswith("run_dir=")]
    directory = given[-1].partition("=")[2].strip("'\"") if given else DEFAULT_DIRECTORY
    return os.path.abspath(directory), rest


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "\\'") + "'"


def _table(jobs: list[dict[str, Any]]) -> str:
    rows = [("job", "state", "objective", "seconds", "default", "moe", "overrides")]
    for job in jobs:
        objective = "-" if job["objective"] is None else f"{job['objective']:.4f}"
        facts = [str(job.get(key, "-")) for key in ("seconds", "default", "moe")]
        rows.append((str(job["job"]), job["state"], objective, *facts, " ".join(job["overrides"])))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    lines = ["  ".join([*(cell.ljust(w) for cell, w in zip(row[:-1], widths, strict=True)), row[-1]]) for row in rows]
    skipped = [f"job {job['job']} skipped: {job['reason']}" for job in jobs if job["state"] == "skipped"]
    return "\n".join(["", *lines, *([""] if skipped else []), *skipped])
