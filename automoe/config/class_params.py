"""Parameters of a class of ``transformers`` in the place of the table's."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any

from automoe.config.rules_model import TRANSFORMERS
from automoe.config.schema import ModelConfig


def or_of_class(native: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Make ``layer_params`` or ``stage_params`` answer for ``model.family=transformers`` too."""

    @wraps(native)
    def params(model: ModelConfig, part: Any, *args: Any, **options: bool) -> list[Any]:
        if model.family != TRANSFORMERS:
            return native(model, part, *args, **options)
        # By name: the module builds on the table, and imports torch.
        found = import_module("automoe.model.transformers_model").class_params(str(model.hf_path))
        buffers = options.get("buffers") or True in args
        return [
            param
            for param in found
            if (buffers or param.spec.kind != "buffer")
            and (param.layer == part or not isinstance(part, int))
        ]

    return params
