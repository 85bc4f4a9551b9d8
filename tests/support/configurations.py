"""Configurations for tests whose subject is not their composition: each choice of groups is composed once.

Hydra takes 0.15 CPU seconds for a configuration, of which the values of an override are a hundredth.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from automoe.config.compose import check_overrides, default_run_dir, list_groups, register_base, resolved_container
from automoe.config.convert import config_from_dict
from automoe.config.schema import Config
from automoe.config.shipped import shipped_folder


@cache
def _groups_composed(config_name: str, groups: tuple[str, ...]) -> Any:
    register_base()
    with initialize_config_dir(config_dir=str(shipped_folder("conf")), version_base="1.3"):
        return compose(config_name, list(groups))


def quick_config(config_name: str = "config", overrides: list[str] | None = None) -> Config:
    """What ``automoe.config.compose.compose_config`` returns and raises, in a tenth of its time from the second call on.

    ``test_configurations.py`` compares the two.
    """
    overrides = overrides or []
    check_overrides(overrides)
    parsed = [OverridesParser.create().parse_override(text) for text in overrides]
    of_groups = [one.key_or_group in list_groups() for one in parsed]
    groups = tuple(text for text, chooses in zip(overrides, of_groups, strict=True) if chooses)
    container = deepcopy(_groups_composed(config_name, groups))
    for one, chooses in zip(parsed, of_groups, strict=True):
        if not chooses:
            OmegaConf.update(container, one.key_or_group, one.value(), merge=True)
    config = config_from_dict(resolved_container(container, overrides))
    if any(one.key_or_group == "run_dir" for one in parsed):
        return config
    return replace(config, run_dir=default_run_dir(config.run_dir, overrides))
