"""``config.json`` as the configuration class of ``transformers`` reads it; torch and transformers
are imported here."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

from automoe.errors import ConfigError

HFConfig = dict[str, Any]

# Said of the file, of weights, or of classifiers' labels, of which the class makes lists: not of
# the decoder.
_OF_OTHERS = (
    "architectures auto_map dtype torch_dtype transformers_version quantization_config "
    "num_labels id2label label2id problem_type"
).split()
# Keys that transformers obeys in every family, and the values of them that this decoder computes.
_EVERYWHERE: dict[str, tuple[Any, ...]] = {
    "is_causal": (True,),
    "attention_dropout": (0, None),
    "per_layer_config": (None,),
    "configuration_files": (None,),
}
_MOST_LAYERS = 10_000  # the class makes a list of them


def as_transformers(hf: HFConfig, model_type: str, path: str) -> Any:
    """The configuration that ``transformers`` makes of a ``config.json``, nothing of the
    checkpoint's own code run.

    Absent keys have the defaults of the class, other spellings of a key are one attribute, and
    ``rope_parameters`` holds what ``rope_theta``, ``rope_scaling`` and keys of the top level say of
    rotary embeddings. A ``model_type`` that this release does not know gets a class without
    defaults. ``name_or_path`` is ``path``.

    Raises:
        ConfigError: values that the class refuses, or that this decoder computes in no family.
    """
    for key, computed in _EVERYWHERE.items():
        if key in hf and hf[key] not in computed:
            raise not_computed(
                path, f"{key}={hf[key]}, and every family here computes {computed[0]} alone"
            )
    layers = hf.get("num_hidden_layers")
    if isinstance(layers, int) and not 0 < layers <= _MOST_LAYERS:
        raise damaged(
            path, f"num_hidden_layers={layers}, and no model has more than {_MOST_LAYERS}, or none"
        )
    make = _class_of(model_type)
    with _without_warnings():  # of keys that it passes over
        try:
            config = make(
                **deepcopy({key: value for key, value in hf.items() if key not in _OF_OTHERS})
            )
            # Again, as where a model is built: only now are keys of the top level attributes.
            config.standardize_rope_params()
            config.name_or_path = path
        except Exception as error:  # it raises anything
            reason = " ".join(str(error).split())[:400]
            raise damaged(
                path, f"values that {make.__name__} of transformers refuses: {reason}"
            ) from None
    return config


def _class_of(model_type: str) -> type:
    from transformers import CONFIG_MAPPING, PreTrainedConfig

    if model_type in CONFIG_MAPPING:
        return CONFIG_MAPPING[model_type]

    class UnlistedConfig(PreTrainedConfig):
        max_position_embeddings: int = 4096
        rope_parameters: dict | None = None

    return UnlistedConfig


@contextmanager
def _without_warnings() -> Iterator[None]:
    logger = logging.getLogger("transformers")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def not_computed(path: object, what: str) -> ConfigError:
    """A ``config.json`` that is fine, of a model that this decoder does not compute."""
    return ConfigError(
        "model.hf_path", path, f"its config.json has {what}", "Choose another checkpoint"
    )


def damaged(path: str, what: str) -> ConfigError:
    """A ``config.json`` that describes no model."""
    return ConfigError(
        "model.hf_path",
        path,
        f"its config.json has {what}",
        "Copy the checkpoint's config.json again",
    )
