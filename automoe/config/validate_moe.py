"""Rules of routing, dropping and the auxiliary losses. No torch."""

from __future__ import annotations

from pathlib import Path

from automoe.config.schema import Config
from automoe.errors import ConfigError

_NOT_NEGATIVE = (
    "capacity_factor",
    "router_jitter",
    "seq_balance_coef",
    "global_balance_coef",
    "micro_batch_balance_coef",
    "z_loss_coef",
    "bias_update_rate",
)


def check_moe(config: Config) -> None:
    """Raise ``ConfigError`` for the first rule of this file that ``config`` breaks."""
    moe, model = config.moe, config.model
    for name in _NOT_NEGATIVE:
        value = getattr(moe, name)
        if not 0 <= value < float("inf"):
            raise ConfigError(f"moe.{name}", value, "must be a number of at least 0", f"Set moe.{name}=0")
    if moe.router_jitter >= 1:
        raise ConfigError(
            "moe.router_jitter",
            moe.router_jitter,
            "the router's input is multiplied by uniform(1 - jitter, 1 + jitter), which must stay above 0",
            "Set moe.router_jitter=0.01, or anything below 1",
        )
    if model.shared_expert_gate and not model.num_shared_experts:
        raise ConfigError(
            "model.shared_expert_gate",
            True,
            "there is no shared expert to gate (model.num_shared_experts=0)",
            "Set model.num_shared_experts=1, or model.shared_expert_gate=false",
        )
    router = model.router
    if router.softmax_after_topk and router.score != "softmax":
        raise ConfigError(
            "model.router.softmax_after_topk",
            True,
            f"a softmax over the chosen logits and score={router.score} exclude each other",
            "Set model.router.score=softmax, or softmax_after_topk=false",
        )
    if router.softmax_after_topk and not router.norm_topk_prob:
        raise ConfigError(
            "model.router.softmax_after_topk",
            True,
            "a softmax over the K chosen logits always sums to one, and norm_topk_prob=false says otherwise",
            "Set model.router.norm_topk_prob=true, or softmax_after_topk=false",
        )
    if moe.gate == "empty" and model.num_experts_per_token >= model.num_experts:
        raise ConfigError(
            "moe.gate",
            "empty",
            f"it leaves one expert out, and a token chooses model.num_experts_per_token="
            f"{model.num_experts_per_token} of {model.num_experts - 1}",
            "Set moe.gate=balanced, or choose fewer experts",
        )
    if moe.pad_to_capacity and not moe.capacity_factor:
        raise ConfigError(
            "moe.pad_to_capacity",
            True,
            "moe.capacity_factor=0 means dropless, so there is no capacity to pad to",
            "Set moe.capacity_factor=1.0, or moe.pad_to_capacity=false",
        )
    _check_deepep(config)
    _check_replay(config)


def _check_deepep(config: Config) -> None:
    """What holds on every machine. Whether this one has DeepEP: ``automoe.launch.hardware``."""
    if config.moe.dispatcher != "deepep":
        return
    if config.train.dtype != "bfloat16":
        raise ConfigError(
            "train.dtype",
            config.train.dtype,
            "moe.dispatcher=deepep sums rows in bfloat16 alone",
            "Set train.dtype=bfloat16, or moe.dispatcher=alltoall",
        )
    row_bytes = 2 * config.model.hidden_size
    if row_bytes % 16:
        raise ConfigError(
            "model.hidden_size",
            config.model.hidden_size,
            f"moe.dispatcher=deepep sends rows of a multiple of 16 bytes: 2 * {config.model.hidden_size} % 16 = "
            f"{row_bytes % 16}",
            f"Set model.hidden_size={-(-row_bytes // 16) * 8}, or moe.dispatcher=alltoall",
        )


def _check_replay(config: Config) -> None:
    moe = config.moe
    if moe.replay_routing is None:
        return
    if moe.gate != "learned":
        raise ConfigError(
            "moe.replay_routing",
            moe.replay_routing,
            f"replayed choices leave moe.gate={moe.gate} nothing to choose",
            "Set moe.gate=learned, or moe.replay_routing=null",
        )
    folder = Path(moe.replay_routing).expanduser()
    if moe.record_routing is not None and Path(moe.record_routing).expanduser().absolute() == folder.absolute():
        raise ConfigError(
            "moe.record_routing",
            moe.record_routing,
            "the same directory as moe.replay_routing, which would be written over while it is read",
            "Name another directory",
        )
    if not any(folder.glob("step-*/rank-*.npz")):
        raise ConfigError(
            "moe.replay_routing",
            moe.replay_routing,
            f"no recorded steps in {folder.absolute()}",
            "Name the moe.record_routing directory of an earlier run",
        )
