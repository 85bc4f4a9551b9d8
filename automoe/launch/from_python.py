"""``automoe.train(...)``: start a run from a script, a notebook or a Python prompt."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from automoe.config.compose import DEFAULT_PRIMARY, Arguments
from automoe.config.convert import config_from_dict
from automoe.config.frozen import flat
from automoe.config.schema import Config, export_name
from automoe.errors import ConfigError, LaunchError, TrainingError
from automoe.launch import run_dir as runs
from automoe.launch.external import detect_external
from automoe.launch.hardware import missing_hardware
from automoe.launch.local import train_here
from automoe.launch.prepare import check_here, compose, settle

# Hydra's grammar reads text that matches this pattern as itself, without quotes.
_PLAIN = re.compile(r"(?!(?:null|true|false|yes|no|on|off|nan|inf)$)[A-Za-z_./~][\w./~-]*", re.I)


@dataclass(frozen=True)
class TrainResult:
    """Result of a run that is done.

    Attributes:
        config: configuration of the run, checked.
        run_dir: run directory with all files of the run (``docs/launch.md``).
        objective: last validation loss, else last training loss; None if the recipe returns none.
        export: folder of the exported HuggingFace checkpoint or adapter; None if the run exports
            nothing.
    """

    config: Config
    run_dir: Path
    objective: float | None
    export: Path | None

    @cached_property
    def records(self) -> list[dict[str, Any]]:
        """One dictionary per step, from ``metrics.jsonl``; empty if the recipe records none."""
        from automoe.observe.metrics import read_metrics

        return read_metrics(self.run_dir)

    @property
    def loss(self) -> float | None:
        """Training loss of the last step; None if the recipe records no steps."""
        return float(self.records[-1]["loss"]) if self.records else None


def train(
    config: Config | Mapping[str, Any] | Sequence[str] = (),
    config_name: str = DEFAULT_PRIMARY,
    config_dir: str | os.PathLike[str] | None = None,
) -> TrainResult:
    """Train on this machine in separate rank processes, wait for the end, and return the result.

    The ranks run nothing of the calling program, so a script needs no ``if __name__ ==
    "__main__"``; the keys ``recipe`` and ``plugins`` name the user's own code that ranks run. Ctrl-C
    makes the ranks save and leave; a second Ctrl-C kills them.

    Args:
        config: overrides as on the command line (``["mesh.ep=2", "model=small_mixtral"]``), as a
            dictionary (``{"mesh": {"ep": 2}, "train.steps": 50}``), or a whole ``Config``.
        config_name: name of the primary configuration, as ``--config-name``; leave it out with a
            whole ``Config``.
        config_dir: further folder of configurations, as ``--config-dir``; leave it out with a whole
            ``Config``.

    Raises:
        ConfigError, DataError, CheckpointError, BackendError, LaunchError: the run could not be started.
        TrainingError: a rank failed, or a signal ended the run before its last step.
        KeyboardInterrupt: Ctrl-C stopped the run after it saved; the same call continues it.
    """
    if threading.current_thread() is not threading.main_thread():
        raise LaunchError(
            "automoe.train runs only in the main thread: ranks end with the thread that started them"
        )
    external = detect_external(os.environ)
    if external is not None:
        raise LaunchError(
            f"automoe.train starts ranks itself, and {external.launcher} has already started this process as one. "
            f"Start the script without {external.launcher}, or python -m automoe.train with it"
        )
    checked = composed(config, config_name, config_dir)
    shape, device = check_here(checked)
    if missing := missing_hardware(shape, device, checked.launch.num_ranks):
        raise LaunchError(f"the configuration is valid; it cannot train here: {missing}")
    run_dir = Path(checked.run_dir).absolute()
    result = train_here(checked, shape, device)
    if result.state == "preempted":
        if result.signum == signal.SIGINT:
            raise KeyboardInterrupt
        raise TrainingError(
            f"stopped before the last step, by signal {result.exit_code - 128}. The same call continues the run",
            run_dir,
        )
    if result.state != "done":
        said = runs.describe_error(result.error) if result.error else "it ended without a result"
        raise TrainingError(f"{said}\nlogs of every rank: {run_dir / runs.LOG_FOLDER}", run_dir)
    name = export_name(checked)
    export = run_dir / name if name and (run_dir / name).is_dir() else None
    return TrainResult(checked, run_dir, result.objective, export)


def composed(config: object, config_name: str, config_dir: str | os.PathLike[str] | None) -> Config:
    """Return the ``Config`` that overrides, a dictionary of keys or a whole ``Config`` stand for.

    Args:
        config_name: primary configuration that overrides or keys apply to.
        config_dir: further folder of configurations.

    Raises:
        ConfigError: ``config`` is none of the three, has a wrong key or value, or is a ``Config`` and
            comes with a name or folder.
        BackendError: Hydra is not installed.
    """
    if isinstance(config, Config):
        if config_name != DEFAULT_PRIMARY or config_dir is not None:
            raise ConfigError(
                "config_name", config_name, "a Config is composed already", "Leave config_name out"
            )
        return settle(config_from_dict(asdict(config)), [])  # as strict as for overrides
    if isinstance(config, Mapping):
        overrides = [f"{key}={override_text(value)}" for key, value in flat(config).items()]
    elif (
        isinstance(config, Sequence)
        and not isinstance(config, str)
        and all(isinstance(word, str) for word in config)
    ):
        overrides = list(config)
    else:
        raise ConfigError(
            "config",
            config,
            "expected a list of overrides, a dictionary or a Config",
            'For example automoe.train(["train.steps=50"])',
        )
    folder = None if config_dir is None else os.fspath(config_dir)
    return compose(Arguments(config_name.removesuffix(".yaml"), folder, overrides=overrides))


def override_text(value: object) -> str:
    """Return a Python value as text for the right side of a Hydra override, quoted if need be."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, (int, float)):
        # A NumPy float is a float too, but its repr names NumPy.
        return repr(float(value) if isinstance(value, float) else int(value))
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{override_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(override_text, value)) + "]"
    text = str(value)
    if _PLAIN.fullmatch(text):
        return text
    return "'" + re.sub(r"(\\*)'", r"\1\1\\'", re.sub(r"(\\+)$", r"\1\1", text)) + "'"
