"""Build a rank's pipeline stages, and apply the parallelisms to them in the required order."""

from __future__ import annotations

import torch

from automoe.config.mesh_shape import MeshShape, stage_layers, stays_unsharded
from automoe.config.pipeline import stages_of_ranks
from automoe.config.schema import Config, ModelConfig, MoEConfig
from automoe.config.tier import tier_of
from automoe.model.backend import BackendConfig
from automoe.model.causal_lm import CausalLM
from automoe.model.decoder import Decoder
from automoe.model.init import default_dtype, initialize, reset_buffers
from automoe.model.lora import fill_adapters, freeze_and_adapt
from automoe.parallel.choices import build_backend
from automoe.parallel.dispatchers import configured_dispatchers, expert_dispatcher
from automoe.parallel.expert import ExpertStyle, apply_expert_parallel
from automoe.parallel.fp8 import apply_fp8
from automoe.parallel.fsdp import COMPUTE_DTYPES, MASTER_DTYPES, apply_data_parallel
from automoe.parallel.mesh import Meshes
from automoe.parallel.tensor import apply_tensor_parallel


def parallelize(part: CausalLM, meshes: Meshes, config: Config, style: ExpertStyle) -> None:
    """Apply all parallelisms but pp, and 8-bit products, to one stage, in the required order.

    Tp, ep and etp shard weights first; then linear layers are replaced for 8 bits, and FSDP cuts
    the shards, unless one rank computes with weights as stored (``stays_unsharded``). Compilation
    and recomputation were already built into the stage's modules.

    Args:
        style: shards the experts.
    """
    apply_tensor_parallel(part, meshes)
    apply_expert_parallel(part, meshes, style)
    apply_fp8(part, meshes, config)
    if not stays_unsharded(config, meshes.shape):
        apply_data_parallel(part, meshes, config.parallel, config.train.dtype)


def build_decoder(
    model: ModelConfig,
    moe: MoEConfig,
    dtype: torch.dtype,
    layers: range | None = None,
    backend: BackendConfig | None = None,
    **ends: bool,
) -> CausalLM:
    """Return a model, or the pipeline stage with ``layers``, on the meta device.

    Parameters have ``dtype``; buffers have their own (counts must not be rounded).

    Args:
        layers: numbers of the stage's layers; None: all. A model that transformers or a plugin
            computes is built whole.
        backend: communicators and kernels; default: one rank and plain torch.
        ends: ``embeds`` and ``predicts``: whether the stage holds the embedding, and the head.
    """
    with default_dtype(dtype):
        if (built := tier_of(model).build(model, moe, backend)) is not None:
            return built
        with torch.device("meta"):
            return Decoder(model, moe, layers, backend=backend, **ends)


def parameter_dtype(config: Config) -> torch.dtype:
    """Return the dtype in which parameters are stored, except those of routers and hyper-connections.

    It is bfloat16 with ``optim.master_weights=stochastic``, else float32, or float64 with
    ``train.dtype=float64``.
    """
    narrow = config.optim.master_weights == "stochastic"
    return torch.bfloat16 if narrow else MASTER_DTYPES[config.train.dtype]


def build_parts(config: Config, meshes: Meshes) -> dict[int, CausalLM]:
    """Build this rank's pipeline stages: {stage number: model part} on the meta device. Collective.

    The parts have shapes and shards, but no memory and no numbers: call ``materialize`` next, or
    call ``allocate`` and load a checkpoint. Raises ``BackendError`` if a package or GPU is missing.
    """
    shape: MeshShape = meshes.shape
    parallel = config.parallel
    stages = stage_layers(config, shape)
    stages_of_rank = stages_of_ranks(shape.pp, parallel.stages_per_rank, parallel.schedule)
    dtype = parameter_dtype(config)

    # What modules are built with: dispatcher, communicators, kernels, wrappers of calls.
    dispatchers = configured_dispatchers(meshes, config)
    backend = build_backend(config, meshes, expert_dispatcher(dispatchers, meshes, config))
    make_style = tier_of(config.model).expert_style
    style = ExpertStyle() if make_style is None else make_style(dispatchers)

    # Each stage: modules, then adapters, then shards.
    model_parts = {}
    for stage in stages_of_rank[meshes.coordinate("pp")]:
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
        freeze_and_adapt(part, config, dtype, COMPUTE_DTYPES[config.train.dtype])
        parallelize(part, meshes, config, style)
        model_parts[stage] = part
    return model_parts


def allocate(model_parts: dict[int, CausalLM], device: torch.device) -> None:
    """Allocate this rank's shards, initialise adapters and buffers, and set training mode.

    All other parameters are left uninitialised.
    """
    for part in model_parts.values():
        part.to_empty(device=device)
        reset_buffers(part)
        fill_adapters(part)
        part.train()


def materialize(model_parts: dict[int, CausalLM], config: Config, device: torch.device) -> None:
    """Allocate this rank's shards on ``device``, initialise them, and set training mode.

    A parameter's first values depend on ``train.seed`` and its name alone, not on the mesh.

    Args:
        model_parts: this rank's pipeline stages, by number in the whole pipeline.
    """
    allocate(model_parts, device)
    for part in model_parts.values():
        initialize(part, config.model.initializer_range, config.train.seed)
