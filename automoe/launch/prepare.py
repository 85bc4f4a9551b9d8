"""From a command line to a checked configuration, its mesh and its device: the one place that every command passes.

What the configuration alone can say is in ``automoe.config``. Here are the checks that read something else: a
checkpoint's ``config.json``, a tokenizer, this machine. Nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter

from automoe.config.compose import Arguments, compose_config
from automoe.config.convert import leaf_keys
from automoe.config.frozen import Device
from automoe.config.mesh_shape import MeshShape
from automoe.config.schema import Config
from automoe.config.validate import validate
from automoe.errors import ConfigError
from automoe.launch.hardware import default_num_ranks, resolve_device


def prepare(args: Arguments) -> tuple[Config, MeshShape, Device]:
    """Compose and check what ``args`` names, for ranks that this process would start.

    Raises:
        ConfigError: the first rule that is broken.
        BackendError: Hydra is not installed.
    """
    config = compose(args)
    return config, *check_here(config)


def compose(args: Arguments) -> Config:
    """The configuration that ``args`` names, with the model of its checkpoint. Raises as ``prepare``."""
    config = compose_config(args.config_name, args.overrides, args.config_dir)
    return with_checkpoint_model(config, args.overrides)


def check_here(config: Config) -> tuple[MeshShape, Device]:
    """The mesh and device of ``config`` on this machine, all rules checked. Raises ``ConfigError``."""
    device = resolve_device(config)
    return check(config, default_num_ranks(config, device), device), device


def check(config: Config, num_ranks: int | None, device: Device) -> MeshShape:
    """All rules of ``config``, those on other files too; its mesh, resolved for ``num_ranks`` ranks.

    Raises:
        ConfigError: the first rule that is broken.
    """
    shape = validate(config, num_ranks, device)
    from automoe.data.tokenizer import fitting_tokenizer

    fitting_tokenizer(config)
    if config.checkpoint.export_hf:  # refused now, and not when the run ends in an export
        from automoe.hf.families.registry import check_exportable

        check_exportable(config.model)
    return shape


def with_checkpoint_model(config: Config, overrides: list[str]) -> Config:
    """``config`` with the model that ``model.hf_path`` holds, if it is set: its config.json is the truth.

    Raises:
        ConfigError: no such checkpoint, an unknown family, or a ``model.`` override that contradicts it.
    """
    path = config.model.hf_path
    if path is None:
        return config
    from automoe.hf.families.registry import model_config_from_hf

    model = replace(model_config_from_hf(path), initializer_range=config.model.initializer_range)
    stored, keys = replace(config, model=model), set(leaf_keys())
    for override in overrides:
        key, _, value = override.lstrip("+").partition("=")
        if key.startswith("model.") and key in keys and attrgetter(key)(config) != attrgetter(key)(stored):
            rule = f"the checkpoint model.hf_path={path} has {attrgetter(key)(stored)}"
            raise ConfigError(key, value, rule, f"Leave {key} out, or start from random weights")
    return stored
