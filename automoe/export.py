"""``python -m automoe.export RUN --out DIR``: write a run's weights as a HuggingFace checkpoint.

The written checkpoint is read back and compared with the weights before success is reported.

python -m automoe.export runs/default --out my-model
python -m automoe.export runs/default --out my-model --dtype bfloat16
python -m automoe.export runs/default --out my-model --fp8
"""

from __future__ import annotations

import argparse
import math
import sys
import textwrap
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from automoe.config.paths import user_path
from automoe.config.schema import Config, export_name
from automoe.errors import CheckpointError, ConfigError, exit_status, number_option, say

if TYPE_CHECKING:
    import torch

    from automoe.hf.files import Written
    from automoe.hf.keys import Encoding
    from automoe.model.causal_lm import CausalLM


def main(argv: list[str] | None = None) -> int:
    """Export the run that ``argv`` names.

    Returns the exit status: 0, or 2 if nothing was exported because of an error.
    """
    parser = argparse.ArgumentParser(
        prog="automoe export",
        description="Write a run's newest weights as a HuggingFace checkpoint, reload it in transformers, compare, "
        "and only then call it saved.",
    )
    parser.add_argument("run", help="run directory of automoe.train")
    add_options(parser, "as in model.hf_path, or as trained without it")
    help_text = "only the adapter of a run with LoRA, as peft loads it; experts one by one, or in one tensor"
    layouts = ("auto", "published", "fused")
    parser.add_argument("--adapter", nargs="?", const="auto", choices=layouts, help=help_text)
    parser.add_argument(
        "--ema", action="store_true", help="averaged weights of a run with optim.ema_decay"
    )
    args = parser.parse_args(argv)
    return report(args, partial(export_run, args.run, adapter=args.adapter, ema=args.ema))


def export_run(
    run_dir: str | Path,
    out: str | Path,
    dtype: str = "keep",
    max_shard_bytes: int = 5 << 30,
    overwrite: bool = False,
    encoding: Encoding = "plain",
    adapter: str | None = None,
    ema: bool = False,
) -> Written | str:
    """Write the newest weights of a run directory as a HuggingFace checkpoint.

    The export runs in one process on the CPU. Weights come from the newest complete training
    checkpoint. If there is none, they come from ``hf/`` or ``adapter/``, which the run wrote at its
    end.

    Args:
        run_dir: run directory of ``automoe.train``.
        out: checkpoint directory to write.
        dtype: dtype of the parameters: ``keep``, ``bfloat16`` or ``float32``.
        max_shard_bytes: size of the largest safetensors file.
        overwrite: replace a checkpoint directory at ``out``.
        encoding: ``plain``, or the quantization to write: ``fp8``, ``mxfp4`` or ``int4``.
        adapter: write only the LoRA adapter: ``published`` (one for each expert and projection),
            ``fused`` (one for all experts of a tensor), or ``auto`` (that of the family's
            checkpoints if peft can load it, else fused). None: write the model with the adapter
            merged.
        ema: write the averaged weights (``optim.ema_decay``) of the training checkpoint.

    Returns:
        The summary of the checkpoint, or a sentence about the adapter.

    Raises:
        ConfigError: ``run_dir`` is no run directory; ``out`` is the run's ``model.hf_path``; the
            family has no checkpoints in ``encoding``; ``adapter`` is given with a dtype or
            encoding, or the run trained no adapter, or changed the model in other ways too; or
            ``ema`` is given, and the run kept no averages.
        CheckpointError: the run has no weights, they are damaged, or the written checkpoint differs
            from them.
    """
    from automoe.config.frozen import load_config
    from automoe.config.hub import local_folder
    from automoe.config.schema import tokenizer_of
    from automoe.data.chat_template import chat_template_of
    from automoe.data.tokenizer import check_tokenizer
    from automoe.hf.families.registry import family_of
    from automoe.hf.folder import check_target
    from automoe.hf.identity import complete
    from automoe.hf.keys import quantization_config

    run_dir = user_path("RUN", run_dir)
    out = user_path("--out", out)
    config = load_config(run_dir)
    check_target(out, overwrite)  # before the weights are read
    base = config.model.hf_path
    if base and out.exists() and local_folder(base).exists() and out.samefile(local_folder(base)):
        rule = "it is model.hf_path of the run, without which the run can neither continue nor be exported again"
        raise ConfigError("--out", out, rule, "Name another directory")
    if adapter is not None and (encoding, dtype) != ("plain", "keep"):
        other = f"--dtype {dtype}" if encoding == "plain" else f"--{encoding}"
        rule = f"an adapter keeps the dtype that it was trained in, and {other} is for whole models"
        raise ConfigError("--adapter", adapter, rule, "Leave one of them out")
    complete(config)  # whatever was trained, the files of the base say how its tensors are stored
    quantization_config(config.model, family_of(config.model).keys, encoding)

    stretched = config.model.rope.extends
    if adapter is not None and (
        not config.lora.rank or config.train.trainable or config.data.is_synthetic or stretched
    ):
        rule = "an adapter holds only what lora trained; the run has lora.rank="
        rule += f"{config.lora.rank}, train.trainable={config.train.trainable}"
        rule += ", data.kind=benchmark" * config.data.is_synthetic
        rule += ", model.rope.extends=true" * stretched
        raise ConfigError("--adapter", adapter, rule, "Omit it")
    if ema and not config.optim.ema_decay:
        raise ConfigError(
            "--ema", True, "the run kept no averages of its weights: optim.ema_decay=0", "Omit it"
        )

    from automoe.hf.peft import to_peft
    from automoe.hf.write import to_hf  # torch

    model = _load_run(run_dir, config, ema)
    if adapter is not None:
        return to_peft(model, out, config.lora, layout=adapter, overwrite=overwrite, averaged=ema)
    # If the weights come from the run's own export, the tokenizer's files are next to them: None.
    known = config.data.is_synthetic or model.config.hf_path == config.model.hf_path
    tokenizer = tokenizer_of(config) if known else None
    chat = None
    if tokenizer is not None:
        check_tokenizer(tokenizer)
        chat = chat_template_of(config)
    whole = to_hf(
        model,
        out,
        dtype=dtype,
        encoding=encoding,
        max_shard_bytes=max_shard_bytes,
        tokenizer=tokenizer,
        chat=chat,
        overwrite=overwrite,
    )
    return replace(whole, averaged=ema)


