"""Scores of a lightning indexer (DeepSeek-V3.2, arXiv 2512.02556), and their divergence from attention.

Letters: B rows, S positions (s of one rank), R positions of keys, N attention heads, J heads of the
indexer, D width of a head, c queries of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK = 128  # queries whose scores by every head are in memory at once


def in_chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(x.split(CHUNK, dim=1) for x in tensors), strict=True)


def index_scores(q_BcJD: Tensor, k_BRD: Tensor, w_BcJ: Tensor) -> tuple[Tensor, Tensor]:
    """Return the index scores (DeepSeek-V3.2, eq. 1) of c queries for R keys, summed and by head.

    Args:
        q_BcJD, k_BRD: queries of J index heads of width D, and the keys that the heads share.
        w_BcJ: weight of each head.

    Returns:
        [B, c, R] weighted sums over heads, and [B, c, J, R], relu(q . k) of each head.
    """
    # One product for all queries of a row; a product per query would copy the keys each time.
    by_head_BcJR = F.relu(q_BcJD.flatten(1, 2) @ k_BRD.mT).unflatten(1, q_BcJD.shape[1:3])
    return (w_BcJ.unsqueeze(-2) @ by_head_BcJR).squeeze(-2), by_head_BcJR


@torch.no_grad()
def attention_shares(q_BSND: Tensor, k_BRND: Tensor, mask_BSR: Tensor, scale: float) -> Tensor:
    """Return attention's probabilities summed over heads: [B, S, R] in at least float32.

    Args:
        mask_BSR: True where a query attends to a key.
        scale: factor of the products of queries and keys.
    """
    wide = torch.promote_types(q_BSND.dtype, torch.float32)
    k_BNRD = k_BRND.transpose(1, 2)
    if len(k_BNRD) > 1:  # else the product of each chunk would copy the keys
        k_BNRD = k_BNRD.contiguous()
    shares = []
    for q, mask in in_chunks(q_BSND, mask_BSR):
        logits_BNcR = (q.transpose(1, 2) @ k_BNRD.mT).to(wide) * scale
        shares.append(logits_BNcR.masked_fill(~mask.unsqueeze(1), -torch.inf).softmax(-1).sum(1))
    return torch.cat(shares, dim=1)


class Divergence(torch.autograd.Function):
    """Autograd function: weighted sum over queries of KL(target || softmax of chosen keys' scores).

    Its inputs are, for s queries, R keys and J index heads, q [B, s, J, D], k [B, R, D] and w
    [B, s, J] (``index_scores``); the target [B, s, R], attention's probabilities; the chosen keys
    [B, s, R] bool; and the weights [B, s], 1 / number of tokens of the global batch, 0 for padding.
    The result is a scalar.

    Gradients are made in the forward pass, one chunk of queries after the other: scores of every
    head would take J numbers for each query and key. The gradient of a query's divergence by its
    scores is softmax - target.
    """

    @staticmethod
    def forward(ctx, q_BsJD, k_BRD, w_BsJ, target_BsR, chosen_BsR, weight_Bs):
        total = weight_Bs.new_zeros(())
        grads_q, grads_w = [], []
        grad_k = torch.zeros_like(k_BRD)
        for q, w, target, chosen, weight in in_chunks(
            q_BsJD, w_BsJ, target_BsR, chosen_BsR, weight_Bs
        ):
            scores, by_head = index_scores(q, k_BRD, w)
            log_shares = scores.masked_fill(~chosen, -torch.inf).log_softmax(-1)
            divergence = F.kl_div(log_shares.masked_fill(~chosen, 0.0), target, reduction="none")
            total += (divergence.sum(-1) * weight).sum()
            grad_BcR = (log_shares.exp() - target) * weight.unsqueeze(-1)
            grads_w.append((by_head @ grad_BcR.unsqueeze(-1)).squeeze(-1))
            grad_BIR = (w.unsqueeze(-1) * grad_BcR.unsqueeze(-2) * (by_head > 0)).flatten(1, 2)
            grads_q.append((grad_BIR @ k_BRD).view_as(q))
            grad_k += grad_BIR.mT @ q.flatten(1, 2)
        ctx.save_for_backward(torch.cat(grads_q, 1), grad_k, torch.cat(grads_w, 1))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return *(grad * saved for saved in ctx.saved_tensors), None, None, None
