"""``kernels.rope=triton`` in the interpreter where there is no GPU, against torch's operations in float64."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from automoe.comm.tokens import MicroBatch
from automoe.config.mesh_shape import resolve_mesh
from automoe.config.rule_engine import check_rows
from automoe.config.rules_kernels import kernel_rows
from automoe.config.schema import (
    AttentionConfig,
    Config,
    KernelsConfig,
    MeshConfig,
    ModelConfig,
    MoEConfig,
    RopeConfig,
    TrainConfig,
)
from automoe.errors import BackendError, ConfigError
from automoe.kernels import rotation
from automoe.model.init import initialize, reset_buffers
from automoe.model.rope import Rope, rope_fns
from automoe.parallel.choices import build_backend
from automoe.parallel.parallelize import build_decoder

_SIZES = dict(vocab_size=32, hidden_size=16, num_layers=2, num_experts=4, moe_intermediate_size=8)
CONFIGS = {
    "deepseek": ModelConfig(
        attention=AttentionConfig(
            kind="mla",
            num_heads=3,
            num_kv_heads=3,
            kv_lora_rank=8,
            qk_nope_head_dim=6,
            qk_rope_head_dim=4,
            v_head_dim=5,
        ),
        rope=RopeConfig(interleaved=True, scaling="yarn", factor=4.0, original_seq_len=8, mscale=1.0),
        **_SIZES,
    ),
    "qwen3": ModelConfig(attention=AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=6, qk_norm=True), **_SIZES),
    "qwen3-next": ModelConfig(
        attention=AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8, output_gate=True),
        rope=RopeConfig(partial_rotary_factor=0.5),
        **_SIZES,
    ),
}
# Relative error in norm: one rounding of the result's dtype, and float32's own for sums.
BOUNDS = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}


def normal(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def with_gradients(function, args: list[torch.Tensor], upstream: list[torch.Tensor]) -> list[torch.Tensor]:
    """Results of ``function``, and the gradients of those ``args`` that are trained."""
    results = function(*args)
    results = [results] if isinstance(results, torch.Tensor) else list(results)
    upstream = [grad.to(result.dtype) for grad, result in zip(upstream, results, strict=True)]
    trained = [arg for arg in args if arg.requires_grad]
    return [result.detach() for result in results] + list(torch.autograd.grad(results, trained, upstream))


def check(function, reference, args: list[torch.Tensor], upstream: list[torch.Tensor]) -> None:
    dtype = args[0].dtype
    got = with_gradients(function, args, upstream)
    wide = [arg.detach().double().requires_grad_(arg.requires_grad) for arg in args]
    expected = with_gradients(reference, wide, [grad.to(dtype).double() for grad in upstream])
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == dtype and one.shape == other.shape
        assert (one.double() - other).norm() <= BOUNDS[dtype] * other.norm()


@pytest.mark.exhaustive
@settings(max_examples=12)
@given(
    dtype=st.sampled_from(list(BOUNDS)),
    half=st.integers(1, 5),
    before=st.integers(0, 7),
    behind=st.sampled_from([0, 3]),
    heads=st.sampled_from([1, 3, 17]),
    interleaved=st.booleans(),
    back=st.booleans(),
)
def test_rotation_equals_torchs(dtype, half, before, behind, heads, interleaved, back) -> None:
    generator = torch.Generator().manual_seed(half)
    dim, shape = before + 2 * half + behind, (2, 3, heads)
    x = normal(generator, *shape, dim).to(dtype).requires_grad_()
    angles = normal(generator, 2, 3, 1, half).float()
    upstream = [normal(generator, *shape, dim)]

    def by(rotate):
        return lambda x, cos, sin: rotate(x, cos, sin, interleaved, before, back)

    check(by(rope_fns("triton").rotate), by(rotation.rotate), [x, angles.cos(), angles.sin()], upstream)


@settings(max_examples=8)
@given(
    dtype=st.sampled_from(list(BOUNDS)),
    dims=st.tuples(st.integers(1, 9), st.integers(1, 9), st.sampled_from([2, 4, 6])),
    heads=st.sampled_from([1, 3, 17]),
)
def test_joined_keys_equal_torchs(dtype, dims, heads) -> None:
    """Gradients of keys come as attention leaves them: heads before positions."""
    generator = torch.Generator().manual_seed(heads)
    nope, values, turn = dims
    kv = normal(generator, 2, 3, heads, nope + values).to(dtype).requires_grad_()
    # A part of a wider projection, as in the model.
    k_rope = normal(generator, 2, 3, 5 + turn).to(dtype)[..., 5:].requires_grad_()
    upstream = [normal(generator, 2, heads, 3, size).transpose(1, 2) for size in (nope + turn, values)]
    check(
        lambda kv, k_rope: rope_fns("triton").join_keys(kv, k_rope, nope),
        lambda kv, k_rope: rotation.join_keys(kv, k_rope, nope),
        [kv, k_rope],
        upstream,
    )


@pytest.mark.one_in(3)
@pytest.mark.parametrize("family", ["deepseek", "qwen3", "qwen3-next"])
def test_a_model_computes_the_same(family: str) -> None:
    """Pairs and YaRN of MLA, whole heads, half heads: loss and every gradient of a step, in float32."""
    torch.manual_seed(0)
    config = CONFIGS[family]
    tokens = torch.randint(0, config.vocab_size, (2, 12))
    runs = []
    for kernel in ("torch", "triton"):
        model = build_decoder(
            config,
            MoEConfig(experts="loop"),
            torch.float32,
            backend=build_backend(Config(kernels=KernelsConfig(rope=kernel))),
        ).to_empty(device="cpu")
        reset_buffers(model)
        initialize(model, 0.3, seed=1)
        loss = model(batch=MicroBatch(tokens, labels=tokens)).sum()
        loss.backward()
        runs.append({name: parameter.grad for name, parameter in model.named_parameters()} | {"loss": loss})
    assert len(runs[0]) > 20
    for name, expected in runs[0].items():
        assert (runs[1][name] - expected).norm() <= 1e-5 * expected.norm(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_that_all_heads_share_repeat_bit_for_bit(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    kv = normal(generator, 1, 4, 33, 12).to(dtype).requires_grad_()
    k_rope = normal(generator, 1, 4, 6).to(dtype).requires_grad_()
    upstream = [normal(generator, 1, 4, 33, size) for size in (14, 4)]
    runs = [
        with_gradients(lambda *args: rope_fns("triton").join_keys(*args, 8), [kv, k_rope], upstream) for _ in range(2)
    ]
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))


def test_angles_stay_float32_and_values_are_not_copied() -> None:
    assert rope_fns("triton").angle_dtype == torch.float32 and rope_fns("torch") == Rope()
    kv = torch.randn(1, 2, 3, 10)
    _, v = rope_fns("triton").join_keys(kv, torch.randn(1, 2, 4), 6)
    assert v.data_ptr() == kv[..., 6:].data_ptr()


def test_other_dtypes_are_refused() -> None:
    x = torch.zeros(1, 1, 1, 4, dtype=torch.float64)
    with pytest.raises(BackendError, match="kernels.rope=torch takes any dtype"):
        rope_fns("triton").rotate(x, x[..., :2], x[..., :2], False, 0)


@pytest.mark.parametrize("name", ["rope", "loss"])
def test_the_configuration_says_where_the_kernels_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(kernels=KernelsConfig(**{name: "triton"}))
    shape = resolve_mesh(MeshConfig(), 1)
    check_rows(config, kernel_rows(config, shape, "cuda"))
    check_rows(config, kernel_rows(config, shape, "cpu"))  # TRITON_INTERPRET=1
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ConfigError, match="this run is on cpu") as raised:
        check_rows(config, kernel_rows(config, shape, "cpu"))
    assert raised.value.key == f"kernels.{name}" and "TRITON_INTERPRET=1" in str(raised.value)
    with pytest.raises(ConfigError, match="no float64"):
        wide = replace(config, train=TrainConfig(dtype="float64"))
        check_rows(wide, kernel_rows(wide, shape, "cuda"))
    for by_token in (replace(config, recipe="dpo"), replace(config, train=TrainConfig(loss="mine"))):
        rows = list(kernel_rows(by_token, shape, "cuda"))
        assert any(broken and "loss of each token" in why for _, broken, why, _ in rows) == (name == "loss")


@pytest.mark.exhaustive
def test_a_model_on_the_cpu_is_told() -> None:
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    code = (
        "import torch; from automoe.model.rope import rope_fns; x = torch.ones(1, 1, 1, 4);"
        "rope_fns('triton').rotate(x, x[..., :2], x[..., :2], False, 0)"
    )
    ended = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert ended.returncode == 1
    assert "BackendError: kernels.rope=triton needs a CUDA device" in ended.stderr
