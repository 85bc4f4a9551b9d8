"""Compose the Hydra tree in ``conf`` into a typed ``Config``; parse command-line arguments.

Only the process that reads the command line runs Hydra, and only this module imports it. The
schema's defaults are registered as the primary ``base``, so a YAML file holds only differences from
them.
"""

from __future__ import annotations

import os
import re
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from automoe.config.convert import (
    FromEnvironment,
    check_key,
    config_from_dict,
    config_to_dict,
    from_environment,
    nearest,
)
from automoe.config.frozen import is_free
from automoe.config.jobs import BY_JOB, register_jobs
from automoe.config.paths import checked_path
from automoe.config.recipe_args import SECTION, check_args
from automoe.config.rule_engine import check_rows
from automoe.config.rules import number_rows
from automoe.config.schema import Config, RopeConfig
from automoe.config.shipped import named_recipe, shipped_folder
from automoe.errors import BackendError, ConfigError, one_line
from automoe.storage.files import read_file
from automoe.storage.foreign import compose_yaml

DEFAULT_PRIMARY = "config"
MAX_NAME = 80  # letters of a folder's name
# Prefix of Optuna's search space: hydra.sweeper.params.optim.lr='interval(1e-4,1e-2)'
SWEPT_BY_SWEEPER = "hydra.sweeper.params."
PARALLEL = "sweep.parallel"  # how many jobs of a sweep run side by side


# Options and the field of ``Arguments`` that each sets: flags, then options with a value.
_FLAGS = {
    "-m": "multirun",
    "--multirun": "multirun",
    "--print-config": "print_config",
    "-h": "help",
    "--help": "help",
}
_VALUES = {
    "-cn": "config_name",
    "--config-name": "config_name",
    "-cd": "config_dir",
    "--config-dir": "config_dir",
}


@dataclass
class Arguments:
    """Parsed command line: values of ``--config-name`` and ``--config-dir``, flags that are set, Hydra overrides."""

    config_name: str = DEFAULT_PRIMARY
    config_dir: str | None = None
    multirun: bool = False
    help: bool = False
    print_config: bool = False
    overrides: list[str] = field(default_factory=list)


def parse_arguments(argv: list[str], others: Iterable[str] = ()) -> Arguments:
    """Split a command line into options and overrides.

    Args:
        argv: words of the command line.
        others: options that the command parsed itself, to be suggested in error messages too.

    Raises:
        ConfigError: an unknown option, or an option without its value.
    """
    args = Arguments()
    rest = list(argv)
    while rest:
        text = rest.pop(0)
        word, _, inline = text.partition("=")
        if not word.startswith("-"):
            args.overrides.append(text)
        elif word in _FLAGS:
            setattr(args, _FLAGS[word], True)
        elif word in _VALUES:
            if not inline and not rest:
                raise ConfigError(word, "", "the option needs a value", f"Write {word} NAME")
            setattr(args, _VALUES[word], inline or rest.pop(0))
        else:
            known = [option for option in [*_VALUES, *_FLAGS, *others] if option.startswith("--")]
            close = " or ".join(nearest(word, known) or known)
            raise ConfigError(
                word, inline, "unknown option", f"Did you mean {close}? Overrides are key=value"
            )
    args.config_name = args.config_name.removesuffix(".yaml")
    return args


def compose_config(
    config_name: str = DEFAULT_PRIMARY,
    overrides: list[str] | None = None,
    config_dir: str | None = None,
) -> Config:
    """Compose a primary configuration of Hydra with overrides into a typed ``Config``.

    Unless ``run_dir`` is overridden, its name is extended by the other overrides.

    Args:
        config_name: the primary: a file of ``conf`` or of ``config_dir``, without ``.yaml``.
        overrides: Hydra overrides, e.g. ``["mesh.ep=4", "model=small_mixtral"]``.
        config_dir: a directory searched besides ``conf``.

    Raises:
        ConfigError: an unknown primary, group option or key, a malformed override, a wrong type.
        BackendError: Hydra is not installed.
    """
    overrides = list(overrides or [])
    raw = composed_container(config_name, overrides, config_dir)
    config = config_from_dict(raw)
    if "run_dir" in map(key_of, overrides):
        return config
    return replace(config, run_dir=default_run_dir(config.run_dir, overrides))


