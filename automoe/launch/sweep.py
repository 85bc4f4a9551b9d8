"""Sweeps with Hydra's multirun: each job has its own ranks, and all share a table and a plot.

A job whose mesh cannot run is skipped with the reason. The directory of a sweep is named after the
overrides that define it, and a job's folder in it after the job's own values. Hydra launchers such
as joblib and submitit run jobs in other processes, so each job writes its own record,
``jobs/NAME.json``, and this process collects the records in ``sweep.json``.
"""

from __future__ import annotations

import math
import os
import re
import signal
import socket
import sys
import time
import traceback
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

from automoe.config.compose import (
    DEFAULT_PRIMARY,
    PARALLEL,
    SWEPT_BY_SWEEPER,
    Arguments,
    check_overrides,
    check_primary,
    check_swept_values,
    escaped,
    folder_name,
    key_of,
    parse_override,
    register_base,
    resolved_container,
    search_path,
    short_keys,
    swept_keys,
)
from automoe.config.convert import config_from_dict
from automoe.config.frozen import CONFIG_FILE, Device, differences, is_free, resolved
from automoe.config.mesh_shape import MeshShape
from automoe.config.schema import Config
from automoe.errors import AutomoeError, ConfigError, say, without
from automoe.launch import run_dir as runs
from automoe.launch.hardware import missing_hardware
from automoe.launch.local import train_here
from automoe.launch.prepare import check_here, settle
from automoe.launch.worker import STOP_SIGNALS
from automoe.storage.guarded import end_with
from automoe.storage.lock_file import take_lock
from automoe.storage.sealed import read_json, replace_json

RECORDS = "jobs"
# A status from here on is that of a stop: plus the signal, if the launching process got it.
STOPPED = 128
INSTALL = "pip install hydra-joblib-launcher"
NO_SHAPE = (
    "data.",
    "checkpoint.",
    "model.hf_path",
    "recipe",
    "plugins",
    "run_dir",
    PARALLEL,
)  # errors in these keys end the job as failed, not as skipped: no mesh would change them
Record = dict[str, Any]
# Predict is a module-level function, because jobs may run in other processes.
Predict = Callable[[Config, MeshShape], Record]


def run_sweep(args: Arguments, predict: Predict) -> int:
    """Run every combination of the comma-separated overrides, and return the exit status.

    Each combination is a job with its own ranks. The status is 0 if all jobs are done, apart from
    those whose mesh cannot run; 1 if another job is not done; 2 if no job could run; and 130, 143
    or 129 if Ctrl-C, SIGTERM or SIGHUP stopped the sweep.

    Hydra sweepers such as Optuna minimise a job's objective: the final validation loss, else the
    training loss, else infinity; with ``observe.objective=tokens_per_second``, -(median tokens/s).

    Args:
        predict: function of a job's configuration and mesh that returns the planner's prediction:
            ``tokens_per_second``, ``mfu``, ``memory`` (bytes), ``balance`` (busiest rank / mean).

    Raises:
        ConfigError: no job could use an override, or the directory holds another sweep or a run.
        LaunchError: the sweep is running already.
    """
    args = replace(args, overrides=side_by_side(args.overrides))
    check_primary(args.config_name, args.config_dir)
    check_overrides(args.overrides, args.config_dir, sweep=True)
    directory, overrides = sweep_directory(args)
    check_swept_values(args.config_name, overrides, args.config_dir)
    sweep = Sweep(replace(args, overrides=overrides), directory, predict)
    with runs.locked(directory):
        sweep.claim()
        status = sweep.run()
        jobs = sweep.collect(stopped=status >= STOPPED)
        if jobs:
            from automoe.observe.plots import draw_sweep
            from automoe.observe.summary import from_here, print_sweep

            print_sweep(jobs)
            try:
                print(f"\nplot {from_here(str(draw_sweep(directory, jobs)))}")
            except OSError as error:
                say(f"\nno plot: {error}")
    # The exit status depends on the jobs of this start only.
    jobs = [job for job in jobs if job["start"] == sweep.start]
    stops = [job["exit_code"] for job in jobs if job["state"] == "preempted"]
    if stops or status >= STOPPED:
        say("\nsweep stopped; the same command goes on where it left off")
        return stops[0] if stops and status <= STOPPED else status
    if all(job["state"] == "skipped" for job in jobs):
        say(f"error: none of the {len(jobs)} jobs could run")
        return 2
    return status or int(any(job["state"] not in ("done", "skipped") for job in jobs))


