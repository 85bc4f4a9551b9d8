"""The weights that a run begins with, and the checkpoint that it leaves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from automoe.config.schema import Config, tokenizer_of
from automoe.data.chat_template import chat_template_of
from automoe.errors import ConfigError
from automoe.hf.files import Written
from automoe.hf.peft import WrittenAdapter, to_peft
from automoe.hf.read import Loaded, load_hf
from automoe.hf.upcycle import upcycled_model
from automoe.hf.write import to_hf
from automoe.model.decoder import Decoder
from automoe.optim.ema import take_averages
from automoe.parallel.mesh import Meshes
from automoe.parallel.parallelize import allocate, build_parts, materialize


def first_weights(
    config: Config, meshes: Meshes, device: torch.device
) -> tuple[dict[int, Decoder], Loaded | None]:
    """This rank's pipeline stages, filled from ``model.hf_path`` or at random; and what was loaded.
    Collective."""
    model_parts = build_parts(config, meshes)
    if not config.model.hf_path:
        materialize(model_parts, config, device)
        return model_parts, None
    allocate(model_parts, device)
    upcycling = upcycled_model(config.model, config.train.seed)[1] if config.model.upcycle else None
    return model_parts, load_hf(
        model_parts, config.model.hf_path, upcycling=upcycling, progress=True
    )


def export_weights(
    config: Config,
    model_parts: dict[int, Decoder],
    run_dir: Path,
    optimizer: torch.optim.Optimizer | None = None,
) -> Written | WrittenAdapter:
    """The run's HuggingFace checkpoint in ``run_dir/hf``, with what ``transformers`` needs to use
    it. Collective.

    With ``lora.export=adapter`` the adapter alone, in ``run_dir/adapter``. The model is not trained
    after it.

    Args:
        optimizer: has the averages that ``checkpoint.export_ema`` exports; ``model_parts`` get
            their values.
    """
    averaged = config.checkpoint.export_ema
    if averaged:
        if optimizer is None:
            rule = f"recipe={config.recipe} does not hand its optimizer to export_weights"
            raise ConfigError(
                "checkpoint.export_ema", True, rule, "Hand it over, or use automoe export --ema"
            )
        take_averages(optimizer)
    if config.lora.rank and config.lora.export == "adapter":
        return replace(
            to_peft(model_parts, run_dir / "adapter", config.lora, overwrite=True),
            averaged=averaged,
        )
    chat = chat_template_of(config)
    written = to_hf(
        model_parts, run_dir / "hf", tokenizer=tokenizer_of(config), chat=chat, overwrite=True
    )
    return replace(written, averaged=averaged)
