"""Folders of other programs that are not read here: what they are, and a way out.

Importing this module does not load torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from automoe.errors import CheckpointError
from automoe.model.wrapper import quantization_in

BASE = "Train the bfloat16 checkpoint that it was quantized from"
# format of compressed-tensors -> what it holds
_FORMATS = {
    "float-quantized": "FP8",
    "naive-quantized": "FP8 or INT8",
    "int-quantized": "INT8",
    "nvfp4-pack-quantized": "NVFP4",
    "mxfp4-pack-quantized": "MXFP4",
}


class _Row(NamedTuple):
    family: str
    name: str  # pattern of a tensor's name that no published folder of the family has
    dtypes: str  # pattern of its dtype
    what: str
    remedy: str = BASE


_ROWS = (
    _Row(
        "gpt_oss",
        r"experts\.\w+_proj_blocks$",
        "BF16|F16|F32",
        "GPT-OSS that transformers 5.23 saved after dequantizing: numbers under the names of MXFP4's "
        "codes, without scales, and readers put random experts in their place",
        "Name the MXFP4 checkpoint itself, which is read here",
    ),
    _Row(
        "gpt_oss",
        r"experts\.\d+\.(gate|up|down)_proj\.",
        "",
        "GPT-OSS of llm-compressor: experts one by one, with split biases",
    ),
    _Row(
        "mixtral",
        r"block_sparse_moe\.experts\.\d+\.(gate|up|down)_proj\.",
        "",
        "Mixtral of llm-compressor, under names that no reader has, transformers included",
    ),
)


def check_writer(
    folder: Path, hf: Mapping[str, Any], family: str, tensors: Mapping[str, Any]
) -> None:
    """Raise ``CheckpointError`` that names the writer of a folder which nobody reads as it is.

    Args:
        hf: content of config.json.
        family: its ``model_type``.
        tensors: headers of the tensors, by name in the files.
    """
    for row in _ROWS:
        for name, one in tensors.items() if row.family == family else ():
            if re.search(row.name, name) and re.match(row.dtypes, one.dtype):
                raise CheckpointError(f"{folder}: {row.what} ({name}). {row.remedy}")
    stated: Any = quantization_in(hf)
    if not isinstance(stated, dict) or stated.get("quant_method") != "compressed-tensors":
        return
    groups = stated.get("config_groups")
    schemes = list(groups.values()) if isinstance(groups, dict) else []
    for scheme in [stated, *schemes]:
        form = scheme.get("format") if isinstance(scheme, dict) else None
        if isinstance(form, str) and form in _FORMATS:
            raise CheckpointError(
                f"{folder}: {_FORMATS[form]} of compressed-tensors (format={form} in config.json), which is not read "
                "here; transformers 5.17 with compressed-tensors 0.19 reads it, and cannot save its experts in "
                f"bfloat16. {BASE}"
            )
