"""Rules of the ``checkpoint`` section."""

from __future__ import annotations

import os
from pathlib import Path

from automoe.config.schema import Config
from automoe.errors import ConfigError


def check_checkpoint(config: Config) -> None:
    """Raise ``ConfigError`` for a place to resume from that is not there, or steps to keep that never come."""
    checkpoint, every = config.checkpoint, config.checkpoint.every
    if checkpoint.resume not in ("auto", "never") and not Path(checkpoint.resume).expanduser().is_dir():
        raise ConfigError(
            "checkpoint.resume",
            checkpoint.resume,
            f"no such directory (looked from {os.getcwd()})",
            "Set auto, never, or the run or step directory to start from",
        )
    if checkpoint.keep_every and (not every or checkpoint.keep_every % every):
        nearest = -(-checkpoint.keep_every // every) * every if every else 0
        raise ConfigError(
            "checkpoint.keep_every",
            checkpoint.keep_every,
            f"checkpoints are of steps that divide by checkpoint.every={every}"
            if every
            else "no checkpoints are written: checkpoint.every=0",
            f"Nearest valid choice: checkpoint.keep_every={nearest}",
        )
    val_every = config.train.val_every
    if checkpoint.keep_best and (not every or not val_every or every % val_every):
        raise ConfigError(
            "checkpoint.keep_best",
            checkpoint.keep_best,
            "the best is told by the validation loss, so a step that is saved must be validated: "
            f"checkpoint.every={every} is not a multiple of train.val_every={val_every}",
            f"Set train.val_every={every or 100} checkpoint.every={every or 100}, or checkpoint.keep_best=0",
        )
