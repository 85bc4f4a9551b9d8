"""The router: jitter, scores, choice of experts, routing weights and drops.

The file also holds the gates of benchmarks, which replace the router's choices, and hooks that
watch choices from outside: for routing files, and to force the choices of one run on another run.

Letters of dimensions: ``automoe.model``; here G groups of experts. Functions of scores alone take any
leading dims in place of B and s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from automoe.comm.communicators import ProcessGroupCollection
from automoe.comm.tokens import Tokens
from automoe.config.schema import ModelConfig, MoEConfig, RouterConfig
from automoe.kernels.counter_random import bits_at, stream_key, uniform_at, uniform_from
from automoe.kernels.wide_product import wide_product
from automoe.moe.balance import (
    LoadCounter,
    attach_loss,
    balance_loss,
    choices_by_sequence,
    load_fractions,
    z_loss,
)
from automoe.moe.capacity import choose_kept
from automoe.passes.calls import Wrap, as_it_is, bind
from automoe.passes.recompute import is_recomputing, save_for_recompute

BALANCE_COEFS = ("seq_balance_coef", "global_balance_coef", "micro_batch_balance_coef")
ROUTER_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Routing(NamedTuple):
    """Experts that serve each token, and their routing weights (``probs``, as in Megatron-Core).

    Attributes:
        topk_expert_ids: [B, s, K] int64, the chosen experts; zero experts have the last ids.
        topk_probs: [B, s, K] in at least float32, routing weights: they multiply experts' outputs.
        plain_ids: [B, s, K] top-k of the scores alone (no bias, no groups), for balance losses.
        kept: [B, s, K] bool, choices within their expert's capacity; None: no expert has a limit.
        differing: [B, s] how many of a token's choices, repeated from an inference engine, the
            router would not make; -1 for tokens without repeated choices. None: no token has any.
    """

    topk_expert_ids: Tensor
    topk_probs: Tensor
    plain_ids: Tensor
    kept: Tensor | None = None
    differing: Tensor | None = None


class Scores(NamedTuple):
    """A router's scores of every expert, all [B, s, E] in at least float32.

    Attributes:
        logits: the product with the router's weight.
        scores: the logits through the score function; none is negative.
        choice: what top-k and routing weights use: scores, or logits with ``softmax_after_topk``.
        sum_to_one: whether the scores of a token sum to one.
    """

    logits: Tensor
    scores: Tensor
    choice: Tensor
    sum_to_one: bool

    def shares(self) -> Tensor:
        """Return [B, s, E], each token's scores divided by their sum.

        Their means over tokens are the factors P of the balance losses.
        """
        if self.sum_to_one:
            return self.scores
        return self.scores / (self.scores.sum(-1, keepdim=True) + 1e-20)


def score_experts(logits_BsE: Tensor, config: RouterConfig) -> Scores:
    """Return each token's scores of all experts: the function ``config.score`` of the router's logits.

    The score functions are softmax, sigmoid and sqrt(softplus).
    """
    if config.score == "softmax":
        scores_BsE = logits_BsE.softmax(-1)
        return Scores(
            logits_BsE,
            scores_BsE,
            logits_BsE if config.softmax_after_topk else scores_BsE,
            sum_to_one=True,
        )
    if config.score == "sigmoid":
        scores_BsE = logits_BsE.sigmoid()
    else:
        # Below -80 the softplus may round to zero, where its root has no finite gradient. Above the
        # threshold float64 cannot tell a softplus from its argument.
        scores_BsE = F.softplus(logits_BsE.clamp_min(-80), threshold=40).sqrt()
    return Scores(logits_BsE, scores_BsE, scores_BsE, sum_to_one=False)


def topk_indices(x: Tensor, k: int, exact_ties: bool) -> Tensor:
    """Return the indices of the ``k`` largest values of the last dim, in descending order.

    ``topk`` breaks ties in any order. With ``exact_ties`` ties go to the lowest index, on every
    device.
    """
    if exact_ties:
        return x.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    return x.topk(k, dim=-1).indices


def select_experts(
    scores_BsE: Tensor, bias_E: Tensor | None, config: RouterConfig, top_k: int
) -> Tensor:
    """Return the top-k of score + bias (None: 0) inside the best groups of experts: [B, s, K] int64.

    Section 2.1.2 of arXiv 2412.19437 (DeepSeek-V3) has the rule. The best ``topk_groups`` of
    ``num_groups`` groups are those with the largest sum of their ``group_score_topk`` best experts.
    The bias takes part in the selection of groups and experts, never in the routing weights.
    """
    choice_BsE = scores_BsE if bias_E is None else scores_BsE + bias_E
    if config.num_groups > 1:
        grouped = choice_BsE.unflatten(-1, (config.num_groups, -1))
        scores_BsG = grouped.topk(
            min(config.group_score_topk, grouped.shape[-1]), dim=-1
        ).values.sum(-1)
        kept_BsG = torch.zeros_like(scores_BsG, dtype=torch.bool)
        kept_BsG.scatter_(-1, topk_indices(scores_BsG, config.topk_groups, config.exact_ties), True)
        choice_BsE = grouped.masked_fill(~kept_BsG.unsqueeze(-1), float("-inf")).flatten(-2)
    return topk_indices(choice_BsE, top_k, config.exact_ties)


def routing_probs(choice_BsE: Tensor, topk_ids_BsK: Tensor, config: RouterConfig) -> Tensor:
    """Return the routing weights [B, s, K] of the chosen experts.

    They are the chosen experts' entries of ``choice_BsE`` (``Scores.choice``): after a softmax over the K with
    ``softmax_after_topk``, divided by their sum with ``norm_topk_prob``; times ``routed_scaling_factor``.
    """
    probs_BsK = choice_BsE.gather(-1, topk_ids_BsK)
    if config.softmax_after_topk:
        probs_BsK = probs_BsK.softmax(-1)
    elif config.norm_topk_prob:
        total_Bs1 = probs_BsK.sum(-1, keepdim=True)
        if config.score != "softmax":
            total_Bs1 = total_Bs1 + 1e-20  # as DeepSeek: scores may all vanish
        elif config.expert_bias:
            total_Bs1 = total_Bs1.clamp_min(1e-12)  # as ERNIE: a bias may choose what vanishes
        probs_BsK = probs_BsK / total_Bs1
    return probs_BsK * config.routed_scaling_factor


def _overlay(forced_BsK: Tensor, live_BsK: Tensor) -> Tensor:
    """Return the expert ids ``forced_BsK``, each -1 replaced by the router's own id in ``live_BsK``."""
    return torch.where(forced_BsK >= 0, forced_BsK.to(live_BsK.dtype), live_BsK)