def composed_container(
    config_name: str, overrides: list[str], config_dir: str | None
) -> dict[str, Any]:
    """Compose a primary configuration with overrides into nested dictionaries.

    Interpolations are resolved, types not checked. ``config_dir`` is searched besides ``conf``.

    Raises:
        ConfigError: an unknown primary, group option or key, or a malformed override.
        BackendError: Hydra is not installed.
    """
    check_primary(config_name, config_dir)
    check_overrides(overrides, config_dir)
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    register_base()
    main, search = search_path(config_name, config_dir)
    try:
        with initialize_config_dir(config_dir=main, version_base="1.3"):
            return resolved_container(compose(config_name, overrides + search), overrides)
    except (HydraException, OmegaConfBaseException, YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(
            "--config-name",
            config_name,
            f"Hydra cannot compose it: {one_line(error)}",
            "Correct that file or override",
        ) from error


def search_path(config_name: str, config_dir: str | None) -> tuple[str, list[str]]:
    """Return Hydra's main directory, and overrides that add a second one to its search path.

    The directories are the shipped ``conf`` and, if given, ``config_dir``. Hydra looks for primary
    configurations only in its main directory, so this is the directory that has ``config_name``,
    and ``config_dir`` if both have it. Config groups are found in both.
    """
    folders = [shipped_folder("conf")]
    if config_dir is not None:
        folders.insert(0, Path(config_dir).absolute())
    folders.sort(key=lambda folder: not (folder / f"{config_name}.yaml").is_file())
    main, *others = (str(folder) for folder in folders)
    return main, ["hydra.searchpath=['file://" + escaped(other) + "']" for other in others]


def escaped(text: str) -> str:
    """Return ``text`` with its single quotes escaped, for a single-quoted value of an override."""
    return text.replace("'", "\\'")


def resolved_container(composed: Any, overrides: Iterable[str]) -> dict[str, Any]:
    """Resolve the interpolations of a configuration that Hydra composed; return dictionaries.

    Text with environment variables, except ``run_dir``, becomes ``FromEnvironment``, so that files
    show ``${oc.env:NAME}`` instead of a variable's content. ``${by_job:A,B,...}`` becomes the default
    for this kind of training job (random weights, fine-tuning, adapters or preferences).

    Args:
        composed: Hydra's ``DictConfig``.
        overrides: overrides of the command line. With ``recipe=NAME`` among them, the recipe
            becomes the path ``recipes/NAME.py`` in the working directory if that file exists.

    Raises:
        OmegaConfBaseException: an interpolation that cannot be resolved, or a missing value.
    """
    from omegaconf.resolvers import oc

    used: set[str] = set()
    named = {key_of(text) for text in overrides if "={" not in text}
    register_jobs(named)

    def content(name: str, *default: Any) -> Any:
        used.add(name)
        return oc.env(name, *default)

    def own_name(name: str, *default: Any) -> Any:
        name = from_environment(name, os.environ)  # one variable may hold the name of another
        return f"${{oc.env:{name}}}" if name in os.environ else oc.env(name, *default)

    raw = _resolve(composed, content)
    if "recipe" in named and isinstance(raw["recipe"], str):
        raw["recipe"] = named_recipe(raw["recipe"])
    if not used:
        return raw
    # Resolve again with every variable replaced by its own name: the values that differ contain
    # variables, even through nested interpolations. run_dir stays resolved, because all files of
    # the run are in it.
    return _named(raw, _resolve(composed, own_name)) | {"run_dir": raw["run_dir"]}


def _resolve(composed: Any, environment: Callable[..., Any]) -> dict[str, Any]:
    from omegaconf import OmegaConf
    from omegaconf.resolvers import oc

    OmegaConf.register_new_resolver("oc.env", environment, replace=True)
    try:
        resolved: Any = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
        return resolved
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)


def _named(value: Any, names: Any) -> Any:
    if value == names or type(value) is not type(names):
        return value
    if isinstance(value, dict):
        return {key: _named(value[key], names[key]) for key in value}
    if isinstance(value, list):
        same = len(value) == len(names)  # else a variable's text has further items
        return list(map(_named, value, names)) if same else value
    return FromEnvironment(value, names)


@cache
def register_base() -> None:
    """Register the schema's defaults in Hydra as ``base``, which every primary's defaults list names."""
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    base = OmegaConf.create(config_to_dict(Config()))
    base.model.rope.original_seq_len = RopeConfig.original_seq_len  # unsaid until settled
    for key, values in BY_JOB.items():
        OmegaConf.update(base, key, values)
    OmegaConf.set_struct(base[SECTION], False)  # the recipe, not the schema, declares these keys
    ConfigStore.instance().store(name="base", node=base)


def list_options(group: str = "", config_dir: str | None = None) -> list[str]:
    """Return the names that ``group=NAME`` accepts; for ``""`` those of primary configurations.

    They are YAML files in ``conf`` and ``config_dir`` whose names do not begin with ``_``.
    """
    files = {path.stem for path in _glob(str(Path(group, "*.yaml")), config_dir)}
    return sorted(name for name in files if not name.startswith("_"))


