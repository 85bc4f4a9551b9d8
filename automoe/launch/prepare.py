"""From a command line to a checked configuration, its mesh and its device: the one place that every
command passes.

What the configuration alone can say is in ``automoe.config``. Here are the checks that read
something else: a checkpoint's ``config.json``, a tokenizer, this machine. Nothing here imports
torch.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from math import prod
from operator import attrgetter
from pathlib import Path
from typing import Any

from automoe.config.compose import Arguments, compose_config, key_of
from automoe.config.convert import FromEnvironment, leaf_keys
from automoe.config.frozen import Device, flat
from automoe.config.hub import pinned
from automoe.config.mesh_shape import DEFAULT_AXES, MeshShape, expand_preset
from automoe.config.rules import check_rows
from automoe.config.rules_kernels import BASE_BLOCKS
from automoe.config.schema import Config, export_name, sources_of, tokenizer_of
from automoe.config.validate import validate
from automoe.data.tokenizer import BYTE_VOCAB_SIZE
from automoe.errors import ConfigError
from automoe.launch.hardware import default_num_ranks, resolve_device
from automoe.launch.run_dir import read_config
from automoe.model.adapters import adapter_rows
from automoe.model.params import count_params

LARGE = 1e9  # parameters


def prepare(args: Arguments) -> tuple[Config, MeshShape, Device]:
    """Compose and check what ``args`` names, for ranks that this process would start.

    Raises:
        ConfigError: the first rule that is broken.
        BackendError: Hydra is not installed.
    """
    config = compose(args)
    return config, *check_here(config)


def compose(args: Arguments) -> Config:
    """The configuration that ``args`` names, with the model of its checkpoint. Raises as
    ``prepare``."""
    return settle(compose_config(args.config_name, args.overrides, args.config_dir), args.overrides)


def settle(config: Config, overrides: list[str]) -> Config:
    """``config`` with the model that ``model.hf_path`` holds, if it is set: its config.json is the
    truth; ids pinned.

    Raises:
        ConfigError: no such checkpoint, an unknown family, an override of the model that
            contradicts it, one of ``launch.num_ranks`` that contradicts the mesh, or a checkpoint
            without a word on its data.
    """
    if "launch.num_ranks" in map(key_of, overrides) and config.launch.num_ranks is not None:
        mesh = expand_preset(config.mesh, config.launch.num_ranks)
        sizes = [getattr(mesh, axis) for axis in DEFAULT_AXES]
        check_num_ranks(
            config, overrides, prod(sizes), f"the mesh holds {'*'.join(DEFAULT_AXES)} = {sizes}"
        )
    config = _pinned(config)
    path = config.model.hf_path
    if path is None:
        return config
    from automoe.hf.families.registry import model_config_from_hf

    if config.model.upcycle:
        from automoe.hf.upcycle import upcycled_model

        model, _ = upcycled_model(config.model)
    else:
        model = replace(
            model_config_from_hf(path), initializer_range=config.model.initializer_range
        )
    stored, keys = replace(config, model=replace(model, hf_path=path)), set(leaf_keys())
    for override in overrides:
        key, value = key_of(override), override.partition("=")[2]
        compared = (key,) if key.startswith("model.") and key in keys else ()
        if key == "model":
            compared = (
                "model.family",
                "model.num_layers",
                "model.hidden_size",
                "model.num_experts",
            )
        values = [(one, attrgetter(one)(stored), attrgetter(one)(config)) for one in compared]
        if differing := ", ".join(
            f"{one}={there} and not {here}" for one, there, here in values if there != here
        ):
            rule = f"the checkpoint model.hf_path={path} has {differing}"
            raise ConfigError(key, value, rule, f"Leave {key}= out, or start from random weights")
    if (
        config.data.kind.startswith("stdlib")
        and not config.data.sources
        and not {"data", "data.kind"} & set(map(key_of, overrides))
    ):
        rule = (
            f"the demonstration corpus is no text for model.hf_path={path} unless it is asked for"
        )
        kind = config.data.kind
        raise ConfigError(
            "data.kind",
            f"{kind}, by default",
            rule,
            f"Set {_own_data(config)}, or data={kind} to train on it",
        )
    return stored


def missing_data(config: Config) -> ConfigError | None:
    """Why there is nothing that a large model could learn from, or to pack; None for a small one,
    or where there is.

    Large is a model of ``LARGE`` parameters from random weights: a hundred for each byte of the
    demonstration corpus.
    """
    parameters = count_params(config.model).total
    if config.lora.base != "weights" and config.model.hf_path is None:
        rule = "it is how the matrices of a checkpoint are stored, and the model begins from random weights"
        return ConfigError(
            "lora.base", config.lora.base, rule, "Set model.hf_path=DIR, or lora.base=weights"
        )
    if config.model.hf_path is not None or config.data.is_synthetic or parameters < LARGE:
        return None
    what = f"a model of {parameters / 1e9:,.1f} B parameters (1 B or more, from random weights)"
    kinds = [one.kind for _, _, one in sources_of(config.data) if one.kind.startswith("stdlib")]
    own = _own_data(config)
    speed = "or data=benchmark for synthetic tokens"
    if kinds:
        rule = f"the demonstration corpus, 10 MB of Python, is nothing for {what}"
        return ConfigError(
            "data.kind", kinds[0], rule, f"Set {own} and data.tokenizer=DIR, {speed}"
        )
    if tokenizer_of(config) == "byte":
        rule = f"bytes are {BYTE_VOCAB_SIZE} of {config.model.vocab_size:,} ids, too few for {what}"
        return ConfigError(
            "data.tokenizer", "byte", rule, f"Set data.tokenizer=DIR of a tokenizer, {speed}"
        )
    return None


def _check_fp8_base(config: Config) -> None:
    """Raise ``ConfigError`` where ``lora.base=fp8`` and the checkpoint is not in FP8 of 128 columns
    a block."""
    path = config.model.hf_path
    if config.lora.base != "fp8" or path is None:
        return
    from automoe.hf.families.registry import family_of, read_hf_config

    remedy = "Set lora.base=nf4 or weights"
    if family_of(config.model).keys.transposed:
        rule = f"it keeps matrices as they are stored, and {config.model.family} stores those of experts transposed"
        raise ConfigError("lora.base", "fp8", rule, remedy)
    stated = read_hf_config(path).get("quantization_config") or {}
    block = stated.get("weight_block_size") or [None, None]
    if stated.get("quant_method") != "fp8" or block[1] != BASE_BLOCKS["fp8"][0]:
        found = ", ".join(
            f"{key}={stated.get(key)}" for key in ("quant_method", "weight_block_size")
        )
        raise ConfigError(
            "lora.base",
            "fp8",
            f"it keeps a checkpoint's own block-FP8, of [128, 128], and config.json of {path} has {found}",
            f"{remedy}, or make an FP8 checkpoint: automoe convert DIR --out OTHER --fp8",
        )


def _pinned(config: Config) -> Config:
    """``config`` with a commit in each Hub id, and a day; a run that goes on stays with those that
    it began with."""
    resume, then = Path(config.checkpoint.resume).expanduser(), dict[str, Any]()
    begun = {"never": [], "auto": [Path(config.run_dir)]}.get(
        str(resume), [resume, resume.parent.parent]
    )
    for folder in begun:
        with suppress(OSError, ValueError):  # none, or one that the run itself will speak of
            then = then or flat(read_config(folder))

    def pin(key: str, spec: str | None) -> str | None:
        if spec is None:
            return None
        found = pinned(key, spec, str(then.get(key)))
        if found != spec and isinstance(spec, FromEnvironment):
            return FromEnvironment(found, f"{spec.written}@{found.rpartition('@')[2]}")
        return found

    data, model = (
        config.data,
        replace(config.model, hf_path=pin("model.hf_path", config.model.hf_path)),
    )
    chat = replace(data.chat, date=data.chat.date or then.get("data.chat.date"))
    config = replace(
        config,
        model=model,
        data=replace(data, tokenizer=pin("data.tokenizer", data.tokenizer), chat=chat),
    )
    if then or not data.is_chat:
        return config
    from automoe.data.chat_template import with_date

    with suppress(ConfigError):  # no tokenizer, no template: that is checked later
        return with_date(config)
    return config


def _own_data(config: Config) -> str:
    """How data of one's own is named, in the place of a demonstration's."""
    if config.data.is_chat:
        return f"data={'preference' if config.data.is_preference else 'chat'} data.path=FILE"
    return "data=jsonl data.path=FILE (or text, parquet, hub)"


def check_num_ranks(config: Config, overrides: list[str], num_ranks: int, why: str) -> None:
    """Raise ``ConfigError`` if ``launch.num_ranks`` is an override of another value than
    ``num_ranks``, not derived."""
    given = config.launch.num_ranks
    if (
        "launch.num_ranks" in map(key_of, overrides)
        and given not in (None, num_ranks)
        and num_ranks > 0
    ):
        remedy = (
            f"Leave it out, set it to {num_ranks}, or mesh.dp_shard=-1 to fill as many as you name"
        )
        raise ConfigError("launch.num_ranks", given, f"{why}: {num_ranks} ranks", remedy)


def check_here(config: Config) -> tuple[MeshShape, Device]:
    """The mesh and device of ``config`` on this machine, all rules checked. Raises
    ``ConfigError``."""
    device = resolve_device(config)
    return check(config, default_num_ranks(config, device), device), device


def check(config: Config, num_ranks: int | None, device: Device) -> MeshShape:
    """All rules of ``config``, those on other files too; its mesh, resolved for ``num_ranks``
    ranks.

    Raises:
        ConfigError, CheckpointError: the first rule that is broken; a folder lies where the run
            would export to.
    """
    shape = validate(config, num_ranks, device)
    check_rows(config, adapter_rows(config, shape), shape)
    _check_fp8_base(config)
    from automoe.data.tokenizer import fitting_tokenizer

    tokenizer = fitting_tokenizer(config)
    if config.data.is_chat:
        from automoe.data.chat_template import chat_template_of

        chat_template_of(config)
    if config.observe.samples:
        from automoe.data.prompts import encoded_prompts

        encoded_prompts(config, tokenizer)
    if config.checkpoint.export_hf:  # refused now, and not when the run ends in an export
        from automoe.hf.families.registry import family_of
        from automoe.hf.folder import check_target, copied_files

        family_of(config.model).write_config(config.model)
        copied_files(config.model, tokenizer_of(config))
        check_target(Path(config.run_dir).expanduser() / str(export_name(config)), overwrite=True)
    return shape
