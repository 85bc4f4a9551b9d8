"""Exchange of rows together with numbers of each row, in one all-to-all.

A block of n rows for one rank is followed by as many further lines of the same width as the numbers
("words") of the n rows fill, as bytes. So rows keep their width and alignment, rows and words are
taken apart without a copy, every bit of a float32 weight next to bfloat16 rows arrives, and the
gradient of the words comes back the same way. Shapes: T tokens to read from, M rows sent, R rows
received, B lines of a buffer (rows and words), H hidden, C words per row, P ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from automoe.moe.dispatch.base import DispatchGroup, Experts, group_ends, regroup_by_expert
from automoe.moe.row_sums import sum_rows


@dataclass(frozen=True)
class Layout:
    """Positions of rows and words in the lines of a buffer.

    Attributes:
        splits: number of lines in each rank's block.
        row_M: int64, the line of each row.
        word_MC: int64, the place of each row's words, counted in words from the start of the
            buffer.
    """

    splits: list[int]
    row_M: torch.Tensor
    word_MC: torch.Tensor


def layout_of(counts_P: torch.Tensor, counts: list[int], num_words: int, line_words: int) -> Layout:
    """Return the layout of blocks of ``counts`` rows.

    Args:
        counts: rows of each rank's block, on the host.
        counts_P: ``counts`` on the device, so that the device need not wait for the host.
        num_words: words per row.
        line_words: words that fill a line.
    """
    num_rows = sum(counts)
    device = counts_P.device
    tail_P = (counts_P * num_words + line_words - 1) // line_words
    block_M = torch.arange(len(counts), device=device).repeat_interleave(
        counts_P, output_size=num_rows
    )
    row_M = torch.arange(num_rows, device=device)
    first_P = counts_P.cumsum(0) - counts_P
    words_P = ((counts_P + tail_P).cumsum(0) - tail_P) * line_words - first_P * num_words
    word_M = words_P[block_M] + row_M * num_words
    return Layout(
        [count - (-count * num_words // line_words) for count in counts],
        row_M + (tail_P.cumsum(0) - tail_P)[block_M],
        word_M.unsqueeze(1) + torch.arange(num_words, device=device),
    )


def _words(lines_BH: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return lines_BH.view(-1).view(dtype)


class _Pack(torch.autograd.Function):
    """Autograd function that packs rows of x and words into lines [B, H].

    ``source`` [B] is the row of x that each line holds, T for lines of words.
    """

    @staticmethod
    def forward(
        ctx,
        x_TH: torch.Tensor,
        words_MC: torch.Tensor,
        source_B: torch.Tensor,
        word_MC: torch.Tensor,
    ):
        ctx.save_for_backward(source_B, word_MC)
        ctx.num_tokens = x_TH.shape[0]
        ctx.dtype = words_MC.dtype
        lines_BH = x_TH.index_select(0, source_B.clamp(max=ctx.num_tokens - 1))
        _words(lines_BH, ctx.dtype)[word_MC] = words_MC
        return lines_BH

    @staticmethod
    def backward(ctx, grad_BH: torch.Tensor):
        source_B, word_MC = ctx.saved_tensors
        grad_BH = grad_BH.contiguous()
        return (
            sum_rows(grad_BH, source_B, ctx.num_tokens),
            _words(grad_BH, ctx.dtype)[word_MC],
            None,
            None,
        )


class _Unpack(torch.autograd.Function):
    """Autograd function that returns the words among received lines, and the lines unchanged."""

    @staticmethod
    def forward(ctx, lines_BH: torch.Tensor, word_RC: torch.Tensor, dtype: torch.dtype):
        ctx.save_for_backward(word_RC)
        return lines_BH.view_as(lines_BH), _words(lines_BH, dtype)[word_RC]

    @staticmethod
    def backward(ctx, grad_BH: torch.Tensor, grad_RC: torch.Tensor):
        (word_RC,) = ctx.saved_tensors
        # No expert has touched these lines of the gradient, and nothing else reads them.
        grad_BH = grad_BH.contiguous()
        _words(grad_BH, grad_RC.dtype)[word_RC] = grad_RC
        return grad_BH, None, None


class SumLines(torch.autograd.Function):
    """Sum of lines by their tokens, which keeps only the index for its backward.

    ``source_B`` is that of ``RowExchange``. The gradient of lines without a token is arbitrary.
    """

    @staticmethod
    def forward(
        ctx, lines_BH: torch.Tensor, source_B: torch.Tensor, num_tokens: int
    ) -> torch.Tensor:
        ctx.save_for_backward(source_B)
        return sum_rows(lines_BH, source_B, num_tokens)

    @staticmethod
    def backward(ctx, grad_TH: torch.Tensor):
        (source_B,) = ctx.saved_tensors
        return grad_TH.index_select(0, source_B.clamp(max=grad_TH.shape[0] - 1)), None, None


class RowExchange:
    """One all-to-all of rows with their words, started by the constructor.

    Args:
        token_idx_M: row of x that each sent row reads, sorted by the destination rank.
        words_MC: words of each row, in at least the width of x: a whole number of them fills a row.
        counts_2P: int64, rows sent to and received from each rank; ``sent`` and ``received`` are
            the same counts on the host.

    Attributes:
        source_B: row of x in each sent line; T for a line of words.
        row_R: the line of each row received.
        out_splits, in_splits: lines sent to and received from each rank.
    """

    def __init__(
        self,
        group: DispatchGroup,
        x_TH: torch.Tensor,
        token_idx_M: torch.Tensor,
        words_MC: torch.Tensor,
        counts_2P: torch.Tensor,
        sent: list[int],
        received: list[int],
    ) -> None:
        self.group = group
        self.dtype, (num_tokens, hidden) = words_MC.dtype, x_TH.shape
        line_words, rest = divmod(hidden * x_TH.element_size(), words_MC.element_size())
        assert not rest, (
            f"rows of {hidden} {x_TH.dtype} numbers hold no whole number of {self.dtype} words"
        )
        out, self.into = (
            layout_of(counts_P, counts, words_MC.shape[1], line_words)
            for counts_P, counts in zip(counts_2P.unbind(0), (sent, received), strict=True)
        )
        self.source_B = token_idx_M.new_full((sum(out.splits),), num_tokens)
        self.source_B[out.row_M] = token_idx_M
        lines_BH = _Pack.apply(x_TH, words_MC, self.source_B, out.word_MC)
        self.out_splits = out.splits
        self.in_splits = self.into.splits
        self.row_R = self.into.row_M
        self._lines = group.all_to_all(lines_BH, self.in_splits, self.out_splits)

    def wait(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the lines [B, H] and the words [R, C] that have arrived."""
        return _Unpack.apply(self.group.wait(self._lines), self.into.word_MC, self.dtype)


def run_received(exchange: RowExchange, counts_PE: torch.Tensor, experts: Experts) -> torch.Tensor:
    """Run the experts on rows that arrive with their routing weights: [R, H], in order of arrival.

    ``counts_PE`` is that of ``regroup_by_expert``.
    """
    by_expert_R, back_R = regroup_by_expert(counts_PE, exchange.row_R.shape[0])
    gather_idx_R = exchange.row_R[by_expert_R]
    lines_BH, words_R1 = exchange.wait()
    probs_R = words_R1.squeeze(1)[by_expert_R]
    out_RH = experts(lines_BH, gather_idx_R, group_ends(counts_PE.sum(0)), probs_R)
    return out_RH.index_select(0, back_R)
