"""AdamW on bfloat16 parameters that have no wider copy: each update is rounded up or down by chance.

An update far below half a unit in the last place would be lost every time by plain rounding. Rounded up with
the probability of its share of a unit, it moves the parameter by as much in the mean (arXiv 1502.02551,
section 3; for training in bfloat16, arXiv 2010.06192). Chance comes from a counter over the parameter's name,
its step and the element's global index: every mesh rounds alike, and so does a run that goes on after a kill.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from automoe.counter_random import bits_at, stream_key
from automoe.model.init import indexed_blocks

_DROPPED_BITS = 16  # of a float32's mantissa, in bfloat16


def round_stochastically(x: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """x float32 -> bfloat16: one of its two neighbours, the nearer one the more often, with mean x.

    Args:
        bits: int64 in the shape of x, of which 16 random bits are used.
    """
    dropped = (1 << _DROPPED_BITS) - 1
    # In sign and magnitude, as a float is stored: what is added to the dropped bits may carry into those kept.
    raised = (x.view(torch.int32) + (bits & dropped).to(torch.int32)) & ~dropped
    return torch.where(x.isfinite(), raised.view(torch.float32), x).to(torch.bfloat16)


class StochasticAdamW(torch.optim.Optimizer):
    """AdamW (arXiv 1711.05101), computed in float32, moments included; bfloat16 parameters rounded by chance.

    Parameters of wider dtypes are updated as they are.

    Args:
        groups: parameter groups, each with ``names``, the global names of its ``params`` in their order.
        seed: of the roundings.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        seed: int,
    ) -> None:
        super().__init__(groups, dict(lr=lr, betas=betas, eps=eps, weight_decay=0.0))
        self.seed = seed

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            for name, parameter in zip(group["names"], group["params"], strict=True):
                if parameter.grad is not None:
                    self._update(name, parameter, group)

    def _update(self, name: str, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state.update(first_state(parameter))
        state["step"] += 1
        # On the device, as the step is: to know it, the host would have to wait.
        steps, (beta1, beta2) = state["step"].to(torch.float64), group["betas"]
        rate = (group["lr"] / (1 - beta1**steps)).to(torch.float32)
        second_scale = (1 - beta2**steps).to(torch.float32)
        key = bits_at(state["step"].to(torch.int64), stream_key(f"rounding.{name}", self.seed))
        values, grads, firsts, seconds = map(
            _local, (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])
        )
        for block, index in indexed_blocks(parameter):
            grad = grads[block].to(firsts.dtype)
            first = firsts[block].lerp_(grad, 1 - beta1)
            second = seconds[block].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            value = values[block].to(firsts.dtype) * (1 - group["lr"] * group["weight_decay"])
            value -= rate * first / ((second / second_scale).sqrt_() + group["eps"])
            if values.dtype == torch.bfloat16:
                value = round_stochastically(value, bits_at(index, key))
            values[block] = value


def first_state(parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """AdamW's state of ``parameter`` before its first step, as a fused AdamW lays it out; never narrower than float32."""
    wide = torch.promote_types(parameter.dtype, torch.float32)
    return {
        # On the parameter's device, so that nobody waits for it.
        "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
        "exp_avg": torch.zeros_like(parameter, dtype=wide),
        "exp_avg_sq": torch.zeros_like(parameter, dtype=wide),
    }


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
