"""Initial weights of a run, and the HuggingFace export of the trained weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from automoe.comm.local_shard import global_offset, local_shard
from automoe.config.schema import Config, tokenizer_of
from automoe.data.chat_template import chat_template_of
from automoe.data.tokenizer import pieces_of_new
from automoe.errors import ConfigError
from automoe.hf.adapter import fill_from
from automoe.hf.files import Written
from automoe.hf.peft import to_peft
from automoe.hf.read import Loaded, load_hf
from automoe.hf.upcycle import upcycled_model
from automoe.hf.write import to_hf
from automoe.interop.torch_private import full_tensor
from automoe.model.causal_lm import CausalLM
from automoe.optim.ema import take_averages
from automoe.parallel.parallelize import allocate, materialize


def load_or_initialize(
    model_parts: dict[int, CausalLM], config: Config, device: torch.device
) -> Loaded | None:
    """Allocate a model on ``device``; read its weights or draw them at random. Collective.

    Weights that are read include the rows of new tokens (``fill_new_rows``) and the adapter at
    ``lora.path``, merged if ``lora.rank`` is 0.

    Args:
        model_parts: this rank's pipeline stages by number, on the meta device; filled in place.

    Returns:
        The report of reading ``model.hf_path``; None if the weights are random: no path is set, or
        ``model.random_weights`` is true.

    Raises:
        ConfigError: the model's ``transformers`` class lets a document affect the next one in its
            packed row, although ``data.document_mask`` is on.
    """
    loaded = None
    if config.model.hf_path and not config.model.random_weights:
        allocate(model_parts, device)
        keys = None  # of the dense checkpoint, if the model is made from one
        if config.model.upcycle:
            _, keys = upcycled_model(config.model, config.train.seed)
        loaded = load_hf(model_parts, config.model.hf_path, keys=keys, progress=True)
        notes = [*loaded.notes, *fill_new_rows(model_parts, config)]
        if path := config.lora.path:
            notes.append(fill_from(model_parts, path, config.model, merge=not config.lora.rank))
        loaded = replace(loaded, notes=tuple(notes))
    else:
        materialize(model_parts, config, device)
    for part in model_parts.values():
        if config.data.document_mask:
            part.check_isolation(config.train.seq_len)
    return loaded


@torch.no_grad()
def fill_new_rows(parts: dict[int, CausalLM], config: Config) -> list[str]:
    """Fill the rows of new tokens in embedding and output head under ``model.new_rows=pieces``. Collective.

    A token is new if the tokenizer of ``model.hf_path`` lacks it. Its row becomes the mean of the
    rows of the tokens into which that tokenizer splits its text.

    Returns:
        Lines to print for the user; [] if there are no new tokens, or under other settings.
    """
    pieces = pieces_of_new(config)
    for part in parts.values():
        for name, parameter in part.named_parameters():
            if pieces and name in ("embed_tokens.weight", "lm_head.weight"):
                whole, local = full_tensor(parameter), local_shard(parameter)
                first, *_ = global_offset(parameter)
                for new, old in pieces.items():
                    if 0 <= new - first < len(local):
                        # added in order, so that threads do not change a bit
                        local[new - first] = whole[old].double().cumsum(0)[-1] / len(old)
    return [f"{len(pieces):,} rows start as the mean of the pieces of their tokens"] * bool(pieces)


def export_weights(
    config: Config,
    model_parts: dict[int, CausalLM],
    run_dir: Path,
    optimizer: torch.optim.Optimizer | None = None,
) -> Written | str:
    """Write the trained weights as a HuggingFace checkpoint to ``run_dir/hf``. Collective.

    With ``lora.export=adapter`` only the adapter is written, to ``run_dir/adapter``. The model
    cannot be trained further afterwards.

    Args:
        optimizer: needed for ``checkpoint.export_ema`` (without it a ``ConfigError``): it holds the
            averaged weights, which the function copies into ``model_parts`` and exports.

    Returns:
        The summary of the checkpoint, or a sentence about the adapter.
    """
    averaged = config.checkpoint.export_ema
    if averaged:
        if optimizer is None:
            rule = f"recipe={config.recipe} does not pass its optimizer to export_weights"
            raise ConfigError(
                "checkpoint.export_ema", True, rule, "Pass it, or use automoe export --ema"
            )
        take_averages(optimizer)
    if config.lora.rank and config.lora.export == "adapter":
        folder = run_dir / "adapter"
        return to_peft(model_parts, folder, config.lora, overwrite=True, averaged=averaged)
    chat = chat_template_of(config)
    written = to_hf(
        model_parts, run_dir / "hf", tokenizer=tokenizer_of(config), chat=chat, overwrite=True
    )
    return replace(written, averaged=averaged)
