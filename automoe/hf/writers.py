"""Checkpoint directories of other programs that automoe cannot read, and what to do instead.

Importing this module does not load torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from automoe.errors import CheckpointError

BASE = "Train the bfloat16 checkpoint that it was quantized from"
CONVERTED = "Train the checkpoint that it was converted from"
# Pattern of a line of evidence, which is family, name and dtype of a tensor that no published
# folder has -> what the folder is, and what to do. A pattern begins with a text or with ``^``: one
# that may begin at any letter takes seconds for 90,000 tensors.
_ROWS = {
    r"gpt_oss \S+experts\.\w+_proj_blocks B?F\d+": "GPT-OSS that transformers 5.23 saved after dequantizing, under the "
    "names of MXFP4's codes: readers put random experts in their place. Name the MXFP4 checkpoint itself, which is read",
    r"gpt_oss \S+experts\.\d+\.\w+_proj\.\S+": f"GPT-OSS of llm-compressor, experts one by one with split biases. {BASE}",
    r"mixtral \S+block_sparse_moe\.experts\.\d+\.\w+_proj\.\S+": "Mixtral of llm-compressor, under names that no reader "
    f"has, transformers included. {BASE}",
    r"(?m)^\S+ (\S+weight U32|\S+\.biases \S+)": "quantized by mlx-lm. Widen it first: "
    "mlx_lm.convert --dequantize --hf-path DIR --mlx-path OUT",
    r"(?m)^\S+ \S+self_attn\.embed_q\.weight \S+": "of mlx-lm, which splits kv_b_proj into embed_q and unembed_out. "
    f"{CONVERTED}",
    r"qwen3_(next|5\w*) \S+switch_mlp\.\S+": f"of mlx-lm, whose norms hold their weights plus one. {CONVERTED}",
    r"gpt_oss \S+experts\.(gate|up)_proj\.\S+": f"GPT-OSS of mlx-lm, gates and ups apart. {CONVERTED}",
}  # fmt: skip


def check_writer(folder: Path, family: str, tensors: Mapping[str, Any]) -> None:
    """Raise ``CheckpointError`` if a program wrote the folder in a form that automoe cannot read.

    The message names the program or format, and a checkpoint or a conversion to use instead.

    Args:
        family: ``model_type`` of config.json.
        tensors: headers of the tensors, by name in the files.
    """
    evidence = "\n".join(f"{family} {name} {stored.dtype}" for name, stored in tensors.items())
    for pattern, advice in _ROWS.items():
        if match := re.search(pattern, evidence):
            raise CheckpointError(f"{folder}: {advice} ({match[0]})")
