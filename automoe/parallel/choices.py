"""Choices of what a model is built with: communicators, implementations, wrappers of calls.

The records are ``BackendConfig`` (``automoe.model.backend``) and, for each layer, ``LayerCalls``
(``automoe.passes.calls``). Modules get them in their constructors and keep them. Some choices are
made elsewhere: ``Block`` chooses the classes of attention and feed-forward,
``automoe.parallel.dispatchers`` the dispatcher, and SDPA its kernel at each call; LoRA and ``train.fp8``
replace linear layers after construction, and LoRA the expert backend. A wrapped call contains the
collectives of tp, ep and cp, since modules call these. FSDP's hooks stay outside of it: they
surround the forward of the module that makes the call, so weights are unsharded whenever the call
is recomputed.
"""

from __future__ import annotations

from functools import partial

from automoe.comm.collectives import communicator
from automoe.comm.communicators import SINGLE_RANK, Communicator, ProcessGroupCollection
from automoe.config.plugins import look_up, registered
from automoe.config.recompute import DISCARDED_OUTPUTS, FULL, recomputed_modules
from automoe.config.schema import Config, ParallelConfig, is_linear
from automoe.kernels.attention import AttentionFn, attend_in_blocks, attention_fn
from automoe.model.attention_masks import MaskFn, block_masks, dense_masks
from automoe.model.backend import BackendConfig
from automoe.model.loss import chunk_loss_fn
from automoe.model.norm import RMSNorm
from automoe.model.rope import rope_fns
from automoe.moe.dispatch.base import Dispatcher
from automoe.moe.experts import MakeExpertBackend, expert_backend
from automoe.moe.gradient_sums import GradientSums
from automoe.moe.grouped_mm import grouped_mm_experts
from automoe.optim.qk_clip import WatchedAttention
from automoe.parallel.compile import compiled
from automoe.parallel.fp8 import fp8_experts
from automoe.parallel.fsdp import MASTER_DTYPES
from automoe.parallel.mesh import Meshes
from automoe.parallel.overlap import MERGED_PASSES
from automoe.parallel.ring import cpu_ring, cuda_ring, ring_masks
from automoe.parallel.runner import checked_loss
from automoe.passes.activation_checkpoint import Recomputed
from automoe.passes.calls import LayerCalls, Wrap, as_it_is, chain
from automoe.passes.discard_outputs import discard_outputs, discard_scope


def layer_calls(config: Config, layer: int) -> LayerCalls:
    """Return the wrappers (compilation, recomputation, recording) of the calls of layer number ``layer``.

    ``train.compile`` compiles, and ``optim.qk_clip`` records the largest attention logits.
    ``parallel.recompute`` names modules that the backward runs again, or whose outputs it
    recomputes, in the layers that ``parallel.recompute_layers`` names.
    """
    modules = recomputed_modules(config.parallel, layer)

    def if_recomputed(name: str, wrap: Wrap) -> Wrap:
        return wrap if name in modules else as_it_is

    compiles = compiled if config.train.compile else as_it_is
    discards_norms = if_recomputed("layernorm", discard_outputs)
    discards = discard_scope if modules.intersection(DISCARDED_OUTPUTS) else as_it_is
    softmax = not is_linear(config.model.attention, layer)
    watches_logits = WatchedAttention if config.optim.qk_clip and softmax else as_it_is
    # A recomputed call runs compiled code again, but core_attn is inside of a compiled part and the
    # compiler recomputes it. Experts are an FSDP unit of their own, so they run again to the end.
    return LayerCalls(
        layer=chain(if_recomputed(FULL, partial(Recomputed, to_end=True, saves=True)), discards),
        run_attention=compiles,
        norm=discards_norms,
        gather=discards_norms,  # of the norms' outputs: recomputing them repeats the all-gather
        project_up=if_recomputed("mla_up_proj", discard_outputs),
        core_attention=chain(if_recomputed("core_attn", Recomputed), watches_logits),
        mlp=chain(compiles, if_recomputed("mlp", Recomputed)),
        shared_experts=chain(compiles, if_recomputed("shared_experts", Recomputed)),
        router=compiles,
        run_experts=if_recomputed("moe", partial(Recomputed, to_end=True)),
        # Autograd recomputes a tensor on the stream of the backward node that needs it first, and
        # nodes on other streams do not wait for it. So shared experts that read a recomputed input
        # stay on the stream of the layer.
        side_stream=not modules & {FULL, "layernorm"},
    )


