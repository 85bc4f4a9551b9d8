"""``run_dir/config.yaml``: the resolved configuration of a run, readable without Hydra.

This module also decides which keys may change when a run is continued in its directory.
"""

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
from automoe.config.plugins import LOADED
from automoe.config.recipe_args import SECTION, default_args
from automoe.config.schema import Config, MeshConfig, tokenizer_of
from automoe.config.shipped import own_recipe
from automoe.errors import ConfigError, one_line
from automoe.storage.files import read_file, replace_file
from automoe.storage.foreign import parse_yaml

Device = Literal["cpu", "cuda"]
CONFIG_FILE = "config.yaml"
ABSENT = "not a key"  # stands for the value of a key that the recipe does not declare
VALUE_KEYS = frozenset(leaf_keys())  # some are mappings themselves
# Keys that never make another run: its location, how ranks start, what is shown, what is saved.
FREE = ("run_dir", "launch", "observe", "cluster", "checkpoint")
# Keys that may also differ when training resumes from a checkpoint, or nothing is finished yet:
# how the same numbers are computed, the location of a file whose content the checkpoint knows,
# how long to train. docs/launch.md has the reasons.
GOES_ON = (
    "mesh parallel kernels train.compile train.micro_batch_size train.val_every train.val_batches train.max_skipped "
    "moe.dispatcher moe.experts moe.overlap_shared_experts moe.record_routing recipe plugins model.hf_path data.path "
    "data.sources data.tokenizer optim.ema_decay checkpoint.resume lora.path recipe_args.engine recipe_args.max_gap"
).split()
LENGTH = ("train.steps", "train.epochs")  # may grow; without epochs the steps count
# Keys that decide which tensors a checkpoint has, besides those of the model.
TENSORS = "lora.rank lora.targets train.freeze train.trainable optim.algorithm".split()


def resolved(config: Config, shape: MeshShape, device: Device) -> Config:
    """Return a copy of ``config`` in which every derived value is filled in.

    Filled in are mesh axes, number of ranks, device, path of the recipe, and tokenizer.
    """
    launch = replace(config.launch, num_ranks=shape.world_size, device=device)
    data = replace(config.data, tokenizer=tokenizer_of(config))
    path = own_recipe(config.recipe)
    # An absolute path names the same file for every rank, whatever its working directory.
    as_typed = not isinstance(path, Path) or isinstance(config.recipe, FromEnvironment)
    recipe = config.recipe if as_typed else str(path)
    return replace(
        config, recipe=recipe, mesh=MeshConfig(**asdict(shape)), launch=launch, data=data
    )


def frozen_shape(config: Config) -> MeshShape:
    """Return the mesh of a configuration whose axes are all resolved, as in ``config.yaml``.

    Raises:
        ConfigError: an axis is still -1, or ``mesh.preset`` is still set.
    """
    shape = MeshShape.of(config.mesh)
    if config.mesh.preset or -1 in shape.sizes("default") + shape.sizes("moe"):
        raise ConfigError(
            "mesh",
            config.mesh,
            f"in the {CONFIG_FILE} of a run every axis has its size",
            "Start the run again",
        )
    return shape


def dump_config(config: Config) -> str:
    """Return the configuration as YAML text.

    With the same environment variables, ``parse_config`` reads it back to an equal ``Config``.
    """
    return yaml.safe_dump(config_to_dict(config), sort_keys=False)


def parse_config(
    text: str | bytes, plugins: bool = False, environment: Mapping[str, str] = os.environ
) -> Config:
    """Read a configuration from the YAML text that ``dump_config`` writes.

    Args:
        text: the YAML text.
        plugins: import the plugins that the text names, and convert ``recipe_args``, which may
            import the recipe. Set this only for text that the launcher of this run wrote, never for
            untrusted folders.
        environment: values of the environment variables that the text names.

    Raises:
        ConfigError: the text is no configuration, or names plugins that are not loaded.
    """
    try:
        raw = from_environment(read_mapping(text), environment)
    except ValueError as error:
        raise ConfigError(
            "configuration", CONFIG_FILE, str(error), "Restore the file from a copy"
        ) from None
    named = typed("plugins", raw.get("plugins", []))
    missing = [name for name in named if name not in LOADED]
    if missing and not plugins:
        raise ConfigError(
            "plugins",
            missing,
            f"the run was trained with plugins, and {CONFIG_FILE} alone does not make automoe import code",
            f"If you trust them, add --plugins {','.join(missing)}",
        )
    return config_from_dict(raw, trusted=plugins)


