"""Rules of training in 8 bits (``train.fp8``). No torch."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from automoe.config.mesh_shape import MeshShape
from automoe.config.schema import Config, is_linear
from automoe.errors import ConfigError

BLOCK = 128  # rows and columns of a weight under one scale
ROW_BYTES = 16  # what grouped products want a row to be a multiple of


def check_fp8(config: Config, shape: MeshShape, device: str) -> None:
    """Raise ``ConfigError`` for the first rule of this file that ``config`` breaks."""
    mode = config.train.fp8
    if mode == "off":
        return
    if config.train.dtype == "float64" and device != "cpu":
        raise ConfigError(
            "train.fp8",
            mode,
            "what surrounds a GPU's 8-bit products is float32 or bfloat16, and train.dtype=float64",
            "Set train.fp8=off, train.dtype=bfloat16, or launch.device=cpu",
        )
    if config.model.first_k_dense < config.model.num_layers:
        _check_experts(config, shape)
    if mode == "blockwise" and shape.tp > 1:
        _check_grid(config, shape)


def _check_experts(config: Config, shape: MeshShape) -> None:
    mode, width = config.train.fp8, config.model.moe_intermediate_size
    if config.moe.experts != "grouped_mm":
        raise ConfigError(
            "moe.experts",
            config.moe.experts,
            f"train.fp8={mode} multiplies the experts with grouped products, and has no other backend",
            "Set moe.experts=grouped_mm, or train.fp8=off",
        )
    if mode != "blockwise" and config.moe.pad_to_capacity:
        raise ConfigError(
            "moe.pad_to_capacity",
            True,
            f"what fills an expert up is the first token of each rank, and train.fp8={mode} would find its scales over "
            "other tokens on every mesh",
            "Set moe.pad_to_capacity=false, or train.fp8=blockwise",
        )
    if mode == "blockwise" and width % (BLOCK * shape.etp):
        raise ConfigError(
            "model.moe_intermediate_size",
            width,
            f"gate and up of a rank's experts are whole blocks of {BLOCK} rows: {width} % ({BLOCK} * mesh.etp) = "
            f"{width} % {BLOCK * shape.etp} = {width % (BLOCK * shape.etp)}",
            "Set train.fp8=tensorwise" + (f", or mesh.etp={_nearest(width, shape.etp)}" if shape.etp > 1 else ""),
        )
    for key, size in (
        ("model.hidden_size", config.model.hidden_size),
        ("model.moe_intermediate_size", width // shape.etp),
    ):
        if size % ROW_BYTES:
            raise ConfigError(
                key,
                size,
                f"grouped products in 8 bits need rows of a multiple of {ROW_BYTES} bytes: {size} % {ROW_BYTES} = "
                f"{size % ROW_BYTES}",
                f"Nearest valid choice: {-(-size // ROW_BYTES) * ROW_BYTES}, or train.fp8=off",
            )


def _check_grid(config: Config, shape: MeshShape) -> None:
    """Blocks are counted from a weight's first row and column, so tp must cut it where blocks meet."""
    for what, size in _cut_sizes(config, shape.tp):
        if size % BLOCK:
            whole = size * shape.tp
            raise ConfigError(
                "mesh.tp",
                shape.tp,
                f"train.fp8=blockwise has scales of {BLOCK} x {BLOCK} blocks of the whole weight, and tp would cut {what} "
                f"inside one: {whole} / {shape.tp} = {size}, {size} % {BLOCK} = {size % BLOCK}",
                f"Nearest valid choice: mesh.tp={_nearest(whole, shape.tp)}, or train.fp8=tensorwise",
            )


def _nearest(size: int, ranks: int) -> int:
    """The largest divisor of ``ranks`` that cuts ``size`` where blocks meet; one if there is none."""
    return gcd(size // BLOCK, ranks) if size % BLOCK == 0 else 1


def _cut_sizes(config: Config, tp: int) -> Iterator[tuple[str, int]]:
    """What tp cuts, and how many rows or columns of it a rank gets."""
    model, a = config.model, config.model.attention
    if model.first_k_dense:
        yield "the dense FFN (model.intermediate_size)", model.intermediate_size // tp
    if model.num_shared_experts and model.first_k_dense < model.num_layers:
        yield (
            "the shared experts (num_shared_experts * moe_intermediate_size)",
            model.num_shared_experts * model.moe_intermediate_size // tp,
        )
    if a.kind == "mla":
        heads = a.num_heads // tp
        yield (
            "queries (num_heads * (qk_nope_head_dim + qk_rope_head_dim))",
            heads * (a.qk_nope_head_dim + a.qk_rope_head_dim),
        )
        yield (
            "keys and values (num_heads * (qk_nope_head_dim + v_head_dim))",
            heads * (a.qk_nope_head_dim + a.v_head_dim),
        )
        yield "the output projection (num_heads * v_head_dim)", heads * a.v_head_dim
        return
    yield "heads (num_heads * head_dim)", a.num_heads * a.head_dim // tp
    # Heads that ranks share are used one by one.
    kv_heads = max(a.num_kv_heads // tp, 1)
    yield "keys and values (num_kv_heads * head_dim)", kv_heads * a.head_dim
    if any(is_linear(a, layer) for layer in range(model.num_layers)):
        keys = a.linear_num_key_heads * a.linear_key_head_dim
        values = a.linear_num_value_heads * a.linear_value_head_dim
        yield "a delta net's keys and values", (2 * keys + 2 * values) // tp
        yield "a delta net's output projection", values // tp
