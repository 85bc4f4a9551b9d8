"""The decoder that every native family declares, whole or as one pipeline stage.

Letters: B rows, S positions, s positions of this rank between two blocks, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from automoe.config.schema import ModelConfig, MoEConfig
from automoe.model.attention import AttentionContext
from automoe.model.backend import BackendConfig
from automoe.model.block import Block
from automoe.model.causal_lm import CausalLM, Unit
from automoe.model.linear import Embedding, Linear
from automoe.moe.layer import MoE
from automoe.moe.tokens import Tokens


class Decoder(CausalLM):
    """Embedding, layers, final norm and vocabulary head; a pipeline stage holds a part of these.

    Layers keep their global number in every stage ("layers.7...."), so initialisation, HuggingFace
    checkpoints and training state need no renaming.

    Args:
        layers: which of the model's layers this part holds; None means all.
        embeds, predicts, backend: see ``CausalLM``.
    """

    def __init__(
        self,
        config: ModelConfig,
        moe: MoEConfig,
        layers: range | None = None,
        embeds: bool = True,
        predicts: bool = True,
        backend: BackendConfig | None = None,
    ) -> None:
        super().__init__(config, backend, embeds, predicts)
        layers = range(config.num_layers) if layers is None else layers
        vocab = config.vocab_size
        hidden = config.hidden_size
        tied = config.tie_embeddings
        self.embed_tokens = (
            Embedding(vocab, hidden, self.first_id) if embeds or (predicts and tied) else None
        )
        self.layers = nn.ModuleDict(
            {str(layer): Block(config, moe, layer, self.backend) for layer in layers}
        )
        norm = self.backend.norm
        self.norm = norm(hidden, config.norm_eps, config.zero_centered_norms) if predicts else None
        self.lm_head = Linear(hidden, vocab) if predicts and not tied else None

    def moe_layers(self) -> Iterator[tuple[int, MoE]]:
        for name, block in self.layers.items():
            if isinstance(block.mlp, MoE):
                yield int(name), block.mlp

    def units(self) -> Iterator[Unit]:
        for name, block in self.layers.items():
            inside = (block.mlp.router, block.mlp.experts) if isinstance(block.mlp, MoE) else ()
            yield Unit(int(name), block, *inside)

    def run_layers(self, x: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        sequence = self.backend.pg_collection.sequence
        if self.embeds:
            assert self.embed_tokens is not None
            x = sequence.reduce_scatter(self.embed_tokens(x))
            if torch.is_grad_enabled() and not (x.requires_grad or self.predicts):
                # a frozen embedding needs no gradient, but the next pipeline stage always sends one
                x.requires_grad_()
        context = AttentionContext(self.config, tokens, self.backend, x.dtype)
        local_tokens = tokens.local_shard(sequence)
        for block in self.layers.values():
            x = block(x, context, local_tokens)
        return x

    def last_norm(self, x_BsH: torch.Tensor) -> torch.Tensor:
        assert self.norm is not None
        return self.norm(x_BsH)

    @property
    def embedding(self) -> nn.Module | None:
        return self.embed_tokens

    @property
    def head_weight(self) -> torch.Tensor:
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        assert head is not None
        return head.weight
