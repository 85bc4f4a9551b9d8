"""``python -m automoe.export RUN --out DIR``: a run's weights as a HuggingFace checkpoint, compared before it is called saved.

python -m automoe.export runs/default --out my-model
python -m automoe.export runs/default --out my-model --dtype bfloat16
python -m automoe.export runs/default --out my-model --fp8
"""

from __future__ import annotations

import argparse
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from automoe.errors import CheckpointError
from automoe.hf.command import add_options, max_shard_bytes, report

if TYPE_CHECKING:
    from automoe.config.schema import Config
    from automoe.hf.writer import Written
    from automoe.model.decoder import Decoder


def main(argv: list[str] | None = None) -> int:
    """Export the run that ``argv`` names; returns the exit status (2: nothing was exported)."""
    args = _parser().parse_args(argv)
    options = dict(max_shard_bytes=max_shard_bytes(args), overwrite=args.overwrite)
    return report(lambda: export_run(args.run, args.out, args.dtype, fp8=args.fp8, **options))


def export_run(
    run_dir: str | Path,
    out: str | Path,
    dtype: str = "keep",
    max_shard_bytes: int = 5 << 30,
    overwrite: bool = False,
    fp8: bool = False,
) -> Written:
    """Write the newest weights of a run directory as a HuggingFace checkpoint, in one process on the CPU.

    The newest training checkpoint that is whole, or where there is none the checkpoint that the run
    itself wrote to ``hf/`` at its end.

    Raises:
        ConfigError: not a run directory, or ``fp8`` of a family that has no such checkpoints.
        CheckpointError: it has no weights, they are damaged, or the export is not equal to them.
    """
    from automoe.config.frozen import load_config
    from automoe.hf.files import check_target

    run_dir, out = Path(run_dir).expanduser(), Path(out).expanduser()
    config = load_config(run_dir)
    check_target(out, overwrite)  # before the weights are read

    from automoe.hf.writer import export_and_verify

    model = _load_run(run_dir, config)
    return export_and_verify(
        model, out, config, dtype=dtype, fp8=fp8, max_shard_bytes=max_shard_bytes, overwrite=overwrite
    )


def _load_run(run_dir: Path, config: Config) -> Decoder:
    """The whole model of a run, with its newest weights."""
    from automoe.hf.reader import load_hf
    from automoe.parallel.fsdp import PARAM_DTYPES
    from automoe.parallel.parallelize import build_decoder

    step_dir = _newest_step(run_dir)
    exported = run_dir / "hf"
    if step_dir is None:
        if not (exported / "config.json").is_file():
            raise CheckpointError(
                f"{run_dir} has no weights: neither a training checkpoint in checkpoints/ nor an export in hf/. "
                "Train it with checkpoint.every=N or checkpoint.export_hf=true"
            )
        # Token ids and tokenizer files come from there too.
        config = replace(config, model=replace(config.model, hf_path=str(exported)))
    # Nothing is computed, so the backends that trained it need not be here.
    moe = replace(config.moe, experts="loop")
    model = build_decoder(config.model, moe, PARAM_DTYPES[config.train.dtype])
    model.to_empty(device="cpu")
    if step_dir is None:
        load_hf(model, exported)
    else:
        _load_step(model, step_dir)
    return model


def _newest_step(run_dir: Path) -> Path | None:
    """The newest training checkpoint, or None where there is none.

    Raises:
        CheckpointError: it is damaged; which older one to take instead is not decided here.
    """
    from automoe.checkpoint.folder import FOLDER, committed_steps
    from automoe.checkpoint.manifest import damage

    steps = committed_steps(run_dir / FOLDER)
    if not steps:
        return None
    newest = run_dir / FOLDER / steps[-1]
    if (problem := damage(newest)) is not None:
        raise CheckpointError(
            f"{newest} is damaged ({problem}). Remove it to export the checkpoint before it, or resume the run"
        )
    return newest


def _load_step(model: Decoder, step_dir: Path) -> None:
    import torch.distributed.checkpoint as dcp

    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module="torch.distributed.checkpoint")
        dcp.load(tensors, checkpoint_id=step_dir, no_dist=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m automoe.export",
        description="Write a run's newest weights as a HuggingFace checkpoint, reload it in transformers, compare, "
        "and only then call it saved.",
    )
    parser.add_argument("run", help="run directory of automoe.train")
    add_options(parser, "as trained")
    return parser


if __name__ == "__main__":
    sys.exit(main())