def _load_run(run_dir: Path, config: Config, ema: bool) -> CausalLM:
    """Build the whole model of a run on the CPU and load its newest weights.

    Args:
        ema: load the averaged weights (``optim.ema_decay``) instead.

    Raises:
        CheckpointError: the run has no weights, or the newest checkpoint is damaged. An older
            checkpoint is not used instead, since that is the user's decision.
    """
    import torch

    from automoe.checkpoint.manifest import check_base, check_model, damage, read_manifest
    from automoe.checkpoint.steps import FOLDER, committed_steps, misnamed
    from automoe.hf.adapter import from_peft
    from automoe.hf.api import from_hf
    from automoe.hf.families.registry import model_of_stranger
    from automoe.hf.headers import ADAPTER
    from automoe.hf.identity import checkpoint_identity
    from automoe.hf.read import load_hf
    from automoe.model.lora import freeze_and_adapt
    from automoe.parallel.fsdp import MASTER_DTYPES
    from automoe.parallel.parallelize import allocate, build_decoder
    from automoe.run.weights import fill_new_rows
    from automoe.storage.files import explained

    exported, adapter = run_dir / "hf", run_dir / "adapter"
    name = export_name(config)
    with explained(run_dir / FOLDER, "Check its permissions", "cannot be read"):
        steps = committed_steps(run_dir / FOLDER)
    newest = run_dir / FOLDER / steps[-1] if steps else None
    for warning in misnamed(run_dir / FOLDER, steps):
        say(f"warning: {warning}")
    if newest is not None:
        if (problem := damage(newest)) is not None:
            raise CheckpointError(
                f"{newest} is damaged ({problem}). Remove it to export the checkpoint before it, or resume the run"
            )
        manifest, _ = read_manifest(newest)  # config.yaml has no checksum: compare them
        check_model(newest, manifest["config"], config)
    elif (exported / "config.json").is_file() and not ema and name == "hf":
        # Token ids and tokenizer files come from the exported folder too.
        model_of_stranger(str(exported))
        return from_hf(exported, dtype=MASTER_DTYPES[config.train.dtype])
    elif ema:
        raise CheckpointError(
            f"{run_dir} has no training checkpoint, which would hold averages. Omit --ema"
        )
    elif not (adapter / ADAPTER).is_file() or name != "adapter":
        raise CheckpointError(
            f"{run_dir} has no weights: neither a training checkpoint in checkpoints/ nor an export in hf/ or "
            "adapter/. Train it with checkpoint.every=N or checkpoint.export_hf=true"
        )
    if newest is None or "base" in manifest:  # before a folder's weights are read
        model_of_stranger(str(config.model.hf_path))
    # Nothing is computed, so this machine need not have the backends of the training run.
    config = replace(config, moe=replace(config.moe, experts="loop"))
    dtype = MASTER_DTYPES[config.train.dtype]
    model = build_decoder(config.model, config.moe, dtype)
    # Adapters keep the weights' full dtype: merged weights are rounded once, when written.
    freeze_and_adapt(model, config, dtype, dtype)
    allocate({0: model}, torch.device("cpu"))
    if newest is None:
        load_hf(model, str(config.model.hf_path))
        from_peft(model, adapter, config.lora)
        return model
    held = model.state_dict()
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    if "base" in manifest:
        assert config.model.hf_path is not None
        check_base(newest, manifest, config, checkpoint_identity(config.model.hf_path))
        load_hf(model, config.model.hf_path)
        fill_new_rows({0: model}, config)
        for name, _ in model.named_parameters():
            if name not in trained:
                held.pop(name, None)
    load_step(held, newest, trained if ema else ())
    return model


