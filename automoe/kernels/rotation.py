"""Rotary position embeddings (arXiv 2104.09864), with YaRN or Llama 3.1 scaling.

YaRN is arXiv 2309.00071, section 3. Letters: B rows, S positions, N heads, D width of a head, R
rotated width (the first dims of a head, except where ``start`` says otherwise), P = R / 2 pairs.
Angles are computed in float32, as published checkpoints were trained.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from automoe.config.schema import RopeConfig


def yarn_mscale(factor: float, mscale: float) -> float:
    """Return YaRN's attention temperature 0.1 m ln(s) + 1 (eq. 22); 1 if s is at most 1.

    Args:
        factor: s, by which YaRN stretches the context.
        mscale: m, DeepSeek's weight of the logarithm.
    """
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def inverse_frequencies(config: RopeConfig, dim: int, device: torch.device) -> tuple[Tensor, float]:
    """Return rotary frequencies after ``config.scaling``, and the factor of cos and sin.

    The frequencies are float32 [P] for P = ``dim`` / 2 pairs of rotary dims; the factor is YaRN's,
    for its attention temperature, and 1 for other scalings.
    """
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
    base = config.theta**exponents
    if config.scaling == "none":
        return 1.0 / base, 1.0
    if config.scaling == "llama3":
        # Dims that turn less than ``low_freq_factor`` times over the original context are stretched
        # by ``factor``, those that turn more than ``high_freq_factor`` times stay, and dims between
        # are mixed linearly.
        inverse = 1.0 / base
        turns = config.original_seq_len * inverse / (2 * math.pi)
        low, high = config.low_freq_factor, config.high_freq_factor
        share = ((turns - low) / (high - low)).clamp(0, 1)
        return (1 - share) * inverse / config.factor + share * inverse, 1.0

    def dim_with_rotations(rotations: float) -> float:
        return (
            dim
            * math.log(config.original_seq_len / (rotations * 2 * math.pi))
            / (2 * math.log(config.theta))
        )

    low = dim_with_rotations(config.beta_fast)
    high = dim_with_rotations(config.beta_slow)
    if config.truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32, device=device) - low) / (
        high - low or 0.001
    )
    interpolated = ramp.clamp(0, 1)  # 0: fast dims keep their frequency; 1: slow dims are stretched
    inverse = interpolated / (config.factor * base) + (1 - interpolated) / base
    if config.attention_factor is not None:
        scale = config.attention_factor
    elif config.mscale and config.mscale_all_dim:
        scale = yarn_mscale(config.factor, config.mscale) / yarn_mscale(
            config.factor, config.mscale_all_dim
        )
    else:
        scale = yarn_mscale(config.factor, 1.0)
    return inverse, scale


def softmax_scale(config: RopeConfig, qk_head_dim: int) -> float:
    """Return the factor of attention's logits: 1 / sqrt(``qk_head_dim``).

    If ``config`` stretches the context and sets ``mscale_all_dim`` (DeepSeek), it is multiplied by
    ``yarn_mscale(factor, mscale_all_dim)``, YaRN's temperature, squared.
    """
    scale = qk_head_dim**-0.5
    if config.scaling != "none" and config.mscale_all_dim:
        scale *= yarn_mscale(config.factor, config.mscale_all_dim) ** 2
    return scale


def rotary_cos_sin(
    config: RopeConfig, dim: int, positions_BS: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return cos and sin of the rotation angles, [B, S, 1, P] each, for P pairs of dims.

    Args:
        dim: number of rotary dims, 2 P.
        positions_BS: index of each token in its document.
        dtype: dtype of the results; angles are float32.
    """
    inverse_P, scale = inverse_frequencies(config, dim, positions_BS.device)
    angles_BSP = positions_BS[..., None].to(torch.float32) * inverse_P
    cos, sin = ((x * scale).to(dtype)[:, :, None] for x in (angles_BSP.cos(), angles_BSP.sin()))
    return cos, sin


