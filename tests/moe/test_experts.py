"""Expert backends against the formula, expert by expert, in float64."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from automoe.config.schema import ModelConfig
from automoe.errors import BackendError
from automoe.kernels.activation import GATE_FUNCTIONS, GLU, ClampedSwiGLU
from automoe.moe.expert_weights import ExpertWeights
from automoe.moe.experts import GroupedExperts, expert_backend
from automoe.moe.gradient_sums import GradientSums, add_product
from automoe.moe.grouped_mm import grouped_mm_experts
from tests.support.experts import flat

E, H, WIDTH, T = 6, 16, 8, 20
NAMES = ("gate_up_proj", "down_proj")

LIMIT = 0.75  # between the sizes that gates and ups have here, so that some are clamped

COUNTS = {
    "even": [7, 7, 7, 7, 7, 7],
    "skewed": [1, 30, 2, 0, 8, 1],
    "one expert": [0, 0, 42, 0, 0, 0],
    "first and last empty": [0, 10, 10, 10, 12, 0],
    "no rows": [0, 0, 0, 0, 0, 0],
}


def inputs(counts: list[int], dtype: torch.dtype, biased: bool = False) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(counts) + counts[0])
    rows = sum(counts)
    x = torch.randn(T, H, generator=generator, dtype=torch.float64)
    gather_idx = torch.randint(0, T, (rows,), generator=generator)
    offsets = torch.tensor(counts).cumsum(0).to(torch.int32)
    probs = torch.rand(rows, generator=generator, dtype=torch.float64)
    gate_up_proj = torch.randn(E, 2, WIDTH, H, generator=generator, dtype=torch.float64) / H**0.5
    down_proj = torch.randn(E, H, WIDTH, generator=generator, dtype=torch.float64) / WIDTH**0.5
    args = [x, gather_idx, offsets, probs, gate_up_proj, down_proj]
    if biased:
        args.append(torch.randn(E, 2, WIDTH, generator=generator, dtype=torch.float64))
        args.append(torch.randn(E, H, generator=generator, dtype=torch.float64))
    return [t.to(dtype).requires_grad_() if t.is_floating_point() else t for t in args]


def row_by_row(
    x,
    gather_idx,
    offsets,
    probs,
    gate_up_proj,
    down_proj,
    gate_up_proj_bias=None,
    down_proj_bias=None,
    limit=None,
    act=lambda gate: gate * torch.sigmoid(gate),
    alpha=1.702,
    offset=1.0,
):
    """probs * expert(x), with the probability last: nothing of the backends' arrangement."""
    expert = torch.searchsorted(offsets.long(), torch.arange(gather_idx.numel()), right=True)
    rows = x[gather_idx]
    gate = torch.einsum("rh,rih->ri", rows, gate_up_proj[expert, 0])
    up = torch.einsum("rh,rih->ri", rows, gate_up_proj[expert, 1])
    if gate_up_proj_bias is not None:
        gate, up = gate + gate_up_proj_bias[expert, 0], up + gate_up_proj_bias[expert, 1]
    if limit is None:
        act = act(gate) * up
    else:  # min and max instead of the clamps of the activation
        gate = torch.minimum(gate, gate.new_tensor(limit))
        up = torch.minimum(torch.maximum(up, up.new_tensor(-limit)), up.new_tensor(limit))
        act = gate / (1 + torch.exp(-alpha * gate)) * (up + offset)
    out = torch.einsum("ri,rhi->rh", act, down_proj[expert])
    return (out if down_proj_bias is None else out + down_proj_bias[expert]) * probs[:, None]


def outputs_and_gradients(function, args: list[torch.Tensor], **options: object) -> list[torch.Tensor]:
    out = function(*args, **options)
    upstream = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).to(out.dtype)
    trained = [arg for arg in args if arg.requires_grad]
    gradients = torch.autograd.grad(out, trained, upstream, materialize_grads=True)
    return [out.detach(), *gradients]


