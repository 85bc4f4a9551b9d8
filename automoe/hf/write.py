"""Export of a model on any mesh to a HuggingFace checkpoint directory, atomically.

Every rank streams the tensors that the plan assigns to it into files of its own. The directory is
renamed to its final name once everything is on disk and verified.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from automoe.data.chat_template import ChatTemplate
from automoe.hf.catalog import open_catalog
from automoe.hf.families.registry import family_of
from automoe.hf.files import Written
from automoe.hf.folder import new_folder, write_settings
from automoe.hf.keys import fp8_config
from automoe.hf.save_plan import gather, plan_writes, write_tensors
from automoe.hf.shards import Parts, as_parts, config_of, export_dtype, local_shards
from automoe.hf.upcycle import upcycled_model
from automoe.hf.verify import verify_hf
from automoe.model.decoder import Decoder
from automoe.model.lora import merge_adapters
from automoe.parallel.agreement import Ranks


def to_hf(
    model: Parts | Decoder,
    path: str | Path,
    *,
    dtype: str | torch.dtype = "keep",
    fp8: bool = False,
    max_shard_bytes: int = 5 << 30,
    tokenizer: str | None = None,
    chat: ChatTemplate | None = None,
    overwrite: bool = False,
    verify: bool = True,
) -> Written:
    """Write ``model`` as a HuggingFace checkpoint directory, renamed into place once verified.

    Collective; ranks share the file system. Adapters are merged into the model's own weights first
    (``merge_adapters``), which stay merged. ``model.hf_path`` of the model's configuration, where
    it is set, gives what weights cannot tell: token ids, generation settings, tokenizer files.

    Args:
        model: the model, or this rank's pipeline stages of it.
        dtype: dtype of parameters: ``keep`` (as in the checkpoint at hf_path, bfloat16 if that is
            quantized; without one the parameters' own), ``bfloat16`` or ``float32``, or torch's own
            name of these; buffers keep theirs.
        fp8: store the matrices of layers in block-FP8, like DeepSeek-V3's own checkpoint.
        max_shard_bytes: largest file, unless one tensor alone is larger.
        tokenizer: tokenizer of the training text: ``byte``, a directory whose files are copied, or
            ``none``; default: that of hf_path.
        chat: chat template of the training; its end of an answer stops generation.
        overwrite: replace a checkpoint directory that is there.
        verify: compare every number with the model, and the whole with transformers
            (``verify_hf``).

    Raises:
        ConfigError: ``fp8`` of a family that has no such checkpoints, or another dtype; no such
            tokenizer, which ranks of several are told as a CheckpointError.
        CheckpointError: on every rank alike: the directory exists or cannot be written, or is not
            equal to the model. Nothing is left under ``path`` then, and an older export stays.
    """
    dtype = str(dtype).removeprefix("torch.")
    parts = as_parts(model)
    path = Path(path).expanduser().absolute()
    ranks = Ranks()
    config = config_of(parts)
    keys = family_of(config).keys
    quantization = fp8_config(config, keys) if fp8 else None
    out_dtype = export_dtype(dtype)
    # ``keep`` takes the dtypes of the weights that training started from: parameters are wider
    # while they are trained.
    source = None
    if dtype == "keep" and config.hf_path is not None:
        dense_keys = upcycled_model(config)[1] if config.upcycle else None
        source = open_catalog(config.hf_path, config, dense_keys)
    with new_folder(path, overwrite, ranks) as folder:
        for part in parts.values():
            merge_adapters(part)
        plan = plan_writes(list(local_shards(parts)), keys, out_dtype, fp8, source)
        written = write_tensors(plan, gather, ranks, folder, max_shard_bytes)
        bases = {item.shard.base for item in plan}
        written = replace(written, base="".join(bases))
        ranks.lead(
            lambda: write_settings(folder, config, written.dtype, tokenizer, quantization, chat)
        )
        if verify:
            error = verify_hf(parts, folder, dtype={item.key: item.dtype for item in plan}, fp8=fp8)
            written = replace(written, checked=True, fp8=fp8, logits_error=error)
    return replace(written, path=path)
