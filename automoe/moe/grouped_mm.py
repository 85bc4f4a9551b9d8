"""Experts as grouped matrix products, with a backward that keeps little and copies little.

Shapes: T rows to read from, R computed rows sorted by expert, E experts, H hidden, I expert width,
J = 2I (gate and up). For a single product: N output and K input features.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from automoe.kernels.activation import SWIGLU, Activation, activation_gradients
from automoe.kernels.row_sums import sum_rows
from automoe.moe.expert_weights import ExpertWeights
from automoe.moe.gradient_sums import GradientSums, read_later

Scales = Tensor | None


class GroupedProducts:
    """The three products (forward, two gradients) of the stacked weight [E, N, K] of all experts.

    The base class multiplies by ``grouped_mm``. ``offsets`` [E] int32 holds the end of each
    expert's rows. A subclass may give each operand scales, which are computed once and passed to
    every product of the operand. Computing scales may be a collective, so a rank without rows
    computes them too; the products are not collective.
    """

    def scales(self, x_RK, w_ENK, offsets_E) -> tuple[Scales, Scales]:
        """Return the scales of the rows and of the weight."""
        return None, None

    def grad_scales(self, grad_RN, offsets_E) -> Scales:
        """Return the scales of the output's gradient."""
        return None

    def output(self, x_RK, w_ENK, offsets_E, x_scales: Scales, w_scales: Scales) -> Tensor:
        """Return each row times its expert's transposed weight: [R, N]."""
        return grouped_mm(x_RK, w_ENK.transpose(1, 2), offsets_E)

    def grad_input(
        self, grad_RN, w_ENK, offsets_E, grad_scales: Scales, w_scales: Scales
    ) -> Tensor:
        """Return each gradient row times its expert's weight: [R, K]."""
        return grouped_mm(grad_RN, w_ENK, offsets_E)

    def grad_weight(
        self, grad_RN, x_RK, offsets_E, grad_scales: Scales, x_scales: Scales
    ) -> Tensor:
        """Return grad.T times x over each expert's rows: [E, N, K]."""
        return grouped_mm(grad_RN.transpose(0, 1), x_RK, offsets_E)


UNSCALED = GroupedProducts()


