"""Experts as grouped matrix products, with a backward that keeps little and copies little.

Shapes: T rows to read from, R computed rows sorted by expert, E experts, H hidden, I expert width,
J = 2I (gate and up). For a single product: N output and K input features.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from automoe.kernels.activation import SWIGLU, Activation, activation_gradients
from automoe.kernels.row_sums import sum_rows
from automoe.moe.expert_weights import ExpertWeights
from automoe.moe.gradient_sums import GradientSums, read_later
from automoe.quantize.packed import unpack

QuantScales = Tensor | None  # scales of a quantized operand; None: it is not quantized


def grouped_mm(a: Tensor, b: Tensor, offsets_E: Tensor) -> Tensor:
    """Return the matrix products of E groups of rows (``torch.nn.functional.grouped_mm``).

    a [R, K] and b [E, K, N] give [R, N], whose rows past the last offset may hold anything. a [M,
    R] and b [R, N] give [E, M, N]. ``offsets`` are the ends of the E groups along R. Float64 takes
    one product per group. R may be 0, which torch's kernels need not accept.
    """
    if not a.numel():
        sizes = (len(offsets_E), len(a)) if b.dim() == 2 else (len(a),)
        return a.new_zeros(*sizes, b.shape[-1])
    if a.dtype == torch.float64:
        return one_by_one(a, b, offsets_E)
    return F.grouped_mm(a, b, offs=offsets_E)


def one_by_one(a: Tensor, b: Tensor, offsets_E: Tensor) -> Tensor:
    """Return ``grouped_mm`` of the arguments, one expert after the other, for any dtype and width.

    a [R, K] times b [E, K, N] gives [R, N]; a [M, R] times b [R, N] gives [E, M, N]. ``offsets``
    are the ends of the experts along R.
    """
    ends = offsets_E.tolist()
    spans = [slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    if b.dim() == 2:
        return torch.stack([a[:, span] @ b[span] for span in spans])
    out = a.new_empty(a.shape[0], b.shape[-1])
    for span, each in zip(spans, b, strict=True):
        out[span] = a[span] @ each
    return out


class GroupedProducts:
    """The three products (forward, two gradients) of the stacked weight [E, N, K] of all experts.

    The base class multiplies by ``mm``, a function with the signature of ``grouped_mm``.
    ``offsets`` [E] int32 holds the end of each expert's rows (one row: one token at one of its
    experts). A subclass may give each operand scales, which are computed once and passed to every
    product of the operand. Computing scales may be a collective, so a rank without rows computes
    them too; the products are not collective.
    """

    mm = staticmethod(grouped_mm)

    def scales(self, x_RK, w_ENK, offsets_E) -> tuple[QuantScales, QuantScales]:
        """Return the quantization scales of x and of the weight: both None, as nothing is quantized here.

        ``offsets_E`` are the ends of the experts' rows.
        """
        return None, None

    def grad_scales(self, grad_RN, offsets_E) -> QuantScales:
        """Return the scales of the output's gradient: None, as nothing is quantized here.

        ``offsets_E`` are the ends of the experts' rows.
        """
        return None

    def output(
        self, x_RK, w_ENK, offsets_E, x_scales: QuantScales, w_scales: QuantScales
    ) -> Tensor:
        """Return each row x times its expert's transposed weight: [R, N].

        ``offsets_E`` are the ends of the experts' rows, ``x_scales`` and ``w_scales`` the two
        results of ``self.scales(x_RK, w_ENK, offsets_E)``.
        """
        return self.mm(x_RK, w_ENK.transpose(1, 2), offsets_E)

    def grad_input(
        self, grad_RN, w_ENK, offsets_E, grad_scales: QuantScales, w_scales: QuantScales
    ) -> Tensor:
        """Return each gradient row times its expert's weight: [R, K].

        ``offsets_E`` are the ends of the experts' rows, ``grad_scales`` the result of
        ``self.grad_scales``, ``w_scales`` the second result of ``self.scales``.
        """
        return self.mm(grad_RN, w_ENK, offsets_E)

    def grad_weight(
        self, grad_RN, x_RK, offsets_E, grad_scales: QuantScales, x_scales: QuantScales
    ) -> Tensor:
        """Return grad.T times x over each expert's rows: [E, N, K].

        ``offsets_E`` are the ends of the experts' rows, ``grad_scales`` the result of
        ``self.grad_scales``, ``x_scales`` the first result of ``self.scales``.
        """
        return self.mm(grad_RN.transpose(0, 1), x_RK, offsets_E)


class LoopProducts(GroupedProducts):
    """The products (forward, two gradients) of all experts' weight, one expert after the other.

    Operands may have any dtype.
    """

    mm = staticmethod(one_by_one)


UNSCALED = GroupedProducts()


# Tensor arguments of ``_GroupedExperts``, or for each of them whether a gradient is needed, or the
# gradient. A and B are the matrices of a LoRA adapter.
_Tensors = namedtuple(
    "_Tensors",
    "x_TH gather_idx_R offsets_E probs_R gate_up_EJH down_EHI gate_up_bias_EJ down_bias_EH "
    "gate_up_A_ErH gate_up_B_EJr down_A_ErI down_B_EHr",
    defaults=[None] * 12,
)


class _Options(NamedTuple):
    """Arguments of the autograd function ``_GroupedExperts`` that are not tensors.

    Attributes:
        activation: function of gate and up.
        up, down: objects that multiply by gate_up_proj and by down_proj, in forward and backward.
        sums: accumulator to which the backward pass adds both matrices' gradients, in place of
            returning them; None: autograd returns them.
        lora_scale: factor of the adapters' outputs.
    """

    activation: Activation
    up: GroupedProducts
    down: GroupedProducts
    sums: GradientSums | None
    lora_scale: float


class _GroupedExperts(torch.autograd.Function):
    """Autograd function of experts: probs * (down(activation(gate, up)) + down_proj_bias).

    It runs on R rows gathered from tokens. Gate and up are one dim J here. For the backward it
    saves its arguments, gate and up [R, J], and with an adapter x A.T [R, r]. The backward gathers
    the rows [R, H] and computes the activation [R, I] again. Quantized weights are widened for each
    product.

    With ``sums`` the matrices are detached, and their gradients are added to ``sums`` instead of
    returned to autograd. The input ``anchor``, a tensor that requires a gradient, then makes
    autograd run the backward even if no other input needs a gradient. Adapters are multiplied by
    ``up.mm``, and their outputs by ``lora_scale``.
    Names that end in ``_scales`` are quantization scales of the operand before it.
    """

    @staticmethod
    def forward(ctx, options: _Options, anchor, *tensors):
        ctx.options = options
        activation, up, down, sums, lora_scale = options
        args = _Tensors(*tensors)
        offsets_E = args.offsets_E
        if sums is not None:
            ctx.ends = read_later(offsets_E)
        rows_RH = args.x_TH.index_select(0, args.gather_idx_R)
        x_scales, gate_up_scales = up.scales(rows_RH, args.gate_up_EJH, offsets_E)
        low_Rr = None
        wide_EJH = unpack(args.gate_up_EJH, rows_RH.shape[1], rows_RH.dtype)
        gate_up_RJ = up.output(rows_RH, wide_EJH, offsets_E, x_scales, gate_up_scales)
        del wide_EJH
        if args.gate_up_A_ErH is not None:
            low_Rr = up.mm(rows_RH, args.gate_up_A_ErH.mT, offsets_E)
            gate_up_RJ.add_(up.mm(low_Rr, args.gate_up_B_EJr.mT, offsets_E), alpha=lora_scale)
        del rows_RH
        if args.gate_up_bias_EJ is not None:
            gate_up_RJ += repeat_by_expert(args.gate_up_bias_EJ, offsets_E, gate_up_RJ.shape[0])
        gate_RI, up_RI = gate_up_RJ.chunk(2, dim=-1)
        probs_R1 = args.probs_R.unsqueeze(1).to(args.x_TH.dtype)
        act_RI = activation(gate_RI, up_RI).mul_(probs_R1).contiguous()
        act_scales, down_scales = down.scales(act_RI, args.down_EHI, offsets_E)
        scales = x_scales, gate_up_scales, act_scales, down_scales
        ctx.save_for_backward(*args, gate_up_RJ, low_Rr, *scales)
        wide_EHI = unpack(args.down_EHI, act_RI.shape[1], args.x_TH.dtype)
        out_RH = down.output(act_RI, wide_EHI, offsets_E, act_scales, down_scales)
        if args.down_A_ErI is not None:
            low_act_Rr = up.mm(act_RI, args.down_A_ErI.mT, offsets_E)
            out_RH.add_(up.mm(low_act_Rr, args.down_B_EHr.mT, offsets_E), alpha=lora_scale)
        if args.down_bias_EH is not None:
            out_RH.addcmul_(
                repeat_by_expert(args.down_bias_EH, offsets_E, out_RH.shape[0]), probs_R1
            )
        return out_RH

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out_RH):
        *tensors, gate_up_RJ, low_Rr, x_scales, gate_up_scales, act_scales, down_scales = (
            ctx.saved_tensors
        )
        args = _Tensors(*tensors)
        # False for frozen weights, and for x if no earlier layer is trained
        needs = _Tensors(*ctx.needs_input_grad[2:])
        offsets_E, hidden, dtype = args.offsets_E, args.x_TH.shape[1], args.x_TH.dtype
        activation, up, down, sums, lora_scale = ctx.options
        mm = up.mm
        grads: dict[str, Tensor] = {}
        grad_out_RH = grad_out_RH.contiguous()  # grouped_mm refuses expanded gradients
        grad_scales = down.grad_scales(grad_out_RH, offsets_E)

        wide_EHI = unpack(args.down_EHI, gate_up_RJ.shape[1] // 2, dtype)
        grad_act_RI = down.grad_input(grad_out_RH, wide_EHI, offsets_E, grad_scales, down_scales)
        del wide_EHI
        if args.down_A_ErI is not None:
            grad_low_act_Rr = mm(grad_out_RH, args.down_B_EHr, offsets_E).mul_(lora_scale)
            grad_act_RI += mm(grad_low_act_Rr, args.down_A_ErI, offsets_E)
        act_RI, grad_gate_up_RJ, grad_probs_R = activation_gradients(
            activation, gate_up_RJ, args.probs_R, grad_act_RI
        )
        # If tokens need no gradient, none is sent that a deferred product could overlap with.
        if sums is not None:
            sums.add("down_proj", grad_out_RH, act_RI, None, ctx.ends, needs.x_TH)
        elif needs.down_EHI:
            grads["down_EHI"] = down.grad_weight(
                grad_out_RH, act_RI, offsets_E, grad_scales, act_scales
            )
        if args.down_A_ErI is not None:
            grads["down_A_ErI"] = mm(grad_low_act_Rr.mT, act_RI, offsets_E)
            low_act_Rr = mm(act_RI, args.down_A_ErI.mT, offsets_E)
            grads["down_B_EHr"] = mm(grad_out_RH.mT, low_act_Rr, offsets_E).mul_(lora_scale)
        del act_RI, grad_act_RI
        if args.down_bias_EH is not None:
            if needs.down_bias_EH:
                probs_R1 = args.probs_R.unsqueeze(1).to(dtype)
                grads["down_bias_EH"] = sum_by_expert(grad_out_RH * probs_R1, offsets_E)
            bias_grad_RH = grad_out_RH * repeat_by_expert(
                args.down_bias_EH, offsets_E, grad_out_RH.shape[0]
            )
            grad_probs_R += bias_grad_RH.sum(-1, dtype=args.probs_R.dtype)
            del bias_grad_RH
        if needs.gate_up_bias_EJ:
            grads["gate_up_bias_EJ"] = sum_by_expert(grad_gate_up_RJ, offsets_E)

        grad_scales = up.grad_scales(grad_gate_up_RJ, offsets_E)
        if args.gate_up_A_ErH is not None:
            grad_low_Rr = mm(grad_gate_up_RJ, args.gate_up_B_EJr, offsets_E).mul_(lora_scale)
            grads["gate_up_B_EJr"] = mm(grad_gate_up_RJ.mT, low_Rr, offsets_E).mul_(lora_scale)
            rows_RH = args.x_TH.index_select(0, args.gather_idx_R)
            grads["gate_up_A_ErH"] = mm(grad_low_Rr.mT, rows_RH, offsets_E)
            del rows_RH
        if sums is not None:
            rows = args.x_TH, args.gather_idx_R
            sums.add("gate_up_proj", grad_gate_up_RJ, *rows, ctx.ends, needs.x_TH)
        elif needs.gate_up_EJH:
            rows_RH = args.x_TH.index_select(0, args.gather_idx_R)
            grads["gate_up_EJH"] = up.grad_weight(
                grad_gate_up_RJ, rows_RH, offsets_E, grad_scales, x_scales
            )
            del rows_RH
        if needs.x_TH:
            wide_EJH = unpack(args.gate_up_EJH, hidden, dtype)
            grad_rows_RH = up.grad_input(
                grad_gate_up_RJ, wide_EJH, offsets_E, grad_scales, gate_up_scales
            )
            if args.gate_up_A_ErH is not None:
                grad_rows_RH += mm(grad_low_Rr, args.gate_up_A_ErH, offsets_E)
            grads["x_TH"] = sum_rows(grad_rows_RH, args.gather_idx_R, args.x_TH.shape[0])
        return None, None, *_Tensors(**grads, probs_R=grad_probs_R)


def repeat_by_expert(bias_EN: Tensor, offsets_E: Tensor, num_rows: int) -> Tensor:
    """Repeat the entries [E, N] of experts for each of their rows, R = ``num_rows``: [R, N].

    ``offsets_E`` are the ends of the experts' rows. Rows past the last get the last expert's entry.
    """
    row_R = torch.arange(num_rows, dtype=offsets_E.dtype, device=offsets_E.device)
    expert_R = torch.searchsorted(offsets_E, row_R, right=True).clamp_(max=bias_EN.shape[0] - 1)
    return bias_EN.index_select(0, expert_R)


def sum_by_expert(rows_RN: Tensor, offsets_E: Tensor) -> Tensor:
    """Sum rows [R, N], sorted by expert, into [E, N]; ``offsets_E`` are the ends of experts' rows.

    Rows past the last offset are left out.

    The sum is a product with ones: accumulated wide, in a fixed order, without atomics.
    """
    step = 16 // rows_RN.element_size()  # grouped_mm takes multiples of 16 bytes
    num_cols = rows_RN.shape[1]
    if missing := -num_cols % step:  # padding copies, so it is done only if needed
        rows_RN = F.pad(rows_RN, (0, missing))
    return grouped_mm(rows_RN.transpose(0, 1), rows_RN.new_ones(rows_RN.shape[0], step), offsets_E)[
        :, :num_cols, 0
    ]


def grouped_mm_experts(
    x_TH,
    gather_idx_R,
    offsets_E,
    probs_R,
    weights: ExpertWeights,
    activation: Activation = SWIGLU,
    up: GroupedProducts = UNSCALED,
    down: GroupedProducts = UNSCALED,
    sums: GradientSums | None = None,
    adapters: Sequence[Tensor | None] = (None,) * 4,
    lora_scale: float = 1.0,
) -> Tensor:
    """Return probs * expert(x) of R rows, sorted by expert: [R, H], by grouped products on CPU or GPU.

    Rows past the last offset are not computed: their output and their terms in the gradients of x
    and probs are uninitialised memory.

    Args:
        x_TH: rows to read from, such as a rank's tokens.
        gather_idx_R: row of x that each of the R computed rows reads.
        offsets_E: int32, end of each expert's rows among the R.
        probs_R: routing weight of each computed row.
        weights: matrices and biases of this rank's experts.
        activation: function of gate and up.
        up, down: objects that multiply by gate_up_proj and by down_proj, in forward and backward.
        sums: accumulator to which the backward pass adds both matrices' gradients, in place of
            returning them; None: autograd returns them.
        adapters: A [E, r, H] and B [E, J = 2 I, r] of gate_up_proj, A [E, r, I] and B [E, H, r] of
            down_proj, or None; ``lora_scale`` multiplies their outputs.
    """
    joined = weights.joined()
    anchor = None
    if sums is not None:
        matrices = joined.gate_up_proj, joined.down_proj
        joined = joined._replace(gate_up_proj=matrices[0].detach(), down_proj=matrices[1].detach())
        anchor = x_TH.new_empty(0).requires_grad_(any(matrix.requires_grad for matrix in matrices))
    rows = x_TH, gather_idx_R, offsets_E, probs_R
    options = _Options(activation, up, down, sums, lora_scale)
    return _GroupedExperts.apply(options, anchor, *rows, *joined, *adapters)
