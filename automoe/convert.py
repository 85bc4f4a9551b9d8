"""``python -m automoe.convert SRC --out DIR``: rewrite a HuggingFace checkpoint.

The copy may have another dtype, layout of experts or quantization.

python -m automoe.convert DeepSeek-V3 --out DeepSeek-V3-bf16 --dtype bfloat16
python -m automoe.convert my-model --out my-model-fp8 --fp8
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from automoe.config.paths import user_path
from automoe.errors import ConfigError
from automoe.export import add_options, report

if TYPE_CHECKING:
    from automoe.hf.files import Written


def main(argv: list[str] | None = None) -> int:
    """Convert the checkpoint that ``argv`` names.

    Returns the exit status: 0, or 2 if nothing was written because of an error.
    """
    parser = argparse.ArgumentParser(
        prog="automoe convert",
        description="Rewrite a HuggingFace checkpoint in another dtype, layout or quantization, one tensor at a "
        "time; block-FP8, MXFP4 and INT4 are dequantized.",
    )
    parser.add_argument("source", metavar="SRC", help="HuggingFace checkpoint directory or Hub id")
    add_options(parser, "as stored; bfloat16 if quantized")
    parser.add_argument(
        "--layout",
        choices=("published", "fused"),
        default="published",
        help="experts one by one as published, or fused as transformers 5 holds them (default: published)",
    )
    args = parser.parse_args(argv)
    return report(args, partial(_convert, args.source, layout=args.layout))


def _convert(source: str, out: str, **options: Any) -> Written:
    from automoe.hf.families.registry import model_of_stranger
    from automoe.hf.folder import check_conversion
    from automoe.hf.identity import checkpoint_folder
    from automoe.model.params import count_params
    from automoe.observe.summary import bytes_text, short_number

    folder = checkpoint_folder(source, "SRC")
    if not folder.is_dir():
        raise ConfigError(
            "SRC", source, "no such directory", "Name a HuggingFace checkpoint directory"
        )
    try:
        config = model_of_stranger(folder)
    except ConfigError as error:  # its message names training's key; name the argument SRC instead
        if error.key != "model.hf_path":
            raise
        raise ConfigError("SRC", source, error.rule, error.remedy) from None
    asked = {key: options[key] for key in ("encoding", "layout", "overwrite")}
    check_conversion(config, user_path("--out", out), **asked)
    size = bytes_text(sum(file.stat().st_size for file in folder.glob("*.safetensors")))
    parameters = short_number(count_params(config).total)
    kind = config.architecture or config.family
    print(f"converting {source}: {kind}, {parameters} parameters, {size}", flush=True)

    from automoe.hf.write import convert_hf  # torch

    written = convert_hf(folder, out, **options)
    return replace(written, checked=True)


if __name__ == "__main__":
    sys.exit(main())
