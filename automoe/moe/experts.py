"""The routed experts' weights and the functions that multiply by them.

One signature for every backend, ``f(x, gather_idx, offsets, probs, w_gate_up, w_down)``:

    x          [N, H]        rows to read from: a rank's tokens, or a dispatcher's receive buffer
    gather_idx [R]           row of x that each of the R computed rows reads, sorted by expert
    offsets    [E] int32     end of each expert's rows among the R
    probs      [R]           routing weight of each computed row
    w_gate_up  [E, 2, I, H]  gate and up projections; a view of [E, 2I, H]
    w_down     [E, H, I]
    returns    [R, H]        probs * expert(x[gather_idx]), in gather_idx order

Probabilities multiply the activation before the down projection, so no copy of the expert output
has to be kept for their gradient ("memory-efficient permutation").
Shapes: E experts of this rank, I expert width, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from automoe.errors import BackendError
from automoe.moe.dispatch.measure import stage
from automoe.moe.grouped_mm import grouped_mm_experts

ExpertFn = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor
]


def loop_experts(
    x: torch.Tensor,
    gather_idx: torch.Tensor,
    offsets: torch.Tensor,
    probs: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
) -> torch.Tensor:
    """Reference: one expert after the other, any dtype, also float64."""
    ends = offsets.tolist()
    outputs, start = [], 0
    # unbind, not w[i]: indexing gives each expert a gradient as large as all of them.
    for end, gate_up, down in zip(ends, w_gate_up.unbind(0), w_down.unbind(0), strict=True):
        rows = x[gather_idx[start:end]]
        act = F.silu(rows @ gate_up[0].T) * (rows @ gate_up[1].T) * probs[start:end, None].to(x.dtype)
        outputs.append(act @ down.T)
        start = end
    return torch.cat(outputs)


BACKENDS: dict[str, ExpertFn] = {"loop": loop_experts, "grouped_mm": grouped_mm_experts}


def expert_backend(name: str) -> ExpertFn:
    """The backend called ``name``.

    Raises:
        BackendError: no such backend; names those that there are.
    """
    if name not in BACKENDS:
        raise BackendError(f"moe.experts={name}: no such expert backend. There are: {', '.join(BACKENDS)}")
    return BACKENDS[name]


class GroupedExperts(nn.Module):
    """The weights of E experts, w_gate_up [E, 2, I, H] and w_down [E, H, I], and the backend that uses them.

    ``[E, 2, I, H]`` keeps gate and up apart: a plain shard of ``[E, 2I, H]`` over I would give one rank
    all gates and the other all ups.
    """

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int, backend: ExpertFn) -> None:
        super().__init__()
        self.w_gate_up = nn.Parameter(torch.empty(num_experts, 2, intermediate_size, hidden_size))
        self.w_down = nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size))
        self.backend = backend

    def forward(
        self, x: torch.Tensor, gather_idx: torch.Tensor, offsets: torch.Tensor, probs: torch.Tensor
    ) -> torch.Tensor:
        """See the module's docstring for shapes."""
        # Under expert parallelism the weights are DTensors over the ep axis, and what this rank
        # computes with is its own slice; the dispatcher has already brought the rows for it.
        weights = [w.to_local() if isinstance(w, DTensor) else w for w in (self.w_gate_up, self.w_down)]
        with stage("experts"):
            return self.backend(x, gather_idx, offsets, probs, *weights)
