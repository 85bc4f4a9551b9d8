"""Low-rank adapters (LoRA, arXiv 2106.09685) of routed experts, as grouped products.

``x W.T`` of each expert becomes ``x W.T + scale (x A.T) B.T``. Gate and up share one A, so that the
pair has rank r both in a layout that keeps gate and up in one tensor and in one that keeps them
apart. Shapes: T rows to read from, R computed rows sorted by expert, E experts of this rank, H
hidden, I expert width, J = 2 I (gate, then up), r rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from automoe.comm.local_shard import global_offset, local_shard, take_over
from automoe.config.schema import LoraConfig
from automoe.kernels.activation import Activation, activation_gradients
from automoe.kernels.counter_random import bits_at, stream_key, uniform_from
from automoe.kernels.row_sums import sum_rows
from automoe.moe.expert_weights import ExpertWeights
from automoe.moe.experts import GroupedExperts
from automoe.moe.grouped_mm import grouped_mm, one_by_one, repeat_by_expert, zero_gradients
from automoe.quantize.packed import unpack

# a function with the signature of ``grouped_mm``
GroupedMM = Callable[[Tensor, Tensor, Tensor], Tensor]
# A [..., r, I] and B [..., O, r] of an adapter for this rank's shard of a weight, and their scale
Added = tuple[Tensor, Tensor, float]
# values of ``moe.experts``
PRODUCTS: dict[str, GroupedMM] = {"grouped_mm": grouped_mm, "loop": one_by_one}


class Adapter(nn.Module):
    """Parameters A... and B... of one adapter.

    The adapter's output is multiplied by ``scale``, alpha / rank. Dropout (arXiv 2404.09610) zeroes
    columns of A, that is input features, for a whole ``step``. A counter-based generator chooses
    the features, so the choice is equal on every mesh. An adapter does not know which token a
    routed row belongs to, so dropout does not differ between tokens.

    Args:
        name: full name in the model of the module that the adapter belongs to.
        seed: seed of initialisation and of dropout.
    """

    def __init__(self, name: str, lora: LoraConfig, seed: int) -> None:
        super().__init__()
        self.name = f"{name}.lora"
        self.seed = seed
        self.step = 0
        self.scale = lora.alpha / lora.rank
        self.dropout = lora.dropout

    @property
    def first_values(self) -> dict[str, str]:
        """Rules that make ``init.initialize`` leave every parameter to ``lora.fill_adapters``."""
        return {name: "kept" for name, _ in self.named_parameters(recurse=False)}

    def weight(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return this rank's shard of ``name`` in ``dtype``; in training, drop columns of A."""
        parameter = getattr(self, name)
        local = local_shard(parameter).to(dtype)
        if not (name.startswith("A") and self.dropout and self.training):
            return local
        first = global_offset(parameter)
        index = torch.arange(local.shape[-1], device=local.device) + first[-1]
        if local.dim() == 3:
            experts = torch.arange(local.shape[0], device=local.device) + first[0]
            index = (experts.unsqueeze(1) * parameter.shape[-1] + index).unsqueeze(1)
        chance = uniform_from(
            bits_at(index, stream_key(f"dropout.{self.name}.{name}.{self.step}", self.seed))
        )
        return local * ((chance >= self.dropout) / (1 - self.dropout)).to(dtype)


class ExpertLora(Adapter):
    """Adapters of a layer's routed experts.

    Gate and up have A13 [E, r, H] and B13 [E, 2, I, r], down has A2 [E, r, I] and B2 [E, H, r].
    Either pair may be missing.

    Args:
        shapes: shapes of the parameters that exist, by name.
        product: function that multiplies rows by their experts' matrices.
    """

    NAMES = ("A13", "B13", "A2", "B2")

    def __init__(
        self,
        name: str,
        lora: LoraConfig,
        seed: int,
        shapes: dict[str, tuple[int, ...]],
        product: GroupedMM,
    ) -> None:
        super().__init__(name, lora, seed)
        self.product = product
        for each in self.NAMES:
            self.register_parameter(
                each, nn.Parameter(torch.empty(shapes[each])) if each in shapes else None
            )

    def forward(
        self, x_TH, gather_idx_R, offsets_E, probs_R, weights: ExpertWeights, activation: Activation
    ) -> Tensor:
        """Compute the experts as an ``ExpertFn``; their weights and biases get no gradient."""
        a13, b13, a2, b2 = (
            None if getattr(self, name) is None else self.weight(name, x_TH.dtype)
            for name in self.NAMES
        )
        adapters = a13, None if b13 is None else b13.flatten(1, 2), a2, b2
        rows = x_TH, gather_idx_R, offsets_E, probs_R
        return _AdaptedExperts.apply(
            self.scale, activation, self.product, *rows, *weights.joined(), *adapters
        )


class LoRAExperts(GroupedExperts):
    """Experts that take the place of ``base``: frozen weights, which may be packed, and adapters.

    Args:
        lora: the adapters; their forward multiplies by the frozen weights as well.
    """

    def __init__(self, base: GroupedExperts, lora: ExpertLora) -> None:
        take_over(self, base)
        self.lora = lora

    def multiply(self, *args: Any) -> Tensor:
        return self.lora(*args)


