"""Interface of a language model, or of one pipeline stage of it, to the trainer.

``Decoder`` implements it for automoe's native families; others have a model of their own
(``automoe.config.tier``). Letters of dimensions: ``automoe.model``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from automoe.comm.communicators import first_of_rank
from automoe.comm.local_shard import local_shard
from automoe.comm.tokens import IGNORE, MicroBatch, TokenCounts, Tokens
from automoe.config.schema import ModelConfig, TrainConfig
from automoe.errors import ConfigError
from automoe.kernels.logits import cap_logits
from automoe.model.backend import BackendConfig
from automoe.model.indexer import KeyChooser
from automoe.model.loss import LossInputs, cross_entropy_sum, greedy_tokens, token_scores
from automoe.model.mtp import MTP_METRICS
from automoe.moe.balance import LoadCounter
from automoe.moe.router import BalancedRouter

# arguments of ``token_scores`` by the names of inputs of a loss
SAMPLED = {
    "temperature_T": "temperature",
    "candidates_TN": "candidates",
    "scored_ids_TK": "scored_ids",
}


class MoELayer(Protocol):
    """Interface of an MoE layer: the module of its experts, and the router that counts tokens."""

    @property
    def experts(self) -> nn.Module: ...

    @property
    def router(self) -> BalancedRouter: ...


class Unit(NamedTuple):
    """Decoder layer that FSDP wraps as one unit, and its experts, which are a unit of their own.

    Attributes:
        number: index of the layer in the full model.
        layer: module of the layer, its experts included.
        experts: module whose parameters are on the moe mesh; None: a dense layer.
    """

    number: int
    layer: nn.Module
    experts: nn.Module | None = None


class CausalLM(nn.Module, ABC):
    """A language model, or one pipeline stage of it (a "part"), whose loss never holds all logits.

    Names of parameters are global: a stage uses the names of the whole model. Initialisation,
    training state and HuggingFace checkpoints rely on these names.

    Args:
        config: the full model's configuration.
        backend: communicators and implementations; default: one rank and plain torch.
        embeds: whether this part holds the token embedding.
        predicts: whether this part holds the vocabulary head.

    Attributes:
        loss: function of per-token losses, by default the backend's; a recipe may set its own.
            None: mean cross-entropy.
        mtp_loss_weight: weight of the mean loss of the modules for multi-token prediction;
            ``forward_backward`` sets it in each step.
        reported: sums of the values that the losses report, by name.
        first_id: token id of the first vocabulary row of embedding and head on this rank.
        notes: lines of text for a run's start that say which kernels compute what.
        logit_scale: factor of the product of hidden states and head.
        soft_cap: bound of the scaled logits, soft_cap * tanh(logits / soft_cap); 0: none.
    """

    notes: tuple[str, ...] = ()
    logit_scale: float = 1.0
    soft_cap: float = 0.0

    def __init__(
        self,
        config: ModelConfig,
        backend: BackendConfig | None = None,
        embeds: bool = True,
        predicts: bool = True,
    ) -> None:
        super().__init__()
        self.config = config
        self.backend = backend or BackendConfig()
        self.embeds = embeds
        self.predicts = predicts
        self.loss = self.backend.loss
        self.mtp_loss_weight = TrainConfig.mtp_loss_weight
        self.reported = dict[str, Tensor]()
        self.tp = self.backend.pg_collection.tp
        self.first_id = first_of_rank(self.tp, config.vocab_size)

    @abstractmethod
    def run_layers(self, x: Tensor, tokens: Tokens) -> Tensor:
        """Return hidden states [B, s, H] after the last layer of this pipeline stage.

        Args:
            x: [B, S] int64 tokens if this stage embeds, else [B, s, H] from the previous stage.
            tokens: positions, document ids and other tensors [B, S] of the same tokens.
        """

    def mtp_states(
        self, x_BsH: Tensor, later_BSD: Tensor | None, tokens: Tokens, mtp_D2: Tensor | None
    ) -> Iterator[Tensor]:
        """Yield the head's input [B, s, H] at each MTP depth of this pipeline stage.

        A model with modules for multi-token prediction overrides this method.

        Args:
            x_BsH: the head's input at the previous depth.
            later_BSD: int64, the later token that each of D depths reads at each position, -1 where
                the document has ended. None: modules do not run, and ``x_BsH`` is yielded in place
                of each result.
            tokens: positions, document ids and other tensors [B, S] of the tokens.
            mtp_D2: numbers of the global batch's labels and of non-padding tokens at each depth.
        """
        yield from ()

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics in ``reported`` after a forward pass with labels."""
        depths = range(1, self.config.num_mtp_layers + 1)
        mtp = (f"{name}.{depth}" for depth in depths for name in MTP_METRICS)
        return *getattr(self.loss, "metrics", ()), *mtp

    @abstractmethod
    def last_norm(self, x_BsH: Tensor) -> Tensor:
        """Return the final norm of ``x_BsH``; ``x_BsH`` itself if another stage has the norm."""

    @property
    @abstractmethod
    def head_weight(self) -> Tensor:
        """Vocabulary head [V, H]; the embedding itself if the two are tied."""

    @property
    @abstractmethod
    def embedding(self) -> nn.Module | None:
        """Token embedding of this pipeline stage, or None; with tied weights the last stage has a copy."""

    @abstractmethod
    def moe_layers(self) -> Iterator[tuple[int, MoELayer]]:
        """Yield (layer number, MoE layer) for the MoE layers of this pipeline stage, in order."""

    def zero_counters(self) -> None:
        """Zero what the layers count during a step (``automoe.training.stats``)."""
        for module in self.modules():
            if isinstance(module, (LoadCounter, KeyChooser)):
                module.reset_buffers()

    @abstractmethod
    def units(self) -> Iterator[Unit]:
        """Yield this pipeline stage's layers as FSDP units, in the order of the forward pass."""

    def add_adapter(self, module: nn.Module, adapter: nn.Module) -> None:
        """Make ``module``, which is no class of automoe, add the LoRA ``adapter``'s output to its own.

        Models with modules of transformers or of a plugin override this method.

        Raises:
            ConfigError: this model does not override it.
        """
        rule = (
            f"{type(self).__name__} does not say how an adapter is added to {type(module).__name__}"
        )
        remedy = "Name other matrices, or override CausalLM.add_adapter"
        raise ConfigError("lora.targets", type(module).__name__, rule, remedy)

    def check_isolation(self, seq_len: int = 0) -> None:
        """Raise ``ConfigError`` if documents packed in a sequence affect one another. Collective.

        This method checks nothing, since the decoder's masks keep documents apart; models that
        transformers or a plugin computes override it.

        Args:
            seq_len: positions of a training sequence, the longest that a check has to try.
        """

    def forward(
        self, *states: Tensor, batch: MicroBatch | None = None
    ) -> Tensor | tuple[Tensor, ...]:
        """Run this pipeline stage on a micro-batch; return states, next tokens, a loss or logits.

        Args:
            states: [B, s, H] from the stage before: hidden states, then those of each depth of
                multi-token prediction so far. For a stage that embeds: tokens [B, S]; default:
                those of the batch.
            batch: tokens, labels and other tensors; default: only tokens.

        Returns:
            If this stage does not predict, the states for the next stage. Else one tensor of what
            the batch asks for. With ``next_token_at``: [B, S] likeliest next tokens, -1 where a
            logit is NaN, ``IGNORE`` (-100) at other positions. Else with ``labels``: [1] this
            micro-batch's share of the loss, by default of the mean cross-entropy in nats. Without
            either: [B, S, V] logits of this tp rank's V rows of the head. Losses of modules for
            multi-token prediction have gradients and are reported, but are not in the loss.
        """
        batch = batch or MicroBatch(*states)
        counts = batch.known_counts()
        tokens = batch.per_token(counts.non_padding)
        x, *earlier_depths = states or (batch.tokens,)
        x = self.last_norm(self.run_layers(x, tokens))
        states = x, *earlier_depths
        depths_here = self.mtp_states(states[-1], batch.mtp_tokens, tokens, counts.mtp)
        if not self.predicts:
            return self._states(states, tuple(depths_here))
        if batch.next_token_at is not None:
            return self._next_tokens(x, batch.next_token_at)
        if batch.labels is None:
            return self._logits(x)
        return self._loss(x, chain(earlier_depths, depths_here), batch, counts)

    def _states(
        self, states: tuple[Tensor, ...], depths_here: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """Return the tensors [B, s, H] that the next stage gets: ``states``, then ``depths_here``.

        Args:
            states: the layers' output, then the outputs of earlier stages' depths of multi-token
                prediction.
            depths_here: outputs of the depths of multi-token prediction in this stage.
        """
        if depths_here:
            # FSDP's hooks make views of inputs, which torch cannot detach between the halves of a
            # backward (zero-bubble schedules)
            states = tuple(state.clone() for state in states)
        return *states, *depths_here

    def _logits(self, x_BsH: Tensor) -> Tensor:
        logits_BSV = nn.functional.linear(self._head_input(x_BsH), local_shard(self.head_weight))
        return cap_logits(logits_BSV, self.soft_cap)[0]

    def _loss(
        self, x_BsH: Tensor, depths: Iterable[Tensor], batch: MicroBatch, counts: TokenCounts
    ) -> Tensor:
        """Return this micro-batch's share of the main loss, a tensor [1].

        Its backward pass also trains the modules for multi-token prediction, but its value is
        without their losses. Metrics of all losses are added to ``self.reported``.

        Args:
            x_BsH: the head's input.
            depths: the head's input [B, s, H] at each depth of multi-token prediction.
            batch: labels and further inputs of the loss.
            counts: counts of the global batch, by which losses are divided.
        """
        assert batch.labels is not None
        row = self.backend.pg_collection.cp
        inputs = LossInputs(batch.labels, batch.doc_ids, counts, row, batch.given, self.reported)
        loss = self._main_loss(x_BsH, inputs)
        if batch.mtp_labels is not None:
            mtp_loss = self._mtp_loss(depths, batch.mtp_labels, inputs)
            # The difference has the value zero and the gradient of the modules' losses.
            loss = loss + (mtp_loss - mtp_loss.detach())
        return loss

    def _head_input(self, x_BsH: Tensor) -> Tensor:
        # Hidden states are scaled and not logits, which are wider.
        return self.tp.all_gather(x_BsH if self.logit_scale == 1 else x_BsH * self.logit_scale)

    def _mtp_loss(self, states: Iterable[Tensor], labels_BSD: Tensor, inputs: LossInputs) -> Tensor:
        """Return this rank's share of ``mtp_loss_weight`` times the mean cross-entropy of D depths.

        Each depth reports its mean cross-entropy and its acceptance: the share of labels that are
        the likeliest token, ties included.

        Args:
            states: the head's input [B, s, H] at each depth.
            labels_BSD: the token that each depth predicts; ``IGNORE``: none.
            inputs: counts that losses are divided by, and the dict that receives the reports.
        """
        weight_VH = local_shard(self.head_weight)
        depths = labels_BSD.shape[-1]
        assert inputs.counts.mtp is not None
        losses = []
        for depth, state_BsH in enumerate(states):
            hits = torch.zeros((), dtype=torch.int64, device=state_BsH.device)
            loss = cross_entropy_sum(
                self._head_input(state_BsH).flatten(0, 1),
                weight_VH,
                labels_BSD[..., depth].flatten(),
                self.first_id,
                self.tp,
                self.backend.chunk_loss,
                hits,
                self.soft_cap,
            )
            count = inputs.counts.mtp[depth, 0].clamp_min(1)
            losses.append(loss / count)
            inputs.report(f"mtp_loss.{depth + 1}", losses[-1])
            inputs.report(f"mtp_acceptance.{depth + 1}", hits.to(torch.float64) / count)
        return self.mtp_loss_weight / depths * torch.stack(losses).sum()

    def _next_tokens(self, x_BsH: Tensor, at_BS: Tensor) -> Tensor:
        x_BSH = self._head_input(x_BsH)
        tokens_BS = torch.full_like(at_BS, IGNORE, dtype=torch.int64)
        if at_BS.any():
            tokens_BS[at_BS] = greedy_tokens(
                x_BSH[at_BS], local_shard(self.head_weight), self.first_id, self.tp, self.soft_cap
            )
        return tokens_BS

    def _main_loss(self, x_BsH: Tensor, inputs: LossInputs) -> Tensor:
        x_TH = self._head_input(x_BsH).flatten(0, 1)
        head = x_TH, local_shard(self.head_weight), inputs.labels.flatten(), self.first_id, self.tp
        if self.loss is not None:
            sampled = {
                name: inputs.given[key].flatten(0, 1)
                for name, key in SAMPLED.items()
                if key in inputs.given
            }
            options = {
                "wants_entropy": getattr(self.loss, "uses_entropy", False),
                "skips_untrained": getattr(self.loss, "skips_untrained", False),
            }
            scores = token_scores(*head, **sampled, **options, soft_cap=self.soft_cap)
            entropy_BS, scored_BSK = (
                None if score is None else score.unflatten(0, inputs.labels.shape)
                for score in (scores.entropy_T, scores.scored_TK)
            )
            inputs = replace(inputs, entropy=entropy_BS, scored=scored_BSK)
            loss = self.loss(scores.nll_T.view(inputs.labels.shape), inputs)
            return torch.stack([loss.to(scores.nll_T.dtype)])
        loss = cross_entropy_sum(*head, self.backend.chunk_loss, soft_cap=self.soft_cap)
        # A step without one trained label has a loss of zero, not NaN.
        # The loss is stacked and not viewed: FSDP hooks outputs, and a view could lose the hook.
        return torch.stack([loss / inputs.counts.trained.clamp_min(1)])
