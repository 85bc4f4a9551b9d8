"""Bounds of single numbers: what a key alone can get wrong, whatever the others say."""

from __future__ import annotations

import re
from math import inf
from typing import Any

from automoe.config.schema import Config
from automoe.errors import ConfigError

# Keys with a smallest value that makes sense; the inclusive bound.
_AT_LEAST = {
    "train.steps": 1,
    "train.seq_len": 2,
    "train.global_batch_size": 1,
    "train.micro_batch_size": 1,
    "train.seed": 0,
    "train.grad_clip": 0,
    "train.max_skipped": 1,
    "train.spike_factor": 0,
    "train.spike_window": 4,
    "train.val_every": 0,
    "train.val_batches": 1,
    "model.vocab_size": 2,
    "model.hidden_size": 1,
    "model.num_layers": 1,
    "model.intermediate_size": 1,
    "model.first_k_dense": 0,
    "model.num_experts": 1,
    "model.num_experts_per_token": 1,
    "model.moe_intermediate_size": 1,
    "model.num_shared_experts": 0,
    "model.norm_eps": 0,
    "model.rope.original_seq_len": 1,
    "model.attention.num_heads": 1,
    "model.attention.num_kv_heads": 1,
    "model.attention.head_dim": 2,
    "model.router.num_groups": 1,
    "model.router.topk_groups": 1,
    "model.router.group_score_topk": 1,
    "optim.lr": 0,
    "optim.weight_decay": 0,
    "optim.warmup_steps": 0,
    "optim.decay_steps": 0,
    "optim.min_lr_ratio": 0,
    "data.max_bytes": 1,
    "checkpoint.every": 0,
    "checkpoint.keep": 1,
    "checkpoint.keep_every": 0,
    "checkpoint.keep_best": 0,
    "observe.log_every": 1,
    "launch.timeout_s": 1,
    "launch.grace_s": 1,
    "launch.max_restarts": 0,
    "launch.threads_per_rank": 0,
    "cluster.gpus_per_node": 1,
    "cluster.memory_bytes": 0,
    "cluster.peak_flops": 0,
}

# Keys that divide, or whose logarithm is taken, and a usual value.
_ABOVE_ZERO = {
    "model.initializer_range": "0.02",
    "model.rope.theta": "10000",
    "model.rope.factor": "1",
    "model.rope.beta_fast": "32",
    "model.rope.beta_slow": "1",
    "model.rope.partial_rotary_factor": "1",
    "model.rope.low_freq_factor": "1",
    "optim.eps": "1e-8",
}


def check_numbers(config: Config) -> None:
    """Raise ``ConfigError`` for the first number that is out of its bounds, infinite or not a number."""
    for key, least in _AT_LEAST.items():
        value = _lookup(config, key)
        if value is None:
            continue
        if not value >= least:  # `not >=` also catches NaN
            raise ConfigError(key, value, f"must be at least {least}", f"Set {key}={least} or more")
        _check_finite(key, value, f"{key}={least} or more")
    for key, usual in _ABOVE_ZERO.items():
        value = _lookup(config, key)
        if not value > 0:
            raise ConfigError(key, value, "must be larger than 0", f"Set {key}={usual}")
        _check_finite(key, value, f"{key}={usual}")
    rope = config.model.rope
    if rope.partial_rotary_factor > 1:
        raise ConfigError(
            "model.rope.partial_rotary_factor",
            rope.partial_rotary_factor,
            "the share of a head that turns, at most 1",
            "Set model.rope.partial_rotary_factor=1",
        )
    if rope.scaling == "llama3" and not rope.low_freq_factor < rope.high_freq_factor < inf:
        raise ConfigError(
            "model.rope.high_freq_factor",
            rope.high_freq_factor,
            f"llama3 scaling mixes between low_freq_factor={rope.low_freq_factor} and a larger high_freq_factor",
            f"Set model.rope.high_freq_factor={4 * rope.low_freq_factor}",
        )
    if rope.scaling == "yarn" and rope.theta <= 1:
        raise ConfigError(
            "model.rope.theta",
            rope.theta,
            "YaRN divides by its logarithm, so it must be larger than 1",
            "Set model.rope.theta=10000",
        )


def _check_finite(key: str, value: float, choice: str) -> None:
    if value == inf:
        raise ConfigError(key, value, "must be a finite number", f"Set {choice}")


def _lookup(config: Config, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def parse_profile_steps(text: str) -> tuple[int, int] | None:
    """First and last step to profile; None when ``text`` is empty.

    Raises:
        ConfigError: not ``first-last`` with 1 <= first <= last.
    """
    if not text:
        return None
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= first <= last:
        raise ConfigError(
            "observe.profile_steps",
            text,
            "a window is first-last with 1 <= first <= last",
            'For example "10-12"',
        )
    return first, last
