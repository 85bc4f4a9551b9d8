"""Gates for benchmarks: routing of a known shape, the same on every mesh, at every step, for any weights.

A token's experts depend on its position in its row and, where it says so, on the layer. Weights still come
from the router's scores, so that everything else costs what it costs in training.
Shapes: B rows, S positions, E experts, K top-k.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from automoe.counter_random import bits_at, stream_key, uniform_from

ZIPF_EXPONENT = 1.0

GateFn = Callable[[torch.Tensor, int, int, int], torch.Tensor]


def balanced(index: torch.Tensor, num_experts: int, top_k: int, layer: int) -> torch.Tensor:
    """Round robin over the row's (token, choice) pairs: every expert gets the same, up to one."""
    slots = index.unsqueeze(-1) * top_k + torch.arange(top_k, device=index.device)
    return slots % num_experts


def empty(index: torch.Tensor, num_experts: int, top_k: int, layer: int) -> torch.Tensor:
    """Balanced over all but the last expert, which gets nothing."""
    return balanced(index, num_experts - 1, top_k, layer)


def one_hot(index: torch.Tensor, num_experts: int, top_k: int, layer: int) -> torch.Tensor:
    """The worst case: every token to experts 0 ... K-1, which live on as few ranks as hold them."""
    return torch.arange(top_k, device=index.device).expand(*index.shape, top_k)


def zipf(index: torch.Tensor, num_experts: int, top_k: int, layer: int) -> torch.Tensor:
    """K different experts drawn with weights 1, 1/2, 1/3, ...; the heaviest expert is the layer's number mod E.

    Gumbel's trick: the K largest of log(weight) + noise are a draw without replacement.
    """
    experts = torch.arange(num_experts, device=index.device)
    rank = (experts - layer) % num_experts + 1
    uniform = uniform_from(bits_at(index.unsqueeze(-1) * num_experts + experts, stream_key(f"zipf.{layer}", 0)))
    noisy = -ZIPF_EXPONENT * rank.to(torch.float64).log() - (-uniform.log()).log()
    return noisy.topk(top_k, dim=-1).indices


GATES: dict[str, GateFn] = {"balanced": balanced, "zipf": zipf, "one_hot": one_hot, "empty": empty}


def gate_choices(gate: str, index: torch.Tensor, num_experts: int, top_k: int, layer: int) -> torch.Tensor:
    """Experts [B, S, K] int64 that the gate called ``gate`` gives the tokens at ``index`` [B, S] of their rows.

    Args:
        layer: number among the model's MoE layers.
    """
    return GATES[gate](index, num_experts, top_k, layer)
