"""The routed experts' weights, and the backends: functions that multiply by them.

All backends have one signature; the last three arguments are optional:

    x_TH            rows to read from: a rank's tokens, or a dispatcher's receive buffer
    gather_idx_R    row of x that each of the R computed rows reads, sorted by expert
    offsets_E       int32, end of each expert's rows among the R
    probs_R         routing weight of each computed row
    w_gate_up_E2IH  gate and up projections; a view of [E, 2I, H]
    w_down_EHI      down projection
    b_gate_up_E2I   added to gate and up; None: no biases
    b_down_EH       added to the output, before it is weighted
    activation      of gate and up (``automoe.moe.activation``); default: SwiGLU
    returns [R, H]  probs * expert(x[gather_idx]), in gather_idx order

Probabilities multiply the activation before the down projection, so that no copy of the expert output has to be
kept for their gradient ("memory-efficient permutation").
Shapes: T rows to read from, R computed rows, E experts of this rank, I expert width, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from automoe.config.plugins import registered
from automoe.config.schema import ModelConfig
from automoe.errors import BackendError, import_backend
from automoe.model.params import EXPERT_SPECS
from automoe.moe.activation import SWIGLU, Activation, ClampedSwiGLU
from automoe.moe.dispatch.base import Dispatcher, LocalDispatcher
from automoe.moe.grouped_mm import grouped_mm_experts
from automoe.moe.local_shard import local_shard

ExpertFn = Callable[..., torch.Tensor]  # its arguments are told above


def loop_experts(
    x_TH, gather_idx_R, offsets_E, probs_R, w_gate_up_E2IH, w_down_EHI, b_gate_up_E2I=None, b_down_EH=None,
    activation: Activation = SWIGLU,
) -> torch.Tensor:  # fmt: skip
    """Reference: one expert after the other, any dtype, float64 included."""
    ends = offsets_E.tolist()
    # unbind, not w[i]: indexing gives each expert a gradient as large as all of them.
    biases = [(None, None)] * len(ends) if b_gate_up_E2I is None else b_gate_up_E2I.unbind(0)
    down_biases = [None] * len(ends) if b_down_EH is None else b_down_EH.unbind(0)
    experts = zip(ends, w_gate_up_E2IH.unbind(0), w_down_EHI.unbind(0), biases, down_biases, strict=True)
    outputs, start = [], 0
    for end, gate_up_2IH, down_HI, bias_2I, down_bias_H in experts:
        rows, weight = x_TH[gather_idx_R[start:end]], probs_R[start:end, None].to(x_TH.dtype)
        act = activation(F.linear(rows, gate_up_2IH[0], bias_2I[0]), F.linear(rows, gate_up_2IH[1], bias_2I[1]))
        out = (act * weight) @ down_HI.T
        outputs.append(out if down_bias_H is None else out + weight * down_bias_H)
        start = end
    return torch.cat(outputs)


def _triton() -> ExpertFn:
    import_backend("triton", "moe.experts=triton", "Install it, or set moe.experts=grouped_mm")
    from automoe.moe.triton_experts import check_gpu, triton_experts

    check_gpu()
    return triton_experts


BACKENDS: dict[str, Callable[[], ExpertFn]] = {  # what makes each
    "loop": lambda: loop_experts,
    "grouped_mm": lambda: grouped_mm_experts,
    "triton": _triton,
}


def expert_backend(name: str, foreign: dict[str, Callable[[], ExpertFn]] | None = None) -> ExpertFn:
    """The backend called ``name``: of a plugin, of this package, or of ``foreign`` ones that the caller knows.

    Raises:
        BackendError: no such backend, or one whose package is missing; names those that there are.
    """
    if name in (plugins := registered("moe.experts")):
        return plugins[name]
    backends = BACKENDS | (foreign or {})
    if name not in backends:
        raise BackendError(f"moe.experts={name}: no such expert backend. There are: {', '.join(backends | plugins)}")
    return backends[name]()


class GroupedExperts(nn.Module):
    """The weights of E experts, w_gate_up [E, 2, I, H] and w_down [E, H, I], and the backend that uses them.

    ``[E, 2, I, H]`` keeps gate and up apart: a plain shard of ``[E, 2I, H]`` over I would give one rank
    all gates and the other all ups. ``config.biased_experts`` adds b_gate_up [E, 2, I] and b_down [E, H].

    Args:
        drops: choices may be of no expert (``LocalDispatcher``).

    Attributes:
        dispatcher: brings tokens to these experts. All experts are on this rank until ``ExpertParallel`` shards them
            and puts its own dispatcher here.
    """

    # For each parameter the dim that expert tensor parallelism shards, and the one that FSDP does.
    WIDTH_DIMS = {name: spec.etp for name, spec in EXPERT_SPECS.items()}
    ROW_DIMS = {name: spec.fsdp for name, spec in EXPERT_SPECS.items()}

    def __init__(self, config: ModelConfig, backend: ExpertFn, drops: bool = False) -> None:
        super().__init__()
        num_experts, hidden, width = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.w_gate_up = nn.Parameter(torch.empty(num_experts, 2, width, hidden))
        self.w_down = nn.Parameter(torch.empty(num_experts, hidden, width))
        biased = config.biased_experts
        self.b_gate_up = nn.Parameter(torch.empty(num_experts, 2, width)) if biased else None
        self.b_down = nn.Parameter(torch.empty(num_experts, hidden)) if biased else None
        self.num_experts = num_experts
        self.dispatcher: Dispatcher = LocalDispatcher(num_experts, drops)
        self.first_bias_column = 0  # of b_down, where this rank has some of its columns
        self.hidden_size, self.backend = hidden, backend
        self.lora: nn.Module | None = None  # then it multiplies, instead of the backend
        clamped = config.expert_activation == "clamped_swiglu"
        self.activation = ClampedSwiGLU(config.swiglu_alpha, config.swiglu_limit) if clamped else SWIGLU

    def forward(
        self, x_TH: torch.Tensor, gather_idx_R: torch.Tensor, offsets_E: torch.Tensor, probs_R: torch.Tensor
    ) -> torch.Tensor:
        """See the module's docstring for shapes."""
        # Of this rank's experts alone: the dispatcher brings the rows for these.
        parameters = self.w_gate_up, self.w_down, self.b_gate_up, self.b_down
        *weights, b_down = (None if p is None else local_shard(p) for p in parameters)
        b_down_EH = None if b_down is None else self._pad_to_hidden(b_down)
        multiply = self.backend if self.lora is None else self.lora
        return multiply(x_TH, gather_idx_R, offsets_E, probs_R, *weights, b_down_EH, self.activation)

    def _pad_to_hidden(self, bias: torch.Tensor) -> torch.Tensor:
        """[E, some of H] -> [E, H], zeros in the columns that other ranks of the etp axis add."""
        behind = self.hidden_size - self.first_bias_column - bias.shape[1]
        return F.pad(bias, (self.first_bias_column, behind)) if bias.shape[1] < self.hidden_size else bias
