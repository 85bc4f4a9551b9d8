"""Recomputation (activation checkpointing, arXiv 1604.06174) of whole layers or of parts of them.

A region keeps its inputs and runs again when its backward pass begins. Regions lie inside the FSDP
units of their layers, whose weights are then unsharded. Experts are an FSDP unit inside a region,
so their hooks run both times. Collectives inside a region run again too, in the same order on all
ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from automoe.config.recompute import DISCARDED_OUTPUTS, FULL, recomputed_modules
from automoe.config.schema import ParallelConfig
from automoe.model.block import MLP, Block
from automoe.model.causal_lm import CausalLM
from automoe.moe.discard_outputs import discard_outputs, discard_scope
from automoe.moe.layer import MoE
from automoe.moe.recompute import recompute_contexts


@dataclass
class Recomputed:
    """Wrapper of ``fn`` that drops intermediate results after the forward pass.

    The wrapper has the arguments and the result of ``fn``.

    Args:
        to_end: recompute to the end, not only to the last tensor that is needed. An FSDP unit
            inside ``fn`` needs this: if stopped early, its state would stay that of a forward pass.
        saves: ``fn`` saves results for its recomputation (``automoe.moe.recompute``).
    """

    fn: Callable[..., torch.Tensor]
    to_end: bool = False
    saves: bool = False

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        # No compiled part has an FSDP unit or saves results.
        if torch.compiler.is_compiling():
            return checkpoint(self.fn, *args, use_reentrant=False)
        return checkpoint(
            partial(self.fn, **kwargs) if kwargs else self.fn,
            *args,
            use_reentrant=False,
            preserve_rng_state=False,  # nothing in a layer draws from a generator's state
            early_stop=not self.to_end,
            context_fn=recompute_contexts if self.saves else noop_context_fn,
        )


def has_side_stream(parallel: ParallelConfig, layer: int) -> bool:
    """Return whether shared experts of ``layer`` may run on a stream of their own.

    Autograd runs a region again on the stream of the node that needs it first, and nodes on the
    other stream would not wait for it. So a layer stays on one stream if its shared experts read
    recomputed tensors.
    """
    return not recomputed_modules(parallel, layer) & {FULL, "layernorm"}


def apply_recompute(model: CausalLM, parallel: ParallelConfig) -> None:
    """Recompute the parts in ``parallel.recompute`` of the layers that the setting selects.

    Call this function after the axes are applied, since their collectives belong inside the
    regions, and before FSDP, whose hooks stay outside.
    """
    for number, block, *_ in model.units():
        modules = recomputed_modules(parallel, number)
        if FULL in modules:
            _recompute_forward(block, to_end=True, saves=True)
        if not isinstance(block, Block):
            continue
        if "core_attn" in modules:
            block.attention.attend = Recomputed(block.attention.attend)
        if "mlp" in modules and isinstance(block.mlp, MLP):
            _recompute_forward(block.mlp)
        if isinstance(block.mlp, MoE):
            if "moe" in modules:
                block.mlp.run_experts = Recomputed(block.mlp.run_experts, to_end=True)
            if "shared_experts" in modules and block.mlp.shared_experts is not None:
                _recompute_forward(block.mlp.shared_experts)
        if "layernorm" in modules:
            _discard_norms(block)
        if "mla_up_proj" in modules:
            block.attention.project_up = discard_outputs(block.attention.project_up)
        if modules.intersection(DISCARDED_OUTPUTS):
            block.forward = discard_scope(block.forward)


def _discard_norms(block: nn.Module) -> None:
    for norm in (block.input_layernorm, block.post_attention_layernorm):
        norm.forward = discard_outputs(norm.forward)
    for module in block.modules():
        # Under tp, projections save gathered tensors; these are discarded and recomputed as well.
        sequence = getattr(module, "sequence", None)
        if sequence is not None and sequence.num_ranks > 1:
            module.sequence = copy(sequence)
            module.sequence.all_gather = discard_outputs(sequence.all_gather)


def _recompute_forward(module: nn.Module, **options: bool) -> None:
    # Replacing forward, not wrapping the module, keeps parameter names and leaves hooks outside.
    module.forward = Recomputed(module.forward, **options)
