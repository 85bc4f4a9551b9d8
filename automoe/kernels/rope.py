"""Kernels for ``kernels.rope=triton``: rotary embedding of heads, and joining of MLA's keys.

    turn_dims   x [B, S, N, D] -> the same with R dims from ``start`` on rotated; the two dims of
                a rotation are adjacent (pairs) or R / 2 apart (halves) in input and output
    join_keys   kv [B, S, N, P + V], k_rope [B, S, R] -> k [B, S, N, P + R] and v, a view of kv

Each number is read once and written once, in the forward and backward pass, and gradients of kv,
k_rope and x need no sum over views. One program sums the gradient of k_rope over heads, in order: a
run repeats bit for bit. Angles and products are float32. Shapes: B rows, S positions, N heads, D
head dim; P dims of a key head without rotation, V of a value head.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from automoe.kernels.products import _load, _store
from automoe.kernels.served import check_served
from automoe.kernels.tiling import precision

_HEADS = 16  # heads per program, or per iteration of its loop
_NUM_WARPS = 4


@triton.jit
def turn_heads(
    x,  # [B, S, N, D] by its strides, the last dim dense
    cos,  # [B * S, R / 2]
    sin,
    out,  # [B * S, N, D], written
    seq_len,
    num_heads,
    stride_b,
    stride_s,
    stride_n,
    DIM: tl.constexpr,
    START: tl.constexpr,
    HALF: tl.constexpr,  # R / 2
    FROM_PAIRS: tl.constexpr,  # pairs (2i, 2i + 1) are read, else (i, i + R/2)
    TO_PAIRS: tl.constexpr,  # the same choice for the output
    BACK: tl.constexpr,  # rotates by minus the angle
    PRECISION: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_KEPT: tl.constexpr,
):
    """Triton kernel: apply rotary embedding; one program rotates HEADS heads of one token.

    ``x`` [B, S, N, DIM] is read by its strides, ``out`` [B * S, N, DIM] written; ``cos`` and
    ``sin`` are [B * S, HALF]. Dims START ... START + 2 HALF - 1 are rotated, the others copied. The
    two dims of a rotation are adjacent in the input with FROM_PAIRS, and in the output with
    TO_PAIRS; otherwise they are HALF apart. BACK rotates by minus the angle. BLOCK_HALF and
    BLOCK_KEPT are HALF and the number of copied dims, rounded up to powers of two. PRECISION
    ``ieee`` is for float32 and for Triton's interpreter, which would not round to bfloat16 by
    itself.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    real = (head < num_heads)[:, None]
    source = (
        x
        + (token // seq_len) * stride_b
        + (token % seq_len) * stride_s
        + head[:, None].to(tl.int64) * stride_n
    )
    target = out + (token * num_heads + head[:, None]) * DIM
    i = tl.arange(0, BLOCK_HALF)
    in_half = i < HALF
    c = _load(cos + token * HALF + i, in_half)[None, :]
    s = _load(sin + token * HALF + i, in_half)[None, :]
    if BACK:
        s = -s
    i = i[None, :]
    mask = real & (i < HALF)
    first = START + (2 * i if FROM_PAIRS else i)
    second = START + (2 * i + 1 if FROM_PAIRS else i + HALF)
    a = _load(source + first, mask)
    b = _load(source + second, mask)
    first = START + (2 * i if TO_PAIRS else i)
    second = START + (2 * i + 1 if TO_PAIRS else i + HALF)
    _store(target + first, a * c - b * s, mask, PRECISION)
    _store(target + second, b * c + a * s, mask, PRECISION)
    if DIM > 2 * HALF:
        columns = tl.arange(0, BLOCK_KEPT)[None, :]
        mask = real & (columns < DIM - 2 * HALF)
        columns = tl.where(columns < START, columns, columns + 2 * HALF)
        tl.store(target + columns, tl.load(source + columns, mask=mask), mask=mask)


@triton.jit
def join_heads(
    kv,  # [B, S, N, KEEP + VALUES] by its strides, the last dim dense
    k_rope,  # [B, S, TURN] by its strides
    k,  # [B * S, N, KEEP + TURN], written
    seq_len,
    num_heads,
    stride_b,
    stride_s,
    stride_n,
    rope_stride_b,
    rope_stride_s,
    KEEP: tl.constexpr,
    TURN: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_KEEP: tl.constexpr,
    BLOCK_TURN: tl.constexpr,
):
    """Triton kernel: concatenate each head's own dims of MLA keys and the shared rotary dims.

    One program writes HEADS keys of one token to ``k`` [B * S, N, KEEP + TURN]: KEEP dims from
    ``kv`` and TURN from ``k_rope``, which are read by their strides. BLOCK_KEEP and BLOCK_TURN are
    these sizes rounded up to powers of two.
    """
    token = tl.program_id(0).to(tl.int64)
    row = token // seq_len
    place = token % seq_len
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    real = head < num_heads
    target = k + (token * num_heads + head) * (KEEP + TURN)
    i = tl.arange(0, BLOCK_KEEP)[None, :]
    mask = real & (i < KEEP)
    source = kv + row * stride_b + place * stride_s + head.to(tl.int64) * stride_n
    tl.store(target + i, tl.load(source + i, mask=mask), mask=mask)
    i = tl.arange(0, BLOCK_TURN)[None, :]
    shared = tl.load(k_rope + row * rope_stride_b + place * rope_stride_s + i, mask=i < TURN)
    tl.store(
        target + KEEP + i, tl.broadcast_to(shared, (HEADS, BLOCK_TURN)), mask=real & (i < TURN)
    )


@triton.jit
def part_heads(
    grad_k,  # [B, S, N, KEEP + TURN] by its strides, the last dim dense
    grad_v,  # [B, S, N, VALUES] by its strides
    grad_kv,  # [B * S, N, KEEP + VALUES], written
    grad_k_rope,  # [B * S, TURN], written
    seq_len,
    num_heads,
    k_stride_b,
    k_stride_s,
    k_stride_n,
    v_stride_b,
    v_stride_s,
    v_stride_n,
    KEEP: tl.constexpr,
    TURN: tl.constexpr,
    VALUES: tl.constexpr,
    PRECISION: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_KEEP: tl.constexpr,
    BLOCK_TURN: tl.constexpr,
    BLOCK_VALUES: tl.constexpr,
):
    """Triton kernel: backward pass of ``join_heads``, which concatenated MLA keys.

    It splits the keys' gradient ``grad_k`` into each head's own KEEP dims, stored with the gradient
    of values (VALUES dims) in ``grad_kv``, and the TURN rotary dims, summed over heads in
    ``grad_k_rope``. One program handles one token, HEADS heads at a time; the BLOCK sizes are the
    numbers of dims rounded up to powers of two. PRECISION ``ieee`` is for float32 and for Triton's
    interpreter, which would not round to bfloat16 by itself.
    """
    token = tl.program_id(0).to(tl.int64)
    row = token // seq_len
    place = token % seq_len
    grad_k += row * k_stride_b + place * k_stride_s
    grad_v += row * v_stride_b + place * v_stride_s
    keep = tl.arange(0, BLOCK_KEEP)
    turn = tl.arange(0, BLOCK_TURN)
    value = tl.arange(0, BLOCK_VALUES)
    acc = tl.zeros((BLOCK_TURN,), tl.float32)
    for start in range(0, num_heads, HEADS):
        head = (start + tl.arange(0, HEADS))[:, None].to(tl.int64)
        real = head < num_heads
        target = grad_kv + (token * num_heads + head) * (KEEP + VALUES)
        mask = real & (keep < KEEP)[None, :]
        read = tl.load(grad_k + head * k_stride_n + keep[None, :], mask=mask)
        tl.store(target + keep[None, :], read, mask=mask)
        mask = real & (value < VALUES)[None, :]
        read = tl.load(grad_v + head * v_stride_n + value[None, :], mask=mask)
        tl.store(target + KEEP + value[None, :], read, mask=mask)
        mask = real & (turn < TURN)[None, :]
        acc += tl.sum(_load(grad_k + head * k_stride_n + KEEP + turn[None, :], mask), axis=0)
    _store(grad_k_rope + token * TURN + turn, acc, turn < TURN, PRECISION)


def turn_dims(
    x: Tensor, cos: Tensor, sin: Tensor, start: int, from_pairs: bool, to_pairs: bool, back: bool
) -> Tensor:
    """Return a copy of x with R of its dims, from ``start`` on, rotated, in one kernel on CUDA.

    Args:
        x: [B, S, N, D] bfloat16, float16 or float32.
        cos, sin: [B, S, 1, R / 2] of the angles.
        from_pairs: the two dims of a rotation in x are (2i, 2i+1); else (i, i + R/2).
        to_pairs: the two dims of a rotation in the result are (2i, 2i+1); else (i, i + R/2).
        back: rotate by minus the angles.

    Raises:
        BackendError: tensors are on the CPU, or of another dtype.
    """
    check_served(x, "kernels.rope")
    x = _dense(x)
    batch, seq_len, num_heads, dim = x.shape
    half = cos.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        turn_heads[(batch * seq_len, triton.cdiv(num_heads, _HEADS))](
            x, cos.contiguous(), sin.contiguous(), out, seq_len, num_heads, *x.stride()[:3],
            DIM=dim, START=start, HALF=half, FROM_PAIRS=from_pairs, TO_PAIRS=to_pairs, BACK=back,
            PRECISION=precision(x.dtype), HEADS=_HEADS,
            BLOCK_HALF=triton.next_power_of_2(half),
            BLOCK_KEPT=triton.next_power_of_2(max(dim - 2 * half, 1)), num_warps=_NUM_WARPS,
        )  # fmt: skip
    return out


def join_keys(kv: Tensor, k_rope: Tensor, nope_dim: int) -> tuple[Tensor, Tensor]:
    """Return MLA's keys and values, joined in one kernel on CUDA.

    Each head's key is its first ``nope_dim`` numbers of ``kv`` followed by ``k_rope``, the rotated
    dims that all heads share; its value is the rest of ``kv``.

    Args:
        kv: [B, S, N, nope_dim + value dim] bfloat16, float16 or float32.
        k_rope: [B, S, rotary dim].

    Raises:
        BackendError: tensors are on the CPU, or of another dtype.
    """
    check_served(kv, "kernels.rope")
    return _JoinKeys.apply(kv, k_rope, nope_dim)


class _JoinKeys(torch.autograd.Function):
    @staticmethod
    def forward(ctx, kv, k_rope, nope_dim):
        ctx.nope_dim = nope_dim
        ctx.turn = k_rope.shape[-1]
        kv = _dense(kv)
        k_rope = _dense(k_rope)
        batch, seq_len, num_heads, _ = kv.shape
        k = kv.new_empty(batch, seq_len, num_heads, nope_dim + ctx.turn)
        if k.numel():
            join_heads[(batch * seq_len, triton.cdiv(num_heads, _HEADS))](
                kv, k_rope, k, seq_len, num_heads, *kv.stride()[:3], *k_rope.stride()[:2],
                KEEP=nope_dim, TURN=ctx.turn, HEADS=_HEADS, BLOCK_KEEP=triton.next_power_of_2(nope_dim),
                BLOCK_TURN=triton.next_power_of_2(ctx.turn), num_warps=_NUM_WARPS,
            )  # fmt: skip
        return k, kv[..., nope_dim:]

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_k, grad_v):
        grad_k = _dense(grad_k)
        grad_v = _dense(grad_v)
        batch, seq_len, num_heads, values = grad_v.shape
        grad_kv = grad_k.new_empty(batch, seq_len, num_heads, ctx.nope_dim + values)
        grad_k_rope = grad_k.new_empty(batch, seq_len, ctx.turn)
        if grad_k.numel():
            part_heads[(batch * seq_len,)](
                grad_k, grad_v, grad_kv, grad_k_rope, seq_len, num_heads,
                *grad_k.stride()[:3], *grad_v.stride()[:3],
                KEEP=ctx.nope_dim, TURN=ctx.turn, VALUES=values, PRECISION=precision(grad_k.dtype),
                HEADS=_HEADS, BLOCK_KEEP=triton.next_power_of_2(ctx.nope_dim),
                BLOCK_TURN=triton.next_power_of_2(ctx.turn), BLOCK_VALUES=triton.next_power_of_2(values),
                num_warps=_NUM_WARPS,
            )  # fmt: skip
        return grad_kv, grad_k_rope, None


def _dense(x: Tensor) -> Tensor:
    """Return ``x`` with stride 1 in its last dim; copy it only if needed."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