def list_groups(config_dir: str | None = None) -> list[str]:
    """Return the names of Hydra's config groups: folders in ``conf`` and ``config_dir`` with YAML files."""
    return sorted({path.parent.name for path in _glob("*/[!_]*.yaml", config_dir)})


def _glob(pattern: str, config_dir: str | None) -> Iterator[Path]:
    yield from shipped_folder("conf").glob(pattern)
    if config_dir is not None:
        yield from Path(config_dir).glob(pattern)


def _check_files(config_dir: str) -> None:
    """Raise ``ConfigError`` if ``config_dir`` is no directory, or a YAML file in it cannot be read.

    A file cannot be read if it is not UTF-8, or its aliases expand to too many values.
    """
    from yaml import YAMLError

    folder = Path(checked_path("--config-dir", config_dir))
    wrong = partial(ConfigError, "--config-dir", config_dir)
    if not folder.is_dir():
        raise wrong("no such directory", "Name a directory with YAML files")
    for path in (*folder.glob("*.yaml"), *folder.glob("*/*.yaml")):
        try:
            raw = read_file(path)
            raw.decode()
            with suppress(YAMLError):  # Hydra reports it, if it reads this file
                compose_yaml(raw)
        except (OSError, ValueError) as error:
            raise wrong(f"{path}: {error}", "Correct that file") from None


def check_primary(config_name: str, config_dir: str | None = None) -> None:
    """Raise ``ConfigError`` unless the primary configuration ``config_name`` exists.

    It is searched in ``conf`` and ``config_dir``, whose YAML files must be readable.
    """
    if config_dir is not None:
        _check_files(config_dir)
    _check_listed(
        "--config-name", config_name, list_options("", config_dir), "no such primary configuration"
    )


def check_overrides(
    overrides: list[str], config_dir: str | None = None, sweep: bool = False
) -> None:
    """Parse overrides with Hydra's grammar and check every key and group option by name.

    Hydra's own error for an unknown key does not name the nearest one.

    Args:
        config_dir: folder searched for config groups besides ``conf``.
        sweep: accept several values of a key (``optim.lr=1,2``), and settings of Hydra itself.

    Raises:
        ConfigError: a malformed override, an unknown key or option, a deleted key, or without
            ``sweep`` several values or a setting of Hydra.
        BackendError: Hydra is not installed.
    """
    if missing := [name for name in ("hydra", "omegaconf") if find_spec(name) is None]:
        raise BackendError(
            f"configurations are composed by Hydra, and {sys.executable} has no {' and no '.join(missing)}. "
            "Install automoe with its dependencies (make setup), or pip install 'hydra-core<1.4' omegaconf"
        )
    from hydra.errors import HydraException

    groups = list_groups(config_dir)
    for text in overrides:
        try:
            parsed = parse_override(text)
        except HydraException as error:
            raise ConfigError(
                "override",
                text,
                f"not of the form key=value: {str(error).strip().splitlines()[0]}",
                "Write key=value; quote as 'key=\"a b\"'",
            ) from None
        key = parsed.key_or_group
        value = text.partition("=")[2]
        hydras = key.startswith(("hydra.", "hydra/"))
        if hydras and sweep:
            continue
        several = parsed.is_sweep_override()
        for broken, rule, remedy in (
            (hydras, "Hydra's own settings apply only to a sweep (-m)", "To choose a run's directory set run_dir="),
            (key == PARALLEL, "only a sweep runs jobs side by side", "Add -m and the values to sweep"),
            (several and not sweep, "several values are a sweep, one run per value", "Add -m, or give one value"),
            (parsed.is_delete(), "a key cannot be deleted: the schema is fixed", f"Set {key} to a value"),
        ):  # fmt: skip
            if broken:
                raise ConfigError(key, value, rule, remedy)
        if key not in groups:
            check_key(key, value)
        elif not several and not isinstance(parsed.value(), dict):
            _check_listed(
                key,
                str(parsed.value()),
                list_options(key, config_dir),
                f"no such option in the group {key}",
                f"{key}=",
            )


def _check_listed(key: str, name: str, listed: list[str], rule: str, prefix: str = "") -> None:
    if name not in listed:
        close = nearest(name, listed)
        hint = f"Did you mean {prefix}{close[0]}? " if close else ""
        raise ConfigError(key, name, rule, f"{hint}Available: {', '.join(listed)}")


