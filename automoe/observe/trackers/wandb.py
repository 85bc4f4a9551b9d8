"""Weights & Biases tracker, online or offline (``observe.wandb``)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from automoe.config.convert import config_to_dict
from automoe.config.schema import Config
from automoe.errors import import_backend
from automoe.observe.trackers.base import About, Numbers, Outcome, Texts, Tracker, one_line

# Seconds to wait for W&B's start, unless WANDB_INIT_TIMEOUT is set; W&B's default would hold a run
# up for 90 s.
INIT_TIMEOUT_S = 30
FINISH_TIMEOUT_S = 60  # seconds to upload remaining data at the end


class WandbTracker(Tracker):
    """A started W&B run, with ``step`` as a metric of its own.

    W&B's own step counter drops records of a repeated step.
    """

    def __init__(self, run: Any) -> None:
        self._run = run
        self.id = str(run.id)
        self.places = {"W&B": run.url} if getattr(run, "url", None) else {}
        self.places["W&B folder"] = str(Path(run.dir).parent)
        run.define_metric("step")
        run.define_metric("*", step_metric="step")

    def held(self) -> range | None:
        """Return the steps that W&B's server has, which gets them in order; None if offline."""
        return None if self._run.offline else range(1 + int(self._run.summary.get("step", 0)))

    def log(self, step: int, numbers: Numbers) -> None:
        self._run.log({**numbers, "step": step})

    def texts(self, step: int, name: str, rows: Texts) -> None:
        import wandb

        table = wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
        self._run.log({name: table, "step": step})

    def finish(self, outcome: Outcome) -> None:
        self._run.finish(exit_code=int(outcome == "failed"))


def start(config: Config, about: About) -> WandbTracker:
    """Start a W&B run, or continue the earlier one; never prompt.

    Without a login or a network, an online run becomes an offline run with a warning; ``wandb
    sync`` can send its files later.
    """
    wandb = import_backend("wandb", f"observe.wandb={config.observe.wandb}", "pip install wandb")
    if config.observe.wandb == "online":
        try:
            return WandbTracker(_init(wandb, config, about, "online"))
        # W&B raises many types: its own errors, and OSErrors, timeouts and assertions of its
        # client, caused by its service process, the network or a full disk.
        except Exception as error:
            then = "recording offline, send it later with `wandb sync`"
            about.warn(f"W&B does not work online ({one_line(error, config)}); {then}")
    return WandbTracker(_init(wandb, config, about, "offline"))


def _init(wandb: Any, config: Config, about: About, mode: str) -> Any:
    # W&B's own output would break the aligned step lines.
    settings = {"silent": True, "console": "off"}
    if "WANDB_INIT_TIMEOUT" not in os.environ:
        settings["init_timeout"] = INIT_TIMEOUT_S
    settings |= {"finish_timeout": FINISH_TIMEOUT_S, "finish_timeout_raises": True}
    wandb.setup(wandb.Settings(silent=True))
    # The login is checked before init, which would stop and prompt in a terminal.
    if mode == "online" and not wandb.login(prompt=False):
        raise LookupError("no login: set WANDB_API_KEY or run `wandb login`")
    return wandb.init(
        project=config.observe.wandb_project,
        name=about.name,
        group=about.group or None,
        tags=config.observe.run_tags or None,
        id=about.earlier or None,
        resume="allow" if about.earlier else None,
        dir=os.environ.get("WANDB_DIR") or str(about.run_dir),
        mode=mode,
        config=config_to_dict(config),
        settings=wandb.Settings(**settings),
    )
