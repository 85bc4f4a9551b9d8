"""How a model meets the meshes: one function that orders the stages, and the builder that calls it."""

from __future__ import annotations

import torch

from automoe.config.mesh_shape import MeshShape, stays_unsharded
from automoe.config.schema import Config, KernelsConfig, ModelConfig, MoEConfig, ParallelConfig
from automoe.config.stages import split_layers, stage_of_rank
from automoe.model.decoder import Decoder
from automoe.model.init import initialize, reset_buffers
from automoe.moe.communicators import SINGLE_RANK, Communicator, Communicators
from automoe.parallel.activation_checkpoint import apply_recompute
from automoe.parallel.collectives import GroupCommunicator
from automoe.parallel.compile import apply_compile
from automoe.parallel.context import apply_context_parallel
from automoe.parallel.expert import apply_expert_parallel
from automoe.parallel.fp8 import apply_fp8
from automoe.parallel.fsdp import PARAM_DTYPES, apply_data_parallel
from automoe.parallel.kernels import apply_kernels
from automoe.parallel.mesh import Meshes
from automoe.parallel.tensor import apply_tensor_parallel


def parallelize(part: Decoder, meshes: Meshes, config: Config) -> None:
    """Apply every axis but pp, compilation and recomputation to one part, in the only order that composes.

    Collectives of tp, ep and cp belong to what is compiled and to what is recomputed. A recomputed region
    runs compiled code again as it is, but for ``core_attn``, which lies within a compiled part and is recomputed by
    the compiler. FSDP comes last: its hooks stay outside both, on modules, whose weights are then gathered.
    """
    apply_tensor_parallel(part, meshes)
    apply_expert_parallel(part, meshes, config.moe)
    apply_context_parallel(part, meshes, config.parallel)
    apply_fp8(part, meshes, config)
    if config.train.compile:
        apply_compile(part)
    apply_recompute(part, config.parallel)
    if not stays_unsharded(config, meshes.shape):
        apply_data_parallel(part, meshes, config.parallel, config.train.dtype)


def build_communicators(meshes: Meshes, parallel: ParallelConfig) -> Communicators:
    """What the modules of this rank's parts talk to."""

    def over(axis: str) -> Communicator:
        group = meshes.group(axis)
        return SINGLE_RANK if group is None else GroupCommunicator(group)

    context = over("cp")
    return Communicators(
        sequence=over("tp"),
        context=context,
        keys=context if parallel.context == "gather" else SINGLE_RANK,
        data=(over("dp_shard"), over("dp_replicate")),
    )


def build_decoder(
    model: ModelConfig,
    moe: MoEConfig,
    dtype: torch.dtype,
    layers: range | None = None,
    kernels: KernelsConfig | None = None,
    comms: Communicators | None = None,
    **ends: bool,
) -> Decoder:
    """A decoder, or the part of one that holds ``layers``, on the meta device; default kernels where None.

    Parameters have ``dtype``; buffers have their own (counts must not be rounded).
    """
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            part = Decoder(model, moe, layers, comms=comms, **ends)
    finally:
        torch.set_default_dtype(default)
    apply_kernels(part, kernels or KernelsConfig())
    return part


def parameter_dtype(config: Config) -> torch.dtype:
    """What parameters are stored in, those of routers apart."""
    narrow = config.optim.master_weights == "stochastic"
    return torch.bfloat16 if narrow else PARAM_DTYPES[config.train.dtype]


def build_parts(config: Config, meshes: Meshes) -> dict[int, Decoder]:
    """This rank's pipeline stages, parallelized, still on the meta device: {stage number: part}."""
    shape: MeshShape = meshes.shape
    stages = split_layers(
        config.model.num_layers, shape.pp * config.parallel.stages_per_rank, config.parallel.layers_per_stage
    )
    mine = stage_of_rank(config.parallel.schedule, shape.pp, config.parallel.stages_per_rank)[meshes.coordinate("pp")]
    comms = build_communicators(meshes, config.parallel)
    parts = {}
    for stage in mine:
        part = build_decoder(
            config.model,
            config.moe,
            parameter_dtype(config),
            stages[stage],
            config.kernels,
            comms,
            embeds=stage == 0,
            predicts=stage == len(stages) - 1,
        )
        for _, layer in part.moe_layers():
            layer.router.seed = config.train.seed
            for parameter in layer.router.parameters():  # wide in every case
                parameter.data = parameter.data.to(PARAM_DTYPES[config.train.dtype])
        parallelize(part, meshes, config)
        parts[stage] = part
    return parts


def allocate(parts: dict[int, Decoder], device: torch.device) -> None:
    """Give this rank's shards storage, parameters not yet filled, buffers at their first values."""
    for part in parts.values():
        part.to_empty(device=device)
        reset_buffers(part)
        part.train()


def materialize(parts: dict[int, Decoder], config: Config, device: torch.device) -> None:
    """Give this rank's shards storage, and their first values by name and index."""
    allocate(parts, device)
    for part in parts.values():
        initialize(part, config.model.initializer_range, config.train.seed)