class _Rotation(torch.autograd.Function):
    """Autograd function of ``rotate``; the backward rotates gradients back, to the layout of x."""

    @staticmethod
    def forward(ctx, x, cos, sin, start: int, layouts: tuple[bool, bool], back: bool, turn):
        ctx.save_for_backward(cos, sin)
        ctx.turn = turn
        ctx.undo = start, *layouts[::-1], not back
        return turn(x, cos, sin, start, *layouts, back)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return ctx.turn(grad, *ctx.saved_tensors, *ctx.undo), *(None,) * 6


def turn_dims(
    x: Tensor, cos: Tensor, sin: Tensor, start: int, from_pairs: bool, to_pairs: bool, back: bool
) -> Tensor:
    """Return a copy of x [B, S, N, D] with R = 2 P dims of D, from ``start`` on, rotated in P pairs.

    Args:
        cos, sin: [B, S, 1, P] of the angles.
        from_pairs: pairs of the input are dims (2i, 2i+1); else (i, i + P).
        to_pairs: pairs of the output are dims (2i, 2i+1); else (i, i + P).
        back: rotate by minus the angles.
    """
    sin = -sin if back else sin
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    before, turned, behind = _thirds(x, start, cos)
    out_before, out_turned, out_behind = _thirds(out, start, cos)
    (a, b), (out_a, out_b) = _pairs(turned, from_pairs), _pairs(out_turned, to_pairs)
    torch.mul(a, cos, out=out_a).addcmul_(b, sin, value=-1)
    torch.mul(b, cos, out=out_b).addcmul_(a, sin)
    out_before.copy_(before)
    out_behind.copy_(behind)
    return out


def _thirds(x: Tensor, start: int, cos: Tensor) -> tuple[Tensor, ...]:
    """Split the last dim of x: dims before the rotary ones, rotary ones, dims after them.

    The 2 P rotary dims begin at ``start``; ``cos`` is [..., P].
    """
    return x.tensor_split((start, start + 2 * cos.shape[-1]), dim=-1)


def _pairs(x: Tensor, interleaved: bool) -> tuple[Tensor, ...]:
    return (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)


def rotate(
    x_BSND: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    start: int = 0,
    back: bool = False,
    turn: Callable[..., Tensor] = turn_dims,
) -> Tensor:
    """Return a copy of x with R = 2 P of its D dims, from ``start`` on, rotated in P pairs.

    The result, unless ``back``, always has the pairs (i, i + P). Queries and keys are permuted
    alike, so their products do not change, and the rest of the attention needs one layout only.

    Args:
        cos, sin: [B, S, 1, P] of the angles.
        interleaved: pairs of the input are dims (2i, 2i+1); else (i, i + P).
        back: undo a rotation: by minus the angles, from the pairs (i, i + P) to those that
            ``interleaved`` says.
        turn: function that rotates, with the arguments of ``turn_dims``.
    """
    # the compiler fuses plain operations, and needs no hand-written backward
    if torch.compiler.is_compiling() and not back:
        before, turned, behind = _thirds(x_BSND, start, cos)
        first, second = _pairs(turned, interleaved)
        return torch.cat(
            (before, first * cos - second * sin, second * cos + first * sin, behind), dim=-1
        )
    layouts = (False, interleaved) if back else (interleaved, False)
    return _Rotation.apply(x_BSND, cos, sin, start, layouts, back, turn)


def join_keys(kv_BSND: Tensor, k_rope_BSR: Tensor, nope_dim: int) -> tuple[Tensor, Tensor]:
    """Return MLA's keys and values; each key joins the head's own dims and the shared rotary dims.

    Args:
        kv_BSND: a head's D dims are ``nope_dim`` of its key, not rotated, followed by its value.
        k_rope_BSR: R rotated dims of keys, which all heads share.

    Returns:
        k [B, S, N, ``nope_dim`` + R] and v [B, S, N, D - ``nope_dim``].
    """
    k_nope_BSND, v_BSND = kv_BSND.split((nope_dim, kv_BSND.shape[-1] - nope_dim), dim=-1)
    k_rope_BSNR = k_rope_BSR.unsqueeze(2).expand(-1, -1, kv_BSND.shape[2], -1)
    return torch.cat((k_nope_BSND, k_rope_BSNR), dim=-1), v_BSND
