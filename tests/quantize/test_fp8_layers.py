"""Linear layers and experts in 8 bits against float64, product by product.

Rounding to e4m3 changes a number by 2.6% of itself on average (root of the mean square), to e5m2 by 5.2%. A
product of two rounded operands whose errors are independent is off by the root of the sum of squares: 3.7% of its
norm, and 5.9% with a gradient in e5m2. The bounds below leave a fifth more.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from automoe.kernels.fp8 import block_scaled_product
from automoe.model.linear import Linear
from automoe.moe import quantized
from automoe.moe.experts import loop_experts
from automoe.moe.quantized import QuantizedExperts, whole_tiles
from automoe.parallel.fp8 import FP8Linear
from automoe.quantize import linear
from automoe.quantize.formats import BLOCK, E4M3, E5M2, LINE, SIDE, WHOLE, Quantized, dequantize, quantize
from automoe.quantize.linear import QuantizedProduct
from automoe.quantize.scaling import GRAD, Blockwise, Delayed, Scaling, Tensorwise, W, X, clipped_share
from tests.support.experts import flat

pytestmark = pytest.mark.usefixtures("trains")

E4, E5 = 0.045, 0.070
SCALINGS: dict[str, tuple[Callable[[], Scaling], float]] = {
    "tensorwise": (partial(Tensorwise, E5M2), E5),
    "delayed": (partial(Delayed, E5M2), E5),
    "blockwise": (Blockwise, E4),
}
EACH = pytest.mark.parametrize("scaling, grad_tol", SCALINGS.values(), ids=SCALINGS)


def off(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def through(product: Callable[..., torch.Tensor], *args: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
    leaves = [arg.detach().clone().requires_grad_() for arg in args]
    out = product(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]


@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_linear_layer_is_off_by_what_its_formats_round(
    scaling: Callable[[], Scaling], grad_tol: float, dtype: torch.dtype
) -> None:
    x, weight, bias = random(3, 150, 200).to(dtype), random(160, 200).to(dtype), random(160).to(dtype)
    grad = random(3, 150, 160, seed=1).to(dtype)
    layer = FP8Linear(Linear(200, 160, bias=True), QuantizedProduct(scaling()))

    def forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(layer, {"weight": weight, "bias": bias}, (x,))

    got = through(forward, x, weight, bias, grad=grad)
    exact = through(torch.nn.functional.linear, *(t.double() for t in (x, weight, bias)), grad=grad)
    assert all(t.dtype == dtype for t in got)
    for name, mine, theirs, bound in zip(
        ("out", "dx", "dw", "db"), got, exact, (E4, grad_tol, grad_tol, 1e-2), strict=True
    ):
        assert off(mine, theirs) < bound, name
        assert name == "db" or off(mine, theirs) > bound / 3, f"{name} was not rounded"


def test_blocks_survive_outliers_that_one_scale_does_not() -> None:
    """A few numbers 2**14 times the rest: under one scale the rest is rounded to a fixed step, or to zero."""
    x, weight, grad = random(256, 512), random(384, 512), random(256, 384, seed=1)
    x[0, 0] = weight[0, 0] = grad[0, 0] = 2.0**14
    exact = through(torch.nn.functional.linear, x.double(), weight.double(), grad=grad)
    errors = {
        name: [
            # Where the outliers are not: they would drown everything in the norm.
            off(mine[1:, 1:], theirs[1:, 1:])
            for mine, theirs in zip(through(QuantizedProduct(make()), x, weight, grad=grad), exact, strict=True)
        ]
        for name, (make, _) in SCALINGS.items()
    }
    for operand in range(3):
        assert errors["blockwise"][operand] < min(errors["tensorwise"][operand] / 1.3, 0.06), errors


@pytest.mark.parametrize("name", SCALINGS)
def test_all_three_products_have_quantized_operands(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def product(a, b, dtype, real=linear.scaled_product):
        seen.append((a.codes.dtype, b.codes.dtype, a.tile, b.tile, tuple(a.codes.shape), tuple(b.codes.shape)))
        return real(a, b, dtype)

    monkeypatch.setattr(linear, "scaled_product", product)
    through(QuantizedProduct(SCALINGS[name][0]()), random(40, 96), random(64, 96), grad=random(40, 64))
    gradient = E4M3 if name == "blockwise" else E5M2
    lines, blocks = (LINE, BLOCK) if name == "blockwise" else (WHOLE, WHOLE)
    assert seen == [
        (E4M3, E4M3, lines, blocks, (40, 96), (64, 96)),  # x w.T
        (gradient, E4M3, lines, blocks, (40, 64), (96, 64)),  # grad w
        (gradient, E4M3, lines, lines, (64, 40), (96, 40)),  # grad.T x
    ]


@EACH
def test_products_of_one_input_keep_it_once(scaling: Callable[[], Scaling], grad_tol: float) -> None:
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    x, weight = random(2, 128, 512).bfloat16().requires_grad_(), random(8, 512).bfloat16().requires_grad_()
    layers = [QuantizedProduct(scaling()) for _ in range(3)]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outs = [layer(x, weight) for layer in layers]
    assert all(out.requires_grad for out in outs)
    scale_bytes = 0 if scaling is Blockwise else 4 + 4  # each product's own, of x and of the weight
    assert sum(kept.values()) == 2 * x.numel() + 2 * weight.numel() + 3 * scale_bytes


@EACH
def test_no_tokens(scaling: Callable[[], Scaling], grad_tol: float) -> None:
    out, dx, dw = through(QuantizedProduct(scaling()), random(0, 2, 64), random(32, 64), grad=random(0, 2, 32))
    assert out.shape == (0, 2, 32) and dx.shape == (0, 2, 64) and torch.equal(dw, torch.zeros(32, 64))


def test_a_delayed_scale_is_the_largest_of_the_steps_before() -> None:
    scaling = Delayed(E5M2)

    def scale_of(number: float) -> float:
        return float(scaling.scales(torch.tensor([[number]]), X))

    assert scale_of(448.0) == 1.0  # nothing known: its own
    scaling.end_step(remember=True)
    assert scale_of(4480.0) == 1.0  # clipped, and seen
    clipped = scaling.quantize(torch.tensor([[4480.0]]), torch.ones(1, 1), X)
    assert dequantize(clipped).item() == 448.0
    scaling.end_step(remember=True)
    assert scale_of(1.0) == 16.0
    scale_of(torch.inf)
    scaling.end_step(remember=False)  # a step that was skipped
    for _ in range(16):
        assert scale_of(1.0) == 16.0
        scaling.end_step(remember=True)
    assert scale_of(1.0) == 2.0**-8  # forgotten after 16


def test_a_history_that_is_loaded_between_steps_counts_at_once() -> None:
    scaling, other = Delayed(E5M2), Delayed(E5M2)
    assert float(scaling.scales(torch.tensor([[1.0]]), X)) == 2.0**-8  # and the host knows of no history
    other.scales(torch.tensor([[448.0]]), X)
    other.end_step(remember=True)
    scaling.load_state_dict(other.state_dict())
    assert float(scaling.scales(torch.tensor([[1.0]]), X)) == 1.0


@pytest.mark.parametrize("make", [Tensorwise, Delayed])
def test_ranks_are_asked_for_what_no_history_tells(make: Callable[..., Tensorwise]) -> None:
    """A history is the same on all ranks; the numbers of the moment, and those that are not numbers, are not."""
    asked: list[float] = []

    def with_another_rank(largest: torch.Tensor) -> torch.Tensor:
        asked.append(float(largest))
        return largest.clamp_min(448.0)

    scaling = make(E5M2, with_another_rank)
    for mine, theirs in ((7.0, 1.0), (1000.0, 4.0), (-1000.0, 4.0), (torch.nan, torch.nan)):
        scale = float(scaling.scales(torch.tensor([[0.5, mine]]), X))
        assert scale == theirs or scale != scale and theirs != theirs
    assert asked == [7.0, 1000.0, 1000.0, torch.inf]
    if isinstance(scaling, Delayed):
        scaling.seen.fill_(7.0)
        scaling.seen[GRAD] = 0  # never anything but zeros
        scaling.end_step(remember=True)
        asked.clear()
        assert float(scaling.scales(torch.ones(1, 1), X)) == 2.0**-6 and not asked
        assert float(scaling.scales(torch.ones(1, 1), GRAD)) == 2.0**-7 and asked == [1.0]


@pytest.mark.parametrize("gradients", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("past", [1e-3, 1.75, 1.8, 300.0])
def test_what_a_delayed_scale_clips_is_counted(past: float, gradients: torch.dtype) -> None:
    """Exactly what lies beyond the largest code under the scale that a history gives."""
    scaling = Delayed(gradients)
    scaling.history[[X, GRAD], 5] = past  # of weights nothing is known
    edge = float(scaling.scales(torch.tensor([[past]]), GRAD)) * torch.finfo(gradients).max
    for largest, share in ((0.5 * edge, 0), (edge, 0), (1.2 * edge, 2 / 3), (1e5 * edge, 2 / 3)):
        numbers = torch.tensor([[largest]])
        scaling.seen.zero_()
        for operand in (X, W, GRAD):
            codes = scaling.quantize(numbers, scaling.scales(numbers, operand), operand)
            is_clipped = float(dequantize(codes)) == edge != largest
            assert is_clipped == (share > 0 and operand != W)
        assert float(clipped_share(scaling.history, scaling.seen)) == pytest.approx(share)


# ---------------------------------------------------------------- experts

COUNTS = {
    "uneven": [200, 30, 129, 0, 1],
    "one": [0, 0, 300, 0, 0],
    "first and last empty": [0, 128, 256, 7, 0],
    "none": [0, 0, 0, 0, 0],
}
HIDDEN, WIDTH, TOKENS = 192, 128, 250


def expert_args(counts: list[int]) -> list[torch.Tensor]:
    num_rows, num_experts = sum(counts), len(counts)
    generator = torch.Generator().manual_seed(num_rows)
    return [
        random(TOKENS, HIDDEN),
        torch.randint(TOKENS, (num_rows,), generator=generator),
        torch.tensor(counts).cumsum(0).int(),
        torch.rand(num_rows, generator=generator) + 0.5,
        random(num_experts, 2, WIDTH, HIDDEN) / HIDDEN**0.5,
        random(num_experts, HIDDEN, WIDTH) / WIDTH**0.5,
    ]


def experts_through(backend: Callable[..., torch.Tensor], args: list[torch.Tensor]) -> list[torch.Tensor]:
    x, gather_idx, offsets, probs, up, down = args
    grad = random(len(gather_idx), HIDDEN, seed=2)
    return through(
        lambda x, probs, up, down: flat(backend)(x, gather_idx, offsets, probs, up, down), x, probs, up, down, grad=grad
    )


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("make", [partial(Tensorwise, E4M3), partial(Delayed, E4M3), Blockwise])
def test_experts_are_off_by_what_their_formats_round(make: Callable[[], Scaling], counts: list[int]) -> None:
    args = expert_args(counts)
    got = experts_through(QuantizedExperts(make(), make()), args)
    exact = experts_through(loop_experts, [t.double() if t.is_floating_point() else t for t in args])
    # Two products in a row for out, d probs and dw_down, and three for dx and dw_up, each with its own errors.
    for name, mine, theirs, bound in zip(
        ("out", "dx", "dprobs", "dw_up", "dw_down"), got, exact, (0.08, 0.11, 0.08, 0.1, 0.08), strict=True
    ):
        assert mine.shape == theirs.shape
        if sum(counts) == 0:
            assert not mine.any(), name
            continue
        assert bound / 4 < off(mine, theirs) < bound, f"{name}: {off(mine, theirs):.3f}"
        if name.startswith("dw"):
            assert not mine[[i for i, n in enumerate(counts) if n == 0]].any(), name


@pytest.mark.parametrize("make", [partial(Tensorwise, E4M3), Blockwise])
def test_an_expert_computes_the_same_among_others(make: Callable[[], Scaling]) -> None:
    """Blocks and lines hold one expert's numbers alone; one scale for all moves what is tiny, and no more."""
    counts = COUNTS["uneven"]
    args = expert_args(counts)
    together = experts_through(QuantizedExperts(make(), make()), args)
    x, gather_idx, _, probs, up, down = args
    grad = random(len(gather_idx), HIDDEN, seed=2)[:200]
    alone = through(
        lambda x, probs, up, down: flat(QuantizedExperts(make(), make()))(
            x, gather_idx[:200], torch.tensor([200], dtype=torch.int32), probs, up, down
        ),
        x, probs[:200], up[:1], down[:1], grad=grad,
    )  # fmt: skip
    for mine, theirs in ((alone[0], together[0][:200]), (alone[3], together[3][:1]), (alone[4], together[4][:1])):
        if make is Blockwise:
            assert torch.equal(mine, theirs)
        else:
            assert off(mine, theirs.double()) < 0.03


