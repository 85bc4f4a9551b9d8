"""Models of the conf tree, read without Hydra: a GPU machine need not have it."""

from __future__ import annotations

import yaml

from automoe.config.convert import config_from_dict
from automoe.config.schema import ModelConfig
from automoe.shipped import shipped_folder


def conf_model(name: str) -> ModelConfig:
    """``model=name`` of the command line."""
    text = (shipped_folder("conf") / "model" / f"{name}.yaml").read_text()
    return config_from_dict({"model": yaml.safe_load(text)}).model