def side_by_side(overrides: list[str]) -> list[str]:
    """Replace the override ``sweep.parallel=N`` by settings of Hydra's joblib launcher: N jobs at a time.

    Raises:
        ConfigError: N is not a positive integer, another launcher is set too, or joblib's launcher
            is not installed.
    """
    values = [text.partition("=")[2] for text in overrides if key_of(text) == PARALLEL]
    rest = [text for text in overrides if key_of(text) != PARALLEL]
    if values in ([], ["1"]):
        return rest
    count = ",".join(values)
    wrong = partial(ConfigError, PARALLEL, count)
    if not re.fullmatch("0*[1-9][0-9]*", count):
        rule = "it is how many jobs run side by side: one number, 1 or more"
        raise wrong(rule, f"Set {PARALLEL}=2, or leave it out")
    for text in rest:
        if key_of(text).startswith(("hydra/launcher", "hydra.launcher")):
            rule = f"Hydra's joblib launcher runs jobs side by side, and {text} also chooses or sets a launcher"
            raise wrong(rule, "Leave one of them out")
    if not (find_spec("hydra_plugins") and find_spec("hydra_plugins.hydra_joblib_launcher")):
        raise wrong("hydra-joblib-launcher is not installed", INSTALL)
    most = int(count)
    swept = [override for override in map(parse_override, rest) if override.is_sweep_override()]
    if not any(text.startswith("hydra") or "glob(" in text for text in rest):
        # A worker of joblib that gets no job would outlive a killed sweep by minutes.
        most = min(most, prod(len(list(override.sweep_iterator())) for override in swept))
    return [*rest, "hydra/launcher=joblib", f"hydra.launcher.n_jobs={most}"]


def sweep_directory(args: Arguments) -> tuple[Path, list[str]]:
    """Return (directory of the sweep, overrides without ``run_dir``).

    Without ``run_dir``, the directory is named after the overrides that define the sweep.

    Raises:
        ConfigError: ``run_dir`` is swept.
    """
    values = [text.partition("=")[2] for text in args.overrides if key_of(text) == "run_dir"]
    rest = [text for text in args.overrides if key_of(text) != "run_dir"]
    if "run_dir" in swept_keys(args.overrides):
        raise ConfigError(
            "run_dir",
            values[-1],
            "a sweep has one directory, with a folder per job",
            "Give one directory",
        )
    base = "runs/sweep" if args.config_name == DEFAULT_PRIMARY else f"runs/sweep-{args.config_name}"
    if name := folder_name(_definition(rest)):
        base = f"{base}-{name}"
    directory = values[-1].strip("'\"") if values else base
    return Path(os.path.abspath(directory)), rest


def _definition(overrides: list[str]) -> list[str]:
    """Return the overrides that tell sweeps apart: swept ones, and fixed ones whose key ``is_free`` does not name."""
    swept = swept_keys(overrides)
    words = [text.removeprefix(SWEPT_BY_SWEEPER) for text in overrides]
    return sorted(
        text
        for text in words
        if not text.startswith("hydra") and (key_of(text) in swept or not is_free(key_of(text)))
    )


