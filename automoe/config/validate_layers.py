"""Rules of layers that differ: sliding windows, attention sinks, biased experts. No torch."""

from __future__ import annotations

from math import gcd

from automoe.config.mesh_shape import MeshShape
from automoe.config.schema import Config
from automoe.errors import ConfigError


def check_layers(config: Config, shape: MeshShape) -> None:
    """Raise ``ConfigError`` for the first rule of this file that ``config`` breaks."""
    _check_windows(config, shape)
    _check_biased_experts(config, shape)


def _check_windows(config: Config, shape: MeshShape) -> None:
    attention = config.model.attention
    for key, least in (("full_attention_interval", 1), ("sliding_window", 0)):
        value = getattr(attention, key)
        if value < least:
            raise ConfigError(
                f"model.attention.{key}",
                value,
                f"must be at least {least}",
                f"Set model.attention.{key}={least}",
            )
    if (attention.full_attention_interval > 1) != (attention.sliding_window > 0):
        raise ConfigError(
            "model.attention.full_attention_interval",
            attention.full_attention_interval,
            "layers without full attention have a window and others have none, and model.attention.sliding_window="
            f"{attention.sliding_window}",
            "Set model.attention.full_attention_interval=1 with sliding_window=0, or 2 and sliding_window=128",
        )
    parts = {
        "sinks": (attention.sinks, "false"),
        "sliding_window": (attention.sliding_window, "0"),
        "o_bias": (attention.o_bias, "false"),
    }
    for key, (value, plain) in parts.items():
        if value and attention.kind != "gqa":
            raise ConfigError(
                f"model.attention.{key}",
                value,
                "attention kind gqa alone has it",
                f"Set model.attention.{key}={plain}, or model.attention.kind=gqa",
            )
        if value and key != "o_bias" and config.parallel.context == "ring" and shape.cp > 1:
            raise ConfigError(
                "parallel.context",
                "ring",
                f"ring attention knows causality alone, and the model has model.attention.{key}={value}",
                "Set parallel.context=gather",
            )


def _check_biased_experts(config: Config, shape: MeshShape) -> None:
    model = config.model
    for key in ("swiglu_alpha", "swiglu_limit"):
        if model.expert_activation == "clamped_swiglu" and not 0 < getattr(model, key) < float("inf"):
            raise ConfigError(
                f"model.{key}",
                getattr(model, key),
                "must be a number larger than 0",
                f"Set model.{key}=1.702",
            )
    ranks = shape.etp * shape.ep_shard
    if model.biased_experts and model.first_k_dense < model.num_layers and model.hidden_size % ranks:
        raise ConfigError(
            "model.hidden_size",
            model.hidden_size,
            "etp and FSDP cut the bias behind the experts' down projection evenly over mesh.etp*mesh.ep_shard = "
            f"{shape.etp}*{shape.ep_shard} = {ranks} ranks: {model.hidden_size} % {ranks} = "
            f"{model.hidden_size % ranks}",
            f"Nearest valid choice: {ranks // gcd(model.hidden_size, ranks)} times more ranks on mesh.ep",
        )
