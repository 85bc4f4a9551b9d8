"""Rules of ``optim``: the numbers of AdamW, and which parameters may be rounded by chance."""

from __future__ import annotations

from automoe.config.schema import Config
from automoe.errors import ConfigError


def check_optimizer(config: Config) -> None:
    """Raise ``ConfigError`` for the first rule of this file that ``config`` breaks."""
    optim = config.optim
    for i, beta in enumerate(optim.betas):
        if not 0 <= beta < 1:
            raise ConfigError(
                "optim.betas", list(optim.betas), f"beta {i + 1} is {beta}, outside [0, 1)", "Set [0.9,0.95]"
            )
    if not optim.min_lr_ratio <= 1:
        raise ConfigError("optim.min_lr_ratio", optim.min_lr_ratio, "a share of optim.lr, at most 1", "Set 0.1")
    if optim.moments == "bfloat16" and optim.master_weights == "float32":
        raise ConfigError(
            "optim.moments",
            optim.moments,
            "moments are rounded by chance where their parameters are, and optim.master_weights=float32 rounds none",
            "Set optim.master_weights=stochastic, or optim.moments=float32",
        )
    if optim.master_weights == "stochastic":
        for wrong, rule, remedy in (
            (
                config.train.dtype != "bfloat16",
                f"it is bfloat16 that is rounded by chance, and train.dtype={config.train.dtype}",
                "train.dtype=bfloat16",
            ),
            (
                config.parallel.grad_sync == "micro_batch" and config.mesh.pp == 1,
                "gradients that are reduced after each micro-batch (parallel.grad_sync=micro_batch) would be added "
                "up in bfloat16",
                "parallel.grad_sync=step",
            ),
        ):
            if wrong:
                raise ConfigError(
                    "optim.master_weights",
                    optim.master_weights,
                    rule,
                    f"Set {remedy}, or optim.master_weights=float32",
                )
