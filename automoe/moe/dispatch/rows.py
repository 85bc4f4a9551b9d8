"""Exchange of rows together with a few numbers per row (its "words"), in one all-to-all.

Words are routing weights, and for the hierarchical dispatcher expert ids. The block of n rows for
one rank is followed by the bytes of their words, in further lines as wide as a row. Rows thus keep
their width and alignment, rows and words are separated without a copy, float32 weights beside
bfloat16 rows lose no bit, and the gradient of the words comes back the same way. If the group sends
rows in 8 bits, lines are encoded rows (``automoe.moe.dispatch.wire``), and gradients come back in
as many lines of x's dtype.

Shapes: T tokens to read from, M rows sent, R rows received, B lines of a buffer (rows and words), W
words of 8 bytes of an encoded line, H hidden, C words per row, P ranks.
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
    """Layout of a send or receive buffer: per rank a block of rows, then lines with their words.

    A row is one token's hidden states; its words are a few numbers, such as routing weights. A line
    is as wide as a row.

    Args:
        counts_P: rows of each rank's block.
        counts: ``counts_P`` on the host, so that the device need not wait for the host.
        num_words: words per row.
        line_words: words that fill a line.

    Attributes:
        splits: number of lines in each rank's block.
        row_M: int64, the line of each row.
        word_MC: int64, the position of each row's words, counted in words from the start of the
            buffer.
    """

    def __init__(
        self, counts_P: Tensor, counts: list[int], num_words: int, line_words: int
    ) -> None:
        self.line_words = line_words
        self.splits = [count - (-count * num_words // line_words) for count in counts]
        num_rows = sum(counts)
        device = counts_P.device
        tail_P = (counts_P * num_words + line_words - 1) // line_words
        block_M = torch.arange(len(counts), device=device).repeat_interleave(
            counts_P, output_size=num_rows
        )
        row_M = torch.arange(num_rows, device=device)
        self.row_M = row_M + (tail_P.cumsum(0) - tail_P)[block_M]
        first_P = counts_P.cumsum(0) - counts_P
        words_P = ((counts_P + tail_P).cumsum(0) - tail_P) * line_words - first_P * num_words
        word_M = words_P[block_M] + row_M * num_words
        self.word_MC = word_M.unsqueeze(1) + torch.arange(num_words, device=device)

    def word_places(self, width: int) -> Tensor:
        """Return the positions ``word_MC`` in a buffer whose lines are ``width`` words wide.

        Each line still holds ``line_words`` words, at its beginning.
        """
        if width == self.line_words:
            return self.word_MC
        return self.word_MC // self.line_words * width + self.word_MC % self.line_words

    def words(self, lines_BW: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the words [M, C] of all rows, read from the lines of a buffer as ``dtype``."""
        width = lines_BW.shape[1] * lines_BW.element_size() // dtype.itemsize
        return _words(lines_BW, dtype)[self.word_places(width)]


def _words(lines_BH: Tensor, dtype: torch.dtype) -> Tensor:
    return lines_BH.view(-1).view(dtype)


def _packed(rows_TW: Tensor, words_MC: Tensor, source_B: Tensor, word_MC: Tensor) -> Tensor:
    lines_BW = rows_TW.index_select(0, source_B.clamp(max=rows_TW.shape[0] - 1))
    _words(lines_BW, words_MC.dtype)[word_MC] = words_MC
    return lines_BW


class _Arrived(torch.autograd.Function):
    """Autograd function that takes received lines apart into rows [B, H] and words [R, C].

    Its inputs x and words are those that this rank sent. The backward sends the gradients back to
    the ranks that the rows came from, in lines of x's dtype.
    """

    @staticmethod
    def forward(ctx, x_TH, words_MC, lines_BW, exchange: RowExchange):
        ctx.num_tokens, hidden = x_TH.shape
        ctx.dtype = words_MC.dtype
        wide = hidden * x_TH.element_size() // words_MC.element_size()
        out, into = exchange.out, exchange.into
        ctx.save_for_backward(exchange.source_B, out.word_places(wide), into.word_places(wide))
        ctx.send = exchange.group.all_to_all
        ctx.splits = out.splits, into.splits
        words_RC = into.words(lines_BW, ctx.dtype)
        if exchange.group.in_8_bits:
            return decode_rows(lines_BW, hidden, x_TH.dtype), words_RC
        return lines_BW.view_as(lines_BW), words_RC

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_BH, grad_RC):
        source_B, word_MC, word_RC = ctx.saved_tensors
        # Experts read no lines of words, so these lines of the gradient are free to be overwritten.
        grad_BH = grad_BH.contiguous()
        _words(grad_BH, ctx.dtype)[word_RC] = grad_RC
        grad_BH = ctx.send(grad_BH, *ctx.splits).contiguous()
        grad_TH = sum_rows(grad_BH, source_B, ctx.num_tokens)
        return grad_TH, _words(grad_BH, ctx.dtype)[word_MC], None, None