COMPUTED = pytest.mark.parametrize(
    "backend, dtype, tolerance",
    [
        ("loop", torch.float64, 1e-13),
        ("loop", torch.float32, 1e-5),
        ("grouped_mm", torch.float64, 1e-13),
        ("grouped_mm", torch.float32, 1e-5),
        ("grouped_mm", torch.bfloat16, 2e-2),
        ("triton", torch.float32, 1e-5),
        ("triton", torch.bfloat16, 1e-2),
        ("triton", torch.float16, 2e-3),
    ],
    ids=["loop64", "loop32", "grouped64", "grouped32", "grouped16", "triton32", "triton-bf16", "triton-fp16"],
)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@COMPUTED
def test_a_backend_computes_the_formula(backend: str, dtype: torch.dtype, tolerance: float, counts: list[int]) -> None:
    expected = outputs_and_gradients(row_by_row, inputs(counts, torch.float64))
    got = outputs_and_gradients(flat(expert_backend(backend)), inputs(counts, dtype))
    for name, mine, theirs in zip(("out", "x", "probs", "gate_up_proj", "down_proj"), got, expected, strict=True):
        assert mine.dtype == dtype and mine.shape == theirs.shape, name
        error = (mine.double() - theirs).norm()
        assert error <= tolerance * theirs.norm(), f"{name}: {error / theirs.norm():.1e}"


FORMULAS = {
    "gelu": lambda gate: gate * (1 + torch.erf(gate / 2**0.5)) / 2,
    "gelu_pytorch_tanh": lambda gate: gate * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3))) / 2,
    "relu": lambda gate: torch.maximum(gate, torch.zeros_like(gate)),
    "relu2": lambda gate: torch.maximum(gate, torch.zeros_like(gate)) ** 2,
}


@pytest.mark.parametrize("hidden_act", FORMULAS)
@pytest.mark.parametrize("backend", ["loop", "grouped_mm"])
def test_every_function_of_the_gate(backend: str, hidden_act: str) -> None:
    assert FORMULAS.keys() | {"silu"} == GATE_FUNCTIONS.keys()
    act = FORMULAS[hidden_act]
    expected = outputs_and_gradients(partial(row_by_row, act=act), inputs(COUNTS["skewed"], torch.float64))
    args = inputs(COUNTS["skewed"], torch.float64)
    got = outputs_and_gradients(flat(expert_backend(backend)), args, activation=GLU(hidden_act))
    for mine, theirs in zip(got, expected, strict=True):
        assert (mine - theirs).norm() <= 1e-13 * theirs.norm()
    with torch.no_grad():
        assert torch.equal(flat(expert_backend(backend))(*args, activation=GLU(hidden_act)), got[0])


@pytest.mark.one_in(3)
@pytest.mark.parametrize("counts", ["skewed", "first and last empty", "no rows"])
@pytest.mark.parametrize("factors", [(1.702, 1.0), (1.0, 0.0)], ids=["gpt-oss", "deepseek-v4"])
@COMPUTED
def test_biases_and_the_clamped_activation(
    backend: str, dtype: torch.dtype, tolerance: float, factors: tuple[float, float], counts: str
) -> None:
    # Rounded to bfloat16, a gate may fall on the other side of the limit and lose its gradient.
    limit = LIMIT if dtype != torch.bfloat16 else 7.0
    alpha, offset = factors
    clamped = ClampedSwiGLU(alpha, limit, offset)
    args = inputs(COUNTS[counts], torch.float64, biased=True)
    expected = outputs_and_gradients(partial(row_by_row, limit=limit, alpha=alpha, offset=offset), args)
    args = inputs(COUNTS[counts], dtype, biased=True)
    got = outputs_and_gradients(flat(expert_backend(backend)), args, activation=clamped)
    names = ("out", "x", "probs", "gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")
    for name, mine, theirs in zip(names, got, expected, strict=True):
        assert mine.dtype == dtype and mine.shape == theirs.shape, name
        error = (mine.double() - theirs).norm()
        assert error <= tolerance * theirs.norm(), f"{name}: {error / theirs.norm():.1e}"


@pytest.mark.one_in(3)
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str
)
def test_gradients_of_the_matrices_are_added_to_their_sums(
    dtype: torch.dtype, tolerance: float, counts: list[int]
) -> None:
    expected = outputs_and_gradients(row_by_row, inputs(counts, torch.float64))
    args = inputs(counts, dtype)
    experts, later = nn.Module(), []
    for name, matrix in zip(NAMES, args[4:], strict=True):
        experts.register_parameter(name, nn.Parameter(matrix.detach()))
        experts.get_parameter(name).grad = torch.ones_like(matrix)
    sums = GradientSums(experts, later.append)
    backend = partial(grouped_mm_experts, sums=sums)
    got = outputs_and_gradients(flat(backend), args)
    assert all(gradient.norm() == 0 for gradient in got[3:])  # none was returned
    assert len(later) == 2
    for work in later:
        work()
    got[3:] = [experts.get_parameter(name).grad - 1 for name in NAMES]
    for name, mine, theirs in zip(("out", "x", "probs", *NAMES), got, expected, strict=True):
        error = (mine.double() - theirs).norm()
        assert error <= tolerance * (theirs.norm() + theirs.numel() ** 0.5), f"{name}: {error / theirs.norm():.1e}"


