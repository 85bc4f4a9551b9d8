"""What the commands that write a HuggingFace checkpoint, ``export`` and ``convert``, have in common."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from automoe.errors import AutomoeError

if TYPE_CHECKING:
    from automoe.hf.writer import Written


def add_options(parser: argparse.ArgumentParser, kept_dtype: str) -> None:
    """The options of the checkpoint to make; ``kept_dtype`` says what ``--dtype keep`` is."""
    parser.add_argument("--out", required=True, metavar="DIR", help="checkpoint directory to make")
    parser.add_argument(
        "--dtype",
        choices=("keep", "bfloat16", "float32"),
        default="keep",
        help=f"of the parameters (default: {kept_dtype})",
    )
    parser.add_argument("--fp8", action="store_true", help="quantize to block-FP8, as DeepSeek-V3 is published")
    parser.add_argument("--max-shard-gb", type=_positive, default=5.0, metavar="GB", help="largest file (default: 5)")
    parser.add_argument("--overwrite", action="store_true", help="replace a checkpoint directory at DIR")


def max_shard_bytes(args: argparse.Namespace) -> int:
    """``--max-shard-gb`` in bytes."""
    return int(args.max_shard_gb * 1e9)


def report(write: Callable[[], Written]) -> int:
    """Write, and say what was saved or why not; returns the exit status (2: nothing was written)."""
    try:
        written = write()
    except AutomoeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"saved {written}")
    return 0


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not larger than 0")
    return value
