"""AdamW in one kernel, with stochastic rounding, for ``optim.master_weights=stochastic``.

It does the operations of ``automoe.optim.stochastic.update_in_torch`` in the same order and rounds
each result (no product is fused with a sum), so both give the same numbers to the bit.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from automoe.kernels.counter_random import GOLDEN_GAMMA, MIX_1, MIX_2

WARPS = 4
BLOCK = 1024  # elements per program
_GOLDEN_GAMMA = tl.constexpr(GOLDEN_GAMMA)
_MIX_1 = tl.constexpr(MIX_1)
_MIX_2 = tl.constexpr(MIX_2)


@triton.jit
def random_bits(index, key):
    """Triton function: return 64 random bits (uint64) for each index of the random stream ``key``.

    They equal those of ``counter_random.bits_at``, which computes them in torch.
    """
    x = (index + 1).to(tl.uint64) * _GOLDEN_GAMMA + key.to(tl.uint64)
    x = (x ^ (x >> 30)) * _MIX_1
    x = (x ^ (x >> 27)) * _MIX_2
    return x ^ (x >> 31)


@triton.jit
def _load(source, at, mask):
    """Triton function: load numbers at pointers ``source + at`` as float32; 0 outside ``mask``.

    bfloat16 is converted by its bits, since the cast of Triton's interpreter is wrong for
    subnormals.
    """
    x = tl.load(source + at, mask=mask, other=0.0)
    if source.dtype.element_ty == tl.bfloat16:
        x = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return x


@triton.jit
def _store(to, at, x, bits, mask):
    """Triton function: store ``x`` (float32) at pointers ``to + at`` where ``mask`` is True.

    If they point to bfloat16, x is rounded stochastically, by the lowest 16 of the random ``bits``.
    """
    if to.dtype.element_ty == tl.bfloat16:
        stored = x.to(tl.uint32, bitcast=True)
        finite = (stored & 0x7F800000) != 0x7F800000
        raised = stored + (bits & 0xFFFF).to(tl.uint32)
        stored = tl.where(finite, raised, tl.where(x == x, stored, 0x7FC00000))
        tl.store(to + at, (stored >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True), mask=mask)
    else:
        tl.store(to + at, x, mask=mask)


@triton.jit(
    do_not_specialize=["place", "key", "first_index", "num_middle", "outer_stride", "middle_stride"]
)
def update_part(
    values,  # [num_outer, num_middle, num_cols], dense, like the next three
    grads,
    firsts,
    seconds,
    steps,  # one per parameter of the group, like the next two; this one's is at ``place``
    rates,
    second_scales,
    place,
    key,
    first_index,  # index in the whole parameter of the part's first element
    num_rows,  # num_outer * num_middle
    num_middle,
    num_cols,
    outer_stride,  # stride in the whole parameter, like the next
    middle_stride,
    beta1,
    beta1_rest,  # 1 - beta1, as the host rounds it
    beta2,
    beta2_rest,
    eps,
    decay,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Triton kernel: update this rank's shard of a parameter and its moments by AdamW.

    One program updates a block of ROWS x COLS elements.

    Args:
        values, grads, firsts, seconds: the shard, its gradient, its first and second moments, each
            [num_rows / num_middle, num_middle, num_cols].
        steps, rates, second_scales: of all parameters of the group, step counts, lr / (1 - beta1^step)
            and 1 / (1 - beta2^step); ``place`` is this parameter's index in them.
        key: key of the parameter's random stream, for the rounding.
        first_index: index of the shard's first element in the full parameter, in which
            ``outer_stride`` and ``middle_stride`` are the strides.
        beta1_rest, beta2_rest: 1 - beta1 and 1 - beta2. ``eps`` is added to the second moment's root.
        decay: factor of the weights, 1 - lr * weight decay.
    """
    blocks = tl.cdiv(num_cols, COLS)
    row = (tl.program_id(0) // blocks) * ROWS + tl.arange(0, ROWS)
    col = (tl.program_id(0) % blocks).to(tl.int64) * COLS + tl.arange(0, COLS)
    mask = (row < num_rows)[:, None] & (col < num_cols)[None, :]
    at = row.to(tl.int64)[:, None] * num_cols + col[None, :]
    grad = _load(grads, at, mask)
    value = _load(values, at, mask)
    first = _load(firsts, at, mask)
    second = _load(seconds, at, mask)
    first = first * beta1 + grad * beta1_rest
    second = second * beta2 + (grad * grad) * beta2_rest
    divisor = tl.sqrt_rn(second * tl.load(second_scales + place)) + eps
    value = value * decay - tl.div_rn(first * tl.load(rates + place), divisor)
    row_start = (row // num_middle).to(tl.int64) * outer_stride + (row % num_middle).to(
        tl.int64
    ) * middle_stride
    index = first_index + row_start[:, None] + col[None, :]
    bits = random_bits(index, random_bits(tl.load(steps + place), key.to(tl.int64)))
    _store(values, at, value, bits, mask)
    _store(firsts, at, first, bits >> 16, mask)
    _store(seconds, at, second, bits >> 32, mask)


def update_in_one_pass(
    tensors: list[torch.Tensor], first_index: int, runs: list[tuple[int, int]], numbers: Any
) -> None:
    """Update a parameter and its moments from its gradient by AdamW, in one launch.

    All tensors are bfloat16 or float32 and contiguous.

    Args:
        tensors: this rank's shards of the parameter, its gradient, its first and second moments.
        first_index: index of the shard's first element in the full parameter.
        runs: for each dim of the shard (at most three): its size, and its stride in the full
            parameter; the last stride is 1.
        numbers: step counts and sizes, coefficients, and the key of the parameter's random stream
            (``automoe.optim.stochastic.AdamWScalars``).
    """
    num_values = tensors[0].numel()
    if not num_values:
        return
    assert all(x.is_contiguous() and x.dtype in (torch.bfloat16, torch.float32) for x in tensors)
    (_, outer), (num_middle, middle), (num_cols, _) = [(1, 0)] * (3 - len(runs)) + runs
    num_rows = num_values // num_cols
    cols = min(triton.next_power_of_2(num_cols), BLOCK)
    rows = BLOCK // cols
    update_part[(triton.cdiv(num_rows, rows) * triton.cdiv(num_cols, cols),)](
        *tensors, numbers.steps, numbers.rates, numbers.second_scales, numbers.place,
        numbers.key, first_index, num_rows, num_middle, num_cols, outer, middle,
        numbers.beta1, 1 - numbers.beta1, numbers.beta2, 1 - numbers.beta2, numbers.eps, numbers.decay,
        ROWS=rows, COLS=cols, num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
