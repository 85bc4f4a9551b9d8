"""Registry of the model families, selected by ``model_type``.

torch is not imported before a ``config.json`` is read.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from automoe.config.data_schema import DataConfig
from automoe.config.hub import local_folder
from automoe.config.mesh_shape import resolve_mesh
from automoe.config.plugins import look_up, registered
from automoe.config.rule_engine import check_rows
from automoe.config.rules import number_rows
from automoe.config.rules_model import model_rows, moe_rows
from automoe.config.schema import Config, MeshConfig, ModelConfig
from automoe.errors import ConfigError
from automoe.hf.codes import decodable, split
from automoe.hf.families import (
    deepseek_v2,
    deepseek_v3,
    deepseek_v4,
    deepseek_v32,
    ernie4_5_moe,
    glm4_moe,
    gpt_oss,
    granite,
    llama,
    longcat_flash,
    minimax_m2,
    mixtral,
    muse_spark,
    olmoe,
    qwen,
)
from automoe.hf.families.as_transformers import config_of_class, damaged, not_computed, number_of
from automoe.hf.families.family import Family
from automoe.hf.headers import ADAPTER, base_of, check_holds, has_own_head, read_headers
from automoe.hf.wrapper import ALONE, names_in, text_config
from automoe.hf.writers import check_writer
from automoe.storage.foreign import parse_settings, read_bytes
from automoe.storage.guarded import guarded

UNDECLARED = "transformers"  # family of every model_type that has none
FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        deepseek_v3.FAMILY,
        deepseek_v32.FAMILY,
        deepseek_v32.GLM_MOE_DSA,
        qwen.QWEN3_MOE,
        qwen.QWEN2_MOE,
        mixtral.FAMILY,
        glm4_moe.FAMILY,
        glm4_moe.LITE,
        gpt_oss.FAMILY,
        qwen.QWEN3_NEXT,
        qwen.QWEN3_5_MOE,
        minimax_m2.FAMILY,
        olmoe.FAMILY,
        granite.FAMILY,
        granite.SHARED,
        deepseek_v2.FAMILY,
        ernie4_5_moe.FAMILY,
        deepseek_v4.FAMILY,
        muse_spark.FAMILY,
        longcat_flash.FAMILY,
        llama.FAMILY,
        qwen.QWEN3,
    )
}


def known_families() -> dict[str, Family]:
    """Return all families, plugins included, by ``model_type`` of ``config.json``.

    Raises:
        ConfigError: a plugin's family has another name than its model_type.
    """
    families = dict(FAMILIES)
    for name, family in registered("model.family").items():
        if name != family.model_type:
            raise ConfigError(
                "model.family",
                name,
                f"it is registered for a family with model_type={family.model_type}",
                "Register it under its model_type",
            )
        families[name] = family
    return families | {name: family for family in families.values() for name in family.known_as}


def family_of(config: ModelConfig) -> Family:
    """Return the family ``config.family``, after its method ``of``, which may adapt it to ``config``'s checkpoint."""
    family = known_families().get(config.family) or look_up("model.family", config.family)
    return family.of(config)


def read_hf_config(path: str | Path, key: str = "model.hf_path") -> dict[str, Any]:
    """Return the content of ``config.json`` in a checkpoint directory.

    Args:
        key: setting or option by which the user named the directory, for the message.

    Raises:
        ConfigError: config.json is missing, unreadable or not a JSON object.
        CheckpointError: config.json is a link out of the directory, not a regular file, or larger
            than 100 MB.
    """
    try:
        return _with_model_type(parse_settings(read_bytes(local_folder(path), "config.json")))
    except (FileNotFoundError, NotADirectoryError):
        there = local_folder(path).is_dir()
        rule = "there is no config.json in it" if there else "there is no such folder"
        remedy = "Name a HuggingFace checkpoint directory, or a Hub id (OWNER/NAME@main)"
        if (base := base_of(local_folder(path))) is not None:
            named = repr(base)[:200] if base else "nothing"
            rule = f"it is an adapter of peft, not a model; its {ADAPTER} names {named} as its base"
            remedy = (
                "Name the base. automoe train starts from both, with lora.path, if the base is a folder; to merge them: "
                "automoe export RUN for a run's adapter, "
                "else peft's merge_and_unload and save_pretrained"
            )
    except OSError as error:
        rule = f"its config.json cannot be read: {error.strerror}"
        remedy = "Make it readable"
    except ValueError as error:
        rule = f"its config.json cannot be read: {error}"
        remedy = "Copy it again; a Git LFS pointer in its place needs `git lfs pull`"
    raise ConfigError(key, path, rule, remedy)