def load_step(
    full_tensors: Mapping[str, torch.Tensor], step_dir: Path, averaged: Collection[str] = ()
) -> None:
    """Load a training checkpoint into a model's unsharded tensors, without process group.

    Args:
        full_tensors: name -> full tensor, filled in place.
        step_dir: folder of the training checkpoint.
        averaged: names of tensors that get the averaged weights (EMA) instead of the weights.

    Raises:
        CheckpointError: the checkpoint cannot be read, or lacks one of the tensors.
    """
    from automoe.checkpoint.reader import StepReader
    from automoe.optim.ema import KEY

    tensors = {
        f"{f'optimizer.{KEY}' if name in averaged else 'model'}.{name}": full_tensors[name]
        for name in full_tensors
    }
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", category=UserWarning, module="torch.distributed.checkpoint"
        )
        StepReader(step_dir).load(tensors, no_dist=True)


def add_options(parser: argparse.ArgumentParser, kept_dtype: str) -> None:
    """Add the command line options that ``export``, ``convert`` and ``upcycle`` share.

    Args:
        parser: parser to extend.
        kept_dtype: text for the help of ``--dtype``: the dtype that the default ``keep`` gives.
    """
    parser.add_argument("--out", required=True, metavar="DIR", help="checkpoint directory to make")
    parser.add_argument(
        "--dtype",
        choices=("keep", "bfloat16", "float32"),
        default="keep",
        help=f"dtype of the parameters (default: {kept_dtype})",
    )
    published = {
        "fp8": "block-FP8, as DeepSeek-V3",
        "mxfp4": "MXFP4, as GPT-OSS",
        "int4": "INT4, as Kimi-K2-Thinking",
    }
    encodings = parser.add_mutually_exclusive_group()
    for encoding, kind in published.items():
        encodings.add_argument(
            f"--{encoding}",
            dest="encoding",
            action="store_const",
            const=encoding,
            default="plain",
            help=f"quantize to {kind} is published",
        )
    parser.add_argument(
        "--max-shard-gb",
        type=number_option(
            float, lambda number: 0 < number < math.inf, "finite number larger than 0"
        ),
        default=5.0,
        metavar="GB",
        help="largest file (default: 5)",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace a checkpoint directory at DIR"
    )
    parser.add_argument(
        "--plugins",
        type=lambda text: text.split(","),
        default=[],
        metavar="A,B",
        help="modules that the model needs",
    )


@exit_status
def report(args: argparse.Namespace, write: Callable[..., Any]) -> int:
    """Write a checkpoint by a command's options and print what was saved; return the exit status.

    It also loads the plugins of ``--plugins``. Errors are printed.

    Args:
        args: parsed options of ``add_options``.
        write: function of the output directory with the keywords ``dtype``, ``encoding``,
            ``overwrite`` and ``max_shard_bytes``, such as a ``functools.partial`` of
            ``export_run``.
    """
    from automoe.config.plugins import load_plugins

    load_plugins(args.plugins)
    written = write(
        args.out,
        dtype=args.dtype,
        encoding=args.encoding,
        overwrite=args.overwrite,
        max_shard_bytes=int(args.max_shard_gb * 1e9),
    )
    layout = textwrap.TextWrapper(
        80, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
    print(layout.fill(f"saved {written}"))
    notes = [*getattr(written, "notes", ())]
    folder = user_path("--out", args.out)
    if (folder / "config.json").is_file():  # an adapter has none
        from automoe.hf.engines import ignored_keys

        notes += ignored_keys(folder)
    print("".join(f"note: {line}\n" for line in notes), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
