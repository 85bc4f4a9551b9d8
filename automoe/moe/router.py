"""How tokens choose experts: jitter, score, select, weight, drop.

Shapes: B rows, S positions, E experts, K top-k, G groups, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from automoe.config.schema import ModelConfig, MoEConfig, RouterConfig
from automoe.counter_random import bits_at, stream_key, uniform_from
from automoe.moe.balance import (
    LoadCounter,
    attach_loss,
    count_choices,
    lagged_balance_loss,
    micro_batch_balance_loss,
    sequence_balance_loss,
    z_loss,
)
from automoe.moe.capacity import choose_kept
from automoe.moe.communicators import Communicators
from automoe.moe.decisions import decided, recomputing
from automoe.moe.gates import gate_choices
from automoe.moe.tokens import Tokens

ROUTER_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Routing(NamedTuple):
    """Which experts serve which token, and with what weight.

    Attributes:
        ids: [B, S, K] int64, the experts that compute.
        weights: [B, S, K] in at least float32, what their outputs are multiplied by.
        plain_ids: [B, S, K] top-k of the scores alone (no bias, no groups), which balance losses use.
        kept: [B, S, K] bool, choices that found room in their expert; None: no expert has a limit.
    """

    ids: torch.Tensor
    weights: torch.Tensor
    plain_ids: torch.Tensor
    kept: torch.Tensor | None = None


class Scores(NamedTuple):
    """What a router thinks of every expert, all [B, S, E] in at least float32.

    Attributes:
        logits: of the router's product.
        scores: the logits through the score function, none negative.
        choice: what experts are chosen by, and weights made from: the scores, or the logits themselves.
        sum_to_one: whether a token's scores do.
    """

    logits: torch.Tensor
    scores: torch.Tensor
    choice: torch.Tensor
    sum_to_one: bool

    def shares(self) -> torch.Tensor:
        """Scores that sum to one: the P of balance losses."""
        return self.scores if self.sum_to_one else self.scores / (self.scores.sum(-1, keepdim=True) + 1e-20)


def score_experts(logits: torch.Tensor, config: RouterConfig) -> Scores:
    """Logits [..., E] scored as the family does it."""
    if config.score == "softmax":
        probs = logits.softmax(-1)
        return Scores(logits, probs, logits if config.softmax_after_topk else probs, sum_to_one=True)
    if config.score == "sigmoid":
        scores = logits.sigmoid()
    else:
        # Below -80 the root of a softplus that rounds to zero would have no finite gradient. The threshold
        # is where float64 cannot tell a softplus from its argument.
        scores = F.softplus(logits.clamp_min(-80), threshold=40).sqrt()
    return Scores(logits, scores, scores, sum_to_one=False)


def best(x: torch.Tensor, k: int, exact_ties: bool) -> torch.Tensor:
    """Indices of the ``k`` largest of the last dim, in descending order.

    ``topk`` breaks ties as it likes; with ``exact_ties`` they go to the lowest index, on every device.
    """
    if exact_ties:
        return x.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    return x.topk(k, dim=-1).indices


def select_experts(scores: torch.Tensor, bias: torch.Tensor | None, config: RouterConfig, top_k: int) -> torch.Tensor:
    """Top-k of score + bias inside the best groups (DeepSeek-V3, section 2.1.2).

    Args:
        scores: [..., E].
        bias: [E] or None; it takes part in the selection of groups and experts, never in the weight.

    Returns:
        [..., K] int64.
    """
    choice = scores if bias is None else scores + bias
    if config.num_groups > 1:
        grouped = choice.unflatten(-1, (config.num_groups, -1))
        group_scores = grouped.topk(min(config.group_score_topk, grouped.shape[-1]), dim=-1).values.sum(-1)
        kept = torch.zeros_like(group_scores, dtype=torch.bool)
        kept.scatter_(-1, best(group_scores, config.topk_groups, config.exact_ties), True)
        choice = grouped.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(-2)
    return best(choice, top_k, config.exact_ties)


def expert_weights(scores: torch.Tensor, ids: torch.Tensor, config: RouterConfig) -> torch.Tensor:
    """Scores that were chosen by, [..., E], at ids [..., K], normalised over the K and scaled as the family asks."""
    weights = scores.gather(-1, ids)
    if config.softmax_after_topk:
        weights = weights.softmax(-1)
    elif config.norm_topk_prob:
        # The epsilon is DeepSeek's, for scores that may all vanish; a softmax cannot.
        tiny = 0.0 if config.score == "softmax" else 1e-20
        weights = weights / (weights.sum(-1, keepdim=True) + tiny)
    return weights * config.routed_scaling_factor


class _WideProduct(torch.autograd.Function):
    """x @ weight.T in the dtype of the weight, which is the wider; x is kept as it came, for others keep it too."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x.to(weight.dtype), weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: torch.Tensor):
        x, weight = ctx.saved_tensors
        rows, grad_rows = x.flatten(0, -2).to(weight.dtype), grad.flatten(0, -2)
        return (grad @ weight).to(x.dtype), (rows.T @ grad_rows).T


