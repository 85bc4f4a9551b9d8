"""``python -m automoe.convert SRC --out DIR``: a HuggingFace checkpoint in another dtype, layout or quantization.

python -m automoe.convert DeepSeek-V3 --out DeepSeek-V3-bf16 --dtype bfloat16
python -m automoe.convert my-model --out my-model-fp8 --fp8
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from automoe.errors import ConfigError
from automoe.hf.command import add_options, max_shard_bytes, report

if TYPE_CHECKING:
    from automoe.hf.writer import Written


def main(argv: list[str] | None = None) -> int:
    """Convert the directory that ``argv`` names; returns the exit status (2: nothing was written)."""
    args = _parser().parse_args(argv)
    options = dict(layout=args.layout, max_shard_bytes=max_shard_bytes(args), overwrite=args.overwrite)
    return report(lambda: convert_hf(args.source, args.out, args.dtype, fp8=args.fp8, **options))


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
    """Write ``source`` anew at ``out``, one tensor at a time, in one process on the CPU.

    Block-FP8 and MXFP4 are dequantized. Config, generation config and tokenizer go along. The result has its
    name when every number was read back and compared with the source's, and ``transformers`` builds the same
    model from it, with the same logits where it is small enough to be run twice.

    Args:
        dtype: of parameters: ``keep`` (quantized ones become bfloat16), ``bfloat16`` or ``float32``.
        fp8: quantize the matrices of layers in blocks of 128 x 128.
        layout: of experts: ``published``, or ``fused`` as transformers 5 holds them.

    Raises:
        ConfigError: an unknown family, dtype or layout, or ``fp8`` together with fused experts.
        CheckpointError: files missing, damaged or not the model's; the target exists or cannot be written.
    """
    from automoe.hf.families.registry import family_of, model_config_from_hf
    from automoe.hf.files import check_target

    path = Path(out).expanduser().absolute()
    check_target(path, overwrite)
    config = model_config_from_hf(source)
    keys = family_of(config).keys
    if layout not in ("published", "fused"):
        raise ConfigError("--layout", layout, "must be published or fused", "Use published")
    if fp8 and layout == "fused":
        raise ConfigError(
            "--fp8",
            "with --layout fused",
            "block-FP8 stores every expert's matrices",
            "Leave one of them out",
        )

    from automoe.hf.catalog import check_catalog
    from automoe.hf.folder import make_folder, working_folder, write_beside
    from automoe.hf.progress import reading
    from automoe.hf.rewrite import compare_rewritten, rewrite_tensors
    from automoe.hf.shard_files import fp8_config
    from automoe.hf.shards import export_dtype
    from automoe.hf.verifier import verify_with_transformers
    from automoe.hf.writer import Written

    quantization = fp8_config(config) if fp8 else None
    out_dtype = export_dtype(dtype)
    catalog = check_catalog(source, config)
    sizes = [stored.num_bytes for one in catalog.sources for stored in (one.data, one.scales) if stored]
    folder = working_folder(path)
    keys = keys.in_memory if layout == "fused" else keys

    def fill() -> Written:
        with reading(catalog.folder.name, lambda: sum(sizes), shown=True) as advance:
            done = rewrite_tensors(
                catalog,
                config,
                folder,
                out_dtype,
                keys=keys,
                fp8=fp8,
                max_shard_bytes=max_shard_bytes,
                advance=advance,
            )
        write_beside(folder, config, str(done.dtype).removeprefix("torch."), None, quantization)
        written = check_catalog(folder, config)
        compare_rewritten(catalog, written, config, out_dtype, keys, fp8)
        error = verify_with_transformers(config, written)
        return Written(path, done.num_tensors, done.num_files, done.num_bytes, logits_error=error)

    return make_folder(path, fill, overwrite)


def _parser() -> argparse.ArgumentParser:
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
    return parser


if __name__ == "__main__":
    sys.exit(main())
