"""Rules of layers that differ: sliding windows, attention sinks, delta nets, biased experts. No torch."""

from __future__ import annotations

from math import gcd

from automoe.config.mesh_shape import MeshShape
from automoe.config.schema import Config
from automoe.errors import ConfigError


def check_layers(config: Config, shape: MeshShape) -> None:
    """Raise ``ConfigError`` for the first rule of this file that ``config`` breaks."""
    _check_windows(config, shape)
    _check_delta_net(config, shape)
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
    kinds = (attention.sliding_window > 0) + (attention.linear_num_key_heads > 0)
    if kinds != (attention.full_attention_interval > 1):
        raise ConfigError(
            "model.attention.full_attention_interval",
            attention.full_attention_interval,
            "layers without full attention have a window or are delta nets, and there are none at an interval of 1; "
            f"model.attention.sliding_window={attention.sliding_window}, linear_num_key_heads="
            f"{attention.linear_num_key_heads}",
            "Set model.attention.full_attention_interval=1 with both of these 0, or 2 and one of them, such as "
            "sliding_window=128",
        )
    parts = {
        "sinks": (attention.sinks, "false"),
        "sliding_window": (attention.sliding_window, "0"),
        "linear_num_key_heads": (attention.linear_num_key_heads, "0"),
        "o_bias": (attention.o_bias, "false"),
        "output_gate": (attention.output_gate, "false"),
    }
    for key, (value, plain) in parts.items():
        if value and attention.kind != "gqa":
            raise ConfigError(
                f"model.attention.{key}",
                value,
                "attention kind gqa alone has it",
                f"Set model.attention.{key}={plain}, or model.attention.kind=gqa",
            )
        if value and key in ("sinks", "sliding_window") and config.parallel.context == "ring" and shape.cp > 1:
            raise ConfigError(
                "parallel.context",
                "ring",
                f"ring attention knows causality alone, and the model has model.attention.{key}={value}",
                "Set parallel.context=gather",
            )


def _check_delta_net(config: Config, shape: MeshShape) -> None:
    attention = config.model.attention
    heads, values = attention.linear_num_key_heads, attention.linear_num_value_heads
    if not heads:
        return
    for key in (
        "linear_num_value_heads",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "linear_conv_kernel_dim",
    ):
        if getattr(attention, key) < 1:
            raise ConfigError(
                f"model.attention.{key}",
                getattr(attention, key),
                f"a delta net needs this size (model.attention.linear_num_key_heads={heads})",
                f"Set model.attention.{key}=1 or more",
            )
    if values % heads:
        raise ConfigError(
            "model.attention.linear_num_value_heads",
            values,
            f"a delta net's key heads serve equal numbers of value heads: {values} % {heads} = {values % heads}",
            f"Nearest valid choices: {max(values // heads, 1) * heads} or {(values // heads + 1) * heads}",
        )
    if heads % shape.tp:
        raise ConfigError(
            "mesh.tp",
            shape.tp,
            f"tp ranks hold equal numbers of a delta net's key heads (model.attention.linear_num_key_heads): "
            f"{heads} % {shape.tp} = {heads % shape.tp}",
            f"Nearest valid choice: mesh.tp={gcd(heads, shape.tp)}",
        )
    if shape.cp > 1:
        raise ConfigError(
            "mesh.cp",
            shape.cp,
            "the state of a delta net runs through the whole row "
            f"(model.attention.linear_num_key_heads={heads}), and cp ranks hold parts of it",
            "Set mesh.cp=1, and mesh.tp or mesh.dp_shard larger",
        )
    if config.data.document_mask:
        raise ConfigError(
            "data.document_mask",
            True,
            "the state of a delta net runs through the whole row "
            f"(model.attention.linear_num_key_heads={heads}) and is not reset where a document begins",
            "Set data.document_mask=false",
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
