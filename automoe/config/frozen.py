"""``run_dir/config.yaml``: the resolved configuration of a run, readable without Hydra, and what is
the same run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import MISSING, asdict, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from automoe.config.convert import (
    FromEnvironment,
    config_from_dict,
    config_to_dict,
    from_environment,
    leaf_keys,
    typed,
)
from automoe.config.mesh_shape import MeshShape
from automoe.config.plugins import load_plugins, loaded_plugins
from automoe.config.recipe_args import SECTION, default_args
from automoe.config.schema import Config, MeshConfig, tokenizer_of
from automoe.config.shipped import own_recipe
from automoe.errors import ConfigError
from automoe.storage.files import replace_file

Device = Literal["cpu", "cuda"]
CONFIG_FILE = "config.yaml"
ABSENT = "not a key"  # of the recipe
VALUE_KEYS = frozenset(leaf_keys())  # some are mappings themselves
# Never part of what a run is: where it lies, how its ranks are started, what is shown of it, what
# it saves when.
FREE = ("run_dir", "launch", "observe", "cluster", "checkpoint")
# May differ as well where training goes on from a checkpoint, or nothing is finished: how the same
# numbers are computed; where a file lies whose content the checkpoint knows; how long.
# docs/launch.md has the reasons.
GOES_ON = (
    "mesh parallel kernels train.compile train.micro_batch_size train.val_every train.val_batches train.max_skipped "
    "moe.dispatcher moe.experts moe.overlap_shared_experts moe.record_routing recipe plugins model.hf_path data.path "
    "data.sources data.tokenizer optim.ema_decay checkpoint.resume"
).split()


def resolved(config: Config, shape: MeshShape, device: Device) -> Config:
    """A copy in which nothing is left to derive: axes, ranks, the device, whose recipe, which
    tokenizer."""
    launch = replace(config.launch, num_ranks=shape.world_size, device=device)
    data = replace(config.data, tokenizer=tokenizer_of(config))
    own = own_recipe(config.recipe)
    # A path: the same file for every rank, whatever its working directory.
    as_typed = not isinstance(own, Path) or isinstance(config.recipe, FromEnvironment)
    recipe = config.recipe if as_typed else str(own)
    return replace(
        config, recipe=recipe, mesh=MeshConfig(**asdict(shape)), launch=launch, data=data
    )


def frozen_shape(config: Config) -> MeshShape:
    """The mesh of a ``resolved`` configuration.

    Raises:
        ConfigError: an axis is left to derive.
    """
    shape = MeshShape.of(config.mesh)
    if config.mesh.preset or -1 in shape.sizes("default") + shape.sizes("moe"):
        raise ConfigError(
            "mesh",
            config.mesh,
            f"{CONFIG_FILE} of a run has every axis resolved",
            "Start the run again",
        )
    return shape


def dump_config(config: Config) -> str:
    """The configuration as YAML text that ``parse_config`` reads back to an equal ``Config`` in
    this environment."""
    return yaml.safe_dump(config_to_dict(config), sort_keys=False)


def parse_config(
    text: str | bytes, plugins: bool = False, environment: Mapping[str, str] = os.environ
) -> Config:
    """The inverse of ``dump_config``.

    Args:
        plugins: import those that it names, and read ``Args`` of its recipe. For what this run's
            own launcher wrote, never for a folder from elsewhere.
        environment: of the variables that it names.

    Raises:
        ConfigError: it is no configuration, or names plugins that nobody here has asked for.
    """
    try:
        raw = from_environment(read_mapping(text), environment)
    except ValueError as error:
        raise ConfigError(
            "configuration", CONFIG_FILE, str(error), "Restore the file from a copy"
        ) from None
    named = typed("plugins", raw.get("plugins", []))
    if plugins:
        load_plugins(named)
    elif missing := [name for name in named if name not in loaded_plugins()]:
        rule = f"the run was trained with plugins, and {CONFIG_FILE} is no reason to import code"
        raise ConfigError(
            "plugins", missing, rule, f"If you trust them, add --plugins {','.join(missing)}"
        )
    return config_from_dict(raw, trusted=plugins)


def read_mapping(text: str | bytes) -> dict[str, Any]:
    """The mapping that YAML ``text`` is. Raises ``ValueError``: it is no YAML, or something
    else."""
    try:
        content = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(" ".join(str(error).split())) from None
    if not isinstance(content, dict):
        raise ValueError(f"a mapping was written, and this is {type(content).__name__}")
    return content


def save_config(config: Config, run_dir: str | Path) -> Path:
    """Write ``run_dir/config.yaml`` in one step (a reader sees the old file or the new one)."""
    path = Path(run_dir) / CONFIG_FILE
    replace_file(path, dump_config(config))
    return path


def load_config(run_dir: str | Path, plugins: bool = False) -> Config:
    """Read the frozen configuration of a run directory; ``plugins`` as ``parse_config`` takes it.

    Raises:
        ConfigError: there is none, or it does not fit the schema.
    """
    path = Path(run_dir) / CONFIG_FILE
    if not path.is_file():
        raise ConfigError(
            "run_dir",
            run_dir,
            f"no {CONFIG_FILE} in it: not a run directory",
            "Name one that train wrote",
        )
    try:
        return parse_config(path.read_bytes(), plugins)
    except OSError as error:
        raise ConfigError(
            "run_dir", run_dir, f"{path} cannot be read: {error.strerror}", "Make it readable"
        ) from None
    except ConfigError as error:
        raise ConfigError(
            error.key, error.value, f"in {path}: {error.rule}", error.remedy
        ) from None


def flat(fields: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections as one mapping, keys dotted, tuples as lists."""
    values: dict[str, Any] = {}
    for key, value in fields.items():
        if (
            isinstance(value, Mapping)
            and f"{prefix}{key}" not in VALUE_KEYS
            and prefix != f"{SECTION}."
        ):
            values |= flat(value, f"{prefix}{key}.")
        else:
            values[f"{prefix}{key}"] = list(value) if isinstance(value, tuple) else value
    return values


