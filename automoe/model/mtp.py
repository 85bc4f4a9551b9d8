"""Modules for multi-token prediction (MTP): DeepSeek-V3, arXiv 2412.19437, section 2.2.

Module k of D takes, at position i, the head's input at depth k - 1 (depth 0 is the model) and the
embedding of token i + k, and predicts token i + k + 1 with the model's own head. As in
Megatron-Core and in engines that draft with these modules, states are passed on after their norm.

Letters of dimensions: ``automoe.model``; here D modules.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from automoe.comm.tokens import IGNORE, Tokens
from automoe.config.schema import ModelConfig, MoEConfig
from automoe.model.attention import AttentionSetup
from automoe.model.backend import BackendConfig
from automoe.model.block import Block
from automoe.model.linear import Linear

MTP_METRICS = ("mtp_loss", "mtp_acceptance")  # followed by ".k" for depth k
ENDED = -1  # in shifted tokens: the document has ended


class MTPBlock(Block):
    """Decoder layer for multi-token prediction, with the norms and projection of its two inputs.

    The inputs are the hidden states of the previous depth and the embeddings of later tokens.
    Parameters have HuggingFace's names.
    """

    def __init__(
        self, config: ModelConfig, moe: MoEConfig, layer: int, backend: BackendConfig
    ) -> None:
        super().__init__(config, moe, layer, backend)
        hidden = config.hidden_size
        norm = partial(backend.norm, hidden, config.norm_eps, config.zero_centered_norms)
        self.enorm, self.hnorm = norm(), norm()
        self.eh_proj = Linear(2 * hidden, hidden)
        self.shared_head = torch.nn.ModuleDict({"norm": norm()})

    def run(  # type: ignore[override]
        self, x_BsH: Tensor, setup: AttentionSetup, tokens: Tokens, embedded_BsH: Tensor
    ) -> Tensor:
        """Return the head's input [B, s, H] at this depth of multi-token prediction.

        Args:
            x_BsH: the head's input at the previous depth.
            setup: angles, masks and kernel of attention, for all S positions.
            tokens: per-token tensors at the s positions; a position is padding if the later token
                that this depth reads is not in its document.
            embedded_BsH: embeddings of the later tokens that this depth reads.
        """
        joined = torch.cat((self.enorm(embedded_BsH), self.hnorm(x_BsH)), dim=-1)
        x_BsH, _ = super().run(self.eh_proj(joined), setup, tokens)
        return self.shared_head["norm"](x_BsH).clone()  # a view could lose FSDP's hooks


def shift_rows(
    tokens_BS: Tensor, labels_BS: Tensor, doc_ids_BS: Tensor, depths: int
) -> tuple[Tensor, Tensor]:
    """Return the tokens that each multi-token depth reads, and its labels: [B, S, D] each.

    Depth k (from 1) reads the token k positions later and has the label of that position if it
    belongs to the same document; else ``ENDED`` (-1) and ``IGNORE``.

    Args:
        tokens_BS, labels_BS: whole sequences.
        doc_ids_BS: index of the document within its sequence, -1 for padding.
        depths: number D of depths.
    """
    size = tokens_BS.shape[1]
    place = torch.arange(size).unsqueeze(1) + torch.arange(1, depths + 1)
    later = place.clamp_max(size - 1)
    same = (doc_ids_BS[:, later] == doc_ids_BS.unsqueeze(2)) & (doc_ids_BS >= 0).unsqueeze(2)
    same &= place < size
    return (
        torch.where(same, tokens_BS[:, later], ENDED),
        torch.where(same, labels_BS[:, later], IGNORE),
    )
