"""Application of the meshes to a model: the order of the parallelisms, and the model's builder."""

from __future__ import annotations

from functools import partial

import torch

from automoe.comm.collectives import communicator
from automoe.comm.process_groups import SINGLE_RANK, ProcessGroupCollection
from automoe.config.mesh_shape import MeshShape, stage_layers, stays_unsharded
from automoe.config.pipeline import stages_of_ranks
from automoe.config.plugins import registered
from automoe.config.rules_model import TRANSFORMERS
from automoe.config.schema import Config, ModelConfig, MoEConfig, ParallelConfig
from automoe.interop import transformer_engine
from automoe.model.attention_kernels import attend_in_blocks, attention_fn
from automoe.model.attention_masks import block_masks, dense_masks
from automoe.model.backend import BackendConfig
from automoe.model.causal_lm import CausalLM
from automoe.model.decoder import Decoder
from automoe.model.init import default_dtype, initialize, reset_buffers
from automoe.model.lora import adapt, fill_adapters
from automoe.model.loss import chunk_loss_fn
from automoe.model.norm import RMSNorm
from automoe.model.rope import rope_fns
from automoe.model.transformers_model import TransformersModel
from automoe.moe.calls import as_it_is
from automoe.moe.experts import expert_backend
from automoe.parallel.activation_checkpoint import recompute_class_layers
from automoe.parallel.build import layer_calls
from automoe.parallel.compile import compiled
from automoe.parallel.context import ring_attention
from automoe.parallel.expert import ExpertParallel, apply_expert_parallel, expert_parallel_style
from automoe.parallel.fp8 import apply_fp8, fp8_experts
from automoe.parallel.fsdp import COMPUTE_DTYPES, PARAM_DTYPES, apply_data_parallel
from automoe.parallel.mesh import Meshes
from automoe.parallel.pipeline import checked_loss
from automoe.parallel.ring import cpu_ring, ring_masks
from automoe.parallel.tensor import apply_tensor_parallel

# constructors of expert backends from other packages, by value of ``moe.experts``
FOREIGN_EXPERTS = {"te": transformer_engine.experts}


def parallelize(part: CausalLM, meshes: Meshes, config: Config, style: ExpertParallel) -> None:
    """Apply every axis but pp, compilation and recomputation to one part, in the required order.

    Collectives of tp, ep and cp belong inside compiled and recomputed regions. A recomputed region
    runs compiled code again unchanged, except for ``core_attn``, which is inside a compiled part
    and is recomputed by the compiler. FSDP comes last: its hooks stay outside both kinds of
    regions, so weights are unsharded whenever a region runs.
    """
    apply_tensor_parallel(part, meshes)
    apply_expert_parallel(part, meshes, style)
    apply_fp8(part, meshes, config)
    recompute_class_layers(part, config.parallel)
    if not stays_unsharded(config, meshes.shape):
        apply_data_parallel(part, meshes, config.parallel, config.train.dtype)


def build_backend(config: Config, meshes: Meshes | None = None) -> BackendConfig:
    """Return the communicators and implementations of every part; ``meshes`` None: one rank.

    Raises:
        BackendError: the package of an implementation is missing, or this machine does not support
            it.
        ConfigError: as ``checked_loss``.
    """
    kernels = config.kernels
    pg_collection = ProcessGroupCollection()
    if meshes is not None:
        pg_collection = _build_communicators(meshes, config.parallel)
    experts = None
    if config.model.num_moe_layers:
        backend = expert_backend(config.moe.experts, FOREIGN_EXPERTS)
        experts = lambda: backend  # noqa: E731
        if meshes is not None and config.train.fp8 != "off":
            experts = partial(fp8_experts, meshes, config)
    masks = block_masks if kernels.attention == "flex" else dense_masks
    cp = None if meshes is None or config.parallel.context != "ring" else meshes.axis("cp")
    if cp is not None and cp.device_type == "cpu":
        attend, masks = cpu_ring(cp.get_group()), ring_masks(pg_collection.context)
    elif cp is not None:
        attend = ring_attention(cp)
    elif kernels.attention == "te":
        attend = transformer_engine.attention()
    elif kernels.attention == "flex":
        attend = compiled(attend_in_blocks)
    else:
        attend = attention_fn(kernels.attention)
    loss = None
    if (named := config.train.loss) != "cross_entropy":
        loss = checked_loss(registered("train.loss")[named], named)
    chunk_loss = chunk_loss_fn(kernels.loss)
    if config.train.compile and kernels.loss == "torch":
        chunk_loss = compiled(chunk_loss)
    return BackendConfig(
        pg_collection=pg_collection,
        experts=experts,
        router_dtype=PARAM_DTYPES[config.train.dtype],
        attend=attend,
        masks=masks,
        rope=rope_fns(kernels.rope),
        norm=transformer_engine.norm() if kernels.norm == "te" else RMSNorm,
        chunk_loss=chunk_loss,
        loss=loss,
        indexer_warmup=config.train.indexer == "warmup",
        calls=partial(layer_calls, config),
        last_norm=compiled if config.train.compile else as_it_is,
        always_masked=config.train.compile,
        seed=config.train.seed,
    )