@pytest.mark.parametrize("make", [partial(Tensorwise, E4M3), partial(Delayed, E4M3), Blockwise])
def test_rows_past_the_last_offset_reach_no_scale(make: Callable[[], Scaling]) -> None:
    """A dispatcher's buffer may be longer than what was received, and hold anything there."""
    args = expert_args([20, 0, 40])
    expected = experts_through(QuantizedExperts(make(), make()), args)
    x, gather_idx, offsets, probs, up, down = args
    rubbish = torch.cat((x, torch.full((1, HIDDEN), torch.nan)))
    longer = torch.cat((gather_idx, torch.full((5,), TOKENS)))
    grad = torch.cat((random(60, HIDDEN, seed=2), torch.full((5, HIDDEN), 1e30)))
    got = through(
        lambda up, down: flat(QuantizedExperts(make(), make()))(
            rubbish, longer, offsets, torch.cat((probs, torch.ones(5))), up, down
        ),
        up, down, grad=grad,
    )  # fmt: skip
    assert torch.equal(got[0][:60], expected[0])
    assert torch.equal(got[1], expected[3]) and torch.equal(got[2], expected[4])


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_every_expert_has_whole_tiles_of_its_own(counts: list[int]) -> None:
    offsets = torch.tensor(counts).cumsum(0).int()
    place, ends, size = whole_tiles(offsets, sum(counts) + 3)
    assert len(place[:-3].unique()) == sum(counts) and (place[-3:] == size - 1).all()
    start, row = 0, 0
    for count, end in zip(counts, ends.tolist(), strict=True):
        assert end - start == max(-(-count // SIDE), 1) * SIDE
        assert place[row : row + count].tolist() == list(range(start, start + count))
        start, row = end, row + count
    assert start < size


# ---------------------------------------------------------------- kernels, interpreted


def assert_equal_rows(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Row by row, since their sizes differ."""
    assert ((got - expected).norm(dim=-1) <= 1e-5 * expected.norm(dim=-1)).all()


@pytest.mark.parametrize(
    "counts, summed, cols",
    [([40, 0, 130, 1], 192, 128), ([0, 7, 0], 40, 200), ([0, 0], 128, 128)],
    ids=["uneven", "one", "none"],
)
def test_kernels_for_blocks_equal_the_emulation(counts: list[int], summed: int, cols: int) -> None:
    offsets = torch.tensor(counts).cumsum(0).int()
    # Rows, and blocks of weights, of very different size: a scale in the wrong place would show.
    x = random(sum(counts) + 3, summed) * torch.logspace(-6, 6, sum(counts) + 3, base=2).unsqueeze(1)
    weight = random(len(counts), cols, summed) * torch.logspace(-6, 6, summed, base=2)
    a, b = quantize(x, E4M3, LINE), quantize(weight, E4M3, BLOCK)
    got = block_scaled_product(a.codes, a.scales, b.codes, b.scales, offsets, torch.float32)
    expected = quantized.grouped_product(a, b, offsets, torch.float32)
    assert_equal_rows(got[: sum(counts)], expected[: sum(counts)])

    place, ends, size = whole_tiles(offsets, len(x))
    grad = random(len(x), cols, seed=1).flip(0)
    lines = [quantize(quantized._spread_rows(t, place, size).T, E4M3, LINE) for t in (grad, x)]
    got = block_scaled_product(lines[0].codes, lines[0].scales, lines[1].codes, lines[1].scales, ends, torch.float32)
    expected = quantized.grouped_product(*lines, ends, torch.float32)
    assert_equal_rows(got, expected)


# ---------------------------------------------------------------- what CUDA would be asked


@pytest.mark.parametrize("rows, cols, summed", [(256, 384, 512), (150, 72, 200), (1, 16, 40)])
@pytest.mark.parametrize("tiles", [(WHOLE, WHOLE), (LINE, BLOCK), (LINE, LINE)])
def test_torch_takes_the_layouts_of_its_cuda_products(
    rows: int, cols: int, summed: int, tiles: tuple[tuple[int, int], tuple[int, int]]
) -> None:
    """Torch's own shape and stride rules for CUDA, which its fake tensors check; no kernel runs here."""

    def fake(size: int, tile: tuple[int, int]) -> Quantized:
        on_cpu = quantize(torch.ones(size, summed), E4M3, tile)
        return Quantized(*(torch.empty_like(t, device="cuda") for t in (on_cpu.codes, on_cpu.scales)), tile)

    with FakeTensorMode(allow_non_fake_inputs=True):
        out = linear.scaled_product(fake(rows, tiles[0]), fake(cols, tiles[1]), torch.bfloat16)
    assert out.shape == (rows, cols) and out.dtype == torch.bfloat16 and out.is_cuda


def test_torch_takes_the_layouts_of_its_grouped_cuda_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked of the operator's first version, whose rules fake tensors know; the second has the same and no fake."""

    def first_version(a, b, scale_a, recipe_a, scale_b, recipe_b, *, offs, output_dtype):
        assert recipe_a == recipe_b == torch.nn.functional.ScalingType.RowWise
        return torch._scaled_grouped_mm(a, b, scale_a, scale_b, offs=offs, out_dtype=output_dtype)

    monkeypatch.setattr(torch.nn.functional, "scaled_grouped_mm", first_version)

    def fake(*shape: int, scales: tuple[int, ...] = (1, 1)) -> Quantized:
        codes = torch.empty(shape, device="cuda", dtype=E4M3)
        return Quantized(codes, torch.empty(scales, device="cuda"), WHOLE)

    with FakeTensorMode():
        offsets = torch.empty(5, device="cuda", dtype=torch.int32)
        rows = quantized.grouped_product(fake(300, 64), fake(5, 96, 64, scales=(5, 1, 1)), offsets, torch.float32)
        weight = quantized.grouped_product(fake(96, 768), fake(64, 768), offsets, torch.bfloat16)
    assert (rows.shape, rows.dtype) == ((300, 96), torch.float32)
    assert (weight.shape, weight.dtype) == ((5, 96, 64), torch.bfloat16)
