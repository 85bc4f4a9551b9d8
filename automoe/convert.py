"""``python -m automoe.convert SRC --out DIR``: a HuggingFace checkpoint in another dtype, layout or quantization.

python -m automoe.convert DeepSeek-V3 --out DeepSeek-V3-bf16 --dtype bfloat16
python -m automoe.convert my-model --out my-model-fp8 --fp8
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from automoe.export import add_options, report

if TYPE_CHECKING:
    from automoe.hf.files import Written


def main(argv: list[str] | None = None) -> int:
    """Convert the directory that ``argv`` names; returns the exit status (2: nothing was written)."""
    parser = argparse.ArgumentParser(
        prog="python -m automoe.convert",
        description="Write a HuggingFace checkpoint anew in another dtype, layout or quantization, one tensor at a "
        "time; block-FP8 and MXFP4 are dequantized.",
    )
    parser.add_argument("source", metavar="SRC", help="HuggingFace checkpoint directory")
    add_options(parser, "as stored, bfloat16 where that is quantized")
    parser.add_argument(
        "--layout",
        choices=("published", "fused"),
        default="published",
        help="experts one by one as published, or fused as transformers 5 holds them (default: published)",
    )
    args = parser.parse_args(argv)
    return report(args, partial(_convert, args.source, layout=args.layout))


def _convert(source: str, out: str, **options: Any) -> Written:
    from automoe.hf.families.registry import model_config_from_hf
    from automoe.hf.folder import check_conversion

    asked = {key: options[key] for key in ("fp8", "layout", "overwrite")}
    check_conversion(model_config_from_hf(source), Path(out).expanduser(), **asked)

    from automoe.hf.api import convert_hf  # torch

    return convert_hf(source, out, **options)


if __name__ == "__main__":
    sys.exit(main())
