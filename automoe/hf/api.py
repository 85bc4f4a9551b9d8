"""Public functions ``from_hf``, ``to_hf``, ``convert_hf`` and ``upcycle_hf`` on checkpoints."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from automoe.config.data_schema import DataConfig
from automoe.config.mesh_shape import resolve_mesh
from automoe.config.rules import check_rows
from automoe.config.rules_model import model_rows
from automoe.config.schema import Config, MeshConfig, ModelConfig, MoEConfig
from automoe.errors import ConfigError
from automoe.hf.catalog import Catalog, check_catalog
from automoe.hf.families.registry import model_config_from_hf
from automoe.hf.files import Written
from automoe.hf.folder import check_conversion, new_folder, write_settings
from automoe.hf.identity import checkpoint_folder
from automoe.hf.keys import KeyMap, fp8_config
from automoe.hf.read import load_hf, show_progress
from automoe.hf.save_plan import compare_rewritten, plan_rewrite, rewrite_tensors
from automoe.hf.shards import export_dtype
from automoe.hf.upcycle import upcycled
from automoe.hf.verify import compare_with_dense, verify_with_transformers
from automoe.hf.write import to_hf as to_hf
from automoe.model.decoder import Decoder
from automoe.parallel.agreement import Ranks
from automoe.parallel.collectives import all_gather
from automoe.parallel.expert import expert_parallel_style
from automoe.parallel.fsdp import COMPUTE_DTYPES, PARAM_DTYPES
from automoe.parallel.mesh import build_meshes
from automoe.parallel.parallelize import build_backend, build_decoder, parallelize


def from_hf(
    path: str | Path,
    mesh: MeshConfig | None = None,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> Decoder:
    """Build and load the model of a HuggingFace checkpoint directory or Hub id, in evaluation mode.

    ``model(tokens)`` with tokens [B, S] int64 returns logits [B, S, V]. NaN or infinite weights
    give a warning.

    Args:
        mesh: None keeps the whole model in this process, whatever other ranks do. Otherwise the
            process group is initialised, every rank calls this function (and, later, the model)
            together, and each rank feeds its own rows. Ranks of a tp group feed the same rows,
            whose length must be a multiple of tp, and all get the full logits. Experts are sharded
            over ep, etp and ep_shard, everything else over dp_shard and tp.
        dtype: dtype of parameters. On a mesh, bfloat16 computes in bfloat16 from float32
            parameters, as training does.
        device: device of this rank's part.

    Raises:
        ConfigError: the family is unknown, the mesh has pp or cp (whose ranks see a part of the
            model or of a row), or the mesh does not divide the model.
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
        model = build_decoder(config, MoEConfig(experts=_expert_backend(config, dtype)), dtype)
        # Other ranks, if any, take no part in this load.
        catalog = check_catalog(path, config)
    else:
        model = _on_mesh(config, mesh, dtype, torch.device(device))
    model.to_empty(device=device)
    loaded = load_hf(model, path, catalog)
    if loaded.not_finite:
        warnings.warn(str(loaded), stacklevel=2)
    return model.eval()


def _on_mesh(
    config: ModelConfig, mesh: MeshConfig, dtype: torch.dtype, device: torch.device
) -> Decoder:
    shape = resolve_mesh(mesh, dist.get_world_size() if dist.is_initialized() else None)
    for axis in ("pp", "cp"):
        if getattr(shape, axis) > 1:
            raise ConfigError(
                f"mesh.{axis}",
                getattr(shape, axis),
                "from_hf gives one module that maps whole rows to logits",
                f"Set mesh.{axis}=1; automoe.train runs the others",
            )
    moe = MoEConfig(experts=_expert_backend(config, dtype, shape.etp))
    on_mesh = Config(mesh=mesh, model=config, moe=moe, data=DataConfig(document_mask=False))
    on_mesh.train.dtype = str(dtype).removeprefix("torch.")  # type: ignore[assignment]
    check_rows(on_mesh, model_rows(on_mesh, shape), shape)
    meshes = build_meshes(shape, device)
    model = build_decoder(
        config, moe, PARAM_DTYPES[on_mesh.train.dtype], backend=build_backend(on_mesh, meshes)
    )
    parallelize(model, meshes, on_mesh, expert_parallel_style(meshes, on_mesh))
    if (tp := meshes.group("tp")) is not None:
        model.register_forward_pre_hook(lambda module, inputs: _check_length(inputs[0], shape.tp))
        model.register_forward_hook(lambda module, inputs, logits: all_gather(logits, 2, tp))
    return model


def _check_length(tokens: torch.Tensor, tp: int) -> None:
    size = tokens.shape[1]
    if size % tp:
        raise ConfigError(
            "tokens",
            list(tokens.shape),
            f"the ranks of mesh.tp={tp} hold equal parts of a row: {size} % {tp} = {size % tp}",
            f"Add {-size % tp} tokens to the end of the rows, whose logits are not needed",
        )


