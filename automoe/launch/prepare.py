"""Preparation of every command: a command line becomes a configuration, a mesh and a device.

``automoe.config`` has the rules on the configuration alone. This module adds the checks that read
something else: a checkpoint's ``config.json``, a tokenizer, this machine. Importing it does not
load torch; reading a ``config.json`` does.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from math import prod
from operator import attrgetter
from pathlib import Path

from automoe.config.compose import Arguments, compose_config, key_of, parse_override
from automoe.config.convert import FromEnvironment, leaf_keys
from automoe.config.data_schema import sources_of
from automoe.config.facts import BASE_BLOCKS
from automoe.config.frozen import Device, flat
from automoe.config.hub import local_folder, pinned
from automoe.config.mesh_shape import DEFAULT_AXES, MeshShape, expand_preset, preset_choice
from automoe.config.rule_engine import Scope, check_rows, refused, table
from automoe.config.schema import Config, ModelConfig, RopeConfig, export_name, tokenizer_of
from automoe.config.tier import tier_of
from automoe.config.validate import validate
from automoe.data.tokenizer import BYTE_VOCAB_SIZE
from automoe.errors import ConfigError
from automoe.hf.headers import base_of
from automoe.hf.wrapper import is_wrapper
from automoe.launch.hardware import default_num_ranks, resolve_device
from automoe.launch.rules_adapters import adapter_rows
from automoe.launch.run_dir import read_config
from automoe.model.params import count_params

LARGE = 1e9  # parameters
# Fields of a model that the configuration sets, whatever the checkpoint has.
_KEPT = ("initializer_range", "random_weights", "num_mtp_layers", "new_rows")
_MSCALES = {"model.rope.mscale", "model.rope.mscale_all_dim"}
_OWN_ROPE = ("theta", "interleaved", "partial_rotary_factor")  # stay the checkpoint's own
# Fields that must be those of the checkpoint if an override names the group ``model``.
_TELLING = "model.family model.num_layers model.hidden_size model.num_experts".split()
# fmt: off
# Rows of the vocabulary that the export would lose.
_GROWTH = table("""
model.vocab_size: not facts.resizable | | STATED a class of transformers takes it from config.json
    | Grow it there first: resize_token_embeddings and save_pretrained
model.vocab_size: lora.export == adapter | lora.rank > 0 | STATED an adapter does not hold the new rows
    | Set lora.export=merged
""", STATED="the checkpoint model.hf_path={model.hf_path} has {facts.rows}, and")
_NEW_ROWS = table("""
model.new_rows == pieces | not facts.resizable; model.upcycle; model.random_weights
    | it is for native families that start from their own weights
lora.export == adapter | lora.rank > 0 and model.new_rows == pieces
    | an adapter does not hold rows that start otherwise than the checkpoint's | Set lora.export=merged
""")
_RANDOM_WEIGHTS = table("""
lora.base != weights | | it says how a checkpoint's matrices are kept, and the model begins from random weights
    | Set model.hf_path=DIR, or lora.base=weights
data.kind: facts.demonstrates | facts.large | the demonstration corpus, 10 MB of Python, is too small for THIS_MODEL
    | Set {facts.own_data} and data.tokenizer=DIR, OR_SPEED
data.tokenizer: facts.bytes | facts.large | bytes are NUM_BYTES of {facts.ids} ids, too few for THIS_MODEL
    | Set data.tokenizer=DIR of a tokenizer, OR_SPEED
""", THIS_MODEL="a model of {facts.billions} B parameters (1 B or more, from random weights)",
    NUM_BYTES=BYTE_VOCAB_SIZE, OR_SPEED="or data=benchmark for synthetic tokens")
_FP8_BASE = table("""
lora.base: facts.transposed | |
    it keeps matrices as they are stored, and {model.family} stores those of experts transposed | OTHERS
lora.base: facts.foreign | | it keeps a checkpoint's own block-FP8, of [128, 128], and config.json of {model.hf_path} has
    quant_method={facts.method}, weight_block_size={facts.block}
    | OTHERS, or make an FP8 checkpoint: automoe convert DIR --out OTHER --fp8