@dataclass(frozen=True)
class Sweep:
    """One start of a sweep, whose jobs are the combinations of its swept values.

    Attributes:
        args: command line with the overrides of all jobs.
        directory: folder with ``sweep.json``, the jobs' records and a folder for each job.
        predict: function of a job's configuration and mesh that returns the planner's prediction.
        start: random id of this start, which each of its jobs writes into its record.
        process: process id of the sweep.
    """

    args: Arguments
    directory: Path
    predict: Predict
    start: str = field(default_factory=lambda: uuid.uuid4().hex)
    process: int = field(default_factory=os.getpid)

    def claim(self) -> None:
        """Write the sweep's definition into its directory, after checking the directory.

        Raises:
            ConfigError: the directory holds another sweep, a run, or a file that cannot be used.
        """
        directory = self.directory
        path = directory / runs.SWEEP_FILE
        now = [f"--config-name={self.args.config_name}", *_definition(self.args.overrides)]
        wrong = partial(ConfigError, "run_dir", directory)
        if (directory / CONFIG_FILE).exists():
            raise wrong(f"holds a run ({CONFIG_FILE})", "Name another run_dir for the sweep")
        if os.path.lexists(path):
            try:
                then = read_json(path)["definition"]
                theirs = " ".join(text for text in then if text not in now) or "nothing"
            except (OSError, ValueError, TypeError, KeyError) as error:
                why = f"{runs.SWEEP_FILE} does not say which: {type(error).__name__}: {error}"
                remedy = "Name another run_dir, or delete that file"
                raise wrong(f"holds a sweep, and {why}", remedy) from None
            if then != now:
                ours = " ".join(text for text in now if text not in then) or "nothing"
                rule = f"holds another sweep: it has {theirs} where this has {ours}"
                raise wrong(rule, "Name another run_dir, or none: then each sweep has its own")
        for file in (
            directory / "multirun.yaml",
            directory / "sweep.png",
            *directory.glob(f"{RECORDS}/*"),
        ):
            if file.exists() and not (file.is_file() and os.access(file, os.R_OK | os.W_OK)):
                rule = f"{file} is not a file that can be read and written"
                raise wrong(rule, "Correct its permissions, or move it away")
        replace_json(path, {"definition": now, "jobs": _records(directory)})

    def run(self) -> int:
        """Run all jobs by Hydra; return 0, 128 + the signal that stopped them, or Hydra's status."""
        import hydra

        register_base()
        args = self.args
        main, search = search_path(args.config_name, args.config_dir)
        options = [
            "--multirun",
            f"--config-name={args.config_name}",
            f"hydra.sweep.dir='{escaped(str(self.directory))}'",
            "hydra.sweep.subdir=.",
            "hydra.output_subdir=null",
            "hydra/job_logging=none",
            "hydra/hydra_logging=none",
        ]
        interrupts = []
        status = 0

        def interrupt(signum: int, frame: object) -> None:
            interrupts.append(signum)  # a library may turn the exception into another
            if not self._end_others() or len(interrupts) > 1:  # else they save, and the sweep waits
                raise KeyboardInterrupt

        start = hydra.main(version_base="1.3", config_path=main, config_name=args.config_name)
        saved = sys.argv
        sys.argv = ["automoe", *options, *search, *args.overrides]
        handlers = {number: signal.signal(number, interrupt) for number in STOP_SIGNALS}
        try:
            start(self.job)()
        except KeyboardInterrupt:
            status = STOPPED
        except SystemExit as error:  # a sweeper or launcher has printed why
            status = error.code if isinstance(error.code, int) else 1
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            sys.argv = saved
        if interrupts or status == STOPPED:
            self._end_others()
            return STOPPED + sum(interrupts[:1])
        return status

    @without("kernels")
    def job(self, composed: Any) -> float:
        """Run one job, called by Hydra's launcher in any process, and return its objective.

        It is the final loss or the negative tokens/s (``observe.objective``); infinite if the job is not
        done. ``jobs/NAME.json`` gets results and errors. ``composed`` is Hydra's ``DictConfig``.

        Raises:
            KeyboardInterrupt: the job was stopped, so the sweep must end.
        """
        from hydra.core.hydra_config import HydraConfig

        mine = HydraConfig.get()
        if "n_jobs" in mine.launcher and os.getpid() != self.process:  # joblib, on this machine
            end_with(self.process)
        if any(
            done["state"] == "preempted" and done["start"] == self.start
            for done in _records(self.directory)
        ):
            return math.inf  # the sweep is being stopped
        task = list(mine.overrides.task)
        fixed = {key_of(text) for text in self.args.overrides} - swept_keys(self.args.overrides)
        swept = [text for text in task if key_of(text) not in fixed]
        name = folder_name(swept) or "as-configured"
        path = self.directory / RECORDS / f"{name}.json"
        label = " ".join(f"{key}={value}" for key, value in short_keys(swept))
        record: Record = {
            "name": name,
            "job": mine.job.num,
            "overrides": swept,
            "start": self.start,
            "label": label or "as configured",
            "state": "running",
            "objective": None,
            "process": [socket.gethostname(), os.getpid()],
        }
        path.parent.mkdir(exist_ok=True)
        # A job may take days: wait for its process however long it lives.
        with os.fdopen(take_lock(path.with_suffix(".lock"), time.monotonic)):
            print(f"\njob {mine.job.num}: {record['label']}", flush=True)
            earlier = _read(path) or {}
            if earlier.get("start") == self.start and earlier["state"] != "running":
                # Optuna may draw the same values twice, even for two jobs that run side by side.
                print(f"done as job {earlier['job']} of this sweep")
                record = earlier
            else:
                replace_json(path, record)
                num_jobs = mine.launcher.get("n_jobs", 1)
                began = time.monotonic()
                result = self._result(composed, task, name, num_jobs, earlier.get("seconds"))
                record |= {"seconds": round(time.monotonic() - began, 1)} | result
                replace_json(path, record)
        # Who stops one job wants the sweep to end; elsewhere joblib would kill jobs that save.
        if record["state"] == "preempted" and os.getpid() == self.process:
            raise KeyboardInterrupt
        if record["state"] != "done":
            return math.inf
        if composed.observe.objective == "loss":
            return math.inf if record["objective"] is None else record["objective"]
        return -record["tokens_per_second"] if record.get("tokens_per_second") else math.inf

    def _result(
        self, composed: Any, task: list[str], name: str, num_jobs: int, earlier_s: float | None
    ) -> Record:
        """Check the configuration of a job and train it; return the entries of its record.

        They are its state, objective, meshes, predicted and measured numbers, or why it did not run.

        Args:
            composed: the job's configuration, Hydra's ``DictConfig``.
            task: the job's overrides.
            name: the job's folder in the directory of the sweep.
            num_jobs: number of jobs that run at the same time.
            earlier_s: seconds that the job took in an earlier start of this sweep, if it ran.
        """
        try:
            raw = resolved_container(composed, task) | {"run_dir": str(self.directory / name)}
            try:
                config = settle(config_from_dict(raw), task)
                shape, device = check_here(config)
                check_alone(device, num_jobs)
                meshes = {"default": shape.describe("default"), "moe": shape.describe("moe")}
                missing = missing_hardware(shape, device, config.launch.num_ranks)
                if missing is not None:
                    raise ConfigError(
                        "mesh", meshes["default"], missing, "Run this job on a machine with as many"
                    )
            except ConfigError as error:
                if error.key.startswith(NO_SHAPE):
                    raise
                print(f"skipped: {error}")
                return {"state": "skipped", "reason": str(error)}
            record: Record = {**meshes, "predicted": self.predict(config, shape)}
            if (earlier := _finished(resolved(config, shape, device))) is not None:
                print("done in an earlier run of this sweep")
                record |= {
                    "state": "done",
                    "objective": earlier.get("objective"),
                    "seconds": earlier_s,
                }
            else:
                result = train_here(config, shape, device, another_follows=True)
                record["state"] = result.state
                record["objective"] = result.objective
                record["exit_code"] = result.exit_code
                if result.error:
                    record["reason"] = runs.describe_error(result.error)
            if record["state"] == "done" and not math.isfinite(record["objective"] or 0.0):
                reason = f"its objective is {record['objective']}"
                record |= {"state": "failed", "reason": reason, "objective": None}
            measured = _measured(config, shape)
            record["tokens_per_second"] = measured["tokens_per_second"]
            return record | {"measured": measured}
        except (AutomoeError, OSError) as error:
            say(f"error: {error}")
            return {"state": "failed", "reason": str(error)}
        except Exception as error:
            traceback.print_exc()
            return {"state": "failed", "reason": f"{type(error).__name__}: {error}"}

    def collect(self, stopped: bool) -> list[Record]:
        """Write the records of all jobs into ``sweep.json``, and return them.

        A job with no recorded end becomes "stopped" if the sweep was stopped or an earlier start ran it, else "failed".
        """
        jobs = _records(self.directory)
        for path in self.directory.glob(f"{RECORDS}/*.json"):
            if _read(path) is None:
                say(f"warning: {path} is damaged; its job is not in the table")
        for job in jobs:
            if job["state"] == "running":
                job["state"] = "stopped"
                if not stopped and job["start"] == self.start:
                    job |= {"state": "failed", "reason": "its process ended without a result"}
        path = self.directory / runs.SWEEP_FILE
        replace_json(path, {"definition": read_json(path)["definition"], "jobs": jobs})
        return jobs

    def _end_others(self) -> int:
        """Send SIGTERM to this sweep's running jobs in other local processes; return how many."""
        here, asked = socket.gethostname(), 0
        for job in _records(self.directory):
            host, process = job["process"]
            runs_on = job["state"] == "running" and job["start"] == self.start
            if runs_on and host == here and process != os.getpid():
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGTERM)
                    asked += 1
        return asked


