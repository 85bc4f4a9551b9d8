"""Rules of ``kernels``: which implementation can serve which model, mask, dtype and device. No torch."""

from __future__ import annotations

import os

from automoe.config.mesh_shape import MeshShape
from automoe.config.schema import Config
from automoe.errors import ConfigError

MAX_FLASH_DIM = 256
MAX_CUDNN_DIM = 128
MLA_DIMS = (192, 128)  # of queries and keys, and of values: what cuDNN has beyond 128
DIM_UNIT = 8
FOREIGN_EXPERTS = {"te": "transformer-engine", "quack": "quack-kernels"}


def check_kernels(config: Config, shape: MeshShape, device: str) -> None:
    """Raise ``ConfigError`` for the first rule of this file that ``config`` breaks.

    Args:
        device: ``cpu``, ``cuda``, or ``auto`` where it is not known yet; rules of one device wait then.
    """
    _check_attention_kernel(config, shape, device)
    _check_rope_kernel(config, device)
    _check_norm_kernel(config, device)
    _check_expert_kernel(config, device)


def _check_rope_kernel(config: Config, device: str) -> None:
    if config.kernels.rope == "torch":
        return
    key, kernel, remedy = "kernels.rope", config.kernels.rope, "Set kernels.rope=torch"
    if config.train.dtype == "float64":
        raise ConfigError(key, kernel, "it has no float64, and train.dtype=float64", remedy)
    if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        remedy += ", or TRITON_INTERPRET=1 to try the kernels out, very slowly"
        raise ConfigError(key, kernel, "Triton's kernels need CUDA, and this run is on cpu", remedy)


def _check_norm_kernel(config: Config, device: str) -> None:
    if config.kernels.norm == "torch":
        return
    for key, value, wrong in (
        ("launch.device", device, "cpu"),
        ("train.dtype", config.train.dtype, "float64"),
    ):
        if value == wrong:
            raise ConfigError(
                "kernels.norm",
                config.kernels.norm,
                f"transformer-engine computes on CUDA, in float32 and narrower, and {key}={value}",
                "Set kernels.norm=torch",
            )
    if "layernorm" in config.parallel.recompute:
        raise ConfigError(
            "kernels.norm",
            config.kernels.norm,
            "transformer-engine frees what its backward pass has read, and with parallel.recompute=[layernorm] others "
            "read it too",
            "Set kernels.norm=torch, or leave layernorm out of parallel.recompute",
        )


def _check_expert_kernel(config: Config, device: str) -> None:
    backend = config.moe.experts
    if backend not in FOREIGN_EXPERTS or config.model.first_k_dense == config.model.num_layers:
        return
    rule = None
    if device == "cpu":
        rule = f"{FOREIGN_EXPERTS[backend]} needs CUDA, and this run is on cpu"
    elif config.model.biased_experts:
        rule = "it has experts without biases, and model.biased_experts=true"
    elif backend == "quack" and config.train.dtype != "bfloat16":
        rule = f"it computes in half precision alone, and train.dtype={config.train.dtype}"
    elif backend == "quack" and config.model.expert_activation != "swiglu":
        rule = f"it has SwiGLU alone, and model.expert_activation={config.model.expert_activation}"
    if rule is not None:
        raise ConfigError("moe.experts", backend, rule, "Nearest valid choice: moe.experts=grouped_mm")


def _check_attention_kernel(config: Config, shape: MeshShape, device: str) -> None:
    kernel = config.kernels.attention
    if kernel == "sdpa":
        return
    if config.parallel.context == "ring" and shape.cp > 1:
        raise _refused(kernel, "ring attention (parallel.context=ring) calls kernels of its own", "sdpa")
    if kernel == "math":
        return
    if kernel != "flash":
        if device == "cpu":
            name = {"cudnn": "cuDNN", "te": "transformer-engine"}[kernel]
            raise _refused(kernel, f"{name} needs CUDA, and this run is on cpu", "sdpa")
        _check_cudnn_dims(config)  # what te's fused attention computes with, too
    if device != "cuda":  # the CPU's flash kernel takes any mask, dtype and dims
        return
    if config.train.dtype != "bfloat16":
        raise _refused(
            kernel,
            f"on CUDA it computes in half precision alone, and train.dtype={config.train.dtype}",
            "sdpa",
            ", or train.dtype=bfloat16",
        )
    if kernel == "flash" and (dim := max(head_dims(config))) > MAX_FLASH_DIM:
        raise _refused(kernel, f"it has heads of up to {MAX_FLASH_DIM} dims, and this model's have {dim}", "sdpa")
    if kernel != "cudnn":
        _check_causal_alone(config, shape)


def _check_cudnn_dims(config: Config) -> None:
    kernel, (query, value) = config.kernels.attention, head_dims(config)
    if (query, value) != MLA_DIMS and max(query, value) > MAX_CUDNN_DIM:
        raise _refused(
            kernel,
            f"it has heads of up to {MAX_CUDNN_DIM} dims, and {MLA_DIMS[0]} with values of {MLA_DIMS[1]}; this "
            f"model's have {query}, its values {value}",
            "sdpa",
        )
    if query % DIM_UNIT or value % DIM_UNIT:
        raise _refused(
            kernel,
            f"it has heads of multiples of {DIM_UNIT} dims: {query} % {DIM_UNIT} = {query % DIM_UNIT}, "
            f"{value} % {DIM_UNIT} = {value % DIM_UNIT}",
            "sdpa",
        )


def _check_causal_alone(config: Config, shape: MeshShape) -> None:
    kernel, attention = config.kernels.attention, config.model.attention
    knows = "on CUDA it knows causality alone, and "
    if config.data.document_mask:
        raise _refused(
            kernel, f"{knows}data.document_mask=true masks documents", "sdpa", ", or data.document_mask=false"
        )
    if window := attention.sliding_window:
        raise _refused(kernel, f"{knows}model.attention.sliding_window={window} masks what is further back", "sdpa")
    if shape.cp > 1:
        raise _refused(kernel, f"{knows}with mesh.cp={shape.cp} keys are masked by their position", "sdpa")
    if attention.sinks and kernel == "te":
        raise _refused(kernel, f"{knows}model.attention.sinks=true adds a key", "sdpa")


def head_dims(config: Config) -> tuple[int, int]:
    """Dims of a head as kernels see it: of queries and keys, and of values."""
    attention = config.model.attention
    if attention.kind == "mla":
        return attention.qk_nope_head_dim + attention.qk_rope_head_dim, attention.v_head_dim
    dim = attention.head_dim
    if attention.sinks:  # one more dim of the queries holds the sink, and multiples of 8 stay so
        dim += DIM_UNIT - dim % DIM_UNIT
    return dim, dim


def _refused(kernel: str, rule: str, choice: str, other: str = "") -> ConfigError:
    return ConfigError("kernels.attention", kernel, rule, f"Nearest valid choice: kernels.attention={choice}{other}")