def _build_communicators(meshes: Meshes, parallel: ParallelConfig) -> ProcessGroupCollection:
    context = communicator(meshes.group("cp"))
    return ProcessGroupCollection(
        sequence=communicator(meshes.group("tp")),
        context=context,
        keys=context if parallel.context == "gather" else SINGLE_RANK,
        heads=context if parallel.context == "ulysses" else SINGLE_RANK,
        data=tuple(communicator(meshes.group(axis)) for axis in ("dp_shard", "dp_replicate")),
    )


def build_decoder(
    model: ModelConfig,
    moe: MoEConfig,
    dtype: torch.dtype,
    layers: range | None = None,
    backend: BackendConfig | None = None,
    **ends: bool,
) -> CausalLM:
    """Return a model, or the part of a decoder with ``layers``, on the meta device.

    Parameters have ``dtype``; buffers have their own (counts must not be rounded).
    """
    with default_dtype(dtype):
        if model.family == TRANSFORMERS:
            return TransformersModel(model, moe, backend)
        with torch.device("meta"):
            return Decoder(model, moe, layers, backend=backend, **ends)


def parameter_dtype(config: Config) -> torch.dtype:
    """Return the dtype in which parameters are stored, except those of routers."""
    narrow = config.optim.master_weights == "stochastic"
    return torch.bfloat16 if narrow else PARAM_DTYPES[config.train.dtype]


def build_parts(config: Config, meshes: Meshes) -> dict[int, CausalLM]:
    """Return {stage number: part}: this rank's parallelized pipeline stages on the meta device."""
    shape: MeshShape = meshes.shape
    parallel = config.parallel
    stages = stage_layers(config, shape)
    held = stages_of_ranks(shape.pp, parallel.stages_per_rank, parallel.schedule)
    backend = build_backend(config, meshes)
    style = expert_parallel_style(meshes, config)
    dtype = parameter_dtype(config)
    model_parts = {}
    for stage in held[meshes.coordinate("pp")]:
        part = build_decoder(
            config.model,
            config.moe,
            dtype,
            stages[stage],
            backend,
            embeds=stage == 0,
            predicts=stage == len(stages) - 1,
        )
        part.mtp_loss_weight = config.train.mtp_loss_weight
        adapt(part, config, dtype, COMPUTE_DTYPES[config.train.dtype])
        parallelize(part, meshes, config, style)
        model_parts[stage] = part
    return model_parts


def allocate(model_parts: dict[int, CausalLM], device: torch.device) -> None:
    """Allocate this rank's shards; initialise adapters and buffers, but not parameters."""
    for part in model_parts.values():
        part.to_empty(device=device)
        reset_buffers(part)
        fill_adapters(part)
        part.train()


def materialize(model_parts: dict[int, CausalLM], config: Config, device: torch.device) -> None:
    """Allocate this rank's shards and initialise them by name and index."""
    allocate(model_parts, device)
    for part in model_parts.values():
        initialize(part, config.model.initializer_range, config.train.seed)