def test_products_run_at_once_where_no_gradient_travels_and_frozen_matrices_have_none() -> None:
    x, gather_idx, offsets, probs, *matrices = inputs(COUNTS["skewed"], torch.float64)
    experts = nn.Module()
    for name, matrix in zip(NAMES, matrices, strict=True):
        experts.register_parameter(name, nn.Parameter(matrix.detach(), requires_grad=name == "down_proj"))
    sums = GradientSums(experts, lambda work: pytest.fail("nothing is waited for"))
    out = grouped_mm_experts(
        x.detach(), gather_idx, offsets, probs.detach(), ExpertWeights(*experts.parameters()), sums=sums
    )
    out.sum().backward()
    assert experts.down_proj.grad.norm() > 0 and experts.gate_up_proj.grad is None
    experts.requires_grad_(False)
    given = x.detach(), gather_idx, offsets, probs.detach(), ExpertWeights(*experts.parameters())
    assert not grouped_mm_experts(*given, sums=sums).requires_grad  # no backward pass for nothing


def test_a_product_is_not_rounded_before_it_is_added() -> None:
    grad, x = (
        torch.full((1, 1), 1 + 2.0**-7, dtype=torch.bfloat16),
        torch.full((1, 1), 1 + 2.0**-7, dtype=torch.bfloat16),
    )
    total = torch.ones(1, 1)
    add_product(total, grad, x)
    assert total.item() == 1 + (1 + 2.0**-7) ** 2


def test_rows_past_the_last_offset_reach_no_bias() -> None:
    """A dispatcher's buffer may be longer than what it received, and hold anything there."""
    args = inputs([3, 0, 2, 1, 0, 4], torch.float32, biased=True)
    expected = outputs_and_gradients(flat(expert_backend("grouped_mm")), args)
    longer = inputs([3, 0, 2, 1, 0, 4], torch.float32, biased=True)
    longer[1] = torch.cat((longer[1], torch.zeros(6, dtype=torch.int64)))
    longer[3] = torch.cat((longer[3].detach(), torch.full((6,), float("nan")))).requires_grad_()
    out = flat(expert_backend("grouped_mm"))(*longer)
    upstream = torch.linspace(-1, 1, 10 * H, dtype=torch.float64).view(10, H).float()
    upstream = torch.cat((upstream, torch.full((6, H), float("nan"))))
    gradients = torch.autograd.grad(out, longer[6:], upstream)
    for mine, theirs in zip(gradients, expected[-2:], strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6)


@pytest.mark.parametrize("backend", ["loop", "grouped_mm", "triton"])
def test_an_expert_without_a_token_gets_a_gradient_of_zeros(backend: str) -> None:
    args = inputs(COUNTS["one expert"], torch.float32, biased=True)
    flat(expert_backend(backend))(*args).sum().backward()
    for weight in args[4:]:
        others = [e for e in range(E) if e != 2]
        assert weight.grad[others].abs().max() == 0 and weight.grad[2].abs().min() > 0


def test_an_unknown_backend_names_those_that_there_are() -> None:
    with pytest.raises(BackendError, match="moe.experts=cublas.*loop, grouped_mm, triton"):
        expert_backend("cublas")


def test_gate_and_up_are_a_view_of_their_fused_matrix() -> None:
    config = ModelConfig(num_experts=E, hidden_size=H, moe_intermediate_size=WIDTH)
    experts = GroupedExperts(config, lambda _: expert_backend("loop"))
    torch.nn.init.normal_(experts.gate_up_proj)  # fresh memory may hold NaN, which equals nothing
    fused = experts.gate_up_proj.view(E, 2 * WIDTH, H)
    assert (
        torch.equal(fused[:, :WIDTH], experts.gate_up_proj[:, 0])
        and fused.data_ptr() == experts.gate_up_proj.data_ptr()
    )
