"""Classes of ``transformers`` that load a checkpoint, of any family."""

from __future__ import annotations

from typing import Any

import torch

from automoe.hf.wrapper import ALONE, Names


def loading_class(config: Any, whole: bool = False) -> Any:
    """Return the auto class of ``transformers`` that loads a checkpoint with this config.

    Args:
        whole: load all parts of a wrapper; else its text model alone, if that has a class of its
            own.
    """
    import transformers

    wrapper = config.get_text_config(decoder=True) is not config
    if (wrapper and whole) or type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        return transformers.AutoModelForImageTextToText
    return transformers.AutoModelForCausalLM


def num_parameters(config: Any) -> int:
    """Build the class of a ``transformers`` configuration on meta, and count its parameters.

    Of buffers, such as tables of positions, what exceeds 1 GiB counts in numbers of 4 bytes.
    """
    with torch.device("meta"):
        model = loading_class(config).from_config(config, trust_remote_code=False)
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    return model.num_parameters() + max(0, buffers - (1 << 30)) // 4


def text_path(model: Any) -> str:
    """Return the name of a wrapper's text model; empty if ``model`` is itself the text model."""
    kind = type(model.config.get_text_config(decoder=True))
    named = ((name, getattr(module, "config", None)) for name, module in model.named_modules())
    return next((name for name, config in named if type(config) is kind), "")


def names_in_class(model: Any) -> Names:
    """Return the names of the text model's parameters in a class of ``transformers``."""
    path = text_path(model)
    if not path:
        return ALONE
    if model.get_submodule(path).get_output_embeddings() is not None:
        return Names(((f"{path}.", ""),))
    return Names(((f"{path}.", "model."), ("lm_head.", "lm_head.")))