def differences(then: Mapping[str, Any], now: Config) -> dict[str, tuple[Any, Any]]:
    """Dotted key -> (value then, value now) of all that makes ``now`` another run than the
    configuration ``then``.

    Args:
        then: nested, as a file has it; a key that it lacks was added later and had its default
            then.
    """
    own = {
        name: None if value is MISSING else value
        for name, value in default_args(now.recipe_args).items()
    }
    default = flat(config_to_dict(Config(recipe_args=own)))
    old, new = (default | flat(config) for config in (then, config_to_dict(now)))
    for values in (old, new):
        if values["checkpoint.resume"] == "never":  # not a path: weights come from nowhere else
            values["checkpoint.resume"] = "auto"
    # A recipe may have lost a key, or given it another name.
    own_keys = (key for key in old | new if key.startswith(f"{SECTION}."))
    pairs = {key: (old.get(key, ABSENT), new.get(key, ABSENT)) for key in (*leaf_keys(), *own_keys)}
    return {key: both for key, both in pairs.items() if both[0] != both[1] and not is_free(key)}


def is_free(key: str) -> bool:
    """Whether ``key`` or the group ``key`` is never part of what a run is."""
    return key != "checkpoint.resume" and key.split(".")[0] in FREE


def goes_on(key: str, then: Any, now: Any) -> bool:
    """Whether training may go on with ``key`` at another value."""
    longer = key == "train.steps" and isinstance(then, int) and now > then
    return longer or key in GOES_ON or key.split(".")[0] in GOES_ON


def describe(changed: Mapping[str, tuple[Any, Any]], most: int = 6) -> str:
    """``optim.lr was 0.003, is 0.001; ...``: the first ``most``, and how many more."""
    said = [f"{key} was {then}, is {now}" for key, (then, now) in list(changed.items())[:most]]
    return "; ".join(said + ([f"and {len(changed) - most} more"] if len(changed) > most else []))