class BalancedRouter(nn.Module):
    """Base class of routers: balance losses and load counters. Subclasses choose the experts and set ``weight`` [E, H].

    The buffer ``expert_bias`` [E] float32 is added to scores when experts are chosen (None: no bias); ``load_fractions``
    [E] float64 are experts' shares of the previous step's choices, for the global balance loss. Checkpoints have both.
    Zero experts are the last of the E. ``moe_index`` counts MoE layers from 0. ``wrap`` is ``LayerCalls.router``.
    """

    expert_bias: Tensor | None
    load_fractions: Tensor
    weight: Tensor

    def __init__(
        self,
        config: ModelConfig,
        moe: MoEConfig,
        moe_index: int,
        pg_collection: ProcessGroupCollection | None = None,
        expert_bias: Tensor | None = None,
        wrap: Wrap = as_it_is,
    ) -> None:
        super().__init__()
        self.wrapped_load_and_losses = bind(wrap, self.load_and_losses)
        self.moe = moe
        self.pg_collection = pg_collection or ProcessGroupCollection()
        self.num_scored_experts = config.num_scored_experts
        self.top_k = config.num_experts_per_token
        self.moe_index = moe_index
        self.register_buffer("expert_bias", expert_bias)
        fractions = torch.empty(self.num_scored_experts, dtype=torch.float64)
        self.register_buffer("load_fractions", fractions)
        self.load = LoadCounter(self.num_scored_experts)
        BalancedRouter.reset_buffers(self)

    def reset_buffers(self) -> None:
        """Set the expert bias to zeros and load fractions to 1 / E; ``to_empty`` left them undefined."""
        if self.expert_bias is not None:
            self.expert_bias.zero_()
        self.load_fractions.fill_(1.0 / self.num_scored_experts)

    def load_and_losses(
        self, scores: Scores, topk_ids_BsK: Tensor, plain_ids_BsK: Tensor, tokens: Tokens
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Return two counts [B, E] of a micro-batch, and its four auxiliary losses, scalars.

        The first counts how often each sequence's tokens chose each expert, the second how often
        plain top-k would, which ignores the expert bias and groups. The losses are sequence, global
        and micro-batch balance loss, and z-loss: this rank's shares times their coefficients.
        """
        chosen_BE = choices_by_sequence(topk_ids_BsK, tokens.valid, self.num_scored_experts)
        plain_BE = chosen_BE
        if plain_ids_BsK is not topk_ids_BsK:
            plain_BE = choices_by_sequence(plain_ids_BsK, tokens.valid, self.num_scored_experts)
        moe, ranks = self.moe, self.pg_collection
        shares_BsE = scores.shares()
        off = shares_BsE.new_zeros(())

        def loss_over(counts: Tensor) -> Tensor:
            return balance_loss(load_fractions(counts, shares_BsE.dtype), shares_BsE, tokens)

        terms = (
            (moe.seq_balance_coef, lambda: loss_over(ranks.sum_over_sequence(plain_BE))),
            (
                moe.global_balance_coef,
                lambda: balance_loss(self.load_fractions.to(shares_BsE.dtype), shares_BsE, tokens),
            ),
            (
                moe.micro_batch_balance_coef,
                lambda: loss_over(ranks.sum_over_data(ranks.sum_over_sequence(plain_BE.sum(0)))),
            ),
            (moe.z_loss_coef, lambda: z_loss(scores.logits, tokens)),
        )
        return chosen_BE, plain_BE, [coef * term() if coef else off for coef, term in terms]

    def replay(
        self, live_BsK: Tensor, plain_BsK: Tensor, tokens: Tokens
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the expert ids to use, those of plain top-k, and how many choices differ.

        Tokens with ``forced_ids``, which a recorded run or an inference engine chose, repeat those
        ids; other tokens keep the router's choices. Layers of modules for multi-token prediction,
        which an engine does not run, repeat none.

        Args:
            live_BsK: the router's own choices.
            plain_BsK: plain top-k of the router's scores.

        Returns:
            Ids to use and ids of plain top-k (``plain_BsK``, unless a recorded run has its own),
            both [B, s, K]; and [B, s], how many of a token's ids from an engine the router would
            not choose (-1: a token without such ids), or None: nothing is repeated, or a recorded
            run is.
        """
        forced = tokens.forced_ids
        # An engine runs no modules for multi-token prediction: their layers come after its last.
        if forced is None or self.moe_index >= forced.shape[2]:
            return live_BsK, plain_BsK, None
        ids_BsK = _overlay(forced[:, :, self.moe_index, 0], live_BsK)
        if forced.shape[3] > 1:  # a recorded run, which is this model's own and is not judged
            return ids_BsK, _overlay(forced[:, :, self.moe_index, 1], plain_BsK), None
        repeated_Bs = tokens.valid & (forced[:, :, self.moe_index, 0, 0] >= 0)
        differs_BsK = (ids_BsK.unsqueeze(-1) != live_BsK.unsqueeze(-2)).all(-1)
        return ids_BsK, plain_BsK, torch.where(repeated_Bs, differs_BsK.sum(-1), -1)

    def _balance(self, scores: Scores, routing: Routing, tokens: Tokens) -> Routing:
        chosen_BE, plain_BE, losses = self.wrapped_load_and_losses(
            scores, routing.topk_expert_ids, routing.plain_ids, tokens
        )
        if any(loss.requires_grad for loss in losses):
            routing = routing._replace(
                topk_probs=attach_loss(routing.topk_probs, torch.stack(losses).sum())
            )
        dropped_BsK = None if routing.kept is None else tokens.valid.unsqueeze(-1) & ~routing.kept
        replayed = None
        if (differing_Bs := routing.differing) is not None:
            repeated = (differing_Bs >= 0).sum() * self.top_k
            replayed = torch.stack((repeated, differing_Bs.clamp_min(0).sum()))
        self.load.add(chosen_BE, plain_BE, losses, dropped_BsK, replayed)
        return routing


class Router(BalancedRouter):
    """Router that scores all experts, picks K per token and weights them by their scores.

    The first ``num_hash_layers`` MoE layers look the experts up instead (DeepSeek-V4, arXiv
    2106.04426): the saved buffer ``tid2eid`` [V, K] int64 has K expert ids for each token id. No
    loss balances these layers. Without a checkpoint the table gives all experts equally many token
    ids. ``seed`` is the seed of the jitter, ``dtype`` the dtype of the parameters.
    """

    tid2eid: Tensor | None

    def __init__(
        self,
        config: ModelConfig,
        moe: MoEConfig,
        moe_index: int,
        pg_collection: ProcessGroupCollection | None = None,
        seed: int = 0,
        dtype: torch.dtype | None = None,
        wrap: Wrap = as_it_is,
    ) -> None:
        num_experts = config.num_scored_experts
        bias = table = None
        if moe_index < config.router.num_hash_layers:
            table = torch.empty(config.vocab_size, config.num_experts_per_token, dtype=torch.int64)
            moe = replace(moe, **dict.fromkeys(BALANCE_COEFS, 0.0))
        elif config.router.expert_bias:
            bias = torch.empty(num_experts, dtype=torch.float32)
        super().__init__(config, moe, moe_index, pg_collection, bias, wrap)
        self.register_buffer("tid2eid", table)
        self.wrapped_score = bind(wrap, self.score)
        self.wrapped_select = bind(wrap, self.select)
        self.wrapped_topk_probs = bind(wrap, self.topk_probs)
        self.config = config.router
        self.seed = seed  # seed of the jitter
        self.weight = nn.Parameter(torch.empty(num_experts, config.hidden_size, dtype=dtype))
        biased = config.router.logit_bias
        self.bias = nn.Parameter(torch.empty(num_experts, dtype=dtype)) if biased else None
        self.reset_buffers()

    def reset_buffers(self) -> None:
        super().reset_buffers()
        if self.tid2eid is not None:
            ids_V = torch.arange(len(self.tid2eid), device=self.tid2eid.device)
            self.tid2eid.copy_(gate_ids("balanced", ids_V, self.num_scored_experts, self.top_k))

    def forward(self, x_BsH: Tensor, tokens: Tokens) -> Routing:
        """Return the routing of x [B, s, H]: chosen experts, their weights, and which are dropped.

        There are s positions of this tp rank; results are [B, s, K]. In training the load counters count
        the micro-batch, and the routing weights carry the auxiliary losses into the backward. They
        multiply every expert output, so they always have a gradient.
        """
        jitter_BsH = (
            self._jitter(x_BsH, tokens) if self.training and self.moe.router_jitter else None
        )
        scores = self.wrapped_score(x_BsH, jitter_BsH)
        with torch.no_grad():
            topk_ids_BsK, plain_ids_BsK, differing = save_for_recompute(
                self._choose, scores.choice, tokens
            )
        probs_BsK = self.wrapped_topk_probs(scores.choice, topk_ids_BsK)
        routing = Routing(topk_ids_BsK, probs_BsK, plain_ids_BsK, differing=differing)
        if self.moe.capacity_factor:
            args = topk_ids_BsK, probs_BsK, tokens, self.pg_collection, self.moe
            sizes = self.num_scored_experts, self.config.num_zero_experts
            routing = routing._replace(kept=save_for_recompute(choose_kept, *args, *sizes))
        if self.training and torch.is_grad_enabled():
            routing = self._balance(scores, routing, tokens)
        return routing

    # The methods below do the arithmetic. Compiled code takes a layer's parameters and buffers as
    # inputs. All else that it reads is equal in all layers, so one compilation serves every layer.

    def score(self, x_BsH: Tensor, jitter_BsH: Tensor | None) -> Scores:
        """Return the scores of all experts for x times the random factors ``jitter_BsH`` (None: for x)."""
        wide = torch.promote_types(x_BsH.dtype, torch.float32)
        dtype = torch.promote_types(x_BsH.dtype, ROUTER_DTYPES[self.moe.router_dtype])
        if jitter_BsH is not None:
            x_BsH = x_BsH.to(dtype) * jitter_BsH.to(dtype)
        logits_BsE = wide_product(x_BsH, self.weight.to(dtype)).to(wide)
        if self.config.logit_scale != 1:
            logits_BsE = logits_BsE * self.config.logit_scale
        if self.bias is not None:
            logits_BsE = logits_BsE + self.bias.to(wide)
        return score_experts(logits_BsE, self.config)

    def select(self, choice_BsE: Tensor) -> tuple[Tensor, Tensor]:
        """Return the chosen experts of each token, and those of plain top-k: [B, s, K] int64 each.

        Plain top-k is of ``choice_BsE`` (scores or logits) alone: without expert bias and groups.
        """
        plain_ids_BsK = topk_indices(choice_BsE, self.top_k, self.config.exact_ties)
        if self.expert_bias is None and self.config.num_groups == 1:
            return plain_ids_BsK, plain_ids_BsK
        return select_experts(choice_BsE, self.expert_bias, self.config, self.top_k), plain_ids_BsK

    def topk_probs(self, choice_BsE: Tensor, topk_ids_BsK: Tensor) -> Tensor:
        """Return the routing weights [B, s, K] of the chosen experts.

        They are the chosen experts' entries of ``choice_BsE`` (scores or logits, ``Scores.choice``), normalised over
        the K and scaled as configured (``routing_probs``).
        """
        return routing_probs(choice_BsE, topk_ids_BsK, self.config)

    def _jitter(self, x_BsH: Tensor, tokens: Tokens) -> Tensor:
        """Return random factors [B, s, H] of the router's input, uniform in 1 +- ``moe.router_jitter``.

        A factor depends on the seed, the number of the MoE layer, the sequence's number in the
        training stream, the token's index in it and the dimension, and on nothing else.
        """
        assert tokens.row_ids is not None
        key = stream_key(f"jitter.{self.moe_index}", self.seed)
        token = bits_at(tokens.index, bits_at(tokens.row_ids, key)).unsqueeze(-1)
        bits = bits_at(torch.arange(x_BsH.shape[-1], device=x_BsH.device), token)
        uniform = uniform_from(bits, torch.promote_types(x_BsH.dtype, torch.float32))
        return 1 + self.moe.router_jitter * (2 * uniform - 1)

    def _choose(self, choice_BsE: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor, Tensor | None]:
        if self.moe.gate == "learned" and self.tid2eid is None:
            ids_BsK, plain_BsK = self.wrapped_select(choice_BsE)
        elif self.moe.gate == "learned":
            ids_BsK = plain_BsK = self.tid2eid[tokens.ids]
        else:
            gate = self.moe.gate, tokens.index, self.num_scored_experts, self.top_k, self.moe_index
            ids_BsK = plain_BsK = gate_ids(*gate)
        return self.replay(ids_BsK, plain_BsK, tokens)


GATES = ("balanced", "zipf", "one_hot", "empty")


def gate_ids(
    gate: str, index_Bs: Tensor, num_experts: int, top_k: int, moe_index: int = 0
) -> Tensor:
    """Return the choices of a benchmark's gate, equal on every mesh and step: [B, s, K] int64.

        balanced  round robin over the sequence's (token, choice) pairs: experts' counts differ by
                  at most one
        empty     balanced over all but the last expert, which gets nothing
        one_hot   the worst case: every token to experts 0 ... K-1, on as few ranks as hold them
        zipf      K different experts drawn with weights 1, 1/2, 1/3, ...; the heaviest expert is
                  ``moe_index`` mod E

    A gate replaces the learned choice. Routing weights still come from the router's scores, so all
    other work costs the same as in training.

    Args:
        gate: name of the gate, one of ``GATES``.
        index_Bs: index of each token in its sequence.
        num_experts: number of experts E.
        top_k: choices per token K.
        moe_index: number of the layer among the MoE layers.
    """
    choice_K = torch.arange(top_k, device=index_Bs.device)
    if gate == "one_hot":
        return choice_K.expand(*index_Bs.shape, top_k)
    if gate == "zipf":
        experts_E = torch.arange(num_experts, device=index_Bs.device)
        rank_E = (experts_E - moe_index) % num_experts + 1
        index_BsE = index_Bs.unsqueeze(-1) * num_experts + experts_E
        uniform_BsE = uniform_at(index_BsE, f"zipf.{moe_index}", 0)
        # Gumbel's trick: the K largest of log(weight) + noise are a draw without replacement.
        noisy_BsE = -rank_E.to(torch.float64).log() - (-uniform_BsE.log()).log()
        return noisy_BsE.topk(top_k, dim=-1).indices
    return (index_Bs.unsqueeze(-1) * top_k + choice_K) % (num_experts - (gate == "empty"))


@contextmanager
def watch_routing(
    modules: Iterable[nn.Module], keep: Callable[[BalancedRouter, Tokens, Routing], object]
) -> Iterator[None]:
    """Within the context call ``keep(router, tokens, routing)`` after each forward of a router in ``modules``.

    Recomputed forwards are left out.
    """

    def hook(router: nn.Module, inputs: tuple, routing: Routing) -> None:
        if not is_recomputing():
            assert isinstance(router, BalancedRouter)
            keep(router, inputs[1], routing)

    inner = (module for part in modules for module in part.modules())
    routers = [module for module in inner if isinstance(module, BalancedRouter)]
    handles = [router.register_forward_hook(hook) for router in routers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def recorded_choices(model: nn.Module) -> Iterator[Callable[[], Tensor]]:
    """Record the expert choices of every router of ``model`` during the context.

    ``model`` must hold all layers and whole sequences (no pp, no cp). Rounding can flip a top-k
    choice between two runs that are otherwise equal. With the choices of the first run forced on
    the second, the runs differ in arithmetic alone.

    Yields:
        A function that returns the choices so far: [B, S, L, 2, K] int64 of L MoE layers, sequences
        in the order of the forward passes. In the dim of size 2, index 0 has the experts that
        compute, index 1 the top-k of the scores alone, without expert bias and groups.
    """
    seen: dict[int, list[Tensor]] = {}

    def keep(router: BalancedRouter, _tokens: Tokens, routing: Routing) -> None:
        choices = torch.stack((routing.topk_expert_ids, routing.plain_ids), dim=2).cpu()
        seen.setdefault(router.moe_index, []).append(choices)

    with watch_routing([model], keep):
        yield lambda: torch.stack(
            [torch.cat(choices) for _, choices in sorted(seen.items())], dim=2
        )