def _expert_backend(
    config: ModelConfig, dtype: torch.dtype, etp: int = 1
) -> Literal["grouped_mm", "loop"]:
    """Return grouped_mm if it can run, else loop.

    grouped_mm has no float64 and needs rows of a multiple of 16 bytes.
    """
    widths = (config.hidden_size, config.moe_intermediate_size // etp)
    aligned = all(width * dtype.itemsize % 16 == 0 for width in widths)
    return "grouped_mm" if aligned and dtype != torch.float64 else "loop"


def convert_hf(
    source: str | Path,
    out: str | Path,
    dtype: str = "keep",
    *,
    fp8: bool = False,
    layout: str = "published",
    max_shard_bytes: int = 5 << 30,
    overwrite: bool = False,
) -> Written:
    """Convert a checkpoint to another dtype or layout, one tensor at a time, on the CPU.

    Runs in one process. Block-FP8 and MXFP4 are dequantized. Config, generation config and
    tokenizer are copied. ``out`` gets its name only after every number was read back and compared
    with ``source``, and after ``transformers`` built the same model from it, with the same logits
    if the model is small enough to be run twice.

    Args:
        dtype: dtype of parameters: ``keep`` (quantized ones become bfloat16), ``bfloat16`` or
            ``float32``.
        fp8: quantize the matrices of layers in blocks of 128 x 128.
        layout: layout of experts: ``published``, or ``fused`` as in transformers 5.
        max_shard_bytes: largest file, unless one tensor alone is larger.
        overwrite: replace an existing checkpoint directory.

    Raises:
        ConfigError: the family, dtype or layout is unknown, or ``fp8`` is combined with fused
            experts.
        CheckpointError: files are missing, damaged or do not match the model; ``out`` exists or
            cannot be written.
    """
    path = Path(out).expanduser().absolute()
    config = model_config_from_hf(source)
    keys = check_conversion(config, path, fp8=fp8, layout=layout, overwrite=overwrite)
    return _rewrite(
        check_catalog(source, config), config, keys, path, dtype, fp8, max_shard_bytes, overwrite
    )


def upcycle_hf(
    source: str | Path,
    out: str | Path,
    num_experts: int,
    num_experts_per_token: int,
    granularity: int = 1,
    dtype: str = "keep",
    *,
    seed: int = 0,
    fp8: bool = False,
    max_shard_bytes: int = 5 << 30,
    overwrite: bool = False,
) -> Written:
    """Write the dense checkpoint ``source`` as a mixture of experts of the same function.

    Runs one tensor at a time, in one process on the CPU, and verifies the result like
    ``convert_hf``. If both models are small enough to be run, their logits are compared too.

    Args:
        granularity: G, number of experts that share a copy of the dense FFN; each has 1/G of its
            width.
        seed: seed of the routers' initial weights.

    Raises:
        ConfigError: the family has no mixture counterpart, or with these sizes the mixture would
            not compute the same function.
        CheckpointError: as ``convert_hf``, or the mixture's logits differ from the dense model's.
    """
    path = Path(out).expanduser().absolute()
    sizes = (num_experts, num_experts_per_token, granularity)
    config, dense_keys = upcycled(source, *sizes, seed=seed)
    keys = check_conversion(config, path, fp8=fp8, layout="published", overwrite=overwrite)
    catalog = check_catalog(source, config, dense_keys)
    return _rewrite(catalog, config, keys, path, dtype, fp8, max_shard_bytes, overwrite)


def _rewrite(
    catalog: Catalog,
    config: ModelConfig,
    keys: KeyMap,
    path: Path,
    dtype: str,
    fp8: bool,
    max_shard_bytes: int,
    overwrite: bool,
) -> Written:
    """Write ``catalog`` to ``path`` as ``config`` in the layout ``keys``, then verify the files."""
    plan = plan_rewrite(catalog, config, keys, export_dtype(dtype), fp8)
    num_bytes = sum(stored.num_bytes for stored in catalog.sources.values())
    with new_folder(path, overwrite, Ranks(alone=True)) as folder:
        with show_progress(catalog.folder.name, num_bytes) as advance:
            done = rewrite_tensors(plan, catalog, folder, max_shard_bytes, advance)
        write_settings(folder, config, done.dtype, None, fp8_config(config, keys) if fp8 else None)
        written = check_catalog(folder, config)
        compare_rewritten(plan, catalog, written)
        logits_error = verify_with_transformers(config, written)
        dense_error = None
        if catalog.keys.ffn_parts and not fp8:
            dense_error = compare_with_dense(catalog.folder, folder)
        return replace(done, path=path, logits_error=logits_error, dense_error=dense_error)
