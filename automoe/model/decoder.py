"""The decoder of all native families, whole or as one pipeline stage.

Letters of dimensions: ``automoe.model``; here D modules for multi-token prediction.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import replace

import torch
from torch import Tensor, nn

from automoe.comm.tokens import Tokens
from automoe.config.schema import ModelConfig, MoEConfig
from automoe.model.attention import AttentionSetup
from automoe.model.backend import BackendConfig
from automoe.model.block import Block
from automoe.model.causal_lm import CausalLM, Unit
from automoe.model.linear import Embedding, Linear
from automoe.model.mtp import MTPBlock
from automoe.model.norm import OutputNorm
from automoe.model.residual import HyperHead
from automoe.moe.layer import MoE
from automoe.passes.calls import call_module


class Decoder(CausalLM):
    """Embedding, layers, final norm and vocabulary head; a pipeline stage holds a part of these.

    Layers keep their global number in every stage ("layers.7...."), so initialisation, HuggingFace
    checkpoints and training state need no renaming.

    Args:
        layers: numbers of the layers that this stage holds; None means all. A stage with modules
            for multi-token prediction holds a copy of the embedding, which they read. The stage
            with the first of these modules holds the final norm.
        backend: communicators and implementations; default: one rank and plain torch.
        embeds, predicts: whether this stage holds the token embedding, and the vocabulary head.
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
        self.logit_scale = 1 / config.logits_scaling
        self.soft_cap = config.final_logit_softcapping or 0.0
        layers = config.all_layers if layers is None else layers
        vocab = config.vocab_size
        hidden = config.hidden_size
        tied = config.tie_embeddings
        kinds = {layer: MTPBlock if layer >= config.num_layers else Block for layer in layers}
        embeds_again = MTPBlock in kinds.values() or (predicts and tied)
        self.embed_tokens = (
            Embedding(vocab, hidden, self.first_id) if embeds or embeds_again else None
        )
        self.embed_norm = OutputNorm(config.norm_eps if config.embedding_norm else None)
        self.layers = nn.ModuleDict(
            {str(layer): kind(config, moe, layer, self.backend) for layer, kind in kinds.items()}
        )
        norm = self.backend.norm
        norms = config.num_layers in layers if config.num_mtp_layers else predicts
        dtype = self.backend.router_dtype
        self.hc_head = HyperHead(config, dtype) if norms and config.hc_mult else None
        self.norm = norm(hidden, config.norm_eps, config.centers_final_norm) if norms else None
        self.call_norm = self.backend.last_norm(call_module)
        self.lm_head = Linear(hidden, vocab) if predicts and not tied else None

    def moe_layers(self) -> Iterator[tuple[int, MoE]]:
        for name, block in self.layers.items():
            if isinstance(block.mlp, MoE):
                yield int(name), block.mlp

    def units(self) -> Iterator[Unit]:
        for name, block in self.layers.items():
            yield Unit(int(name), block, block.mlp.experts if isinstance(block.mlp, MoE) else None)

    def run_layers(self, x: Tensor, tokens: Tokens) -> Tensor:
        if self.embeds:
            x = self._embed(x)
            if self.config.hc_mult:
                x = x.repeat(1, 1, self.config.hc_mult)
            if torch.is_grad_enabled() and not (x.requires_grad or self.predicts):
                # a frozen embedding needs no gradient, but the next pipeline stage always sends one
                x.requires_grad_()
        blocks = [layer for layer in self.layers.values() if not isinstance(layer, MTPBlock)]
        if not blocks:  # a pipeline stage with only the embedding or the head, or an empty one
            return x
        setup = self._setup(tokens, x.dtype)
        local_tokens = tokens.local_shard(self.tp)
        routed = None  # what the second layer of a pair adds
        for block in blocks:
            x, routed = block(x, setup, local_tokens, routed)
        return x

    def mtp_states(
        self, x_BsH: Tensor, later_BSD: Tensor | None, tokens: Tokens, mtp_D2: Tensor | None
    ) -> Iterator[Tensor]:
        modules = [pair for pair in self.layers.items() if isinstance(pair[1], MTPBlock)]
        if later_BSD is None or mtp_D2 is None:
            yield from [x_BsH] * len(modules)
            return
        setup = self._setup(tokens, x_BsH.dtype)
        for name, block in modules:
            depth = int(name) - self.config.num_layers
            given_BS, count = later_BSD[..., depth], mtp_D2[depth, 1].clamp_min(1)
            here = replace(tokens, not_padding=given_BS >= 0, num_tokens=count)
            # a copy: a recomputation reads the tokens of its own depth
            setup = copy(setup)
            setup.tokens = here
            local_tokens = here.local_shard(self.tp)
            x_BsH = block(x_BsH, setup, local_tokens, self._embed(given_BS.clamp_min(0)))
            yield x_BsH

    def _setup(self, tokens: Tokens, dtype: torch.dtype) -> AttentionSetup:
        layers = [int(name) for name in self.layers]
        return AttentionSetup(self.config, tokens, self.backend, dtype, layers)

    def _embed(self, ids_BS: Tensor) -> Tensor:
        assert self.embed_tokens is not None
        x_BsH = self.tp.reduce_scatter(self.embed_tokens(ids_BS))
        x_BsH = self.embed_norm(x_BsH)
        multiplier = self.config.embedding_multiplier
        return x_BsH if multiplier == 1 else x_BsH * multiplier

    def last_norm(self, x_BsH: Tensor) -> Tensor:
        x_BsH = x_BsH if self.hc_head is None else self.hc_head(x_BsH)
        return x_BsH if self.norm is None else self.call_norm(self.norm, x_BsH)

    @property
    def embedding(self) -> nn.Module | None:
        return self.embed_tokens

    @property
    def head_weight(self) -> Tensor:
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        assert head is not None
        return head.weight
