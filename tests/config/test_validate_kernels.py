"""What a kernel cannot serve is an error before ranks start, with the rule and the nearest choice."""

from __future__ import annotations

import pytest

from automoe.config.data_schema import DataConfig
from automoe.config.mesh_shape import resolve_mesh
from automoe.config.recompute import recompute_rows
from automoe.config.rule_engine import check_rows
from automoe.config.rules_kernels import kernel_rows
from automoe.config.schema import (
    AttentionConfig,
    Config,
    KernelsConfig,
    MeshConfig,
    ModelConfig,
    ParallelConfig,
    TrainConfig,
)
from automoe.errors import ConfigError

DSV3 = AttentionConfig(kind="mla", kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)


def config(kernel: str, attention: AttentionConfig = DSV3, **changes: object) -> Config:
    """A model with ``attention`` on one rank that the kernel can serve on CUDA, but for ``changes``."""
    return Config(
        mesh=MeshConfig(dp_shard=1, cp=changes.pop("cp", 1)),
        model=ModelConfig(attention=attention),
        parallel=ParallelConfig(context=changes.pop("context", "gather")),
        train=TrainConfig(dtype=changes.pop("dtype", "bfloat16"), seq_len=changes.pop("seq_len", 256)),
        data=DataConfig(document_mask=changes.pop("document_mask", False)),
        kernels=KernelsConfig(**({"attention": kernel} | changes)),
    )


def check(config: Config, device: str = "cuda") -> None:
    check_rows(config, kernel_rows(config, resolve_mesh(config.mesh, None), device))


def gqa(dim: int, **changes: object) -> AttentionConfig:
    return AttentionConfig(head_dim=dim, **changes)


@pytest.mark.parametrize(
    ("wrong", "device", "problem"),
    [
        (config("cudnn"), "cpu", "cuDNN needs CUDA, and this run is on cpu"),
        (config("cudnn", dtype="float32"), "cuda", "only in half precision, and train.dtype=float32"),
        (config("cudnn", gqa(256)), "cuda", "up to 128 dims, and 192 with values of 128; this model's have 256"),
        (config("cudnn", gqa(12)), "cuda", r"multiples of 8 dims: 12 % 8 = 4"),
        (config("cudnn", gqa(128, sinks=True)), "cuda", "this model's have 136, its values 136"),
        (config("cudnn", document_mask=True, seq_len=320), "cuda", "train.seq_len=320 on mesh.cp=1 has 320"),
        (config("cudnn", cp=2), "cuda", "train.seq_len=256 on mesh.cp=2 has 64"),
        (config("flash", dtype="float64"), "cuda", "only in half precision, and train.dtype=float64"),
        (config("flash", document_mask=True), "cuda", "data.document_mask=true masks documents"),
        (config("flash", cp=2), "cuda", "with mesh.cp=2 keys are masked by their position"),
        (config("flash", gqa(64, sliding_window=128)), "cuda", "sliding_window=128 masks keys further back"),
        (config("flash", gqa(256, sinks=True)), "cuda", "up to 256 dims, and this model's have 264"),
        (config("flex"), "cpu", "FlexAttention has no backward pass on the CPU"),
        (config("flex", dtype="float64"), "cuda", "no float64 on CUDA, and train.dtype=float64"),
        (config("flex", gqa(8)), "cuda", "heads of 16 to 256 dims, and this model's have 8, its values 8"),
        (config("flex", cp=2, context="ring"), "cuda", "ring attention .* calls its own kernels"),
        (config("te"), "cpu", "transformer-engine needs CUDA, and this run is on cpu"),
        (config("te", dtype="float32"), "cuda", "only in half precision, and train.dtype=float32"),
        (config("te", gqa(256)), "cuda", "up to 128 dims, and 192 with values of 128; this model's have 256"),
        (config("te", document_mask=True), "cuda", "data.document_mask=true masks documents"),
        (config("te", gqa(120, sinks=True)), "cuda", "model.attention.sinks=true adds a key"),
        (config("math", cp=2, context="ring"), "cuda", "ring attention .* calls its own kernels"),
    ],
)
def test_what_a_kernel_cannot_serve(wrong: Config, device: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=rf"{problem}.*Set kernels\.attention=sdpa"):
        check(wrong, device)


@pytest.mark.parametrize(
    ("right", "device"),
    [
        (config("sdpa", document_mask=True, cp=2, dtype="float32"), "cuda"),
        (config("sdpa", cp=2, context="ring"), "cuda"),
        (config("math", document_mask=True, dtype="float64"), "cuda"),
        (config("cudnn", document_mask=True, cp=2, seq_len=512), "cuda"),
        (config("cudnn", seq_len=320), "cuda"),
        (config("cudnn", gqa(120, sinks=True)), "cuda"),
        (config("flash"), "cuda"),
        (config("flash", gqa(248, sinks=True)), "cuda"),
        (config("flex", document_mask=True, cp=2, dtype="float32"), "cuda"),
        (config("flex", gqa(256, sinks=True, sliding_window=128), document_mask=True), "cuda"),
        (config("te"), "cuda"),
        (config("sdpa", norm="te", dtype="float32"), "cuda"),
        (config("flash", document_mask=True, dtype="float64"), "cpu"),
        (config("flash", document_mask=True, dtype="float64"), "auto"),  # told when the device is known
        (config("cudnn"), "auto"),
    ],
)
def test_what_a_kernel_serves(right: Config, device: str) -> None:
    check(right, device)


@pytest.mark.parametrize(
    ("device", "dtype", "problem"), [("cpu", "float32", "launch.device=cpu"), ("cuda", "float64", "float64")]
)
def test_where_transformer_engine_has_no_norm(device: str, dtype: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=rf"kernels\.norm=te: .*{problem}.*Set kernels\.norm=torch"):
        check(config("sdpa", norm="te", dtype=dtype), device)


def test_transformer_engine_keeps_no_norm_for_others() -> None:
    remade = config("sdpa", norm="te")
    remade.parallel.recompute = ["core_attn", "layernorm"]
    with pytest.raises(ConfigError, match=r"parallel\.recompute=\[layernorm\].*Set kernels\.norm=torch"):
        check(remade)
    remade.parallel.recompute = ["core_attn"]
    check(remade)


def test_transformer_engine_keeps_the_activation() -> None:
    asked = config("sdpa")
    asked.parallel.recompute = ["moe_act"]
    asked.moe.experts = "te"
    with pytest.raises(ConfigError, match="moe.experts=te keeps the activation"):
        check_rows(asked, recompute_rows(asked))


def test_what_experts_of_a_foreign_framework_cannot_serve() -> None:
    foreign = config("sdpa")
    foreign.moe.experts = "te"
    check(foreign)
    check(foreign, "auto")
    nearest = r"Set moe\.experts=grouped_mm"
    with pytest.raises(ConfigError, match=f"needs CUDA, and this run is on cpu.*{nearest}"):
        check(foreign, "cpu")
    foreign.model.biased_experts = True
    with pytest.raises(ConfigError, match=f"model.biased_experts=true.*{nearest}"):
        check(foreign)
    foreign.model.first_k_dense = foreign.model.num_layers  # nothing to compute
    check(foreign, "cpu")
