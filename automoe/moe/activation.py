"""What stands between an expert's two products: SwiGLU, and the clamped form of GPT-OSS.

Each is a small object that a backend is handed: a call for autograd, and its gradient written out for
backends with a backward pass of their own. Shapes: R rows, I expert width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from automoe.config.schema import ModelConfig


class Activation(Protocol):
    """A function of gate and up, both [R, I]."""

    def __call__(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """The activation [R, I], in storage of its own."""

    def backward(
        self,
        gate: torch.Tensor,
        up: torch.Tensor,
        scale: torch.Tensor,
        grad: torch.Tensor,
        act: torch.Tensor,
        grad_gate: torch.Tensor,
        grad_up: torch.Tensor,
        grad_scale: torch.Tensor,
    ) -> None:
        """Gradients of ``scale * activation``, and the product itself once more, written into given storage.

        Args:
            scale: [R, 1] in the dtype of gate and up.
            grad: [R, I] of the product; scratch afterwards.
            act: [R, I], takes the product.
            grad_gate, grad_up: [R, I] each.
            grad_scale: [R], summed at least as wide as its own dtype.
        """


class SwiGLU:
    """silu(gate) * up (arXiv 2002.05202, eq. 5)."""

    def __call__(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        silu = F.silu(gate)
        # A backward pass would need it unchanged.
        return silu * up if torch.is_grad_enabled() else silu.mul_(up)

    def backward(self, gate, up, scale, grad, act, grad_gate, grad_up, grad_scale) -> None:
        silu = F.silu(gate)
        torch.mul(silu, up, out=act)
        # ``grad_up`` is scratch until its own value is due.
        torch.sum(torch.mul(grad, act, out=grad_up), -1, dtype=grad_scale.dtype, out=grad_scale)
        act.mul_(scale)
        torch.mul(grad.mul_(scale), silu, out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad.mul_(up), gate, grad_input=grad_gate)


@dataclass(frozen=True)
class ClampedSwiGLU:
    """(up' + 1) * gate' * sigmoid(alpha * gate'), gate' at most ``limit``, up' within +-``limit``.

    GPT-OSS (arXiv 2508.10925, section 2.2; transformers' ``GptOssExperts``). Like torch's clamp, a value
    at the limit still has its gradient.
    """

    alpha: float
    limit: float

    def __call__(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        gate = gate.clamp(max=self.limit)
        return (up.clamp(-self.limit, self.limit) + 1) * (gate * torch.sigmoid(self.alpha * gate))

    def backward(self, gate, up, scale, grad, act, grad_gate, grad_up, grad_scale) -> None:
        low = gate.clamp(max=self.limit)
        sigmoid = torch.sigmoid(self.alpha * low)
        raised = up.clamp(-self.limit, self.limit).add_(1)
        swish = low * sigmoid
        torch.mul(raised, swish, out=act)
        torch.sum(torch.mul(grad, act, out=grad_up), -1, dtype=grad_scale.dtype, out=grad_scale)
        act.mul_(scale)
        grad.mul_(scale)
        torch.mul(grad, swish, out=grad_up).mul_(up.abs() <= self.limit)
        # d(g sigmoid(a g)) / dg = sigmoid (1 + a g (1 - sigmoid))
        slope = low.mul_(self.alpha).mul_(1 - sigmoid).add_(1).mul_(sigmoid)
        torch.mul(grad, raised, out=grad_gate).mul_(slope).mul_(gate <= self.limit)


SWIGLU = SwiGLU()


def expert_activation(config: ModelConfig) -> Activation:
    """The activation that ``config.expert_activation`` names."""
    if config.expert_activation == "clamped_swiglu":
        return ClampedSwiGLU(config.swiglu_alpha, config.swiglu_limit)
    return SWIGLU


BLOCK_ELEMENTS = 1 << 17  # 512 KiB of float32: what an operation wrote is still in L2 for the next


def row_blocks(num_rows: int, width: int, device: torch.device) -> Iterator[slice]:
    """Slices of rows over which to run a chain of element-wise operations, one slice after the other.

    On a CPU each operation of an eager chain reads and writes memory unless its operands fit the cache. A GPU
    pays for each launch instead, so it gets all rows at once.
    """
    step = max(1, BLOCK_ELEMENTS // max(width, 1)) if device.type == "cpu" else max(1, num_rows)
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))
