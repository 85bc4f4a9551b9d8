"""Writing of HuggingFace checkpoint directories, from a model on any mesh or another checkpoint.

A directory gets its final name once everything is on disk and verified. When a model is exported,
every rank streams the tensors that the plan assigns to it into files of its own.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from automoe.comm.agreement import Ranks
from automoe.config.schema import ModelConfig
from automoe.data.chat_template import ChatTemplate
from automoe.hf.catalog import Catalog, check_catalog, open_catalog
from automoe.hf.families.registry import family_of, model_config_from_hf
from automoe.hf.files import Written
from automoe.hf.folder import check_conversion, new_folder, write_settings
from automoe.hf.keys import Encoding, KeyMap, quantization_config
from automoe.hf.merge import adapters_of
from automoe.hf.read import show_progress
from automoe.hf.save_plan import Transfer, WriteItem, compare_beside, plan_writes, unread_shards
from automoe.hf.shards import Parts, as_parts, config_of, export_dtype, local_shards
from automoe.hf.upcycle import upcycled, upcycled_model
from automoe.hf.verify import compare_with_dense, verify_hf, verify_with_transformers
from automoe.model.causal_lm import CausalLM


def to_hf(
    model: Parts | CausalLM,
    path: str | Path,
    *,
    dtype: str | torch.dtype = "keep",
    encoding: Encoding = "plain",
    max_shard_bytes: int = 5 << 30,
    tokenizer: str | None = None,
    chat: ChatTemplate | None = None,
    overwrite: bool = False,
    verify: bool = True,
) -> Written:
    """Write ``model`` as a HuggingFace checkpoint directory, renamed into place once verified.

    Collective; ranks share the file system. Adapters are added to the weights that they adapt: the
    sum is computed in at least float32 and rounded once. The model is not changed. Token ids,
    generation settings and tokenizer files come from ``hf_path`` of the model's configuration, if
    it is set.

    Args:
        model: the model, or this rank's pipeline stages of it.
        dtype: dtype of parameters, as a name or a torch dtype: ``bfloat16``, ``float32`` or
            ``keep``. The last keeps the dtype of each tensor in the checkpoint at hf_path (bfloat16
            if it is quantized), or in the model without such a checkpoint. Buffers always keep
            their dtype.
        encoding: ``fp8``: store the matrices of layers in block-FP8, like DeepSeek-V3's own
            checkpoint; ``mxfp4``, ``int4``: store experts as GPT-OSS and Kimi-K2-Thinking do. MXFP4
            and INT4 codes of hf_path are kept if they decode to the model's numbers.
        max_shard_bytes: largest file, unless one tensor alone is larger.
        tokenizer: tokenizer of the training text: ``byte``, a directory whose files are copied, or
            ``none``; default: that of hf_path.
        chat: chat template of the training; the token that ends an answer also stops generation.
        overwrite: replace a checkpoint directory that is there.
        verify: compare every number with the model, and the whole with transformers
            (``verify_hf``).

    Raises:
        ConfigError: the family has no checkpoints in ``encoding``, ``dtype`` is unknown, or the
            tokenizer does not exist (a CheckpointError if there are several ranks).
        CheckpointError, on every rank: the directory exists or cannot be written, or is not equal
            to the model. Nothing is left under ``path`` then, and an older export stays.
    """
    dtype = str(dtype).removeprefix("torch.")
    parts = as_parts(model)
    path = Path(path).expanduser().absolute()
    ranks = Ranks()
    config = config_of(parts)
    quantization = quantization_config(config, family_of(config).keys, encoding)
    export_dtype(dtype)
    source = source_of(config)
    with new_folder(path, overwrite, ranks) as folder:
        plan = plan_export(parts, dtype, encoding, source)
        written = Transfer(plan, ranks, source).write(folder, max_shard_bytes)
        written = replace(written, encoding=encoding)
        ranks.lead(
            lambda: write_settings(
                folder, config, written.dtype, tokenizer, quantization, chat, source
            )
        )
        if verify:
            dtypes = {item.key: item.dtype for item in plan}
            error = verify_hf(parts, folder, dtype=dtypes, encoding=encoding, source=source)
            written = replace(written, checked=True, logits_error=error)
            if encoding != "plain":
                coded = [item for item in plan if item.target.scales is not None]
                off = Transfer(coded, ranks, source).compare(open_catalog(folder, config))
                written = replace(written, error=off)
    return replace(written, path=path)


def source_of(config: ModelConfig) -> Catalog | None:
    """Return the list of tensors of the checkpoint that a model started from. Collective.

    None if it started from random weights. ``CheckpointError`` if the files do not fit the model.
    """
    if config.hf_path is None or config.random_weights:
        return None
    dense_keys = upcycled_model(config)[1] if config.upcycle else None
    return open_catalog(config.hf_path, config, dense_keys)


def plan_export(
    parts: Parts, dtype: str, encoding: Encoding, source: Catalog | None, fused: bool = False
) -> list[WriteItem]:
    """Plan the checkpoint tensors of an export of this rank's pipeline stages.

    Args:
        dtype: ``bfloat16``, ``float32``, or ``keep`` for the dtypes of ``source``, else the
            model's.
        encoding: quantization of the files, ``plain`` for none; ``ConfigError`` if the family lacks it.
        source: tensors of the checkpoint that the model started from (result of ``source_of``);
            None: it started from random weights.
        fused: True to fuse a layer's experts, as models of transformers do in memory.
    """
    config = config_of(parts)
    keys = family_of(config).keys
    keys = keys.in_memory if fused else keys
    if quantization_config(config, keys, encoding):
        keys = keys.per_expert
    # ``keep`` uses the dtypes of the source, since parameters are wider while they are trained.
    dtypes_of = source if dtype == "keep" else None
    shards = list(local_shards(parts, adapters_of(parts)))
    return plan_writes(shards, config, keys, export_dtype(dtype), encoding, dtypes_of)


def convert_hf(
    source: str | Path,
    out: str | Path,
    dtype: str = "keep",
    *,
    encoding: Encoding = "plain",
    layout: str = "published",
    max_shard_bytes: int = 5 << 30,
    overwrite: bool = False,
    mixture: tuple[ModelConfig, KeyMap] | None = None,
) -> Written:
    """Convert a checkpoint to another dtype or layout, one tensor at a time, on the CPU.

    The conversion runs in one process. Quantized tensors are dequantized. Config, generation config
    and tokenizer are copied. ``out`` gets its name only after every number was read back and
    compared with ``source``, and after ``transformers`` built the same model from it, with the same
    logits if the model is small enough to be run twice.

    Args:
        dtype: dtype of parameters: ``keep`` (quantized parameters become bfloat16), ``bfloat16`` or
            ``float32``.
        encoding: ``plain``, or a quantization that the family has: ``fp8`` (block-FP8 matrices),
            ``mxfp4`` or ``int4`` (experts alone).
        layout: layout of experts: ``published``, or ``fused`` as in transformers 5.
        max_shard_bytes: largest file, unless one tensor alone is larger.
        overwrite: replace an existing checkpoint directory.
        mixture: result of ``upcycled``: write the dense ``source`` as this mixture of experts.

    Raises:
        ConfigError: the family, dtype or layout is unknown, or ``encoding`` is not one of the
            family's or is combined with fused experts.
        CheckpointError: files are missing, damaged or do not match the model; ``out`` exists or
            cannot be written; or a mixture's logits differ from the dense model's.
    """
    path = Path(out).expanduser().absolute()
    config, dense_keys = mixture or (model_config_from_hf(source), None)
    keys = check_conversion(config, path, encoding=encoding, layout=layout, overwrite=overwrite)
    catalog = check_catalog(source, config, dense_keys)
    plan = plan_writes(unread_shards(config), config, keys, export_dtype(dtype), encoding, catalog)
    transfer = Transfer(plan, Ranks(alone=True), catalog)
    num_bytes = sum(stored.num_bytes for stored in catalog.sources.values())
    with new_folder(path, overwrite, Ranks(alone=True)) as folder:
        with show_progress(catalog.folder.name, num_bytes) as advance:
            done = transfer.write(folder, max_shard_bytes, advance)
        quantization = quantization_config(config, keys, encoding)
        write_settings(folder, config, done.dtype, None, quantization, source=catalog)
        written = check_catalog(folder, config)
        compare_beside(catalog, written, catalog.beside)
        off = transfer.compare(written)
        if encoding != "plain":
            done = replace(done, encoding=encoding, error=off)
        logits_error = verify_with_transformers(config, written)
        dense_error = None
        if mixture and encoding == "plain":
            wide = any(stored.dtype == "F32" for stored in catalog.sources.values())
            dense_error = compare_with_dense(catalog.folder, folder, wide and dtype == "bfloat16")
        checks = {"logits_error": logits_error, "dense_error": dense_error}
        return replace(done, path=path, notes=catalog.notes, **checks)


def upcycle_hf(
    source: str | Path,
    out: str | Path,
    num_experts: int,
    num_experts_per_token: int,
    granularity: int = 1,
    *,
    seed: int = 0,
    **options: Any,
) -> Written:
    """Write the dense checkpoint ``source`` as a mixture of experts with the same function.

    If both models are small enough to be run, their logits are compared.

    Args:
        granularity: G, number of experts that share a copy of the dense FFN; each has 1/G of its
            width.
        seed: seed of the routers' initial weights.
        options: ``dtype``, ``encoding``, ``max_shard_bytes`` and ``overwrite`` of ``convert_hf``.

    Raises:
        ConfigError: the family has no mixture counterpart, or with these sizes the mixture would
            not compute the same function.
        CheckpointError: files are missing or damaged, ``out`` exists or cannot be written, or the
            two models' logits differ.
    """
    mixture = upcycled(source, num_experts, num_experts_per_token, granularity, seed=seed)
    return convert_hf(source, out, mixture=mixture, **options)
