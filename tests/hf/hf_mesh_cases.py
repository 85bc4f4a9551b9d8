"""Meshes that checkpoints are read into and written from, and what ranks do there."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from automoe.config.data_schema import DataConfig
from automoe.config.mesh_shape import resolve_mesh
from automoe.config.schema import Config, MeshConfig, MoEConfig, ParallelConfig, TrainConfig
from automoe.hf.families.registry import model_config_from_hf
from automoe.hf.read import load_hf
from automoe.model.decoder import Decoder
from automoe.parallel.mesh import Meshes, build_meshes
from automoe.parallel.parallelize import build_parts

ROWS, SEQ = 8, 16

MESHES = {
    "one": MeshConfig(dp_shard=1),
    "ep2": MeshConfig(dp_shard=2, ep=2),
    "ep_shard2": MeshConfig(dp_shard=2, ep_shard=2),
    "pp2": MeshConfig(pp=2, dp_shard=1),
    "cp2_ep2": MeshConfig(dp_shard=1, cp=2, ep=2),
    "hsdp2x2_ep2": MeshConfig(dp_replicate=2, dp_shard=2, ep=2, ep_shard=2),
    "hsdp2x2_ep2_ep_replicate2": MeshConfig(dp_replicate=2, dp_shard=2, ep=2, ep_replicate=2),
    "pp2_dp2_ep2": MeshConfig(pp=2, dp_shard=2, ep=2),
    "dp4_ep2_ep_shard2": MeshConfig(dp_shard=4, ep=2, ep_shard=2),
    "tp2": MeshConfig(dp_shard=1, tp=2),
    "tp2_dp2_ep2_etp2": MeshConfig(dp_shard=2, tp=2, ep=2, etp=2),
    "tp2_dp2_ep2_ep_shard2": MeshConfig(dp_shard=2, tp=2, ep=2, ep_shard=2),
    "dp4_etp2": MeshConfig(dp_shard=4, ep_shard=2, etp=2),
    "ep_replicate2_tp2": MeshConfig(dp_shard=2, tp=2, ep=2, ep_replicate=2),
    "dp4_ep4": MeshConfig(dp_shard=4, ep=4),
    "pp2_ep2_ep_shard2": MeshConfig(pp=2, dp_shard=4, ep=2, ep_shard=2),
}


def config_for(path: Path, mesh: MeshConfig) -> Config:
    model = model_config_from_hf(path)
    return Config(
        mesh=mesh,
        model=model,
        moe=MoEConfig(experts="loop"),
        parallel=ParallelConfig(),
        train=TrainConfig(seq_len=SEQ, global_batch_size=ROWS, micro_batch_size=1, dtype="float32"),
        data=DataConfig(tokenizer="byte"),
    )


def empty_on_mesh(path: Path, mesh: MeshConfig) -> tuple[dict[int, Decoder], Meshes, Config]:
    """Parts with storage in which nothing is a number."""
    config = config_for(path, mesh)
    meshes = build_meshes(resolve_mesh(mesh, None), torch.device("cpu"))
    parts = build_parts(config, meshes)
    for part in parts.values():
        part.to_empty(device="cpu")
        part.train()
        with torch.no_grad():
            for parameter in part.parameters():
                parameter.fill_(float("nan"))  # nothing may be left unread
    return parts, meshes, config


def load_on_mesh(path: Path, mesh: MeshConfig) -> tuple[dict[int, Decoder], Meshes, Config]:
    parts, meshes, config = empty_on_mesh(path, mesh)
    load_hf(parts, path)
    return parts, meshes, config


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint directory; a name in two files is a mistake."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        for key, tensor in load_file(file).items():
            assert key not in tensors, key
            tensors[key] = tensor
    return tensors


def world_size(mesh: MeshConfig) -> int:
    return resolve_mesh(mesh, None).world_size


def mesh_name(mesh: MeshConfig) -> str:
    """Its axes of more than one rank."""
    sizes = ((axis, getattr(mesh, axis)) for axis in resolve_mesh(mesh, None).__dataclass_fields__)
    return "_".join(f"{axis}{size}" for axis, size in sizes if size > 1) or "one"
