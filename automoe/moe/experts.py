"""The routed experts' weights, and the expert backends: functions that multiply by these weights.

Routing weights multiply the activation before the down projection, so that no copy of the expert
output has to be kept for their gradient ("memory-efficient permutation"). A row is a copy of a
token for one of its experts. Shapes: T rows to read from, R computed rows, E experts of this rank, I
expert width, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from automoe.comm.local_shard import global_offset, local_shard
from automoe.config.plugins import look_up, registered
from automoe.config.schema import ModelConfig
from automoe.errors import BackendError, import_backend
from automoe.kernels.activation import SWIGLU, Activation, activation_of
from automoe.model.params import EXPERT_SPECS
from automoe.moe.expert_weights import ExpertWeights
from automoe.moe.grouped_mm import grouped_mm_experts


class ExpertBackend(Protocol):
    """Function that returns probs * expert(x) of R rows, sorted by expert: [R, H].

    Args:
        x_TH: rows to read from: a rank's tokens, or a dispatcher's receive buffer.
        gather_idx_R: row of x that each of the R computed rows reads, sorted by expert.
        offsets_E: int32, end of each expert's rows among the R.
        probs_R: routing weight of each computed row.
        weights: matrices and biases of this rank's experts.
        activation: function of gate and up.
    """

    def __call__(
        self,
        x_TH,
        gather_idx_R,
        offsets_E,
        probs_R,
        weights: ExpertWeights,
        activation: Activation = SWIGLU,
        /,
    ) -> Tensor: ...


# Takes the ``GroupedExperts`` whose weights the backend multiplies by.
MakeExpertBackend = Callable[[nn.Module], ExpertBackend]


def loop_experts(
    x_TH, gather_idx_R, offsets_E, probs_R, weights: ExpertWeights, activation: Activation = SWIGLU
) -> Tensor:
    """Compute the rows of one expert after the other; return probs * expert(x) for all rows [R, H].

    This is the reference ``ExpertBackend``: it takes any dtype, float64 included. The R rows are
    (token, expert) pairs, sorted by expert.

    Args:
        x_TH: T hidden states of size H, such as a rank's tokens.
        gather_idx_R: for each row, the index of its hidden state in ``x_TH``.
        offsets_E: int32, for each of this rank's E experts the end of its rows.
        probs_R: routing weight of each row.
        weights: matrices and biases of this rank's experts.
        activation: function of an expert's gate and up projections.
    """
    ends = offsets_E.tolist()
    # Indexing w[i] instead would give each expert a gradient of the size of all experts.
    by_expert = ([None] * len(ends) if each is None else each.unbind(0) for each in weights)
    outputs = []
    start = 0
    for end, gate_up_2IH, down_HI, bias_2I, down_bias_H in zip(ends, *by_expert, strict=True):
        rows = x_TH[gather_idx_R[start:end]]
        probs = probs_R[start:end, None].to(x_TH.dtype)
        biases = (None, None) if bias_2I is None else bias_2I
        act = activation(*map(partial(F.linear, rows), gate_up_2IH, biases))
        out = (act * probs) @ down_HI.T
        outputs.append(out if down_bias_H is None else out + probs * down_bias_H)
        start = end
    return torch.cat(outputs)


def _triton() -> ExpertBackend:
    import_backend("triton", "moe.experts=triton", "Install it, or set moe.experts=grouped_mm")
    from automoe.moe.triton_experts import check_gpu, triton_experts

    check_gpu()
    return triton_experts


BACKENDS: dict[str, Callable[[], ExpertBackend]] = {  # each value makes its backend
    "loop": lambda: loop_experts,
    "grouped_mm": lambda: grouped_mm_experts,
    "triton": _triton,
    "te": lambda: look_up("moe.experts", "te")(),
}


def expert_backend(name: str) -> ExpertBackend:
    """Return the expert backend called ``name`` in ``moe.experts``: one of automoe's or of a plugin.

    Raises:
        BackendError: no backend has this name, or its package is missing. The error lists the
            backends that exist.
    """
    if name in (plugins := registered("moe.experts")):
        return plugins[name]
    if name not in BACKENDS:
        raise BackendError(
            f"moe.experts={name}: no such expert backend. Available: {', '.join(BACKENDS | plugins)}"
        )
    return BACKENDS[name]()


class GroupedExperts(nn.Module):
    """Weights of a layer's E experts, and the backend that multiplies tokens by them.

    The weights are gate_up_proj [E, 2, I, H] and down_proj [E, H, I]. ``[E, 2, I, H]`` keeps gate
    and up apart: a plain shard of ``[E, 2I, H]`` over I would give one rank all gates and the other
    all ups. ``config.biased_experts`` adds gate_up_proj_bias [E, 2, I] and down_proj_bias [E, H].

    Args:
        make_expert_backend: function that takes this module and returns its ``ExpertBackend``.
    """

    # Each parameter has a dim that expert tensor parallelism shards and a dim that FSDP shards.
    WIDTH_DIMS = {name: spec.etp for name, spec in EXPERT_SPECS.items()}
    ROW_DIMS = {name: spec.fsdp for name, spec in EXPERT_SPECS.items()}

    def __init__(self, config: ModelConfig, make_expert_backend: MakeExpertBackend) -> None:
        super().__init__()
        num_experts = config.num_experts
        hidden = config.expert_hidden_size
        width = config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2, width, hidden))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden, width))
        biased = config.biased_experts
        self.gate_up_proj_bias = (
            nn.Parameter(torch.empty(num_experts, 2, width)) if biased else None
        )
        self.down_proj_bias = nn.Parameter(torch.empty(num_experts, hidden)) if biased else None
        self.num_experts = num_experts
        self.hidden_size = hidden
        self.backend = make_expert_backend(self)
        self.activation = activation_of(config)

    def forward(
        self, x_TH: Tensor, gather_idx_R: Tensor, offsets_E: Tensor, probs_R: Tensor
    ) -> Tensor:
        """Return probs * expert(x) of R rows, sorted by expert: [R, H], by the module's backend.

        Args:
            x_TH: rows to read from: a rank's tokens, or a dispatcher's receive buffer.
            gather_idx_R: row of x that each of the R computed rows reads.
            offsets_E: int32, end of each expert's rows among the R.
            probs_R: routing weight of each computed row.
        """
        # Rows are of this rank's experts only, so only their shards are used.
        parameters = self.gate_up_proj, self.down_proj, self.gate_up_proj_bias, self.down_proj_bias
        weights = ExpertWeights(*(None if p is None else local_shard(p) for p in parameters))
        bias = weights.down_proj_bias
        if bias is not None and (missing := self.hidden_size - bias.shape[1]):
            # zeros for the columns that other etp ranks hold: the ranks' outputs are summed
            first = global_offset(self.down_proj_bias)[1]
            weights = weights._replace(down_proj_bias=F.pad(bias, (first, missing - first)))
        return self.backend(x_TH, gather_idx_R, offsets_E, probs_R, weights, self.activation)
