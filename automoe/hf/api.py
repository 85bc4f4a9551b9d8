"""Public function ``from_hf``, which builds a checkpoint's model in one process or on a mesh."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
import torch.distributed as dist

from automoe.comm.collectives import all_gather
from automoe.config.data_schema import DataConfig
from automoe.config.mesh_shape import resolve_mesh
from automoe.config.rule_engine import check_rows
from automoe.config.rules_model import model_rows
from automoe.config.schema import Config, MeshConfig, MoEConfig
from automoe.errors import ConfigError
from automoe.hf.catalog import check_catalog
from automoe.hf.families.registry import model_config_from_hf
from automoe.hf.identity import checkpoint_folder
from automoe.hf.read import load_hf
from automoe.hf.verify import expert_product
from automoe.hf.write import to_hf as to_hf
from automoe.model.causal_lm import CausalLM
from automoe.parallel.fsdp import COMPUTE_DTYPES
from automoe.parallel.mesh import build_meshes
from automoe.parallel.parallelize import build_decoder, build_parts


def from_hf(
    path: str | Path,
    mesh: MeshConfig | None = None,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> CausalLM:
    """Build and load the model of a HuggingFace checkpoint directory or Hub id, in evaluation mode.

    ``model(tokens)`` with tokens [B, S] int64 returns logits [B, S, V]. NaN or infinite weights
    give a warning.

    Args:
        mesh: None builds the whole model in this process, independently of other ranks. With a
            mesh, the process group must be initialised, and all ranks must call this function, and
            later the model, together. Each rank feeds its own rows. Ranks of a tp group feed the
            same rows, whose length must be a multiple of tp, and all get the full logits. Experts
            are sharded over ep, etp and ep_shard, everything else over dp_shard and tp.
        dtype: dtype of parameters. On a mesh, bfloat16 keeps float32 parameters and computes in
            bfloat16, as training does.
        device: device of the model's tensors; on a mesh, of this rank's shards.

    Raises:
        ConfigError: family or dtype is unknown, the mesh has pp or cp (whose ranks see a part of
            the model or of a row), or the mesh does not divide the model.
        CheckpointError: files are missing, damaged, or do not match config.json.
    """
    path = checkpoint_folder(path, "path")
    config = model_config_from_hf(path)
    if dtype not in COMPUTE_DTYPES.values():
        raise ConfigError(
            "dtype", dtype, f"must be one of {', '.join(COMPUTE_DTYPES)}", "Use torch.float32"
        )
    catalog = None
    if mesh is None:
        model = build_decoder(config, MoEConfig(experts=expert_product(config, dtype)), dtype)
        # Other ranks, if any, take no part in this load.
        catalog = check_catalog(path, config)
    else:
        shape = resolve_mesh(mesh, dist.get_world_size() if dist.is_initialized() else None)
        for axis, size in {"pp": shape.pp, "cp": shape.cp}.items():
            if size > 1:
                raise ConfigError(
                    f"mesh.{axis}",
                    size,
                    "from_hf gives one module that maps whole rows to logits",
                    f"Set mesh.{axis}=1; automoe.train runs the others",
                )
        moe = MoEConfig(experts=expert_product(config, dtype, shape.etp))
        on_mesh = Config(mesh=mesh, model=config, moe=moe, data=DataConfig(document_mask=False))
        on_mesh.train.dtype = str(dtype).removeprefix("torch.")  # type: ignore[assignment]
        check_rows(on_mesh, model_rows(on_mesh, shape), shape)
        meshes = build_meshes(shape, torch.device(device))
        model = build_parts(on_mesh, meshes)[0]
        if (tp := meshes.group("tp")) is not None:
            model.register_forward_pre_hook(
                lambda module, inputs: _check_length(inputs[0], shape.tp)
            )
            model.register_forward_hook(lambda module, inputs, logits: all_gather(logits, 2, tp))
    model.to_empty(device=device)
    loaded = load_hf(model, path, catalog)
    if loaded.not_finite or loaded.notes:
        warnings.warn(str(loaded), stacklevel=2)
    return model.eval()


def _check_length(tokens: torch.Tensor, tp: int) -> None:
    size = tokens.shape[1]
    if size % tp:
        raise ConfigError(
            "tokens",
            list(tokens.shape),
            f"the ranks of mesh.tp={tp} hold equal parts of a row: {size} % {tp} = {size % tp}",
            f"Add {-size % tp} tokens to the end of the rows, and ignore their logits",
        )