class RowExchange:
    """All-to-all of tokens' hidden states (rows) with a few numbers each (words), started at once.

    The constructor starts it, ``wait`` returns the result.

    Args:
        x_TH: hidden states of this rank's tokens.
        token_idx_M: token that each sent row copies, sorted by the destination rank.
        words_MC: words of each row; a row of x must be a whole number of words wide.
        counts_2P: int64, rows sent to and received from each rank; ``sent`` and ``received`` are
            the same counts on the host.

    Attributes:
        source_B: token in each sent line; T for a line of words.
        out, into: layouts of the lines sent and received.
    """

    def __init__(
        self,
        group: DispatchGroup,
        x_TH: Tensor,
        token_idx_M: Tensor,
        words_MC: Tensor,
        counts_2P: Tensor,
        sent: list[int],
        received: list[int],
    ) -> None:
        self.group = group
        num_tokens, hidden = x_TH.shape
        line_words, rest = divmod(hidden * x_TH.element_size(), words_MC.element_size())
        assert not rest, (
            f"rows of {hidden} {x_TH.dtype} numbers hold no whole number of {words_MC.dtype} words"
        )
        if group.in_8_bits:
            # Encoded rows and gradients share one layout, so the narrower line limits the words.
            line_words = min(line_words, wire_row_bytes(hidden) // words_MC.element_size())
        self.out, self.into = (
            Layout(counts_P, counts, words_MC.shape[1], line_words)
            for counts_P, counts in zip(counts_2P.unbind(0), (sent, received), strict=True)
        )
        self.source_B = token_idx_M.new_full((sum(self.out.splits),), num_tokens)
        self.source_B[self.out.row_M] = token_idx_M
        rows_TW = encode_rows(x_TH) if group.in_8_bits else x_TH.detach()
        width = rows_TW.shape[1] * rows_TW.element_size() // words_MC.element_size()
        places = self.out.word_places(width)
        lines = _packed(rows_TW, words_MC.detach(), self.source_B, places)
        self._sent = x_TH, words_MC
        self._lines = group.all_to_all(lines, self.into.splits, self.out.splits)

    def wait(self) -> tuple[Tensor, Tensor]:
        """Wait for the exchange; return its lines [B, H], rows and others, and the words [R, C].

        Call it once. ``into.row_M`` has the lines that are rows.
        """
        lines, sent = self.group.wait(self._lines), self._sent
        del self._lines, self._sent
        rows_BH, words_RC = _Arrived.apply(*sent, lines, self)
        return keep_encoded(rows_BH, lines) if self.group.in_8_bits else rows_BH, words_RC


def run_received(exchange: RowExchange, counts_PE: Tensor, experts: RunExperts) -> Tensor:
    """Run this rank's experts on the tokens that arrive: output [R, H], in order of arrival.

    Args:
        exchange: its words are one routing weight per token.
        counts_PE: tokens from each of P ranks for each of this rank's E experts.
        experts: function that runs the experts on rows sorted by expert.
    """
    line_R = exchange.into.row_M
    by_expert_R, back_R = regroup_by_expert(counts_PE, len(line_R))
    gather_idx_R = line_R[by_expert_R]
    lines_BH, words_R1 = exchange.wait()
    probs_R = words_R1.squeeze(1)[by_expert_R]
    out_RH = experts(lines_BH, gather_idx_R, group_ends(counts_PE.sum(0)), probs_R)
    return out_RH.index_select(0, back_R)