def read_mapping(text: str | bytes) -> dict[str, Any]:
    """Parse YAML ``text`` into a mapping; raise ``ValueError`` if it is not one."""
    try:
        content = parse_yaml(text.encode() if isinstance(text, str) else text)
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(one_line(error)) from None
    if not isinstance(content, dict):
        raise ValueError(f"expected a mapping, got {type(content).__name__}")
    return content


def save_config(config: Config, run_dir: str | Path) -> Path:
    """Write ``run_dir/config.yaml`` atomically and return its path."""
    path = Path(run_dir) / CONFIG_FILE
    replace_file(path, dump_config(config))
    return path


def save_first_config(config: Config, run_dir: Path) -> None:
    """Write ``run_dir/config.yaml`` if it is missing, so that the commands can read a session's checkpoints."""
    if not (run_dir / CONFIG_FILE).exists():
        run_dir.mkdir(parents=True, exist_ok=True)
        save_config(config, run_dir)


def load_config(run_dir: str | Path, plugins: bool = False) -> Config:
    """Read the configuration of a run from its ``config.yaml``.

    Args:
        plugins: import the plugins that the file names: only for a trusted folder.

    Raises:
        ConfigError: the file is missing or unreadable, does not fit the schema, or names plugins
            that are neither loaded nor to be imported.
    """
    path = Path(run_dir) / CONFIG_FILE
    try:
        return parse_config(read_file(path), plugins)
    except OSError as error:
        raise ConfigError(
            "run_dir",
            run_dir,
            f"it has no {CONFIG_FILE} that can be read ({path}: {error.strerror})",
            "Name a directory that automoe train wrote",
        ) from None
    except ConfigError as error:
        raise ConfigError(
            error.key, error.value, f"in {path}: {error.rule}", error.remedy
        ) from None


def flat(fields: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten ``fields``, nested sections, into a mapping with dotted keys; tuples become lists.

    A mapping that is the value of a single setting, such as ``data.chat.keys``, stays whole.

    Args:
        prefix: text before each key.
    """
    values: dict[str, Any] = {}
    for name, value in fields.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and key not in VALUE_KEYS and prefix != f"{SECTION}.":
            values |= flat(value, f"{key}.")
        else:
            values[key] = list(value) if isinstance(value, tuple) else value
    return values


def differences(then: Mapping[str, Any], now: Config) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ from an earlier configuration and change the run's results.

    Args:
        then: the earlier one: nested dictionaries, as in a file. A key missing from them was added
            to the schema later, so its default counts.
        now: the configuration to compare.

    Returns:
        Dotted key -> (value then, value now), without keys such as ``observe.*`` that change no
        result.
    """
    defaults = default_args(now.recipe_args)
    defaults = {name: None if value is MISSING else value for name, value in defaults.items()}
    default = flat(config_to_dict(Config(recipe_args=defaults)))
    old = default | flat(then)
    new = default | flat(config_to_dict(now))
    for values in (old, new):
        # Neither "auto" nor "never" takes weights from elsewhere, as a path does.
        if values["checkpoint.resume"] == "never":
            values["checkpoint.resume"] = "auto"
    if new["train.epochs"]:  # they give the steps, once the data is known
        new["train.steps"] = old["train.steps"]
    # The recipe may have removed or renamed a key since.
    own_keys = (key for key in old | new if key.startswith(f"{SECTION}."))
    changed = {}
    for key in (*leaf_keys(), *own_keys):
        both = old.get(key, ABSENT), new.get(key, ABSENT)
        if both[0] != both[1] and not is_free(key):
            changed[key] = both
    return changed


def is_free(key: str) -> bool:
    """Return True if ``key`` changes no result, so that a run may continue with another value.

    Such keys are ``run_dir`` and those of ``launch``, ``observe``, ``cluster`` and ``checkpoint``,
    except ``checkpoint.resume``.
    """
    return key != "checkpoint.resume" and key.split(".")[0] in FREE


def goes_on(key: str, then: Any, now: Any) -> bool:
    """Return True if training may resume although ``key`` changed from ``then`` to ``now``.

    It may for the keys in ``GOES_ON``, such as the mesh, kernels and paths of the data, and for
    more steps or epochs.
    """
    longer = key in LENGTH and isinstance(then, (int, float)) and (now > then or not now)
    return longer or key in GOES_ON or key.split(".")[0] in GOES_ON


def describe(changed: Mapping[str, tuple[Any, Any]]) -> str:
    """Return the changes as text, such as ``optim.lr was 0.003, is 0.001``, separated by semicolons.

    After the first six, only the number of the others follows, such as ``and 2 more``.

    Args:
        changed: dotted key -> (earlier value, value now).
    """
    said = [f"{key} was {then}, is {now}" for key, (then, now) in changed.items()]
    if len(said) > 6:
        said[6:] = [f"and {len(said) - 6} more"]
    return "; ".join(said)