def check_alone(device: Device, num_jobs: int) -> None:
    """Raise ``ConfigError`` on CUDA unless ``num_jobs`` is 1: side by side all jobs would use a node's first GPUs."""
    if device == "cuda" and num_jobs != 1:
        raise ConfigError(
            PARALLEL,
            num_jobs,
            "jobs that run side by side would train on the same GPUs, of which each job takes the first",
            "Leave it out, or give each job a node (hydra/launcher=submitit_slurm)",
        )


def _measured(config: Config, shape: MeshShape) -> Record:
    """Return what a job's training run measured, by name; None where nothing was recorded.

    ``tokens_per_second`` and ``mfu`` are medians over steps, ``memory`` is the peak in bytes, and
    ``balance`` the tokens of the busiest rank's experts divided by the mean of ranks.
    """
    from automoe.observe.metrics import rank_balance, read_expert_load, read_metrics, series
    from automoe.observe.summary import median

    records, (_, counts) = read_metrics(config.run_dir), read_expert_load(config.run_dir)
    memory = series(records, "peak_memory_bytes")[1]
    return {
        "tokens_per_second": median(records, "tokens_per_second"),
        "mfu": median(records, "mfu"),
        "memory": float(memory.max()) if len(memory) else None,
        "balance": rank_balance(counts, shape.ep, config.model.num_experts),
    }


def _finished(config: Config) -> dict[str, Any] | None:
    """Return ``status.json`` of ``config.run_dir`` if that run need not be repeated, else None.

    The run must be done and have had the same settings, with an export if ``config`` asks for one.
    """
    try:
        status = runs.read_status(config.run_dir)
        then = runs.read_config(Path(config.run_dir))
        same = status.get("state") == "done" and not differences(then, config)
        # A run without an export must run again if an export is now configured.
        same &= then["checkpoint"]["export_hf"] or not config.checkpoint.export_hf
    except (OSError, ValueError, KeyError, TypeError):
        return None  # training continues there, or reports what is wrong
    return status if same else None


# ---------------------------------------------------------------- the journal


def _records(directory: Path) -> list[Record]:
    records = map(_read, sorted((directory / RECORDS).glob("*.json")))
    return sorted(filter(None, records), key=lambda record: record["job"])


def _read(path: Path) -> Record | None:
    """Return a job's record from its JSON file; None if it is missing or damaged."""
    with suppress(OSError, ValueError):
        record = read_json(path)
        if {"name", "job", "label", "start", "state", "objective", "process"} <= record.keys():
            return record
    return None
