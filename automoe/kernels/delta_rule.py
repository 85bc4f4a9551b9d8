"""The gated delta rule (arXiv 2412.06464), and the short convolution before it, in plain torch.

A head keeps a matrix S that maps keys to values. For each token the state decays by a factor
exp(g), and its value for the token's key moves towards the token's value by a share beta:

    S <- exp(g) S;   S <- S + beta k (v - S^T k)^T;   o = S^T q

Letters: B rows, S positions, G key heads (queries too) of width K, N value heads of width V, r = N
/ G value heads per key head, C positions of a chunk, M chunks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64
UNIT_EPS = 1e-6  # added to a squared length under the root


def gated_delta_rule(
    q_BSGK: Tensor,
    k_BSGK: Tensor,
    v_BSNV: Tensor,
    log_decay_BSN: Tensor,
    beta_BSN: Tensor,
    chunk: int = CHUNK,
) -> Tensor:
    """Return the outputs of the gated delta rule (arXiv 2412.06464), from a state of zeros.

    It computes a chunk of positions at a time. Within a chunk the values U that tokens add to the
    state depend on the tokens before them. With c_i, the log decays summed from the chunk's start,
    and S, the state before the chunk, U solves a unit lower triangular system (the WY form, section
    3.3 and arXiv 2406.06484):

        (I + strictly lower of [beta_i exp(c_i - c_j) k_i.k_j]) U = beta (V - exp(c) K S)

    Queries and keys are normalised to length one first, and queries divided by sqrt(K).

    Args:
        q_BSGK, k_BSGK, v_BSNV: queries and keys of G key heads of width K, values of N value heads of
            width V; B rows, S positions.
        log_decay_BSN: logarithm of the factor that each token multiplies the state by, at most 0.
        beta_BSN: strength with which a token writes, between 0 and 1.
        chunk: positions per chunk.

    Returns:
        [B, S, N, V] in the dtype of v; computed in at least float32.
    """
    dtype = v_BSNV.dtype
    size = v_BSNV.shape[1]
    repeats = v_BSNV.shape[2] // k_BSGK.shape[2]
    wide = torch.promote_types(dtype, torch.float32)
    # [B, S, N, D], for any width D, becomes [B, N, M, C, D]. Padding after the row has a beta of
    # zero, so it changes no state; it is cut off at the end.
    q_BNMCK, k_BNMCK, v_BNMCV, log_decay_BNMC1, beta_BNMC1 = (
        F.pad(x.to(wide).transpose(1, 2), (0, 0, 0, -size % chunk)).unflatten(2, (-1, chunk))
        for x in (
            (_unit(q_BSGK.to(wide)) * q_BSGK.shape[-1] ** -0.5).repeat_interleave(repeats, dim=2),
            _unit(k_BSGK.to(wide)).repeat_interleave(repeats, dim=2),
            v_BSNV,
            log_decay_BSN.unsqueeze(-1),
            beta_BSN.unsqueeze(-1),
        )
    )
    to_here_BNMC1 = log_decay_BNMC1.cumsum(3).exp()
    # Entry [..., i, j] sums the log decays of positions j + 1 ... i. Each is summed by itself, since
    # a difference of long sums would lose the precision of a short one.
    square_CC = torch.ones(chunk, chunk, dtype=torch.bool, device=v_BSNV.device)
    steps_BNMCC = log_decay_BNMC1.expand(*log_decay_BNMC1.shape[:4], chunk).masked_fill(
        square_CC.triu(), 0
    )
    between_BNMCC = steps_BNMCC.cumsum(3).masked_fill(square_CC.triu(1), float("-inf")).exp()
    k_to_here_BNMCK = k_BNMCK * to_here_BNMC1
    solved = torch.linalg.solve_triangular(
        beta_BNMC1 * between_BNMCC * (k_BNMCK @ k_BNMCK.transpose(3, 4)),
        beta_BNMC1 * torch.cat((v_BNMCV, k_to_here_BNMCK), dim=-1),
        upper=False,
        unitriangular=True,
    )
    added_BNMCV, of_state_BNMCK = solved.split((v_BNMCV.shape[-1], k_BNMCK.shape[-1]), dim=-1)
    seen_BNMCC = between_BNMCC * (q_BNMCK @ k_BNMCK.transpose(3, 4))
    q_to_here_BNMCK = q_BNMCK * to_here_BNMC1
    k_to_end_BNMCK = k_BNMCK * between_BNMCC[:, :, :, -1:].transpose(3, 4)
    kept_BNM11 = to_here_BNMC1[:, :, :, -1:]

    state_BNKV = v_BNMCV.new_zeros(*v_BNMCV.shape[:2], k_BNMCK.shape[-1], v_BNMCV.shape[-1])
    outputs = []
    for m in range(v_BNMCV.shape[2]):
        values_BNCV = added_BNMCV[:, :, m] - of_state_BNMCK[:, :, m] @ state_BNKV
        outputs.append(q_to_here_BNMCK[:, :, m] @ state_BNKV + seen_BNMCC[:, :, m] @ values_BNCV)
        state_BNKV = (
            state_BNKV * kept_BNM11[:, :, m] + k_to_end_BNMCK[:, :, m].transpose(2, 3) @ values_BNCV
        )
    return torch.cat(outputs, dim=2)[:, :, :size].transpose(1, 2).to(dtype)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + UNIT_EPS)


def causal_conv(x_BSD: Tensor, weight_D1W: Tensor, doc_ids_BS: Tensor | None = None) -> Tensor:
    """Convolve each of D channels of x over its W last positions, the current one included.

    ``weight_D1W`` is laid out as in ``nn.Conv1d``, the current position last. Positions of other
    documents count as zeros (None: a sequence is one document). The result is [B, S, D].
    """
    width = weight_D1W.shape[-1]
    size = x_BSD.shape[1]
    padded_BSD = F.pad(x_BSD, (0, 0, width - 1, 0))
    terms = []
    for i in range(width):
        term_BSD = padded_BSD[:, i : i + size] * weight_D1W[:, 0, i]
        if doc_ids_BS is not None:  # a product with a mask saves only the mask
            shifted_BS = F.pad(doc_ids_BS, (width - 1, 0))[:, i : i + size]
            term_BSD = term_BSD * (shifted_BS == doc_ids_BS).unsqueeze(-1)
        terms.append(term_BSD)
    return sum(terms)  # type: ignore[return-value]