class _GroupedExperts(torch.autograd.Function):
    """Experts on gathered rows: probs * (down(activation(gate, up)) + down_proj_bias).

    Gate and up are one dim J here. For the backward it saves its arguments, and gate and up [R, J].
    The backward gathers the rows [R, H] and computes the activation [R, I] again.

    With ``sums`` the matrices are detached, and their gradients are added to ``sums`` instead of
    returned to autograd. ``anchor`` then makes autograd run the backward even if no other input
    needs a gradient.
    """

    @staticmethod
    def forward(
        ctx,
        activation: Activation,
        up: GroupedProducts,
        down: GroupedProducts,
        sums: GradientSums | None,
        anchor,
        *args,
    ):
        ctx.activation = activation
        ctx.products = (up, down)
        ctx.sums = sums
        x_TH, gather_idx_R, offsets_E, probs_R = args[:4]
        gate_up_proj_EJH, down_proj_EHI, gate_up_proj_bias_EJ, down_proj_bias_EH = args[4:]
        if sums is not None:
            ctx.ends = read_later(offsets_E)
        rows_RH = x_TH.index_select(0, gather_idx_R)
        x_scales, up_scales = up.scales(rows_RH, gate_up_proj_EJH, offsets_E)
        if gather_idx_R.shape[0] == 0:
            # This rank has no token. Kernels need not accept empty operands, but the backward still
            # runs.
            act_scales, down_scales = down.scales(
                x_TH.new_empty(0, down_proj_EHI.shape[-1]), down_proj_EHI, offsets_E
            )
            ctx.save_for_backward(
                *args, x_TH.new_empty(0), x_scales, up_scales, act_scales, down_scales
            )
            return x_TH.new_empty(0, x_TH.shape[1])
        gate_up_RJ = up.output(rows_RH, gate_up_proj_EJH, offsets_E, x_scales, up_scales)
        del rows_RH
        if gate_up_proj_bias_EJ is not None:
            gate_up_RJ += repeat_by_expert(gate_up_proj_bias_EJ, offsets_E, gate_up_RJ.shape[0])
        gate_RI, up_RI = gate_up_RJ.chunk(2, dim=-1)
        scale_R1 = probs_R.unsqueeze(1).to(x_TH.dtype)
        act_RI = activation(gate_RI, up_RI).mul_(scale_R1).contiguous()
        act_scales, down_scales = down.scales(act_RI, down_proj_EHI, offsets_E)
        ctx.save_for_backward(*args, gate_up_RJ, x_scales, up_scales, act_scales, down_scales)
        out_RH = down.output(act_RI, down_proj_EHI, offsets_E, act_scales, down_scales)
        if down_proj_bias_EH is not None:
            out_RH.addcmul_(
                repeat_by_expert(down_proj_bias_EH, offsets_E, out_RH.shape[0]), scale_R1
            )
        return out_RH

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out_RH):
        *args, gate_up_RJ, x_scales, up_scales, act_scales, down_scales = ctx.saved_tensors
        x_TH, gather_idx_R, offsets_E, probs_R = args[:4]
        gate_up_proj_EJH, down_proj_EHI, gate_up_proj_bias_EJ, down_proj_bias_EH = args[4:]
        up, down = ctx.products
        grad_out_RH = grad_out_RH.contiguous()  # grouped_mm refuses expanded gradients
        grad_scales = down.grad_scales(grad_out_RH, offsets_E)
        if gather_idx_R.shape[0] == 0:
            up.grad_scales(x_TH.new_empty(0, gate_up_proj_EJH.shape[1]), offsets_E)
            if ctx.sums is not None:  # all ranks must reduce the same gradients
                ctx.sums.find("gate_up_proj"), ctx.sums.find("down_proj")
                args[4:6] = None, None
            return *[None] * 5, *zero_gradients(*args)
        scale_R1 = probs_R.unsqueeze(1).to(x_TH.dtype)

        grad_act_RI = down.grad_input(
            grad_out_RH, down_proj_EHI, offsets_E, grad_scales, down_scales
        )
        act_RI, grad_gate_up_RJ, grad_probs_R = activation_gradients(
            ctx.activation, gate_up_RJ, probs_R, grad_act_RI
        )
        grad_w_gate_up_EJH = grad_w_down_EHI = None  # frozen weights have none
        sums = ctx.sums
        # If tokens need no gradient, none is sent that a deferred product could overlap with.
        travels = ctx.needs_input_grad[5]
        if sums is not None:
            sums.add("down_proj", grad_out_RH, act_RI, None, ctx.ends, travels)
        elif ctx.needs_input_grad[10]:
            grad_w_down_EHI = down.grad_weight(
                grad_out_RH, act_RI, offsets_E, grad_scales, act_scales
            )
        del act_RI, grad_act_RI
        grad_b_gate_up_EJ = grad_b_down_EH = None
        if down_proj_bias_EH is not None:
            grad_b_down_EH = sum_by_expert(grad_out_RH * scale_R1, offsets_E)
            bias_grad_RH = grad_out_RH * repeat_by_expert(
                down_proj_bias_EH, offsets_E, grad_out_RH.shape[0]
            )
            grad_probs_R += bias_grad_RH.sum(-1, dtype=probs_R.dtype)
            del bias_grad_RH
        if gate_up_proj_bias_EJ is not None:
            grad_b_gate_up_EJ = sum_by_expert(grad_gate_up_RJ, offsets_E)

        grad_scales = up.grad_scales(grad_gate_up_RJ, offsets_E)
        if sums is not None:
            sums.add("gate_up_proj", grad_gate_up_RJ, x_TH, gather_idx_R, ctx.ends, travels)
        elif ctx.needs_input_grad[9]:
            rows_RH = x_TH.index_select(0, gather_idx_R)
            grad_w_gate_up_EJH = up.grad_weight(
                grad_gate_up_RJ, rows_RH, offsets_E, grad_scales, x_scales
            )
            del rows_RH
        grad_rows_RH = up.grad_input(
            grad_gate_up_RJ, gate_up_proj_EJH, offsets_E, grad_scales, up_scales
        )
        grad_x_TH = sum_rows(grad_rows_RH, gather_idx_R, x_TH.shape[0])
        grad_weights = grad_w_gate_up_EJH, grad_w_down_EHI, grad_b_gate_up_EJ, grad_b_down_EH
        gradients = grad_x_TH, None, None, grad_probs_R, *grad_weights
        return *[None] * 5, *gradients


