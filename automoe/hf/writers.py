"""Folders of other programs that are not read here: what they are, and a way out.

Importing this module does not load torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from automoe.errors import CheckpointError
from automoe.hf.wrapper import quantization_in

BASE = "Train the bfloat16 checkpoint that it was quantized from"
_FORMAT = f"of compressed-tensors: of its formats, INT4 in groups of 32 is read here. {BASE}"
# Pattern of a line of evidence, which is family, name and dtype of a tensor that no published
# folder has, or a format in config.json -> what the folder is, and what to do.
_ROWS = {
    r"gpt_oss \S+experts\.\w+_proj_blocks B?F\d+": "GPT-OSS that transformers 5.23 saved after dequantizing, under the "
    "names of MXFP4's codes: readers put random experts in their place. Name the MXFP4 checkpoint itself, which is read",
    r"gpt_oss \S+experts\.\d+\.\w+_proj\.\S+": f"GPT-OSS of llm-compressor, experts one by one with split biases. {BASE}",
    r"mixtral \S+block_sparse_moe\.experts\.\d+\.\w+_proj\.\S+": "Mixtral of llm-compressor, under names that no reader "
    f"has, transformers included. {BASE}",
    '"format": "(float|naive)-quantized"': f"FP8 {_FORMAT}",
    '"format": "int-quantized"': f"INT8 {_FORMAT}",
    '"format": "nvfp4-pack-quantized"': f"NVFP4 {_FORMAT}",
    '"format": "mxfp4-pack-quantized"': f"MXFP4 {_FORMAT}",
    '"format": "(mxfp|marlin|sparse)[^"]+"': f"other codes {_FORMAT}",
}  # fmt: skip


def check_writer(
    folder: Path, hf: Mapping[str, Any], family: str, tensors: Mapping[str, Any]
) -> None:
    """Raise ``CheckpointError`` if a program wrote the folder in a form that is not read here.

    The message names the program or format and a way out.

    Args:
        hf: content of config.json.
        family: its ``model_type``.
        tensors: headers of the tensors, by name in the files.
    """
    lines = [f"{family} {name} {stored.dtype}" for name, stored in tensors.items()]
    evidence = "\n".join([json.dumps(quantization_in(hf)), *lines])
    for pattern, advice in _ROWS.items():
        if match := re.search(pattern, evidence):
            raise CheckpointError(f"{folder}: {advice} ({match[0]})")
