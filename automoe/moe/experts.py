"""The routed experts' weights and the functions that multiply by them.

One signature for every backend, ``f(x, gather_idx, offsets, probs, w_gate_up, w_down, b_gate_up, b_down,
activation)``, the last three optional:

    x          [N, H]        rows to read from: a rank's tokens, or a dispatcher's receive buffer
    gather_idx [R]           row of x that each of the R computed rows reads, sorted by expert
    offsets    [E] int32     end of each expert's rows among the R
    probs      [R]           routing weight of each computed row
    w_gate_up  [E, 2, I, H]  gate and up projections; a view of [E, 2I, H]
    w_down     [E, H, I]
    b_gate_up  [E, 2, I]     added to gate and up; None: no biases
    b_down     [E, H]        added to the output, before it is weighted
    activation               of gate and up (``automoe.moe.activation``); default: SwiGLU
    returns    [R, H]        probs * expert(x[gather_idx]), in gather_idx order

Probabilities multiply the activation before the down projection, so no copy of the expert output
has to be kept for their gradient ("memory-efficient permutation").
Shapes: E experts of this rank, I expert width, H hidden.
"""

from __future__ import annotations

from importlib import import_module
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from automoe.config.plugins import registered
from automoe.errors import BackendError
from automoe.moe.activation import SWIGLU, Activation
from automoe.moe.dispatch.measure import stage
from automoe.moe.grouped_mm import grouped_mm_experts
from automoe.parallel.collectives import arrived


class ExpertFn(Protocol):
    """See the module's docstring for shapes."""

    def __call__(
        self,
        x: torch.Tensor,
        gather_idx: torch.Tensor,
        offsets: torch.Tensor,
        probs: torch.Tensor,
        w_gate_up: torch.Tensor,
        w_down: torch.Tensor,
        b_gate_up: torch.Tensor | None = None,
        b_down: torch.Tensor | None = None,
        activation: Activation = SWIGLU,
    ) -> torch.Tensor: ...


def loop_experts(
    x: torch.Tensor,
    gather_idx: torch.Tensor,
    offsets: torch.Tensor,
    probs: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    b_gate_up: torch.Tensor | None = None,
    b_down: torch.Tensor | None = None,
    activation: Activation = SWIGLU,
) -> torch.Tensor:
    """Reference: one expert after the other, any dtype, also float64."""
    ends = offsets.tolist()
    # unbind, not w[i]: indexing gives each expert a gradient as large as all of them.
    biases = [(None, None)] * len(ends) if b_gate_up is None else b_gate_up.unbind(0)
    down_biases = [None] * len(ends) if b_down is None else b_down.unbind(0)
    experts = zip(ends, w_gate_up.unbind(0), w_down.unbind(0), biases, down_biases, strict=True)
    outputs, start = [], 0
    for end, gate_up, down, bias, down_bias in experts:
        rows, weight = x[gather_idx[start:end]], probs[start:end, None].to(x.dtype)
        act = activation(F.linear(rows, gate_up[0], bias[0]), F.linear(rows, gate_up[1], bias[1]))
        out = (act * weight) @ down.T
        outputs.append(out if down_bias is None else out + weight * down_bias)
        start = end
    return torch.cat(outputs)


BACKENDS: dict[str, ExpertFn] = {"loop": loop_experts, "grouped_mm": grouped_mm_experts}
INTEROP = {"te": "automoe.interop.transformer_engine", "quack": "automoe.interop.quack"}


def expert_backend(name: str) -> ExpertFn:
    """The backend called ``name``.

    Raises:
        BackendError: no such backend, or one whose package is missing; names those that there are.
    """
    if name == "triton":  # imports triton, which is heavy and not on every platform
        try:
            from automoe.kernels.experts import experts
        except ImportError as error:
            raise BackendError(
                f"moe.experts=triton needs the package triton ({error}). Install it, or choose one of: "
                + ", ".join(BACKENDS)
            ) from None
        return experts()
    if name in INTEROP:
        # Upwards, against the order of the house: what comes from a foreign framework is in one file, there.
        return import_module(INTEROP[name]).experts()
    if name in (own := registered("moe.experts")):
        return own[name]
    if name not in BACKENDS:
        raise BackendError(
            f"moe.experts={name}: no such expert backend. There are: {', '.join([*BACKENDS, 'triton', *INTEROP])}"
        )
    return BACKENDS[name]


class GroupedExperts(nn.Module):
    """The weights of E experts, w_gate_up [E, 2, I, H] and w_down [E, H, I], and the backend that uses them.

    ``[E, 2, I, H]`` keeps gate and up apart: a plain shard of ``[E, 2I, H]`` over I would give one rank
    all gates and the other all ups. ``biased`` adds b_gate_up [E, 2, I] and b_down [E, H].
    """

    # By parameter: the dim that expert tensor parallelism cuts, and the one that FSDP does. Ranks that share
    # the width I of an expert add up their outputs, so each of them adds its own columns of the last bias.
    WIDTH_DIMS = {"w_gate_up": 2, "w_down": 2, "b_gate_up": 2, "b_down": 1}
    ROW_DIMS = {"w_gate_up": 2, "w_down": 1, "b_gate_up": 2, "b_down": 1}

    b_gate_up: nn.Parameter | None
    b_down: nn.Parameter | None

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        backend: ExpertFn,
        biased: bool = False,
        activation: Activation = SWIGLU,
    ) -> None:
        super().__init__()
        self.w_gate_up = nn.Parameter(torch.empty(num_experts, 2, intermediate_size, hidden_size))
        self.w_down = nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size))
        self.b_gate_up = self.b_down = None
        if biased:
            self.b_gate_up = nn.Parameter(torch.empty(num_experts, 2, intermediate_size))
            self.b_down = nn.Parameter(torch.empty(num_experts, hidden_size))
        self.first_bias_column = 0  # of b_down, where this rank has some of its columns
        self.hidden_size, self.backend, self.activation = hidden_size, backend, activation

    def forward(
        self, x: torch.Tensor, gather_idx: torch.Tensor, offsets: torch.Tensor, probs: torch.Tensor
    ) -> torch.Tensor:
        """See the module's docstring for shapes."""
        # Under expert parallelism the weights are DTensors over the ep axis, and what this rank
        # computes with is its own slice; the dispatcher has already brought the rows for it.
        w_gate_up, w_down, b_gate_up, b_down = map(
            _on_this_rank, (self.w_gate_up, self.w_down, self.b_gate_up, self.b_down)
        )
        b_down = None if b_down is None else self._whole_width(b_down)
        with stage("experts"):
            # As late as can be, but before a backend reads them by pointer, which an asynchronous tensor has not.
            x, probs = arrived(x), arrived(probs)
            return self.backend(x, gather_idx, offsets, probs, w_gate_up, w_down, b_gate_up, b_down, self.activation)

    def _whole_width(self, bias: torch.Tensor) -> torch.Tensor:
        """[E, some of H] -> [E, H] with zeros where other ranks of the etp axis add theirs."""
        behind = self.hidden_size - self.first_bias_column - bias.shape[1]
        return F.pad(bias, (self.first_bias_column, behind)) if bias.shape[1] < self.hidden_size else bias


def _on_this_rank(parameter: torch.Tensor | None) -> torch.Tensor | None:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
