"""Weights & Biases tracker, online or offline (``observe.wandb``)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from struct import unpack_from
from typing import Any

from automoe.config.schema import Config
from automoe.errors import import_backend
from automoe.observe.trackers.base import About, Numbers, Outcome, Texts, Tracker, one_line

# Seconds to wait for W&B's start, unless WANDB_INIT_TIMEOUT is set; W&B's default would hold a run
# up for 90 s.
INIT_TIMEOUT_S = 30
FINISH_TIMEOUT_S = 60  # seconds to upload remaining data at the end


class WandbTracker(Tracker):
    """Tracker that writes to a W&B run, with the training step as an ordinary metric ``step``.

    W&B's own step counter would drop the records of a repeated step.
    """

    def __init__(self, run: Any) -> None:
        self._run = run
        self.id = str(run.id)
        self.places = {"W&B": run.url} if getattr(run, "url", None) else {}
        self.places["W&B folder"] = str(Path(run.dir).parent)
        run.define_metric("step")
        run.define_metric("*", step_metric="step")

    def held(self) -> dict[int, float | None]:
        """Return step -> loss for the steps that W&B has, on its server or in offline files.

        The server receives steps in order, and its losses are not queried, so they are None.
        Offline, W&B writes its file up to 32 KiB or 15 seconds late, so a killed run's last steps
        are missing.
        """
        if not self._run.offline:
            return dict.fromkeys(range(1 + int(self._run.summary.get("step", 0))))
        folder = Path(self._run.dir).parent
        files = [
            path
            for path in sorted(folder.parent.glob(f"*run-*-{self.id}/run-{self.id}.wandb"))
            if path.parent.resolve() != folder.resolve()
        ]
        return {step: loss for path in files for step, loss in _losses(path.read_bytes())}

    def log(self, step: int, numbers: Numbers) -> None:
        self._run.log({**numbers, "step": step})

    def texts(self, step: int, name: str, rows: Texts) -> None:
        import wandb

        table = wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
        self._run.log({name: table, "step": step})

    def finish(self, outcome: Outcome) -> None:
        self._run.finish(exit_code=int(outcome == "failed"))


def _losses(data: bytes) -> Iterator[tuple[int, float]]:
    """Yield (step, loss) of each record in a ``.wandb`` file (LevelDB's log format).

    The wandb package no longer has a reader for its files in Python. A record that a kill has cut
    is left out.

    Args:
        data: content of the file.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    at = 7
    waiting = b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:  # too short for another piece
            at += left
            continue
        # The kind 1 is a whole record; 2, 3 and 4 are its first, middle and last piece.
        size, kind = unpack_from("<HB", data, at + 4)
        waiting = waiting * (kind > 2) + data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (2, 3) or at > len(data):  # a kill has cut the last one
            continue
        row = {
            item.key or ".".join(item.nested_key): item.value_json
            for item in Record.FromString(waiting).history.item
        }
        if "loss" in row:
            yield int(row["step"]), float(json.loads(row["loss"]))


def start(config: Config, about: About) -> WandbTracker:
    """Start a W&B run, or continue the run of an earlier start; never ask for a login.

    If an online run cannot be started (no login or network), an offline run is started with a
    warning; ``wandb sync`` can upload its files later.

    Args:
        about: name, tags, configuration and earlier id of the run.
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
        tags=about.tags or None,
        id=about.earlier or None,
        resume="allow" if about.earlier else None,
        dir=os.environ.get("WANDB_DIR") or str(about.run_dir),
        mode=mode,
        config=about.config,
        settings=wandb.Settings(**settings),
    )