def _product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if x.dtype == weight.dtype or torch.compiler.is_compiling():  # compiled, a cast is made again by itself
        return F.linear(x.to(weight.dtype), weight)
    return _WideProduct.apply(x, weight)


class Router(nn.Module):
    """Scores tokens against experts and picks K of them; holds the balance losses and counters.

    Buffers: ``expert_bias`` [E] float32 (saved), ``load_fractions`` [E] float64 (saved: fractions of the
    step before, for the lagged balance loss), and the step's counters (not saved).
    """

    expert_bias: torch.Tensor | None
    load_fractions: torch.Tensor

    def __init__(
        self, config: ModelConfig, moe: MoEConfig, moe_index: int, comms: Communicators | None = None, seed: int = 0
    ) -> None:
        super().__init__()
        num_experts = config.num_experts
        self.config, self.moe, self.comms = config.router, moe, comms or Communicators()
        self.num_experts, self.top_k, self.moe_index = num_experts, config.num_experts_per_token, moe_index
        self.seed = seed  # of the jitter
        self.weight = nn.Parameter(torch.empty(num_experts, config.hidden_size))
        self.bias = nn.Parameter(torch.empty(num_experts)) if config.router.logit_bias else None
        bias = torch.empty(num_experts, dtype=torch.float32) if config.router.expert_bias else None
        self.register_buffer("expert_bias", bias)
        self.register_buffer("load_fractions", torch.empty(num_experts, dtype=torch.float64))
        self.load = LoadCounter(num_experts)
        self.reset_buffers()

    def reset_buffers(self) -> None:
        """Give buffers their first values; called again after a model built on meta gets its storage."""
        if self.expert_bias is not None:
            self.expert_bias.zero_()
        self.load_fractions.fill_(1.0 / self.num_experts)

    def forward(self, x: torch.Tensor, tokens: Tokens) -> Routing:
        """x [B, S, H] -> routing.

        In training mode the weights carry the auxiliary losses into the backward (every expert output
        is multiplied by one, so they always have a gradient), and one micro-batch is counted.
        """
        jitter = self._jitter(x, tokens) if self.training and self.moe.router_jitter else None
        scores = self.score(x, jitter)
        with torch.no_grad():
            ids, plain_ids = decided(self._choose, scores.choice, tokens)
        routing = Routing(ids, self.weigh(scores.choice, ids), plain_ids)
        if self.moe.capacity_factor:
            kept = decided(choose_kept, ids, routing.weights, tokens, self.comms, self.moe, self.num_experts)
            routing = routing._replace(kept=kept)
        if self.training and torch.is_grad_enabled():
            routing = self._balance(scores, routing, tokens)
        return routing

    # The arithmetic: functions of their arguments and of what all layers have alike, so that one compilation
    # of each serves every layer.

    def score(self, x: torch.Tensor, jitter: torch.Tensor | None) -> Scores:
        """x [B, S, H], times ``jitter`` of that shape if given -> scores of all experts."""
        wide = torch.promote_types(x.dtype, torch.float32)
        dtype = torch.promote_types(x.dtype, ROUTER_DTYPES[self.moe.router_dtype])
        if jitter is not None:
            x = x.to(dtype) * jitter.to(dtype)
        logits = _product(x, self.weight.to(dtype)).to(wide)
        if self.bias is not None:
            logits = logits + self.bias.to(wide)
        return score_experts(logits, self.config)

    def select(self, choice: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """choice [B, S, E] -> ids and plain_ids of ``Routing``."""
        plain_ids = best(choice, self.top_k, self.config.exact_ties)
        if self.expert_bias is None and self.config.num_groups == 1:
            return plain_ids, plain_ids
        return select_experts(choice, self.expert_bias, self.config, self.top_k), plain_ids

    def weigh(self, choice: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """choice [B, S, E], ids [B, S, K] -> weights [B, S, K]."""
        return expert_weights(choice, ids, self.config)

    def count(
        self, scores: Scores, ids: torch.Tensor, plain_ids: torch.Tensor, tokens: Tokens
    ) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """Counts [B, E] of ids and of plain_ids, and the losses, in the order of ``balance.LOSSES``."""
        chosen = count_choices(ids, tokens.valid, self.num_experts)
        same = ids is plain_ids
        plain = chosen if same else count_choices(plain_ids, tokens.valid, self.num_experts)
        moe, shares = self.moe, scores.shares()
        off = shares.new_zeros(())
        terms = (
            (moe.seq_balance_coef, lambda: sequence_balance_loss(shares, plain, tokens, self.comms, self.top_k)),
            (moe.global_balance_coef, lambda: lagged_balance_loss(shares, self.load_fractions, tokens)),
            (moe.micro_batch_balance_coef, lambda: micro_batch_balance_loss(shares, plain, tokens, self.comms)),
            (moe.z_loss_coef, lambda: z_loss(scores.logits, tokens)),
        )
        return chosen, plain, [coef * term() if coef else off for coef, term in terms]

    def _jitter(self, x: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        """Factors around one, [B, S, H], by (seed, layer, row of the training stream, index, dimension)."""
        assert tokens.row_ids is not None
        key = stream_key(f"jitter.{self.moe_index}", self.seed)
        token = bits_at(tokens.index, bits_at(tokens.row_ids, key)).unsqueeze(-1)
        bits = bits_at(torch.arange(x.shape[-1], device=x.device), token)
        uniform = uniform_from(bits, torch.promote_types(x.dtype, torch.float32))
        return 1 + self.moe.router_jitter * (2 * uniform - 1)

    def _choose(self, choice: torch.Tensor, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
        if tokens.forced_ids is not None:
            forced = tokens.forced_ids[:, :, self.moe_index]
            return forced[:, :, 0], forced[:, :, 1]
        if self.moe.gate != "learned":
            ids = gate_choices(self.moe.gate, tokens.index, self.num_experts, self.top_k, self.moe_index)
            return ids, ids
        return self.select(choice)

    def _balance(self, scores: Scores, routing: Routing, tokens: Tokens) -> Routing:
        chosen, plain, losses = self.count(scores, routing.ids, routing.plain_ids, tokens)
        if any(loss.requires_grad for loss in losses):
            routing = routing._replace(weights=attach_loss(routing.weights, torch.stack(losses).sum()))
        self.load.add(chosen, plain, losses)
        if routing.kept is not None:
            self.load.add_dropped(routing.kept, tokens.valid)
        return routing


@contextmanager
def watch_routing(
    modules: Iterable[nn.Module], keep: Callable[[Router, Tokens, Routing], object]
) -> Iterator[list[Router]]:
    """Call ``keep(router, tokens, routing)`` after every forward of a router in ``modules``, recomputation apart.

    Gives the routers, in the order of the model's layers.
    """

    def hook(router: nn.Module, inputs: tuple, routing: Routing) -> None:
        if not recomputing():
            assert isinstance(router, Router)
            keep(router, inputs[1], routing)

    routers = [module for part in modules for module in part.modules() if isinstance(module, Router)]
    routers.sort(key=lambda router: router.moe_index)
    handles = [router.register_forward_hook(hook) for router in routers]
    try:
        yield routers
    finally:
        for handle in handles:
            handle.remove()


class RoutingRecorder:
    """Keeps the choices of every router of ``model`` while it is entered.

    Rounding can flip a top-k choice between two runs that are otherwise equal; with the choices of the first
    forced on the second, what is left to compare is arithmetic. The model must hold all layers and whole rows
    (no pipeline, no context axis).
    """

    def __init__(self, model: nn.Module) -> None:
        self._choices: dict[int, list[torch.Tensor]] = {}
        self._watching = watch_routing([model], self._keep)

    def __enter__(self) -> RoutingRecorder:
        self._watching.__enter__()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._watching.__exit__(None, None, None)

    def _keep(self, router: Router, _tokens: Tokens, routing: Routing) -> None:
        choices = torch.stack((routing.ids, routing.plain_ids), dim=2).cpu()
        self._choices.setdefault(router.moe_index, []).append(choices)

    def choices(self) -> torch.Tensor:
        """[rows, S, MoE layers, 2, K] int64, rows in the order they were seen; 2: chosen, plain top-k."""
        return torch.stack([torch.cat(seen) for _, seen in sorted(self._choices.items())], dim=2)
