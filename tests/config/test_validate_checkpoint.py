"""The checkpoint section: what is refused before a rank starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from automoe.config.rule_engine import check_rows
from automoe.config.rules_settings import checkpoint_rows
from automoe.config.schema import Config
from automoe.errors import ConfigError


def settings(val_every: int = 5, **checkpoint: object) -> Config:
    config = Config()
    config.train.val_every = val_every
    for name, value in checkpoint.items():
        setattr(config.checkpoint, name, value)
    return config


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (settings(resume="atuo"), r"checkpoint.resume=atuo: no such directory .*Set auto, never, or the run"),
        (settings(keep_every=10), r"keep_every=10: no checkpoints are written: checkpoint.every=0"),
        (settings(every_minutes=30, keep_every=10), r"keep_every=10: checkpoint.every_minutes saves any step"),
        (
            settings(every=4, keep_every=10),
            r"at multiples of checkpoint.every=4: .*10 % 4 = 2.*Set .*keep_every=8 or 12",
        ),
        (settings(keep_best=1), r"keep_best=1: .*checkpoint.every=0 is not a multiple of train.val_every=5"),
        (settings(every=4, keep_best=1), r"checkpoint.every=4 is not a multiple of train.val_every=5"),
        (settings(every=4, keep_best=1, val_every=0), r"train.val_every=0. Set train.val_every=4"),
    ],
)
def test_what_cannot_be_is_refused(config: Config, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_rows(config, checkpoint_rows(config))


def test_what_can_be_is_not(tmp_path: Path) -> None:
    kept = (settings(resume="never", every=4, keep_every=12), settings(every=10, keep_best=2))
    for config in (settings(resume=str(tmp_path)), *kept):
        check_rows(config, checkpoint_rows(config))
