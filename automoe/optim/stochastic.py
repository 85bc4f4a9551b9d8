"""AdamW with stochastic rounding, for bfloat16 parameters that have no float32 master copy.

Rounding to nearest would lose every update far below half a unit in the last place. Stochastic
rounding rounds up with a probability equal to the update's share of a unit, so the mean movement of
the parameter is exact (arXiv 1502.02551, section 3; for training in bfloat16, arXiv 2010.06192).
Random bits come from a counter-based generator over the parameter's name, its step and the
element's global index, so rounding is the same on every mesh and in a run resumed after a kill.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from automoe.comm.local_shard import local_shard
from automoe.interop.torch_private import foreach_add_
from automoe.kernels.counter_random import bits_at, stream_key
from automoe.model.init import index_runs, indexed_blocks

_DROPPED_BITS = 16  # bfloat16 drops this many low bits of a float32.


def round_stochastically(x: Tensor, bits: Tensor) -> Tensor:
    """Round float32 ``x`` to one of its two bfloat16 neighbours at random, with expected value x.

    Numbers that are not finite are converted as they are.

    Args:
        x: float32 of any shape.
        bits: random int64 in the shape of x; the lowest 16 bits are used.
    """
    dropped = (1 << _DROPPED_BITS) - 1
    # A float is stored as sign and magnitude, so the addition raises the magnitude: random bits
    # added to the dropped bits may carry into the kept ones.
    raised = (x.view(torch.int32) + (bits & dropped).to(torch.int32)) & ~dropped
    return torch.where(x.isfinite(), raised.view(torch.float32), x).to(torch.bfloat16)


@dataclass(frozen=True)
class AdamWScalars:
    """Scalars of one parameter's AdamW update; P is the number of updated parameters in its group.

    Attributes:
        steps: int64 [P] on the device, the number of this step for each parameter.
        rates: float32 [P] on the device, ``lr / (1 - beta1**step)``: the learning rate times the
            bias correction of the first moment.
        second_scales: float32 [P] on the device, ``1 / (1 - beta2**step)``: the bias correction of
            the second moment.
        place: index of this parameter in ``steps``, ``rates`` and ``second_scales``.
        key: int64 key of the parameter's stream of random numbers, from its name and the seed.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: term added to the root of the second moment.
        decay: factor of weight decay on the parameter, ``1 - lr * weight_decay``.
    """

    steps: Tensor
    rates: Tensor
    second_scales: Tensor
    place: int
    key: int
    beta1: float
    beta2: float
    eps: float
    decay: float


class StochasticAdamW(torch.optim.Optimizer):
    """AdamW (arXiv 1711.05101) in float32 with stochastic rounding of bfloat16 results.

    Parameters and moments in bfloat16 are rounded stochastically; wider ones are stored as
    computed. On a GPU one kernel updates a parameter (``automoe.kernels.stochastic_adamw``), on the
    CPU plain torch does. Both give the same bits on one device if they are given the same bias
    corrections, whose powers differ in the last bit between libraries.

    ``build_optimizer`` creates this optimizer and its state.

    Args:
        groups: parameter groups, each with ``names``, the global names of its ``params`` in their
            order.
        lr: learning rate.
        betas: decays of the first and second moment.
        eps: term added to the root of the second moment.
        seed: seed of stochastic rounding.
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
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            pairs = zip(group["names"], group["params"], strict=True)
            if updated := [pair for pair in pairs if pair[1].grad is not None]:
                self._update(group, updated)

    def _update(self, group: dict[str, Any], updated: list[tuple[str, Tensor]]) -> None:
        counts = [self.state[parameter]["step"] for _, parameter in updated]
        foreach_add_(counts, 1)
        # Counts stay on the device: the host would have to wait to read them.
        steps, (beta1, beta2) = torch.stack(counts).to(torch.float64), group["betas"]
        rates = (group["lr"] / (1 - beta1**steps)).to(torch.float32)
        second_scales = (1 / (1 - beta2**steps)).to(torch.float32)
        steps = steps.to(torch.int64)
        decay = 1 - group["lr"] * group["weight_decay"]
        for place, (name, parameter) in enumerate(updated):
            key = stream_key(f"rounding.{name}", self.seed)
            numbers = AdamWScalars(
                steps, rates, second_scales, place, key, beta1, beta2, group["eps"], decay
            )
            if parameter.device.type == "cpu":
                update_in_torch(parameter, self.state[parameter], numbers)
            else:
                update_in_triton(parameter, self.state[parameter], numbers)


def update_in_triton(parameter: Tensor, state: dict[str, Tensor], numbers: AdamWScalars) -> None:
    """Update ``parameter`` and its moments by AdamW, in place, from its gradient, in one CUDA kernel.

    Each of these tensors is bfloat16 or float32.

    Args:
        state: the moments ``exp_avg`` and ``exp_avg_sq``.
        numbers: learning rate and other scalars of the update.
    """
    from automoe.kernels.stochastic_adamw import update_in_one_pass

    # There are at most three runs of indices: ep_shard and etp cut two dims of an expert's
    # down_proj.
    first_index, runs = index_runs(parameter)
    update_in_one_pass(local_tensors(parameter, state), first_index, runs, numbers)


def update_in_torch(parameter: Tensor, state: dict[str, Tensor], numbers: AdamWScalars) -> None:
    """Update ``parameter`` and its moments by AdamW, in place, from its gradient.

    Every operation returns the float32 nearest to its exact result, so a kernel can reproduce it.

    Args:
        state: the moments ``exp_avg`` and ``exp_avg_sq``.
        numbers: learning rate and other scalars of the update.
    """
    place, (beta1, beta2) = numbers.place, (numbers.beta1, numbers.beta2)
    key = bits_at(numbers.steps[place], numbers.key)
    values, grads, firsts, seconds = local_tensors(parameter, state)
    wide = torch.promote_types(values.dtype, torch.float32)
    for block, index in indexed_blocks(parameter):
        grad = grads[block].to(wide)
        first = (firsts[block].to(wide) * beta1).add_(grad * (1 - beta1))
        second = (seconds[block].to(wide) * beta2).add_((grad * grad).mul_(1 - beta2))
        # The root is taken in float64: on the CPU torch's float32 root is not always the nearest.
        root = (second * numbers.second_scales[place]).to(torch.float64).sqrt_().to(wide)
        value = values[block].to(wide) * numbers.decay
        value -= first * numbers.rates[place] / root.add_(numbers.eps)
        # Without a bfloat16 result no random bits are read, and any tensor will do.
        bits = bits_at(index, key) if torch.bfloat16 in (values.dtype, firsts.dtype) else index
        for stored, x, first_bit in (
            (values, value, 0),
            (firsts, first, 16),
            (seconds, second, 32),
        ):
            stored[block] = (
                round_stochastically(x, bits >> first_bit) if stored.dtype == torch.bfloat16 else x
            )


def local_tensors(parameter: Tensor, state: dict[str, Tensor]) -> list[Tensor]:
    """Return this rank's shards of parameter, gradient, and ``exp_avg`` and ``exp_avg_sq`` of ``state``."""
    assert parameter.grad is not None
    tensors = (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])
    return [local_shard(tensor) for tensor in tensors]
