"""Expert backends against the formula, expert by expert, in float64."""

from __future__ import annotations

import pytest
import torch

from automoe.errors import BackendError
from automoe.moe.experts import BACKENDS, GroupedExperts, expert_backend

E, H, WIDTH, T = 6, 16, 8, 20

COUNTS = {
    "even": [7, 7, 7, 7, 7, 7],
    "skewed": [1, 30, 2, 0, 8, 1],
    "one expert": [0, 0, 42, 0, 0, 0],
    "first and last empty": [0, 10, 10, 10, 12, 0],
    "no rows": [0, 0, 0, 0, 0, 0],
}


def inputs(counts: list[int], dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(counts) + counts[0])
    rows = sum(counts)
    x = torch.randn(T, H, generator=generator, dtype=torch.float64)
    gather_idx = torch.randint(0, T, (rows,), generator=generator)
    offsets = torch.tensor(counts).cumsum(0).to(torch.int32)
    probs = torch.rand(rows, generator=generator, dtype=torch.float64)
    w_gate_up = torch.randn(E, 2, WIDTH, H, generator=generator, dtype=torch.float64) / H**0.5
    w_down = torch.randn(E, H, WIDTH, generator=generator, dtype=torch.float64) / WIDTH**0.5
    floats = {id(t): t.to(dtype).requires_grad_() for t in (x, probs, w_gate_up, w_down)}
    return [floats.get(id(t), t) for t in (x, gather_idx, offsets, probs, w_gate_up, w_down)]


def row_by_row(x, gather_idx, offsets, probs, w_gate_up, w_down):
    """probs * down(silu(gate x) * up x), with the probability last: nothing of the backends' arrangement."""
    expert = torch.searchsorted(offsets.long(), torch.arange(gather_idx.numel()), right=True)
    rows = x[gather_idx]
    gate = torch.einsum("rh,rih->ri", rows, w_gate_up[expert, 0])
    up = torch.einsum("rh,rih->ri", rows, w_gate_up[expert, 1])
    act = gate * torch.sigmoid(gate) * up
    return torch.einsum("ri,rhi->rh", act, w_down[expert]) * probs[:, None]


def outputs_and_gradients(function, args: list[torch.Tensor]) -> list[torch.Tensor]:
    out = function(*args)
    upstream = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).to(out.dtype)
    trained = [arg for arg in args if arg.requires_grad]
    gradients = torch.autograd.grad(out, trained, upstream, materialize_grads=True)
    return [out.detach(), *gradients]


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize(
    "backend, dtype, tolerance",
    [
        ("loop", torch.float64, 1e-13),
        ("loop", torch.float32, 1e-5),
        ("grouped_mm", torch.float32, 1e-5),
        ("grouped_mm", torch.bfloat16, 2e-2),
    ],
    ids=["loop64", "loop32", "grouped32", "grouped16"],
)
def test_a_backend_computes_the_formula(
    backend: str, dtype: torch.dtype, tolerance: float, counts: list[int]
) -> None:
    expected = outputs_and_gradients(row_by_row, inputs(counts, torch.float64))
    got = outputs_and_gradients(expert_backend(backend), inputs(counts, dtype))
    for name, mine, theirs in zip(("out", "x", "probs", "w_gate_up", "w_down"), got, expected, strict=True):
        assert mine.dtype == dtype and mine.shape == theirs.shape, name
        error = (mine.double() - theirs).norm()
        assert error <= tolerance * theirs.norm(), f"{name}: {error / theirs.norm():.1e}"


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_expert_without_a_token_gets_a_gradient_of_zeros(backend: str) -> None:
    args = inputs(COUNTS["one expert"], torch.float32)
    expert_backend(backend)(*args).sum().backward()
    for weight in args[4:]:
        others = [e for e in range(E) if e != 2]
        assert weight.grad[others].abs().max() == 0 and weight.grad[2].abs().min() > 0


def test_an_unknown_backend_names_those_that_there_are() -> None:
    with pytest.raises(BackendError, match="moe.experts=triton.*loop, grouped_mm"):
        expert_backend("triton")


def test_gate_and_up_are_a_view_of_their_fused_matrix() -> None:
    experts = GroupedExperts(E, H, WIDTH, expert_backend("loop"))
    torch.nn.init.normal_(experts.w_gate_up)  # fresh memory may hold NaN, which equals nothing
    fused = experts.w_gate_up.view(E, 2 * WIDTH, H)
    assert (
        torch.equal(fused[:, :WIDTH], experts.w_gate_up[:, 0])
        and fused.data_ptr() == experts.w_gate_up.data_ptr()
    )
