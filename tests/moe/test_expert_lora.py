"""Adapters of routed experts: the grouped products against each expert alone, with merged weights."""

from __future__ import annotations

import pytest
import torch

from automoe.config.schema import LoraConfig
from automoe.kernels.activation import SWIGLU, ClampedSwiGLU
from automoe.moe.experts import loop_experts
from automoe.moe.lora import PRODUCTS, ExpertLora
from tests.support.experts import flat

E, H, I, R, T = 4, 16, 8, 4, 12  # noqa: E741
SHAPES = {"A13": (E, R, H), "B13": (E, 2, I, R), "A2": (E, R, I), "B2": (E, H, R)}
OFFSETS = torch.tensor([5, 5, 9, 20], dtype=torch.int32)  # the second expert has no row


def problem(dtype: torch.dtype, biased: bool) -> tuple[list[torch.Tensor | None], torch.Tensor]:
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    biases = [normal(E, 2, I), normal(E, H)] if biased else [None, None]
    idx = torch.randint(T, (20,), generator=generator)
    x, probs = normal(T, H).requires_grad_(), normal(20).abs().requires_grad_()
    return [x, idx, OFFSETS, probs, normal(E, 2, I, H), normal(E, H, I), *biases], normal(20, H)


def adapter(dtype: torch.dtype, product: str = "loop", shapes=SHAPES, **lora: float) -> ExpertLora:
    made = ExpertLora("layers.0.mlp.experts", LoraConfig(rank=R, alpha=6.0, **lora), 0, shapes, PRODUCTS[product])
    generator = torch.Generator().manual_seed(2)
    for parameter in made.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(dtype)
    return made


def merged(args, made: ExpertLora) -> torch.Tensor:
    """Each expert's own matrix, the adapter's product added, one expert after the other."""
    *rest, w13, w2, b13, b2 = args
    if made.A13 is not None:
        w13 = w13 + made.scale * torch.einsum("egir,erh->egih", made.B13, made.weight("A13", w13.dtype))
    if made.A2 is not None:
        w2 = w2 + made.scale * torch.einsum("ehr,eri->ehi", made.B2, made.weight("A2", w13.dtype))
    return flat(loop_experts)(*rest, w13, w2, b13, b2, activation=ACTIVATION[b13 is not None])


ACTIVATION = {False: SWIGLU, True: ClampedSwiGLU(1.702, 0.5)}
PAIRS = {
    "both": SHAPES,
    "gate_up": {n: SHAPES[n] for n in ("A13", "B13")},
    "down": {n: SHAPES[n] for n in ("A2", "B2")},
}


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize(("dtype", "product", "bound"), [("float64", "loop", 1e-12), ("float32", "grouped_mm", 1e-5)])
@pytest.mark.parametrize("biased", [False, True])
def test_output_and_gradients_are_those_of_merged_experts(pair, dtype, product, bound, biased) -> None:
    dtype = getattr(torch, dtype)
    made = adapter(dtype, product, PAIRS[pair])
    args, grad = problem(dtype, biased)
    leaves = [args[0], args[3], *made.parameters()]
    got, expected = flat(made)(*args, activation=ACTIVATION[biased]), merged(args, made)
    assert (got - expected).norm() <= bound * expected.norm()
    theirs = torch.autograd.grad(expected, leaves, grad)
    for mine, other in zip(torch.autograd.grad(got, leaves, grad), theirs, strict=True):
        assert other.norm() > 0 and (mine - other).norm() <= bound * other.norm()


def test_a_rank_without_rows_has_zero_gradients() -> None:
    made = adapter(torch.float64)
    args, _ = problem(torch.float64, biased=False)
    args[1:4] = [args[1][:0], torch.zeros_like(OFFSETS), torch.zeros(0, dtype=torch.float64, requires_grad=True)]
    out = flat(made)(*args, activation=SWIGLU)
    out.sum().backward()
    assert out.shape == (0, H) and all(p.grad is not None and not p.grad.any() for p in made.parameters())


def test_dropout_leaves_out_columns_of_a_step_and_nothing_when_evaluated() -> None:
    made = adapter(torch.float64, dropout=0.5)
    whole = made.A13.detach()
    kept = [made.weight("A13", torch.float64).detach()]
    made.step = 1
    kept.append(made.weight("A13", torch.float64).detach())
    for each in kept:
        left = (each != 0).all(1)  # a column is there for all r rows, doubled, or for none
        assert torch.equal(each, torch.where(left.unsqueeze(1), 2 * whole, torch.zeros(()).double()))
        assert 0.2 < left.double().mean() < 0.8 and len({tuple(row) for row in left.tolist()}) == E
    assert not torch.equal(*kept)
    args, _ = problem(torch.float64, biased=False)
    torch.testing.assert_close(flat(made)(*args, activation=SWIGLU), merged(args, made))
    assert torch.equal(made.eval().weight("A13", torch.float64), whole)
