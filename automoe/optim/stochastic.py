"""AdamW on bfloat16 parameters that have no wider copy: each update is rounded stochastically.

An update far below half a unit in the last place would be lost every time by plain rounding.
Rounded up with the probability of its share of a unit, it moves the parameter by as much in the
mean (arXiv 1502.02551, section 3; for training in bfloat16, arXiv 2010.06192). Chance comes from a
counter over the parameter's name, its step and the element's global index: every mesh rounds alike,
and so does a run that goes on after a kill.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from automoe.interop.torch_private import foreach_add_
from automoe.kernels.counter_random import bits_at, stream_key
from automoe.model.init import index_runs, indexed_blocks
from automoe.moe.local_shard import local_shard

_DROPPED_BITS = 16  # of a float32's mantissa, in bfloat16


def round_stochastically(x: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """x float32 -> bfloat16: one of its two neighbours, the nearer one the more often, with mean x.

    Args:
        bits: int64 in the shape of x, of which 16 random bits are used.
    """
    dropped = (1 << _DROPPED_BITS) - 1
    # In sign and magnitude, as a float is stored: what is added to the dropped bits may carry into
    # those kept.
    raised = (x.view(torch.int32) + (bits & dropped).to(torch.int32)) & ~dropped
    return torch.where(x.isfinite(), raised.view(torch.float32), x).to(torch.bfloat16)


@dataclass(frozen=True)
class Numbers:
    """What an update needs besides a parameter and its state: P parameters of a group, of which
    this is one.

    Attributes:
        steps: int64 [P], this step's number, on the device as the two that follow from it.
        rates: float32 [P], the learning rate with the first moment's bias corrected in it.
        second_scales: float32 [P], times which the second moment has no bias.
        place: in these.
        key: of the parameter's stream of random numbers.
        kept: share of a parameter that weight decay leaves.
    """

    steps: torch.Tensor
    rates: torch.Tensor
    second_scales: torch.Tensor
    place: int
    key: int
    beta1: float
    beta2: float
    eps: float
    kept: float


class StochasticAdamW(torch.optim.Optimizer):
    """AdamW (arXiv 1711.05101), computed in float32; parameters and moments in bfloat16 are rounded
    stochastically.

    Those of wider dtypes are updated as they are. On a GPU a kernel makes a parameter's update
    (``automoe.kernels.stochastic_adamw``), on the CPU plain torch: on one device the same numbers
    to the bit, given the same bias corrections, whose powers differ in the last bit between
    libraries.

    ``build_optimizer`` makes it, and its state.

    Args:
        groups: parameter groups, each with ``names``, the global names of its ``params`` in their
            order.
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
            pairs = zip(group["names"], group["params"], strict=True)
            if updated := [pair for pair in pairs if pair[1].grad is not None]:
                self._update(group, updated)

    def _update(self, group: dict[str, Any], updated: list[tuple[str, torch.Tensor]]) -> None:
        counts = [self.state[parameter]["step"] for _, parameter in updated]
        foreach_add_(counts, 1)
        # On the device, as the counts are: to know them, the host would have to wait.
        steps, (beta1, beta2) = torch.stack(counts).to(torch.float64), group["betas"]
        rates = (group["lr"] / (1 - beta1**steps)).to(torch.float32)
        second_scales = (1 / (1 - beta2**steps)).to(torch.float32)
        steps = steps.to(torch.int64)
        kept = 1 - group["lr"] * group["weight_decay"]
        for place, (name, parameter) in enumerate(updated):
            key = stream_key(f"rounding.{name}", self.seed)
            numbers = Numbers(
                steps, rates, second_scales, place, key, beta1, beta2, group["eps"], kept
            )
            if parameter.device.type == "cpu":
                update_in_torch(parameter, self.state[parameter], numbers)
            else:
                update_in_triton(parameter, self.state[parameter], numbers)


def update_in_triton(
    parameter: torch.Tensor, state: dict[str, torch.Tensor], numbers: Numbers
) -> None:
    """``update_in_torch`` of a parameter in bfloat16 or float32 in one kernel, on CUDA."""
    from automoe.kernels.stochastic_adamw import update_in_one_pass

    # At most three runs: an expert's down_proj is cut in two of its dims, by ep_shard and by etp.
    first_index, runs = index_runs(parameter)
    update_in_one_pass(local_tensors(parameter, state), first_index, runs, numbers)


def update_in_torch(
    parameter: torch.Tensor, state: dict[str, torch.Tensor], numbers: Numbers
) -> None:
    """Move ``parameter`` and its moments by its gradient; every operation's result is the float32
    nearest to it."""
    place, (beta1, beta2) = numbers.place, (numbers.beta1, numbers.beta2)
    key = bits_at(numbers.steps[place], numbers.key)
    values, grads, firsts, seconds = local_tensors(parameter, state)
    wide = torch.promote_types(values.dtype, torch.float32)
    for block, index in indexed_blocks(parameter):
        grad = grads[block].to(wide)
        first = (firsts[block].to(wide) * beta1).add_(grad * (1 - beta1))
        second = (seconds[block].to(wide) * beta2).add_((grad * grad).mul_(1 - beta2))
        # In double: on the CPU torch's root of a float32 is not always the nearest one.
        root = (second * numbers.second_scales[place]).to(torch.float64).sqrt_().to(wide)
        value = values[block].to(wide) * numbers.kept
        value -= first * numbers.rates[place] / root.add_(numbers.eps)
        # which nobody reads
        bits = bits_at(index, key) if torch.bfloat16 in (values.dtype, firsts.dtype) else index
        for stored, x, first_bit in (
            (values, value, 0),
            (firsts, first, 16),
            (seconds, second, 32),
        ):
            stored[block] = (
                round_stochastically(x, bits >> first_bit) if stored.dtype == torch.bfloat16 else x
            )


def local_tensors(parameter: torch.Tensor, state: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """This rank's parts of ``parameter``, its gradient and its two moments."""
    assert parameter.grad is not None
    tensors = (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])
    return [local_shard(tensor) for tensor in tensors]