def parse_override(text: str) -> Any:
    """Parse ``text``, such as ``mesh.ep=4``, into Hydra's ``Override``.

    Raises:
        OverrideParseException: ``text`` is malformed.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser

    return OverridesParser.create().parse_override(text)


def swept_keys(overrides: list[str]) -> set[str]:
    """Return the keys that sweep several values, such as ``optim.lr`` in ``optim.lr=1,2``."""
    parsed = map(parse_override, overrides)
    return {override.key_or_group for override in parsed if override.is_sweep_override()}


def check_swept_values(config_name: str, overrides: list[str], config_dir: str | None) -> None:
    """Check every value of a sweep before its first job starts.

    Each is composed once with the primary ``config_name`` of ``conf`` or ``config_dir``, and other keys' first values.

    Raises:
        ConfigError: a value of the wrong type or out of bounds, an unknown option, or a
            configuration that Hydra cannot compose.
    """
    texts = [text for text in overrides if not text.startswith(("hydra.", "hydra/"))]
    for text in overrides:
        if text.startswith(SWEPT_BY_SWEEPER):
            key, _, value = text.removeprefix(SWEPT_BY_SWEEPER).partition("=")
            texts.append(f"{key}={value.strip(chr(39) + chr(34))}")
    check_overrides(texts, config_dir, sweep=True)
    values = [_single_values(text, config_dir) for text in texts]
    first = [choices[0] for choices in values]
    others = [[value] for choices in values for value in choices[1:]]
    for other in [[], *others]:  # of two overrides of a key the last one counts
        config = compose_config(config_name, first + other, config_dir)
        check_rows(config, number_rows(config))
        try:
            check_args(config)
        except ConfigError as error:
            # An error under another key may come from this combination alone; its job is skipped.
            if error.key.startswith(SECTION):
                raise


def _single_values(text: str, config_dir: str | None) -> list[str]:
    """Split an override such as ``mesh.ep=1,2`` into ``mesh.ep=1`` and ``mesh.ep=2``.

    A range or interval gives only its two ends; ``glob`` gives the options found in ``conf`` and ``config_dir``.
    """
    parsed = parse_override(text)
    if not parsed.is_sweep_override():
        return [text]
    swept: Any = parsed.value()
    if parsed.is_interval_sweep():
        values = [swept.start, swept.end]
    elif parsed.is_range_sweep():
        values = list(swept.range())
        values = values[:: max(1, len(values) - 1)]
    elif hasattr(swept, "filter"):  # glob
        values = swept.filter(list_options(parsed.key_or_group, config_dir))
    else:
        values = list(parsed.sweep_string_iterator())
    if not values:
        _, _, value = text.partition("=")
        raise ConfigError(parsed.key_or_group, value, "the sweep has no value", "Give at least one")
    return [f"{parsed.get_key_element()}={value}" for value in values]


# ---------------------------------------------------------------- folders named after overrides


def default_run_dir(run_dir: str, overrides: Iterable[str]) -> str:
    """Return ``run_dir`` with ``overrides`` appended to its name, e.g. ``runs/default-ep4-pp1``.

    Overrides that change no result, such as ``observe.log_every=1``, are left out.
    """
    plain = ("checkpoint.resume=auto", "checkpoint.resume=never")
    name = folder_name(
        text for text in overrides if not is_free(key_of(text)) and text not in plain
    )
    return f"{run_dir}-{name}" if name else run_dir


def folder_name(overrides: Iterable[str]) -> str:
    """Return a folder name made of ``key=value`` words, e.g. ``ep4-lr0.003-model-small_mixtral``.

    The order of the overrides does not matter; without overrides the name is empty. A name that is
    cut (after 80 characters) or loses characters ends in a CRC-32 of the full text.
    """
    words = short_keys(overrides)
    text = "-".join(f"{key}{'' if value[:1].isdigit() else '-'}{value}" for key, value in words)
    text = re.sub(r"[\[\]]", "", text).replace(",", "-")
    name = re.sub(r"[^A-Za-z0-9_.]+", "-", text).strip("-")[:MAX_NAME]
    return (
        name if name == text else f"{name}-{zlib.crc32(text.encode(errors='surrogateescape')):08x}"
    )


def short_keys(overrides: Iterable[str]) -> list[tuple[str, str]]:
    """Return ``overrides`` as sorted (key, last value); ``mesh.ep`` is ``ep`` unless another of them ends so."""
    # As in Hydra, the last override of a key counts.
    typed = {key_of(text): text.partition("=")[2] for text in overrides}
    last = {key: key.rpartition(".")[2] for key in typed}
    count = Counter(last.values())
    return [
        (last[key] if count[last[key]] == 1 else key, value) for key, value in sorted(typed.items())
    ]


def key_of(override: str) -> str:
    """Return ``key`` of an override ``key=value``, ``+key=value`` or ``~key``."""
    return override.lstrip("+~").partition("=")[0]
