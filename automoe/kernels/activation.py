"""Gated activations of an FFN or expert: a table of functions, and the clamped SwiGLU.

Each activation is a small object. Autograd can differentiate a call; ``backward`` computes the
gradients explicitly, for expert backends that implement their own backward pass. Shapes: R rows, I
expert width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from automoe.config.schema import ModelConfig


class GateFunction(NamedTuple):
    """An element-wise function of the gate, and its backward pass.

    ``slope(gradient, gate, out)`` takes the gradient of ``function(gate)`` and writes that of gate
    to ``out``.
    """

    function: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor, Tensor, Tensor], object]


def _gelu(approximate: str) -> GateFunction:
    def slope(grad: Tensor, gate: Tensor, out: Tensor) -> None:
        _aten.gelu_backward.grad_input(grad, gate, approximate=approximate, grad_input=out)

    return GateFunction(partial(F.gelu, approximate=approximate), slope)


_aten = torch.ops.aten
# by ``model.hidden_act``, transformers' name
GATE_FUNCTIONS = {
    "silu": GateFunction(
        F.silu, lambda grad, gate, out: _aten.silu_backward.grad_input(grad, gate, grad_input=out)
    ),
    "gelu": _gelu("none"),
    "gelu_pytorch_tanh": _gelu("tanh"),
    "relu": GateFunction(F.relu, lambda grad, gate, out: torch.mul(grad, gate > 0, out=out)),
    "relu2": GateFunction(
        lambda gate: F.relu(gate).square(),
        lambda grad, gate, out: torch.mul(grad, F.relu(gate), out=out).mul_(2),
    ),
}


@dataclass(frozen=True)
class GLU:
    """Gated activation function(gate) * up (arXiv 2002.05202, eq. 5); SwiGLU by default.

    Attributes:
        hidden_act: name of the function in ``GATE_FUNCTIONS``.
    """

    hidden_act: str = "silu"

    def __call__(self, gate_RI: Tensor, up_RI: Tensor) -> Tensor:
        """Return function(gate) * up [R, I] as a new tensor; the inputs stay unchanged."""
        of_gate_RI = GATE_FUNCTIONS[self.hidden_act].function(gate_RI)
        # Autograd needs the factors unchanged for the backward pass.
        return of_gate_RI * up_RI if torch.is_grad_enabled() else of_gate_RI.mul_(up_RI)

    def backward(
        self, gate_RI, up_RI, scale_R1, grad_RI, act_RI, grad_gate_RI, grad_up_RI, grad_scale_R
    ) -> None:
        """Compute scale * activation and the gradients of gate, up and scale.

        Args:
            scale_R1: scale of each row, in the dtype of gate and up.
            grad_RI: gradient of scale * activation; used as scratch memory afterwards.
            act_RI: receives scale * activation.
            grad_gate_RI: receives the gradient of gate.
            grad_up_RI: receives the gradient of up.
            grad_scale_R: receives the gradient of scale, accumulated in at least its own dtype.
        """
        function, slope = GATE_FUNCTIONS[self.hidden_act]
        of_gate_RI = function(gate_RI)
        torch.mul(of_gate_RI, up_RI, out=act_RI)
        _scale(act_RI, scale_R1, grad_RI, grad_up_RI, grad_scale_R)
        torch.mul(grad_RI, of_gate_RI, out=grad_up_RI)
        slope(grad_RI.mul_(up_RI), gate_RI, grad_gate_RI)


@dataclass(frozen=True)
class ClampedSwiGLU:
    """Clamped SwiGLU: (up' + offset) * gate' * sigmoid(alpha * gate').

    gate' is gate clamped to at most ``limit``, up' is up clamped to [-``limit``, ``limit``]. At
    exactly the limit the gradient still passes, as with torch's clamp. GPT-OSS (arXiv 2508.10925,
    section 2.2) has alpha 1.702 and offset 1, DeepSeek-V4 1 and 0.

    Attributes:
        alpha: factor within the sigmoid.
        limit: bound of gate and up.
        offset: number added to up'.
    """

    alpha: float
    limit: float
    offset: float = 1.0

    def __call__(self, gate_RI: Tensor, up_RI: Tensor) -> Tensor:
        low_RI = gate_RI.clamp(max=self.limit)
        return (up_RI.clamp(-self.limit, self.limit) + self.offset) * (
            low_RI * torch.sigmoid(self.alpha * low_RI)
        )

    def backward(
        self, gate_RI, up_RI, scale_R1, grad_RI, act_RI, grad_gate_RI, grad_up_RI, grad_scale_R
    ) -> None:
        low_RI = gate_RI.clamp(max=self.limit)
        sigmoid_RI = torch.sigmoid(self.alpha * low_RI)
        raised_RI = up_RI.clamp(-self.limit, self.limit).add_(self.offset)
        swish_RI = low_RI * sigmoid_RI
        torch.mul(raised_RI, swish_RI, out=act_RI)
        _scale(act_RI, scale_R1, grad_RI, grad_up_RI, grad_scale_R)
        torch.mul(grad_RI, swish_RI, out=grad_up_RI).mul_(up_RI.abs() <= self.limit)
        # d(g sigmoid(a g)) / dg = sigmoid (1 + a g (1 - sigmoid))
        slope_RI = low_RI.mul_(self.alpha).mul_(1 - sigmoid_RI).add_(1).mul_(sigmoid_RI)
        torch.mul(grad_RI, raised_RI, out=grad_gate_RI).mul_(slope_RI).mul_(gate_RI <= self.limit)


def _scale(act_RI, scale_R1, grad_RI, scratch_RI, grad_scale_R) -> None:
    """Scale activation and gradient by row in place; write the gradient of the scales.

    Args:
        scale_R1: factor of each row.
        act_RI: the activation, becomes scale * activation.
        grad_RI: gradient of scale * activation, becomes that of the activation.
        scratch_RI: overwritten.
        grad_scale_R: receives the gradient of the scales.
    """
    product_RI = torch.mul(grad_RI, act_RI, out=scratch_RI)
    torch.sum(product_RI, -1, dtype=grad_scale_R.dtype, out=grad_scale_R)
    act_RI.mul_(scale_R1)
    grad_RI.mul_(scale_R1)


Activation = GLU | ClampedSwiGLU
SWIGLU = GLU()


def activation_of(model: ModelConfig) -> Activation:
    """Return the gated activation of every FFN and expert of ``model``."""
    if model.expert_activation == "clamped_swiglu":
        return ClampedSwiGLU(model.swiglu_alpha, model.swiglu_limit, model.swiglu_offset)
    return GLU(model.hidden_act)


# 512 KiB of float32 fit in L2, so the next operation finds the result of the last one in cache.
BLOCK_ELEMENTS = 1 << 17


def activation_gradients(
    activation: Activation, gate_up_RJ: Tensor, probs_R: Tensor, grad_act_RI: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return probs * activation [R, I], the gradient of ``gate_up_RJ`` and that of ``probs_R``.

    Args:
        gate_up_RJ: gate and up concatenated, J = 2 I.
        probs_R: routing weight of each row.
        grad_act_RI: gradient of probs * activation; overwritten.
    """
    act_RI = torch.empty_like(grad_act_RI)
    grad_gate_up_RJ = torch.empty_like(gate_up_RJ)
    grad_probs_R = torch.empty_like(probs_R)
    scale_R1 = probs_R.unsqueeze(1).to(act_RI.dtype)
    read = *gate_up_RJ.chunk(2, dim=-1), scale_R1, grad_act_RI
    written = act_RI, *grad_gate_up_RJ.chunk(2, dim=-1), grad_probs_R
    for block in row_blocks(*act_RI.shape, act_RI.device):
        activation.backward(*(tensor[block] for tensor in read + written))
    return act_RI, grad_gate_up_RJ, grad_probs_R


def row_blocks(num_rows: int, width: int, device: torch.device) -> Iterator[slice]:
    """Yield slices of the rows of a matrix [num_rows, width], to be processed one after the other.

    The caller applies all of its element-wise operations to a slice before the next. On a CPU,
    slices are small enough that an operation finds the previous result in the cache. On a GPU each
    operation costs a kernel launch, so one slice holds all rows.
    """
    step = max(1, BLOCK_ELEMENTS // max(width, 1)) if device.type == "cpu" else max(1, num_rows)
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))