def build_backend(
    config: Config, meshes: Meshes | None = None, dispatcher: Dispatcher | None = None
) -> BackendConfig:
    """Return the communicators and kernels that every pipeline stage of the model is built with.

    Args:
        meshes: the run's device meshes; None: one rank.
        dispatcher: brings tokens to the ranks of their experts; None: all experts are here.

    Raises:
        BackendError: the package of an implementation is missing, or this machine does not support
            it.
        ConfigError: the configured loss reports a metric under a name that another metric has.
    """
    kernels = config.kernels
    pg_collection = ProcessGroupCollection()
    if meshes is not None:
        pg_collection = _build_communicators(meshes, config.parallel)
    attention_kernel, masks = _attention_kernel(config, meshes, pg_collection.cp)
    loss = None
    if (named := config.train.loss) != "cross_entropy":
        loss = checked_loss(registered("train.loss")[named], named)
    chunk_loss = chunk_loss_fn(kernels.loss)
    if config.train.compile and kernels.loss == "torch":
        chunk_loss = compiled(chunk_loss)
    return BackendConfig(
        pg_collection=pg_collection,
        make_expert_backend=_expert_backend_maker(config, meshes)
        if config.model.num_moe_layers
        else None,
        dispatcher=dispatcher,
        router_dtype=MASTER_DTYPES[config.train.dtype],
        attention_kernel=attention_kernel,
        masks=masks,
        rope=rope_fns(kernels.rope),
        norm=look_up("kernels.norm", "te")() if kernels.norm == "te" else RMSNorm,
        chunk_loss=chunk_loss,
        loss=loss,
        indexer_warmup=config.train.indexer == "warmup",
        calls=partial(layer_calls, config),
        last_norm=compiled if config.train.compile else as_it_is,
        always_masked=config.train.compile,
        seed=config.train.seed,
    )


def _expert_backend_maker(config: Config, meshes: Meshes | None) -> MakeExpertBackend:
    """Return the function that makes a layer's expert backend, given the layer's ``GroupedExperts``.

    With ``train.fp8`` a layer's backend multiplies in 8 bits, with its own scales. Unless
    ``parallel.expert_wgrad`` is autograd, it adds weight gradients to FSDP's sums. Both imply
    moe.experts=grouped_mm. In other cases all layers get the backend that ``moe.experts`` names.
    LoRA adapters of experts replace the backend later (``automoe.moe.lora``).
    """
    if meshes is not None and config.train.fp8 != "off":
        return lambda experts: fp8_experts(meshes, config)
    if (how := config.parallel.expert_wgrad) != "autograd":
        later = MERGED_PASSES.defer if how == "delayed" else None
        return lambda experts: partial(grouped_mm_experts, sums=GradientSums(experts, later))
    backend = expert_backend(config.moe.experts)
    return lambda experts: backend


def _attention_kernel(
    config: Config, meshes: Meshes | None, cp_ranks: Communicator
) -> tuple[AttentionFn, MaskFn]:
    """Return the function that computes attention, and the one that makes its masks.

    With ``parallel.context=ring`` it is ring attention, whose masks on the CPU need the document
    ids of all ``cp_ranks``; else ``kernels.attention`` names the kernel.
    """
    kernel = config.kernels.attention
    cp = None if meshes is None or config.parallel.context != "ring" else meshes.submesh("cp")
    if cp is not None:
        if cp.device_type == "cpu":
            return cpu_ring(cp.get_group()), ring_masks(cp_ranks)
        return cuda_ring(cp), dense_masks
    if kernel == "flex":
        return compiled(attend_in_blocks), block_masks
    if kernel == "te":
        return look_up("kernels.attention", "te")(), dense_masks
    return attention_fn(kernel), dense_masks


def _build_communicators(meshes: Meshes, parallel: ParallelConfig) -> ProcessGroupCollection:
    cp = communicator(meshes.group("cp"))
    return ProcessGroupCollection(
        tp=communicator(meshes.group("tp")),
        cp=cp,
        key_gather=cp if parallel.context == "gather" else SINGLE_RANK,
        head_exchange=cp if parallel.context == "ulysses" else SINGLE_RANK,
        data=tuple(communicator(meshes.group(axis)) for axis in ("dp_shard", "dp_replicate")),
    )
