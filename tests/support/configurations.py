"""Configurations for tests whose subject is not their composition: each choice of groups is composed once.

Hydra takes 0.15 CPU seconds for a configuration, of which the values of an override are a hundredth. So ranks, and the
next run of the tests, find what was composed in ``.pytest_cache``, as long as no file changes that it is made of.
"""

from __future__ import annotations

import pickle
import shutil
import sys
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from copy import deepcopy
from dataclasses import replace
from functools import cache, partial
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import hydra
import omegaconf
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from automoe.config.compose import (
    check_overrides,
    default_run_dir,
    key_of,
    list_groups,
    register_base,
    resolved_container,
)
from automoe.config.convert import config_from_dict
from automoe.config.schema import Config, ModelConfig
from automoe.config.shipped import shipped_folder
from automoe.storage.files import replace_file

_groups = cache(list_groups)


@cache
def _kept() -> Path:
    """The folder of this version's compositions; that of another version is removed."""
    folder = Path(__file__).parents[2] / ".pytest_cache" / "composed"
    sources = [shipped_folder("conf"), Path(find_spec("automoe.config").origin).parent]
    files = sorted(path for source in sources for path in source.rglob("*") if path.suffix in (".py", ".yaml"))
    digest = sha256(f"{sys.version} {hydra.__version__} {omegaconf.__version__}".encode())
    for path in [Path(__file__), *files]:
        digest.update(path.read_bytes())
    mine = folder / digest.hexdigest()
    for other in folder.iterdir() if folder.is_dir() else ():
        if other != mine:
            shutil.rmtree(other, ignore_errors=True)
    return mine


@cache
def _groups_composed(config_name: str, groups: tuple[str, ...]) -> Any:
    register_base()
    file = _kept() / sha256(repr((config_name, groups)).encode()).hexdigest()
    with suppress(OSError):
        return pickle.loads(file.read_bytes())
    shipped = partial(initialize_config_dir, config_dir=str(shipped_folder("conf")), version_base="1.3")
    with nullcontext() if GlobalHydra().is_initialized() else shipped():
        composed = compose(config_name, list(groups))
    with suppress(OSError):  # a folder that nobody may write to
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, pickle.dumps(composed))
    return composed


def _quickly(config_name: str, overrides: Sequence[str]) -> Any:
    """What ``hydra.compose`` returns, where each override chooses of a group or changes a value."""
    parsed = [OverridesParser.create().parse_override(text) for text in overrides]
    of_groups = [one.key_or_group in _groups() for one in parsed]
    groups = tuple(text for text, chooses in zip(overrides, of_groups, strict=True) if chooses)
    container = deepcopy(_groups_composed(config_name, groups))
    for one, chooses in zip(parsed, of_groups, strict=True):
        if not chooses:
            OmegaConf.update(container, one.key_or_group, one.value(), merge=True)
    return container


def quick_compose(config_name: str, overrides: Sequence[str] = (), **options: Any) -> Any:
    """In place of ``hydra.compose``: what it returns and raises, as quickly as ``quick_config`` where that is the same.

    A folder of the user's own, Hydra's own settings, keys that are added, and all errors are Hydra's.
    """
    paths = GlobalHydra.instance().config_loader().get_search_path().get_path()
    shipped = str(shipped_folder("conf")) in [path.path for path in paths if path.provider == "main"]
    if options or not shipped or any(text.startswith(("hydra", "+", "~")) for text in overrides):
        return compose(config_name, list(overrides), **options)
    try:
        return _quickly(config_name, overrides)
    except (HydraException, OmegaConfBaseException):
        return compose(config_name, list(overrides))


def quick_config(config_name: str = "config", overrides: list[str] | None = None) -> Config:
    """What ``automoe.config.compose.compose_config`` returns and raises, in a tenth of its time from the second call on.

    ``test_configurations.py`` compares the two.
    """
    overrides = overrides or []
    check_overrides(overrides)
    config = config_from_dict(resolved_container(_quickly(config_name, overrides), overrides))
    if "run_dir" in map(key_of, overrides):
        return config
    return replace(config, run_dir=default_run_dir(config.run_dir, overrides))


def quick_model(name: str) -> ModelConfig:
    """What ``quick_config(overrides=["model=NAME"]).model`` is, from the model's files, in a fiftieth of its time."""
    return config_from_dict({"model": _settings_of(name)}).model


def _settings_of(name: str) -> dict[str, Any]:
    own = yaml.safe_load((shipped_folder("conf") / "model" / f"{name}.yaml").read_text())
    settings: dict[str, Any] = {}
    for other in own.pop("defaults", ["_self_"]):
        settings = _merged(settings, own if other == "_self_" else _settings_of(other))
    return settings


def _merged(first: dict[str, Any], later: dict[str, Any]) -> dict[str, Any]:
    both = {key: _merged(first[key], later[key]) for key in first if isinstance(later.get(key), dict)}
    return first | later | both
