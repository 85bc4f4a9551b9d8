"""Models of transformers' classes: what loads a checkpoint, and how large its model is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from automoe.hf.families.registry import known_families, read_hf_config


def stated_config(folder: Path) -> Any:
    """Return the configuration object of ``transformers`` that a checkpoint's config.json states.

    A family's class reads a file without ``model_type``, which ``AutoConfig`` refuses.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    model_type = read_hf_config(folder).get("model_type")
    native = model_type in known_families() and model_type in CONFIG_MAPPING
    kind = CONFIG_MAPPING[model_type] if native else AutoConfig
    return kind.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def loading_class(config: Any, whole: bool = False) -> Any:
    """Return the auto class of ``transformers`` that loads a checkpoint with this config.

    Args:
        whole: load all parts of a multimodal model; else its text model alone, if that has a class
            of its own.
    """
    import transformers

    if family := known_families().get(config.model_type):
        family.mend()
    wrapper = config.get_text_config(decoder=True) is not config
    if (wrapper and whole) or type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        return transformers.AutoModelForImageTextToText
    return transformers.AutoModelForCausalLM


def weightless(config: Any, whole: bool = False) -> Any:
    """Return transformers' model of this configuration on the meta device, without weights.

    Args:
        whole: build all parts of a multimodal model; else its text model alone, if that has a class
            of its own.
    """
    import torch

    with torch.device("meta"):
        return loading_class(config, whole).from_config(config, trust_remote_code=False)


def num_parameters(config: Any) -> int:
    """Build the class of a ``transformers`` configuration on meta, and count its parameters.

    Of buffers, such as tables of positions, only the bytes above 1 GiB in total count, four bytes
    as one parameter.
    """
    model = weightless(config)
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    return model.num_parameters() + max(0, buffers - (1 << 30)) // 4
