"""Experiment trackers: Weights & Biases when ``observe.wandb`` asks for it, nothing otherwise.

A tracker is a convenience: without a login, a network or a working service the run goes on, after
one warning. What it would have shown is in ``metrics.jsonl`` in any case.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from automoe.config.convert import config_to_dict
from automoe.config.schema import Config

INIT_TIMEOUT_S = 30  # unless WANDB_INIT_TIMEOUT says otherwise; its own default would hold up a run for 90
FINISH_TIMEOUT_S = 60  # upload of what is left at the end
WITHOUT = "training goes on without it"


class Tracker:
    """A started W&B run, or nothing. The first error ends its use, with a warning; training goes on."""

    def __init__(self, run: Any | None = None, warn: Callable[[str], None] = print) -> None:
        self._run, self._warn = run, warn
        # Of a run that W&B gave both: where its page is, and the folder with its files.
        self.places: dict[str, str] = {}
        if run is not None:
            self.places = {"W&B": run.url} if getattr(run, "url", None) else {}
            self.places["W&B folder"] = str(Path(run.dir).parent)

    def log(self, record: Mapping[str, Any]) -> None:
        """Send one step's record (the keys of ``metrics.jsonl``)."""
        known = {key: value for key, value in record.items() if not isinstance(value, (list, dict, type(None)))}
        self._call("log", known, step=record["step"])

    def finish(self, exit_code: int = 0) -> None:
        """Flush and close; ``exit_code`` other than 0 marks the run as failed."""
        self._call("finish", exit_code=exit_code)
        self._run = None

    def _call(self, method: str, *args: Any, **options: Any) -> None:
        if self._run is None:
            return
        try:
            getattr(self._run, method)(*args, **options)
        except Exception as error:  # its service process died: nothing of training depends on it
            self._warn(f"W&B stopped working ({_one_line(error)}); {WITHOUT}")
            self._run = None


def make_tracker(config: Config, run_dir: str | os.PathLike[str], warn: Callable[[str], None] | None = None) -> Tracker:
    """The tracker of a run, in the one process that records it (rank 0).

    Args:
        config: ``observe.wandb`` is off, offline or online.
        run_dir: W&B keeps its files in ``run_dir/wandb``, unless WANDB_DIR is set.
        warn: told, in one line, what does not work; prints to standard error by default.

    Online without a login or a network falls back to offline, whose files can be sent later with
    ``wandb sync``; if that fails too, to nothing. Never raises on account of W&B, never asks.
    """
    if config.observe.wandb == "off":
        return Tracker()
    warn = warn or (lambda text: print(f"automoe: {text}", file=sys.stderr))
    try:
        import wandb
    except ImportError as error:
        warn(f"observe.wandb={config.observe.wandb}, but wandb cannot be imported ({error}); {WITHOUT}")
        return Tracker()

    for mode in dict.fromkeys((config.observe.wandb, "offline")):
        try:
            return Tracker(_start(wandb, config, Path(run_dir), mode), warn)
        # Whatever its service process, the network or a full disk makes it raise (its own errors, and
        # OSErrors, timeouts and assertions from its client) must not cost the run.
        except Exception as error:
            then = "recording offline, send it later with `wandb sync`" if mode == "online" else WITHOUT
            warn(f"W&B does not work {mode} ({_one_line(error)}); {then}")
    return Tracker()


def _start(wandb: Any, config: Config, run_dir: Path, mode: str) -> Any:
    settings: dict[str, Any] = {"silent": True, "console": "off"}  # its lines would break the aligned ones
    if "WANDB_INIT_TIMEOUT" not in os.environ:
        settings["init_timeout"] = INIT_TIMEOUT_S
    settings |= {"finish_timeout": FINISH_TIMEOUT_S, "finish_timeout_raises": True}
    wandb.setup(wandb.Settings(silent=True))
    # Asked before init, which would stop and prompt in a terminal.
    if mode == "online" and not wandb.login(prompt=False):
        raise LookupError("no login: set WANDB_API_KEY or run `wandb login`")
    return wandb.init(
        project=config.observe.wandb_project,
        name=run_dir.resolve().name,
        dir=os.environ.get("WANDB_DIR") or str(run_dir),
        mode=mode,
        config=config_to_dict(config),
        settings=wandb.Settings(**settings),
    )


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
