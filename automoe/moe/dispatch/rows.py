"""All-to-all of tokens' hidden states together with metadata of each, in one exchange.

A row is a copy of one token's hidden state on its way to one rank. Its metadata are a few numbers:
the routing weight, and for the hierarchical dispatcher expert ids. A buffer consists of lines as wide as
a row, which hold rows or metadata; ``Layout`` shows an example.

Rows thus keep their width and alignment, rows and metadata are separated without a copy, float32
routing weights beside bfloat16 rows lose no bit, and the gradient of the metadata comes back the
same way. If the group sends rows in 8 bits, lines are encoded rows (``automoe.moe.dispatch.wire``),
and gradients come back in as many lines of x's dtype.

Shapes: T tokens to read from, M rows sent, R rows received, B lines of a buffer, W int64 of an
encoded line, H hidden, C metadata per row, P ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from automoe.config.rules_kernels import wire_row_bytes
from automoe.kernels.row_sums import sum_rows
from automoe.moe.dispatch.base import DispatchGroup, RunExperts, group_ends, regroup_by_expert
from automoe.moe.dispatch.wire import decode_rows, encode_rows, keep_encoded


class Layout:
    """Layout of a send or receive buffer: for each rank rows, then lines with their metadata.

    The buffer consists of lines, each as wide as a row: a line holds a row, or metadata of several.
    Rows a and b for rank 0, and c, d and e for rank 1, with one number w each, two to a line:

        line       0  1  2      3  4  5  6      7
        holds      a  b  wa wb  c  d  e  wc wd  we
        number           4  5            12 13  14

    ``splits`` is then [3, 5], ``line_M`` [0, 1, 3, 4, 5], and ``metadata_index(2)`` [4, 5, 12, 13, 14].

    Args:
        counts_P: rows for (or from) each rank.
        counts: ``counts_P`` on the host, so that the device need not wait for the host.
        num_meta: numbers of metadata per row.
        meta_per_line: numbers of metadata that fill a line.

    Attributes:
        splits: number of lines for each rank.
        line_M: int64, the line of each row.
    """

    def __init__(
        self, counts_P: Tensor, counts: list[int], num_meta: int, meta_per_line: int
    ) -> None:
        self.meta_per_line = meta_per_line
        self.splits = [count - (-count * num_meta // meta_per_line) for count in counts]
        num_rows = sum(counts)
        device = counts_P.device
        meta_lines_P = (counts_P * num_meta + meta_per_line - 1) // meta_per_line
        rank_M = torch.arange(len(counts), device=device).repeat_interleave(
            counts_P, output_size=num_rows
        )
        row_M = torch.arange(num_rows, device=device)
        self.line_M = row_M + (meta_lines_P.cumsum(0) - meta_lines_P)[rank_M]
        first_meta_line_P = (counts_P + meta_lines_P).cumsum(0) - meta_lines_P
        first_row_P = counts_P.cumsum(0) - counts_P
        start_P = first_meta_line_P * meta_per_line - first_row_P * num_meta
        start_M = start_P[rank_M] + row_M * num_meta
        self._index_MC = start_M.unsqueeze(1) + torch.arange(num_meta, device=device)

    def metadata_index(self, width: int) -> Tensor:
        """Return where the metadata of M rows, C numbers each, stands in a buffer's flat view: [M, C].

        The buffer has lines of ``width`` numbers. If ``width`` is above ``meta_per_line``, a line of
        metadata is filled only to that number. ``width`` and positions count numbers of the
        metadata's dtype, not of the rows'.
        """
        if width == self.meta_per_line:
            return self._index_MC
        return self._index_MC // self.meta_per_line * width + self._index_MC % self.meta_per_line

    def metadata(self, lines_BW: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the metadata [M, C] of a buffer's M rows (hidden states): C numbers each, of ``dtype``.

        They are read from the buffer's lines that hold metadata.

        Args:
            lines_BW: all B lines of the buffer, of any dtype; their bytes are viewed as ``dtype``.
        """
        width = lines_BW.shape[1] * lines_BW.element_size() // dtype.itemsize
        return _flat(lines_BW, dtype)[self.metadata_index(width)]


def _flat(lines_BH: Tensor, dtype: torch.dtype) -> Tensor:
    return lines_BH.view(-1).view(dtype)


