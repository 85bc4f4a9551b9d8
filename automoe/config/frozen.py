"""``run_dir/config.yaml``: the fully resolved configuration of a run, readable without Hydra."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal

import yaml

from automoe.config.convert import config_from_dict, config_to_dict
from automoe.config.mesh_shape import MeshShape
from automoe.config.plugins import load_plugins, loaded_plugins
from automoe.config.schema import Config, MeshConfig
from automoe.errors import ConfigError
from automoe.shipped import own_recipe

Device = Literal["cpu", "cuda"]
CONFIG_FILE = "config.yaml"


def resolved(config: Config, shape: MeshShape, device: Device) -> Config:
    """A copy in which nothing is left to derive: every axis, the number of ranks, the device, whose recipe."""
    launch = replace(config.launch, num_ranks=shape.world_size, device=device)
    own = own_recipe(config.recipe)
    # A path: the same file for every rank, whatever its working directory.
    recipe = str(own) if isinstance(own, Path) else config.recipe
    return replace(config, recipe=recipe, mesh=MeshConfig(**asdict(shape)), launch=launch)


def frozen_shape(config: Config) -> MeshShape:
    """The mesh of a ``resolved`` configuration.

    Raises:
        ConfigError: an axis is left to derive.
    """
    shape = MeshShape.of(config.mesh)
    if config.mesh.preset or -1 in shape.sizes("default") + shape.sizes("moe"):
        raise ConfigError("mesh", config.mesh, f"{CONFIG_FILE} of a run has every axis resolved", "Start the run again")
    return shape


def dump_config(config: Config) -> str:
    """The configuration as YAML text that ``parse_config`` reads back to an equal ``Config``."""
    return yaml.safe_dump(config_to_dict(config), sort_keys=False)


def parse_config(text: str, plugins: bool = False) -> Config:
    """The inverse of ``dump_config``.

    Args:
        plugins: import those that it names. For what this run's own launcher wrote, never for a folder from elsewhere.

    Raises:
        ConfigError: it does not fit the schema, or names plugins that nobody here has asked for.
    """
    raw = yaml.safe_load(text)
    named = raw.get("plugins", [])
    if plugins:
        load_plugins(named)
    elif missing := [name for name in named if name not in loaded_plugins()]:
        rule = f"the run was trained with plugins, and {CONFIG_FILE} is no reason to import code"
        raise ConfigError("plugins", missing, rule, f"If you trust them, add --plugins {','.join(missing)}")
    return config_from_dict(raw)


def save_config(config: Config, run_dir: str | Path) -> Path:
    """Write ``run_dir/config.yaml`` in one step (a reader sees the old file or the new one)."""
    path = Path(run_dir) / CONFIG_FILE
    scratch = path.with_name(f".{CONFIG_FILE}.{os.getpid()}")
    scratch.write_text(dump_config(config))
    os.replace(scratch, path)
    return path


def load_config(run_dir: str | Path, plugins: bool = False) -> Config:
    """Read the frozen configuration of a run directory; ``plugins`` as ``parse_config`` takes it.

    Raises:
        ConfigError: there is none, or it does not fit the schema.
    """
    path = Path(run_dir) / CONFIG_FILE
    if not path.is_file():
        raise ConfigError(
            "run_dir", run_dir, f"no {CONFIG_FILE} in it: not a run directory", "Name one that train wrote"
        )
    return parse_config(path.read_text(), plugins)