def zero_gradients(x, gather_idx, offsets, probs, *weights: Tensor | None) -> list[Tensor | None]:
    """Return zero gradients of an expert function that computed no row.

    All ranks must reduce the same gradients, so a rank without rows contributes zeros.
    """
    grad_x, *others = (
        None if tensor is None else torch.zeros_like(tensor) for tensor in (x, probs, *weights)
    )
    return [grad_x, None, None, *others]


def repeat_by_expert(bias_EN: Tensor, offsets_E: Tensor, num_rows: int) -> Tensor:
    """Repeat the entries [E, N] for each row of their expert: [R, N].

    Rows past the last offset get the last expert's entry.
    """
    row_R = torch.arange(num_rows, dtype=offsets_E.dtype, device=offsets_E.device)
    expert_R = torch.searchsorted(offsets_E, row_R, right=True).clamp_(max=bias_EN.shape[0] - 1)
    return bias_EN.index_select(0, expert_R)


def sum_by_expert(rows_RN: Tensor, offsets_E: Tensor) -> Tensor:
    """Sum rows [R, N] by expert into [E, N], without the rows past the last offset.

    The sum is a product with ones: accumulated wide, in a fixed order, without atomics.
    """
    step = 16 // rows_RN.element_size()  # grouped_mm takes multiples of 16 bytes
    num_cols = rows_RN.shape[1]
    if missing := -num_cols % step:  # padding copies, so it is done only if needed
        rows_RN = F.pad(rows_RN, (0, missing))
    return grouped_mm(rows_RN.transpose(0, 1), rows_RN.new_ones(rows_RN.shape[0], step), offsets_E)[
        :, :num_cols, 0
    ]


def grouped_mm(a: Tensor, b: Tensor, offsets_E: Tensor) -> Tensor:
    """Multiply as ``torch.nn.functional.grouped_mm``; in float64 one product after the other.

    a [R, K] and b [E, K, N] give [R, N], whose rows past the last offset may hold anything.
    a [M, R] and b [R, N] give [E, M, N].
    """
    return (
        one_by_one(a, b, offsets_E)
        if a.dtype == torch.float64
        else F.grouped_mm(a, b, offs=offsets_E)
    )


def one_by_one(a: Tensor, b: Tensor, offsets_E: Tensor) -> Tensor:
    """Multiply as ``grouped_mm``, one expert after the other, for any dtype and any width."""
    ends = offsets_E.tolist()
    spans = [slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    if b.dim() == 2:
        return torch.stack([a[:, span] @ b[span] for span in spans])
    out = a.new_empty(a.shape[0], b.shape[-1])
    for span, each in zip(spans, b, strict=True):
        out[span] = a[span] @ each
    return out


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
) -> Tensor:
    """Compute the experts with grouped products, in any dtype, on CPU or GPU.

    Arguments and result are those of ``automoe.moe.experts``; ``up`` and ``down`` compute the
    products of gate_up_proj and of down_proj. ``sums`` receives the gradients of both matrices;
    None: autograd returns them. Rows past the last offset are not computed: their output and their
    terms in the gradients of x and probs are uninitialised memory.
    """
    joined = weights.joined()
    anchor = None
    if sums is not None:
        matrices = joined.gate_up_proj, joined.down_proj
        joined = joined._replace(gate_up_proj=matrices[0].detach(), down_proj=matrices[1].detach())
        anchor = x_TH.new_empty(0).requires_grad_(any(matrix.requires_grad for matrix in matrices))
    return _GroupedExperts.apply(
        activation, up, down, sums, anchor, x_TH, gather_idx_R, offsets_E, probs_R, *joined
    )