def _with_model_type(hf: dict[str, Any]) -> dict[str, Any]:
    """Return ``hf``, with the ``model_type`` of its class if it names only that (LongCat-Flash)."""
    for family in known_families().values():
        if hf.get("model_type") is None and hf.get("architectures") == [family.architecture]:
            return hf | {"model_type": family.model_type}
    return hf


def check_model(folder: Path) -> None:
    """Check config.json, headers and quantization of a checkpoint before ``transformers`` loads it.

    No weights are decoded. If automoe does not know the family, of config.json only the number of
    layers and the quantization are checked.

    Raises:
        ConfigError: config.json is missing or wrong, or its model has other sizes than the files.
        CheckpointError: a file is damaged, or automoe cannot read the quantization.
    """
    hf = read_hf_config(folder)
    if str(text_config(hf).get("model_type")) in known_families():
        model_config_from_hf(folder)
        return
    _check_layers(hf, folder)
    # A class may keep positions and masks beside its weights.
    weights = {
        name: stored
        for name, stored in read_headers(folder, partial_ok=True).items()
        if stored.dtype not in ("I64", "I16", "BOOL") and not name.endswith(("bias", "mask"))
    }
    check_writer(folder, str(text_config(hf).get("model_type")), weights)
    decodable(folder, hf, weights)


def _check_layers(hf: dict[str, Any], folder: Path) -> None:
    """Raise ``ConfigError`` if config.json's ``num_hidden_layers`` is negative or exceeds the number of tensors.

    The tensors are those of all files in the folder; nothing is checked while files are missing.
    The check is for models of a family that automoe does not know.

    Args:
        hf: content of config.json.
    """
    theirs = config_of_class(hf, str(folder))
    tensors = read_headers(folder, partial_ok=True)
    if theirs is None or not tensors:
        return
    if not 0 <= (layers := number_of(theirs, "num_hidden_layers") or 0) <= len(tensors):
        sizes = f"num_hidden_layers={layers}, and its files hold {len(tensors):,} tensors"
        raise damaged(folder, sizes)


def model_of_stranger(path: str | Path) -> ModelConfig:
    """Return the configuration of the model in an untrusted checkpoint directory.

    If the model belongs to no family of automoe, transformers' class is built in a child process
    with limits of time and memory.

    Raises:
        DataError: the class of transformers takes too long or too much memory.
        ConfigError: config.json is missing, or describes a model that automoe does not compute.
        CheckpointError: a file of the weights is damaged, or in a form that automoe cannot read.
    """
    if str(text_config(read_hf_config(path)).get("model_type")) in known_families():
        return model_config_from_hf(path)
    look_up("model.family", UNDECLARED)  # imported here: no child spends its time on that

    def build() -> ModelConfig:
        config = model_config_from_hf(path)
        family_of(config)
        return config

    return guarded(f"{local_folder(path) / 'config.json'}: its class of transformers", build)


def model_config_from_hf(path: str | Path, mtp: bool = False) -> ModelConfig:
    """Return the configuration of the model in a checkpoint directory, with ``hf_path`` set.

    Args:
        mtp: True to keep the number of modules for multi-token prediction that config.json states;
            False sets it to 0.

    Raises:
        ConfigError: config.json is missing or unreadable, its model_type is unknown (the known ones
            are listed), it has a value that the family does not compute, or the weights have other
            sizes.
        CheckpointError: all files of the weights exist, and one is damaged; or another program
            wrote the folder in a form that automoe cannot read.
    """
    whole = read_hf_config(path)
    hf = text_config(whole)
    family = known_families().get(str(hf.get("model_type")))
    if family is None:
        _check_layers(whole, local_folder(path))
        family = look_up("model.family", UNDECLARED)
    config = family.read_config(hf, str(path))
    config = config if mtp else replace(config, num_mtp_layers=0)
    # The weights are read, not drawn, so initializer_range may be 0.
    alone = Config(
        model=replace(config, initializer_range=1.0), data=DataConfig(document_mask=False)
    )
    shape = resolve_mesh(MeshConfig(), 1)
    try:
        check_rows(
            alone, chain(number_rows(alone), model_rows(alone, shape), moe_rows(alone)), shape
        )
    except ConfigError as error:
        raise not_computed(path, f"{error.key}={error.value}: {error.rule}") from None
    folder = local_folder(path)
    tensors = read_headers(folder, partial_ok=True)
    check_writer(folder, config.family, tensors)
    names = names_in(folder, whole, tensors) if tensors else ALONE
    check_holds(folder, config, tensors)
    text, _ = split(tensors, names, config, family.keys)
    decodable(folder, whole, text)
    if config.tie_embeddings and has_own_head(folder, text):
        # As in transformers, files with two different matrices overrule config.json.
        return replace(config, tie_embeddings=False)
    return config