class _AdaptedExperts(torch.autograd.Function):
    """``grouped_mm._GroupedExperts`` with adapters, and without gradients of the frozen weights.

    For the backward it keeps its arguments, gate and up [R, J], and x A13.T [R, r]. Packed weights
    are widened for each product.
    """

    @staticmethod
    def forward(ctx, scale: float, activation: Activation, mm: GroupedMM, *args):
        ctx.scale = scale
        ctx.activation = activation
        ctx.mm = mm
        x_TH, gather_idx_R, offsets_E, probs_R = args[:4]
        w13_EJH, w2_EHI, bias13_EJ, bias2_EH = args[4:8]
        a13_ErH, b13_EJr, a2_ErI, b2_EHr = args[8:]
        if gather_idx_R.shape[0] == 0:  # without tokens the backward still runs
            ctx.save_for_backward(*args, None, None)
            return x_TH.new_empty(0, x_TH.shape[1])
        rows_RH = x_TH.index_select(0, gather_idx_R)
        low_Rr = None
        gate_up_RJ = mm(rows_RH, unpack(w13_EJH, rows_RH.shape[1], x_TH.dtype).mT, offsets_E)
        if a13_ErH is not None:
            low_Rr = mm(rows_RH, a13_ErH.mT, offsets_E)
            gate_up_RJ.add_(mm(low_Rr, b13_EJr.mT, offsets_E), alpha=scale)
        if bias13_EJ is not None:
            gate_up_RJ += repeat_by_expert(bias13_EJ, offsets_E, gate_up_RJ.shape[0])
        ctx.save_for_backward(*args, gate_up_RJ, low_Rr)
        scale_R1 = probs_R.unsqueeze(1).to(x_TH.dtype)
        act_RI = activation(*gate_up_RJ.chunk(2, dim=-1)).mul_(scale_R1).contiguous()
        out_RH = mm(act_RI, unpack(w2_EHI, act_RI.shape[1], x_TH.dtype).mT, offsets_E)
        if a2_ErI is not None:
            out_RH.add_(mm(mm(act_RI, a2_ErI.mT, offsets_E), b2_EHr.mT, offsets_E), alpha=scale)
        if bias2_EH is not None:
            out_RH.addcmul_(repeat_by_expert(bias2_EH, offsets_E, out_RH.shape[0]), scale_R1)
        return out_RH

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out_RH):
        *args, gate_up_RJ, low_Rr = ctx.saved_tensors
        x_TH, gather_idx_R, offsets_E, probs_R = args[:4]
        w13_EJH, w2_EHI, _, bias2_EH = args[4:8]
        a13_ErH, b13_EJr, a2_ErI, b2_EHr = args[8:]
        mm = ctx.mm
        scale = ctx.scale
        if gate_up_RJ is None:
            return None, None, None, *zero_gradients(*args[:4], *[None] * 4, *args[8:])
        grad_out_RH = grad_out_RH.contiguous()  # grouped_mm refuses expanded gradients
        grad_act_RI = mm(
            grad_out_RH, unpack(w2_EHI, gate_up_RJ.shape[1] // 2, x_TH.dtype), offsets_E
        )
        if a2_ErI is not None:
            grad_low_Rr = mm(grad_out_RH, b2_EHr, offsets_E).mul_(scale)
            grad_act_RI += mm(grad_low_Rr, a2_ErI, offsets_E)

        act_RI, grad_gate_up_RJ, grad_probs_R = activation_gradients(
            ctx.activation, gate_up_RJ, probs_R, grad_act_RI
        )
        grad_a13 = grad_b13 = grad_a2 = grad_b2 = None
        if a2_ErI is not None:
            grad_a2 = mm(grad_low_Rr.mT, act_RI, offsets_E)
            grad_b2 = mm(grad_out_RH.mT, mm(act_RI, a2_ErI.mT, offsets_E), offsets_E).mul_(scale)
        del act_RI, grad_act_RI
        if bias2_EH is not None:
            bias_grad_RH = grad_out_RH * repeat_by_expert(bias2_EH, offsets_E, grad_out_RH.shape[0])
            grad_probs_R += bias_grad_RH.sum(-1, dtype=probs_R.dtype)
            del bias_grad_RH

        if a13_ErH is not None:
            grad_low_Rr = mm(grad_gate_up_RJ, b13_EJr, offsets_E).mul_(scale)
            grad_b13 = mm(grad_gate_up_RJ.mT, low_Rr, offsets_E).mul_(scale)
            grad_a13 = mm(grad_low_Rr.mT, x_TH.index_select(0, gather_idx_R), offsets_E)
        grad_x_TH = None
        if ctx.needs_input_grad[3]:  # False if no earlier layer is trained
            grad_rows_RH = mm(
                grad_gate_up_RJ, unpack(w13_EJH, x_TH.shape[1], x_TH.dtype), offsets_E
            )
            if a13_ErH is not None:
                grad_rows_RH += mm(grad_low_Rr, a13_ErH, offsets_E)
            grad_x_TH = sum_rows(grad_rows_RH, gather_idx_R, x_TH.shape[0])
        adapters = grad_a13, grad_b13, grad_a2, grad_b2
        return *[None] * 3, grad_x_TH, None, None, grad_probs_R, *[None] * 4, *adapters