class _SplitBuffer(torch.autograd.Function):
    """Autograd function that splits a receive buffer of B lines into hidden states and metadata.

    It returns all lines, even those that hold metadata, as hidden states [B, H], decoded if rows
    were sent in 8 bits; and C numbers of metadata for each of the R rows received, [R, C]. Its
    inputs are the hidden states and the metadata that this rank sent, the buffer, and the exchange.
    The backward returns gradients to the ranks that the rows came from, in a buffer of x's dtype.
    """

    @staticmethod
    def forward(ctx, x_TH, meta_MC, lines_BW, exchange: RowExchange):
        ctx.num_tokens, hidden = x_TH.shape
        ctx.dtype = meta_MC.dtype
        width = hidden * x_TH.element_size() // meta_MC.element_size()
        sent, received = exchange.send_layout, exchange.receive_layout
        positions = sent.metadata_index(width), received.metadata_index(width)
        ctx.save_for_backward(exchange.token_idx_B, *positions)
        ctx.send = exchange.group.all_to_all
        ctx.splits = sent.splits, received.splits
        meta_RC = received.metadata(lines_BW, ctx.dtype)
        if exchange.group.in_8_bits:
            return decode_rows(lines_BW, hidden, x_TH.dtype), meta_RC
        return lines_BW.view_as(lines_BW), meta_RC

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_BH, grad_RC):
        token_idx_B, index_MC, index_RC = ctx.saved_tensors
        # Experts read no lines of metadata, so these lines of the gradient are free to be overwritten.
        grad_BH = grad_BH.contiguous()
        _flat(grad_BH, ctx.dtype)[index_RC] = grad_RC
        grad_BH = ctx.send(grad_BH, *ctx.splits).contiguous()
        grad_TH = sum_rows(grad_BH, token_idx_B, ctx.num_tokens)
        return grad_TH, _flat(grad_BH, ctx.dtype)[index_MC], None, None


class RowExchange:
    """Asynchronous all-to-all of tokens' hidden states (rows), each with its metadata.

    The constructor starts the exchange, ``wait`` returns its result.

    Args:
        group: the ranks that exchange rows; it says whether rows are sent in 8 bits.
        x_TH: hidden states of this rank's tokens.
        token_idx_M: token that each sent row copies, sorted by the destination rank.
        meta_MC: metadata, C numbers per row; a number's bytes must divide the bytes of a row of x.
        counts_2P: int64, rows sent to and received from each rank; ``sent`` and ``received`` are
            the same counts on the host.

    Attributes:
        token_idx_B: the token in each line of the send buffer; T for lines of metadata.
        send_layout, receive_layout: ``Layout`` of rows and metadata in either buffer.
    """

    def __init__(
        self,
        group: DispatchGroup,
        x_TH: Tensor,
        token_idx_M: Tensor,
        meta_MC: Tensor,
        counts_2P: Tensor,
        sent: list[int],
        received: list[int],
    ) -> None:
        self.group = group
        num_tokens, hidden = x_TH.shape
        meta_per_line, rest = divmod(hidden * x_TH.element_size(), meta_MC.element_size())
        assert not rest, (
            f"rows of {hidden} {x_TH.dtype} numbers hold no whole number of {meta_MC.dtype} metadata"
        )
        if group.in_8_bits:
            # Encoded rows and gradients share one layout, so the narrower line limits the metadata.
            meta_per_line = min(meta_per_line, wire_row_bytes(hidden) // meta_MC.element_size())
        self.send_layout, self.receive_layout = (
            Layout(counts_P, counts, meta_MC.shape[1], meta_per_line)
            for counts_P, counts in zip(counts_2P.unbind(0), (sent, received), strict=True)
        )
        self.token_idx_B = token_idx_M.new_full((sum(self.send_layout.splits),), num_tokens)
        self.token_idx_B[self.send_layout.line_M] = token_idx_M
        rows_TW = encode_rows(x_TH) if group.in_8_bits else x_TH.detach()
        width = rows_TW.shape[1] * rows_TW.element_size() // meta_MC.element_size()
        lines = rows_TW.index_select(0, self.token_idx_B.clamp(max=num_tokens - 1))
        _flat(lines, meta_MC.dtype)[self.send_layout.metadata_index(width)] = meta_MC.detach()
        self._sent = x_TH, meta_MC
        self._lines = group.all_to_all(lines, self.receive_layout.splits, self.send_layout.splits)

    def wait(self) -> tuple[Tensor, Tensor]:
        """Wait for the exchange; return the receive buffer and the received rows' metadata.

        Call it once. R rows are received.

        Returns:
            The buffer [B, H] of B lines: received row i is line ``receive_layout.line_M[i]``, and other
            lines held metadata; and the metadata [R, C], the C numbers that the sender gave with each
            row.
        """
        lines, sent = self.group.wait(self._lines), self._sent
        del self._lines, self._sent
        lines_BH, meta_RC = _SplitBuffer.apply(*sent, lines, self)
        return keep_encoded(lines_BH, lines) if self.group.in_8_bits else lines_BH, meta_RC


def run_received(exchange: RowExchange, counts_PE: Tensor, experts: RunExperts) -> Tensor:
    """Wait for R tokens, run this rank's experts on them, and return their outputs [R, H].

    Outputs are in the order in which the tokens lie in the receive buffer: sorted by the rank that
    sent them. The experts multiply each output by its routing weight.

    Args:
        exchange: the all-to-all, already started, of the tokens and their routing weights.
        counts_PE: tokens from each of P ranks for each of this rank's E experts.
        experts: function that runs the experts on rows sorted by expert.
    """
    line_R = exchange.receive_layout.line_M
    by_expert_R, back_R = regroup_by_expert(counts_PE, len(line_R))
    gather_idx_R = line_R[by_expert_R]
    lines_BH, meta_R1 = exchange.wait()
    probs_R = meta_R1.squeeze(1)[by_expert_R]
    out_RH = experts(lines_BH, gather_idx_R, group_ends(counts_PE.sum(0)), probs_R)
    return out_RH.index_select(0, back_R)