""", OTHERS="Set lora.base=nf4 or weights")
# fmt: on


def prepare(args: Arguments) -> tuple[Config, MeshShape, Device]:
    """Compose and check the configuration of ``args`` for ranks that this process would start.

    Returns:
        The configuration, its resolved mesh and its device.

    Raises:
        ConfigError, CheckpointError: a rule is broken; the first one is named.
        BackendError: Hydra is not installed.
    """
    config = compose(args)
    return config, *check_here(config)


def compose(args: Arguments) -> Config:
    """Return the configuration of ``args``; ``config.json`` of ``model.hf_path``, if set, defines its model.

    Raises:
        ConfigError: a key or value is wrong, the checkpoint cannot be read, or an override
            contradicts it.
        BackendError: Hydra is not installed.
    """
    return settle(compose_config(args.config_name, args.overrides, args.config_dir), args.overrides)


def _with_base(config: Config) -> Config:
    """Replace a peft adapter in ``model.hf_path`` by its base model; return the new configuration.

    ``lora.path`` becomes the adapter's folder. ``config`` is returned unchanged if ``hf_path`` is
    no adapter, or its base is not on this machine.

    Raises:
        ConfigError: ``lora.path`` names another adapter.
    """
    path = config.model.hf_path
    base = path and base_of(local_folder(path))
    if not base or not local_folder(base).is_dir():
        return config
    if config.lora.path not in (None, path):
        rule = f"model.hf_path={path} is an adapter too"
        raise ConfigError(
            "lora.path", config.lora.path, rule, f"Leave it out, or set model.hf_path={base}"
        )
    model, lora = replace(config.model, hf_path=base), replace(config.lora, path=path)
    return replace(config, model=model, lora=lora)


def settle(config: Config, overrides: list[str]) -> Config:
    """Return ``config`` with its model taken from ``model.hf_path``, if set, and Hub ids with commits.

    The checkpoint's ``config.json`` defines the model. A peft adapter is replaced by its base model.
    A chat template that writes today's date gets it as ``data.chat.date``.

    Args:
        overrides: overrides of the command line, which must not contradict the checkpoint.

    Raises:
        ConfigError: the checkpoint does not exist or has an unknown family; an override contradicts
            the checkpoint's model; ``launch.num_ranks`` contradicts the mesh; or the configuration
            has a checkpoint but names no data.
    """
    _check_ranks(config, overrides)
    config = _pinned(_with_base(config))
    path = config.model.hf_path
    if path is None:
        return config
    from automoe.hf.families.registry import model_config_from_hf, model_of_stranger

    named = _named(overrides)
    if config.model.upcycle:
        from automoe.hf.upcycle import upcycled_model

        model, _ = upcycled_model(config.model)
    else:
        mine = config.model
        settings = {key: getattr(mine, key) for key in _KEPT}
        model = replace(model_of_stranger(path), **settings)
        if mine.rope.extends:
            model = replace(model, rope=_extended(mine.rope, model, named))
        if mine.num_mtp_layers and not mine.random_weights:
            there = model_config_from_hf(path, mtp=True).num_mtp_layers
            if mine.num_mtp_layers > there:
                raise ConfigError(
                    "model.num_mtp_layers",
                    mine.num_mtp_layers,
                    f"the checkpoint model.hf_path={path} holds {there} modules that automoe trains",
                    f"Set model.num_mtp_layers={there}",
                )
    ties = config.model.router.exact_ties
    ties |= "model.router.exact_ties" not in named and model.router.exact_ties
    model = replace(model, hf_path=path, router=replace(model.router, exact_ties=ties))
    grown = replace(model, vocab_size=max(model.vocab_size, config.model.vocab_size))
    see = Scope(config, config.mesh).knowing(
        rows=model.vocab_size, resizable=tier_of(model).resizable
    )
    check_rows(config, refused(see, _NEW_ROWS))
    # A whole ``Config`` that was settled before names nothing, and has the checkpoint's model.
    # A file that names hf_path means its rows, unless they are those that nobody asked for.
    beside = "model.hf_path" not in named and config.model.vocab_size != ModelConfig.vocab_size
    if grown != model and (beside or "model.vocab_size" in named or grown == config.model):
        check_rows(config, refused(see, _GROWTH))
        model = grown
    model_keys = list(leaf_keys(ModelConfig, "model."))
    for key, value in named.items():
        compared = _TELLING if key == "model" else {key}.intersection(model_keys)
        differing = []
        for name in compared:
            get = attrgetter(name.removeprefix("model."))
            settled = config.model.rope.extends and name == "model.rope.original_seq_len"
            if get(model) != get(config.model) and not (settled and not get(config.model)):
                differing.append(f"{name}={get(model)} and not {get(config.model)}")
        if differing:
            stretches = key.startswith("model.rope") and model.rope.scaling == "none"
            stretches &= not key.endswith(_OWN_ROPE)
            raise ConfigError(
                key,
                value,
                f"the checkpoint model.hf_path={path} has {', '.join(differing)}",
                f"Leave {key}= out, or start from random weights"
                + ", or stretch it for longer rows with model.rope.extends=true" * stretches,
            )
    kind = config.data.kind
    demonstrates = kind.startswith("stdlib") and not config.data.sources
    demonstrates &= getattr(config.recipe_args, "reads_data", True)
    if demonstrates and not named.keys() & {"data", "data.kind"}:
        raise ConfigError(
            "data.kind",
            f"{kind}, by default",
            f"the demonstration corpus is not used with model.hf_path={path} unless it is named",
            f"Set {_own_data(config)}, or data={kind} to train on it",
        )
    config = replace(config, model=model)
    if config.lora.path is not None:
        from automoe.hf.adapter import check_adapter  # imports torch's parts for ranks

        check_adapter(config)
    return config


def _check_ranks(config: Config, overrides: list[str]) -> None:
    """Raise ``ConfigError`` if an override sets another ``launch.num_ranks`` than the mesh holds."""
    if config.launch.num_ranks is None:
        return
    mesh = expand_preset(config.mesh, config.launch.num_ranks)
    sizes = [getattr(mesh, axis) for axis in DEFAULT_AXES]
    if min(sizes) > 0:  # else dp_shard is derived, or an axis is refused by name
        why = f"the mesh holds {'*'.join(DEFAULT_AXES)} = {sizes}"
        chosen = preset_choice(config.mesh, config.launch.num_ranks)
        check_num_ranks(config, overrides, prod(sizes), why, chosen)


def _named(overrides: list[str]) -> dict[str, str]:
    """Return the values of ``overrides`` by key, as text.

    ``model.rope={factor: 4}`` also gives ``model.rope.factor``.
    """
    named = {}
    for override in overrides:
        key, _, value = override.partition("=")
        named[key_of(override)] = value
        if key.startswith("model.") and "{" in value:
            parsed = parse_override(override).value()
            if isinstance(parsed, dict):
                named |= {f"{key}.{name}": str(item) for name, item in parsed.items()}
    return named


def _extended(asked: RopeConfig, checkpoint: ModelConfig, named: Collection[str]) -> RopeConfig:
    """Return ``checkpoint``'s rotary embeddings with the scaling of ``asked``, for longer sequences.

    If the family reads DeepSeek's ``mscale`` and ``mscale_all_dim`` and they are unset, both are 1,
    as inference engines require.

    Args:
        asked: ``model.rope`` as the user set it.
        checkpoint: model of ``model.hf_path``.
        named: keys that the command line sets.

    Raises:
        ConfigError: the checkpoint's embeddings are scaled already, its ``config.json`` nests the
            text model in a multimodal one, ``asked`` allows no longer sequences than the checkpoint,
            or its ``original_seq_len`` is below half of the checkpoint's, or above it.
    """
    from automoe.hf.families.registry import family_of, read_hf_config

    rope = checkpoint.rope
    why = f"are scaled already: {rope.scaling}, factor={rope.factor}"
    if is_wrapper(read_hf_config(str(checkpoint.hf_path))):
        why = "are set in a wrapper's config.json"
    elif rope.scaling == "none":
        why = ""
    if why:
        raise ConfigError(
            "model.rope.extends",
            True,
            f"the rotary embeddings of model.hf_path={checkpoint.hf_path} {why}",
            "Leave it out",
        )
    longest = rope.original_seq_len
    original = asked.original_seq_len or longest
    if not longest <= 2 * original <= 2 * longest:
        raise ConfigError(
            "model.rope.original_seq_len",
            original,
            f"YaRN stretches the rows that the checkpoint was trained on, and its max_position_embeddings={longest}",
            f"Set model.rope.original_seq_len={longest}, or to what it was trained on: half of that or more",
        )
    if not asked.factor * original > longest:
        raise ConfigError(
            "model.rope.factor",
            asked.factor,
            f"rows of {asked.factor:g} * {original} = {asked.factor * original:g} tokens are no longer than those of the "
            f"checkpoint, whose max_position_embeddings={longest}",
            f"Set model.rope.factor={2 * longest / original:g}, or leave model.rope.extends out",
        )
    numbers = {name: getattr(rope, name) for name in _OWN_ROPE}
    stated = asked.mscale or asked.mscale_all_dim or asked.attention_factor
    if family_of(checkpoint).mscale and not stated and _MSCALES.isdisjoint(named):
        numbers |= {"mscale": 1.0, "mscale_all_dim": 1.0}
    return replace(asked, original_seq_len=original, **numbers)


def check_data(config: Config) -> None:
    """Raise ``ConfigError`` if a model with random weights lacks data.

    A model of 1e9 parameters or more needs a tokenizer (not ``byte``), and other text than the
    demonstration corpus (``data.kind=stdlib``). Packed weights (``lora.base``) need a checkpoint.
    """
    if config.model.hf_path is not None:
        return
    data = replace(config.data, tokenizer=tokenizer_of(config))
    parameters = count_params(config.model).total
    see = Scope(config, config.mesh).knowing(
        large=parameters >= LARGE and not data.is_synthetic,
        billions=f"{parameters / 1e9:,.1f}",
        demonstrates=any(source.kind.startswith("stdlib") for _, _, source in sources_of(data)),
        bytes=data.tokenizer == "byte",
        ids=f"{config.model.vocab_size:,}",
        own_data=_own_data(config),
    )
    check_rows(replace(config, data=data), refused(see, _RANDOM_WEIGHTS))


def _check_fp8_base(config: Config) -> None:
    """Raise ``ConfigError`` if ``lora.base=fp8`` and the checkpoint is not in FP8 blocks.

    A block must have 128 columns, and the family must not store matrices transposed.
    """
    path = config.model.hf_path
    if config.lora.base != "fp8" or path is None:
        return
    from automoe.hf.families.registry import family_of, read_hf_config
    from automoe.hf.wrapper import quantization_in

    stated = quantization_in(read_hf_config(path)) or {}
    method, block = stated.get("quant_method"), stated.get("weight_block_size")
    see = Scope(config, config.mesh).knowing(
        transposed=family_of(config.model).keys.transposed,
        foreign=method != "fp8" or not block or block[1] != BASE_BLOCKS["fp8"][0],
        method=str(method),
        block=str(block),
    )
    check_rows(config, refused(see, _FP8_BASE))


def _pinned(config: Config) -> Config:
    """Return ``config`` with a commit added to each Hub id, and ``data.chat.date`` set.

    The date is today, if the chat template writes it. A continued run keeps its commits and date.
    """
    resume = Path(config.checkpoint.resume).expanduser()
    begun = {"never": [], "auto": [Path(config.run_dir)]}
    then = {}
    for folder in begun.get(str(resume), [resume, resume.parent.parent]):
        with suppress(OSError, ValueError):  # the run itself reports an unreadable file
            then = then or flat(read_config(folder))

    def pin(key: str, spec: str | None) -> str | None:
        if spec is None:
            return None
        pinned_spec = pinned(key, spec, str(then.get(key)))
        if pinned_spec != spec and isinstance(spec, FromEnvironment):
            return FromEnvironment(pinned_spec, f"{spec.written}@{pinned_spec.rpartition('@')[2]}")
        return pinned_spec

    data = config.data
    model = replace(config.model, hf_path=pin("model.hf_path", config.model.hf_path))
    chat = replace(data.chat, date=data.chat.date or then.get("data.chat.date"))
    data = replace(data, tokenizer=pin("data.tokenizer", data.tokenizer), chat=chat)
    config = replace(config, model=model, data=data)
    if then or not data.is_chat:
        return config
    from automoe.data.chat_template import with_date

    with suppress(ConfigError):  # a missing tokenizer or template is reported later
        return with_date(config)
    return config


def _own_data(config: Config) -> str:
    """Return overrides, for an error message, by which users train on their own data."""
    if config.data.is_chat:
        return f"data={'preference' if config.data.is_preference else 'chat'} data.path=FILE"
    return "data=jsonl data.path=FILE (or text, parquet, hub)"


def check_num_ranks(
    config: Config, overrides: list[str], num_ranks: int, why: str, chosen: str = ""
) -> None:
    """Raise ``ConfigError`` if an override sets ``launch.num_ranks`` to another value than ``num_ranks``.

    Args:
        num_ranks: number of ranks that the mesh holds, or that torchrun or srun started.
        why: text that says where ``num_ranks`` comes from.
        chosen: text that says which axes ``mesh.preset`` chose; empty without a preset.
    """
    named = config.launch.num_ranks
    if (
        "launch.num_ranks" in map(key_of, overrides)
        and named not in (None, num_ranks)
        and num_ranks > 0
    ):
        remedy = "Set mesh.dp_shard=-1 to use as many as you name"
        if not chosen:
            remedy += f", set it to {num_ranks}, or leave it out"
        raise ConfigError("launch.num_ranks", named, f"{why}{chosen}: {num_ranks} ranks", remedy)


def check_here(config: Config) -> tuple[MeshShape, Device]:
    """Check all rules, and return the mesh and device of ``config`` on this machine.

    Raises:
        ConfigError: a rule is broken; the first one is named.
        CheckpointError: the folder that the run would export to has other content.
    """
    device = resolve_device(config)
    return check(config, default_num_ranks(config, device), device), device


def check(config: Config, num_ranks: int | None, device: Device) -> MeshShape:
    """Check all rules of ``config``, and return its mesh, resolved for ``num_ranks`` ranks.

    The rules include those on the tokenizer, the chat template, prompts and the export.
    ``num_ranks`` is None if the number is unknown.

    Raises:
        ConfigError: a rule is broken; the first one is named.
        CheckpointError: the folder that the run would export to has other content.
    """
    shape = validate(config, num_ranks, device)
    check_rows(config, adapter_rows(config, shape), shape)
    _check_fp8_base(config)
    tier_of(config.model).check(config)
    from automoe.data.tokenizer import check_tokenizer, fitting_tokenizer

    check_tokenizer(tokenizer_of(config))
    tokenizer = fitting_tokenizer(config)
    if config.data.is_chat:
        from automoe.data.chat_template import chat_template_of

        chat_template_of(config)
    if config.observe.samples:
        from automoe.data.prompts import encoded_prompts

        encoded_prompts(config, tokenizer)
    name = export_name(config)
    if name is not None:  # an export that cannot work is refused before the run
        from automoe.hf.families.registry import family_of
        from automoe.hf.folder import check_target, copied_files

        family_of(config.model).write_config(config.model)
        copied_files(config.model, tokenizer_of(config))
        check_target(Path(config.run_dir).expanduser() / name, overwrite=True)
    return shape
