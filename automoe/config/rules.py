"""Rules as rows of a table: key, whether it is broken, the rule with its numbers, the remedy. And bounds of numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import inf
from typing import Any

from automoe.config.mesh_shape import MeshShape
from automoe.config.schema import Config
from automoe.errors import ConfigError

Row = tuple[str, bool, str, str]


def check_rows(config: Config, rows: Iterable[Row], shape: MeshShape | None = None) -> None:
    """Raise ``ConfigError`` for the first broken row; its value is what ``config``, or of the mesh ``shape``, has.

    Rows come from a generator, one at a time: a row may divide by what an earlier one has found not to be zero.
    """
    for key, broken, rule, remedy in rows:
        if broken:
            on_mesh = shape is not None and key.startswith("mesh.")
            value = getattr(shape, key.removeprefix("mesh.")) if on_mesh else lookup(config, key)
            raise ConfigError(key, list(value) if isinstance(value, tuple) else value, rule, remedy)


def lookup(config: Config, key: str) -> Any:
    """The value under a dotted key."""
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def divides(key: str, value: int, divisor: int, rule: str, other: str = "") -> Row:
    """The row for ``value % divisor == 0``; the remedy names the nearest values, and ``other`` than to change this key."""
    below, above = value // divisor * divisor, (value // divisor + 1) * divisor
    choices = f"{key}={below} or {above}" if below else f"{key}={above}"
    return key, value % divisor != 0, rule, f"Nearest valid choices: {choices}" + (f", or {other}" if other else "")


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


def number_rows(config: Config) -> Iterator[Row]:
    """Bounds of single numbers: what a key alone can get wrong, whatever the others say."""
    for key, least in _AT_LEAST.items():
        value = lookup(config, key)
        if value is not None:
            # `not >=` also catches NaN
            yield key, not value >= least, f"must be at least {least}", f"Set {key}={least} or more"
            yield key, value == inf, "must be a finite number", f"Set {key}={least} or more"
    for key, usual in _ABOVE_ZERO.items():
        value = lookup(config, key)
        yield key, not value > 0, "must be larger than 0", f"Set {key}={usual}"
        yield key, value == inf, "must be a finite number", f"Set {key}={usual}"
    rope = config.model.rope
    yield (
        "model.rope.partial_rotary_factor",
        rope.partial_rotary_factor > 1,
        "the share of a head that turns, at most 1",
        "Set model.rope.partial_rotary_factor=1",
    )
    yield (
        "model.rope.high_freq_factor",
        rope.scaling == "llama3" and not rope.low_freq_factor < rope.high_freq_factor < inf,
        f"llama3 scaling mixes between low_freq_factor={rope.low_freq_factor} and a larger high_freq_factor",
        f"Set model.rope.high_freq_factor={4 * rope.low_freq_factor}",
    )
    yield (
        "model.rope.theta",
        rope.scaling == "yarn" and rope.theta <= 1,
        "YaRN divides by its logarithm, so it must be larger than 1",
        "Set model.rope.theta=10000",
    )
