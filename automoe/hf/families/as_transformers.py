"""Reading of ``config.json`` by the configuration class of ``transformers``.

transformers, and torch with it, is imported once a function of this module needs it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import cache
from typing import Any

from automoe.config.hub import local_folder
from automoe.errors import ConfigError, one_line
from automoe.hf.wrapper import TEXT, HFConfig, is_wrapper
from automoe.storage.foreign import brief

# These keys do not describe the decoder but the file, the weights or a classifier's labels, of
# which the class would make lists.
_OF_OTHERS = (
    "architectures auto_map dtype torch_dtype transformers_version quantization_config "
    "num_labels id2label label2id problem_type"
).split()
# transformers obeys these keys in every family; this decoder computes only the listed values.
_EVERYWHERE: dict[str, tuple[Any, ...]] = {
    "is_causal": (True,),
    "attention_dropout": (0, None),
    "per_layer_config": (None,),
    "configuration_files": (None,),
    "transformers_weights": (None,),
}
_LAYERS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")
_MOST_LAYERS = 10_000  # the class makes a list with an item per layer


def as_transformers(hf: HFConfig, model_type: str, path: str) -> Any:
    """Return the configuration object that ``transformers`` makes of a ``config.json``.

    None of the checkpoint's own code is run. Absent keys get the defaults of the class. Different
    spellings of a key become one attribute. ``rope_parameters`` combines ``rope_theta``,
    ``rope_scaling`` and the rotary keys of the top level. A ``model_type`` that this release of
    transformers does not know gets a class without defaults. ``name_or_path`` is ``path``.

    Args:
        hf: content of config.json, or of its part for the text model.
        model_type: ``model_type`` that selects the class.
        path: folder of config.json.

    Raises:
        ConfigError: the class refuses a value, or a key has a value that automoe computes in no
            family.
    """
    _check_keys(hf, path, *_EVERYWHERE)
    check_layers(hf, path)
    from transformers import CONFIG_MAPPING, PreTrainedConfig

    class UnlistedConfig(PreTrainedConfig):
        max_position_embeddings: int = 4096
        rope_parameters: dict | None = None

    make = CONFIG_MAPPING[model_type] if model_type in CONFIG_MAPPING else UnlistedConfig
    with _made_by(make, path):  # it warns of keys that it ignores
        config = make(
            **deepcopy({key: value for key, value in hf.items() if key not in _OF_OTHERS})
        )
        # Repeated, as when a model is built: only now are top-level keys attributes.
        config.standardize_rope_params()
        config.name_or_path = path
    return config


def config_of_class(hf: HFConfig, path: str) -> Any:
    """Return transformers' configuration of the text model in a checkpoint of any class.

    It serves checkpoints whose ``model_type`` is none of automoe's own families.

    Args:
        hf: content of config.json.
        path: folder of config.json.

    Returns:
        The configuration object; None if ``transformers`` does not know the ``model_type``.

    Raises:
        ConfigError: the class refuses a value, or a multimodal config.json has no ``text_config``.
    """
    from transformers import CONFIG_MAPPING, PreTrainedConfig

    _check_keys(hf, path, "is_causal", "configuration_files", "transformers_weights")
    check_layers(hf, path)
    if (model_type := hf.get("model_type")) not in CONFIG_MAPPING:
        return None
    make = CONFIG_MAPPING[model_type]
    if TEXT in make.sub_configs and not is_wrapper(hf):
        raise damaged(path, f"no {TEXT}, which is the part that is trained")
    with _made_by(make, path):
        # This function decodes numbers that JSON lacks, such as infinity.
        stated, _ = PreTrainedConfig.get_config_dict(local_folder(path))
        stated = {key: value for key, value in stated.items() if key not in _OF_OTHERS}
        return make.from_dict(stated).get_text_config(decoder=True)


@contextmanager
def _made_by(make: type, path: str) -> Iterator[None]:
    """Context in which ``make`` reads a config.json: no warnings, and errors become ConfigError.

    Args:
        make: configuration class of transformers.
        path: folder of config.json, for the message.
    """
    with without_warnings():
        try:
            yield
        except Exception as error:  # the class may raise any exception
            said = f"values that {make.__name__} of transformers refuses: {one_line(error)}"
            raise damaged(path, said) from None


def _check_keys(hf: HFConfig, path: str, *keys: str) -> None:
    for key in keys:
        computed = _EVERYWHERE[key]
        if key in hf and hf[key] not in computed:
            raise not_computed(
                path, f"{key}={brief(hf[key])}, and every family here computes only {computed[0]}"
            )


def check_layers(hf: HFConfig, path: str) -> None:
    """Raise ``ConfigError`` for fewer than 1 or over 10,000 layers, or an integer beyond 63 bits.

    A configuration class could take all memory or time for such numbers.

    Args:
        hf: content of config.json, whose text model is checked too.
    """
    for part in (hf, hf.get("text_config")):
        for key, size in part.items() if isinstance(part, dict) else ():
            if key in _LAYERS and isinstance(size, int) and not 0 < size <= _MOST_LAYERS:
                raise damaged(
                    path, f"{key}={size}, and a model has at least 1 and at most {_MOST_LAYERS}"
                )
            if isinstance(size, int) and abs(size) >= 1 << 63:
                raise damaged(path, f"{key}={brief(size)}, which is out of range for any model")


def number_of(config: Any, key: str) -> int | None:
    """Return the integer at ``key`` of a configuration object of transformers.

    Returns None if there is no integer, or if its value differs between layers.
    """
    try:
        value = getattr(config, key, None)
    except RuntimeError:  # AmbiguousGlobalPerLayerAttributeError
        return None
    return value if isinstance(value, int) else None


@contextmanager
def without_warnings() -> Iterator[None]:
    """Silence the warnings of ``transformers`` in the block."""
    logger = logging.getLogger("transformers")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


@cache
def kept_in_float32(architecture: str) -> re.Pattern[str]:
    """Return a pattern that finds names of parameters which transformers keeps in float32.

    Args:
        architecture: name of the model's class in transformers. If it is unknown, the pattern finds
            nothing.
    """
    import transformers

    cls = getattr(transformers, architecture, None)
    names = getattr(cls, "_keep_in_fp32_modules_strict", None) or ()
    return re.compile("|".join(rf"(^|\.){name}($|\.)" for name in names) or "(?!)")


def not_computed(path: object, content: str) -> ConfigError:
    """Return the error for a valid ``config.json`` whose model automoe does not compute.

    Args:
        path: folder of config.json.
        content: end of a sentence that begins "its config.json has": the setting, and what is
            required, such as ``index_topk=0, and a query sees at least 1 key``.
    """
    return ConfigError(
        "model.hf_path", path, f"its config.json has {content}", "Choose another checkpoint"
    )


def damaged(path: object, content: str) -> ConfigError:
    """Return the error for a ``config.json`` that describes no model.

    Args:
        path: folder of config.json.
        content: what config.json has, such as ``no hidden_size, which a llama model needs``.
    """
    return ConfigError(
        "model.hf_path",
        path,
        f"its config.json has {content}",
        "Copy the checkpoint's config.json again",
    )
