"""The MoE layer: router, dispatch, experts and combine, and shared experts beside them.

Letters of dimensions: ``automoe.model``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from automoe.comm.tokens import Tokens
from automoe.config.schema import ModelConfig, MoEConfig
from automoe.moe.capacity import dispatch_padded, slots_per_expert
from automoe.moe.dispatch.base import Dispatcher, LocalDispatcher
from automoe.moe.experts import GroupedExperts, expert_backend
from automoe.moe.router import Router, Routing
from automoe.passes.calls import as_it_is, bind, call_module, chain
from automoe.passes.discard_outputs import discard_scope

if TYPE_CHECKING:
    from automoe.model.backend import BackendConfig
    from automoe.model.block import Latent


class MoE(nn.Module):
    """Sparse feed-forward layer: router, dispatch to experts, combination of their outputs.

    Args:
        layer: number of this layer in the model, counted from 0.
        shared_experts: dense FFN that every token passes, or None.
        backend: communicators, dispatcher, expert backend and wrappers of this layer's calls.
        latent: projections to the routed experts' input width and back, and the norm of their
            outputs.
    """

    def __init__(
        self,
        config: ModelConfig,
        moe: MoEConfig,
        layer: int,
        shared_experts: nn.Module | None,
        backend: BackendConfig,
        latent: Latent,
    ) -> None:
        super().__init__()
        calls = backend.calls(layer)
        self.pg_collection = backend.pg_collection
        self.router = Router(
            config,
            moe,
            moe_index=config.moe_layers.index(layer),
            pg_collection=self.pg_collection,
            seed=backend.seed,
            dtype=backend.router_dtype,
            wrap=calls.router,
        )
        make_backend = backend.make_expert_backend or (lambda _: expert_backend(moe.experts))
        self.experts = GroupedExperts(config, make_backend)
        zeros = config.router.num_zero_experts
        self.dispatcher = backend.dispatcher or LocalDispatcher(config.num_experts, moe, zeros > 0)
        self.identities = zeros > 0 and config.router.zero_expert_type == "identity"
        fp8 = moe.dispatch_dtype == "fp8"
        scope = partial(discard_scope, outermost=True) if fp8 else as_it_is
        self.wrapped_run_experts = bind(chain(scope, calls.run_experts), self.run_experts)
        self.shared_experts = shared_experts
        self.latent = latent
        self.norms_outputs = config.post_norm_eps is not None
        self.call_shared_experts = calls.shared_experts(call_module)
        self.side_stream = moe.overlap_shared_experts and calls.side_stream
        self.moe = moe
        self.shortcut = config.moe_shortcut
        self.num_experts = config.num_experts
        self.num_scored_experts = config.num_scored_experts

    def forward(self, x_BsH: Tensor, tokens: Tokens) -> Tensor | tuple[Tensor, Tensor]:
        """Return the layer's output [B, s, H], without residual, for hidden states [B, s, H].

        ``tokens`` has per-token tensors of the same positions, such as the mask of padding. With
        ``moe_shortcut`` there are two outputs: of the shared experts, and of the routed ones.
        """
        routing = self.router(x_BsH, tokens)
        # On a side stream shared experts start first, so the GPU has work while the host waits for
        # the sizes of the dispatch. Elsewhere they run last, when ``shared`` is called.
        shared = None
        if self.shared_experts is not None:
            start = run_on_side_stream if self.side_stream and x_BsH.is_cuda else partial
            shared = start(partial(self.call_shared_experts, self.shared_experts), x_BsH)
        y_BsL = self.wrapped_run_experts(self.latent(x_BsH), routing, tokens)
        y_BsH = self.latent.post_expert_proj(y_BsL)
        if shared is None:
            return y_BsH
        return (shared(), y_BsH) if self.shortcut else y_BsH + shared()

    def run_experts(self, x_BsH: Tensor, routing: Routing, tokens: Tokens) -> Tensor:
        """Dispatch tokens, run their experts and combine the results, in the shape of ``x_BsH``.

        Args:
            x_BsH: the routed experts' input, of width ``moe_latent_size`` if that is set.
            routing: the experts that each token chose, and its routing weights.
            tokens: per-token tensors; with ``moe.pad_to_capacity`` their shape decides how many rows
                each expert computes, padding included.
        """
        x_TH, ids_TK, probs_TK = (
            x.flatten(0, 1) for x in (x_BsH, routing.topk_expert_ids, routing.topk_probs)
        )
        if routing.kept is not None:
            ids_TK = ids_TK.masked_fill(~routing.kept.flatten(0, 1), self.num_scored_experts)
        run: Dispatcher = self.dispatcher
        if routing.kept is not None and self.moe.pad_to_capacity:
            sizes = ids_TK.shape[1], self.num_scored_experts
            slots = slots_per_expert(self.moe, tokens, self.pg_collection, *sizes)
            run = partial(dispatch_padded, run, self.num_experts, slots)
        # Rows travel to the ranks of their experts, these run on them, and their sums come back.
        experts = self._normed_experts if self.norms_outputs else self.experts
        y_BsH = run(x_TH, ids_TK, probs_TK, experts).view(x_BsH.shape)
        if self.identities:
            passed_TK = (ids_TK >= self.num_experts) & (ids_TK < self.num_scored_experts)
            share_Bs1 = (probs_TK * passed_TK).sum(-1).view(*x_BsH.shape[:-1], 1)
            # The sum is in the weights' float32, and so is their gradient. It is no view: FSDP would warn.
            y_BsH = y_BsH.addcmul(x_BsH, share_Bs1).to(x_BsH.dtype)
        return y_BsH

    def _normed_experts(
        self, x_TH: Tensor, gather_idx_R: Tensor, offsets_E: Tensor, probs_R: Tensor
    ) -> Tensor:
        args = x_TH, gather_idx_R, offsets_E, torch.ones_like(probs_R)
        rows_RH = call_module(self.experts, *args)
        return (self.latent.post_expert_norm(rows_RH) * probs_R[:, None]).to(rows_RH.dtype)


@functools.cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the second CUDA stream of ``device`` for shared experts, the same in every call."""
    return torch.cuda.Stream(device)


def run_on_side_stream(fn: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], Tensor]:
    """Start ``fn(x)`` on a second CUDA stream, parallel to the current one in forward and backward.

    Returns:
        A function that makes the current stream wait for the result and returns the result. Call it
        once.
    """
    main = torch.cuda.current_stream(x.device)
    side = side_stream(x.device)
    if x.requires_grad:
        # In the backward autograd orders the gradient of x by itself, but not gradients of weights,
        # which are accumulated on the side stream. FSDP reads those on the current stream as soon
        # as the gradient of x has arrived.
        x = x.view_as(x)
        x.register_hook(lambda grad: torch.cuda.current_stream(grad.device).wait_stream(side))
    side.wait_stream(main)
    # Autograd keeps x for the backward on the side stream too, so the memory of x is free only
    # when both streams are done.
    x.record_stream(side)
    with torch.cuda.stream(side):
        out = fn(x)

    def join() -> Tensor:
        main.wait_stream(side)
        out.record_stream(main)
        return out

    return join
