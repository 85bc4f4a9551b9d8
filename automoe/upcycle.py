"""``python -m automoe.upcycle DENSE --out DIR``: turn a dense checkpoint into an equivalent MoE.

Until it is trained, the mixture of experts has the same logits as the dense model.

python -m automoe.upcycle Qwen3-0.6B --out Qwen3-8x0.6B --experts 8 --top-k 2
python -m automoe.upcycle Meta-Llama-3-8B --out Llama3-G4 --experts 32 --top-k 8 --granularity 4
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from automoe.config.paths import user_path
from automoe.errors import ConfigError
from automoe.export import add_options, report

if TYPE_CHECKING:
    from automoe.hf.files import Written

# training's keys -> this command's arguments
_OPTIONS = {
    "model.hf_path": "DENSE",
    "upcycle": "DENSE",
    "num_experts": "--experts",
    "num_experts_per_token": "--top-k",
    "granularity": "--granularity",
}


def main(argv: list[str] | None = None) -> int:
    """Upcycle the checkpoint that ``argv`` names.

    Returns the exit status: 0, or 2 if nothing was written because of an error.
    """
    parser = argparse.ArgumentParser(
        prog="automoe upcycle",
        description="Write a dense HuggingFace checkpoint (Llama, Qwen3) as a mixture of experts with the same "
        "logits, one tensor at a time. Train it with model.hf_path=DIR.",
    )
    parser.add_argument(
        "source",
        metavar="DENSE",
        help="HuggingFace checkpoint directory or Hub id of a dense model",
    )
    parser.add_argument(
        "--experts", type=int, required=True, metavar="E", help="routed experts per layer"
    )
    parser.add_argument("--top-k", type=int, required=True, metavar="K", help="experts per token")
    parser.add_argument(
        "--granularity",
        type=int,
        default=1,
        metavar="G",
        help="cut each copy of the FFN into G experts; G divides E and K (default: 1)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the routers' initial weights (default: 0)"
    )
    add_options(parser, "as stored; bfloat16 if quantized")
    args = parser.parse_args(argv)

    def write(out: str, **options: Any) -> Written:
        from automoe.hf.folder import check_target
        from automoe.hf.identity import checkpoint_folder

        check_target(user_path("--out", out), options["overwrite"])

        from automoe.hf.write import upcycle_hf  # torch

        source = checkpoint_folder(args.source, "DENSE")
        sizes = args.experts, args.top_k, args.granularity
        try:
            return upcycle_hf(source, out, *sizes, seed=args.seed, **options)
        except ConfigError as error:  # its message names training's key
            key = _OPTIONS.get(error.key, error.key)
            raise ConfigError(key, error.value, error.rule, error.remedy) from None

    return report(args, write)


if __name__ == "__main__":
    sys.exit(main())
