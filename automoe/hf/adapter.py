"""Reading of ``peft`` adapters, to train them further or to merge them into their base model."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from automoe.comm.agreement import Ranks
from automoe.comm.local_shard import global_offset, local_shard
from automoe.config.hub import local_folder
from automoe.config.schema import Config, LoraConfig, ModelConfig
from automoe.errors import CheckpointError, ConfigError, listed
from automoe.hf.families.registry import family_of
from automoe.hf.headers import ADAPTER
from automoe.hf.keys import Piece
from automoe.hf.merge import add_low_rank, added_product
from automoe.hf.peft import (
    WEIGHTS_FILE,
    adapter_names,
    adapter_table,
    belongs_to,
    joined_modules,
    open_adapter,
)
from automoe.hf.read import is_finite
from automoe.hf.shards import Parts
from automoe.model.causal_lm import CausalLM
from automoe.model.params import Param, model_params
from automoe.model.trainable import adapters, is_target
from automoe.storage.foreign import read_settings

_MERGE = "Merge it with peft (merge_and_unload, save_pretrained), and name the result"
# Settings that do not change what an adapter adds, or that its tensors repeat; of peft 0.21.
_HARMLESS = frozenset(
    "task_type auto_mapping peft_version base_model_name_or_path revision inference_mode r target_modules "
    "exclude_modules lora_alpha lora_dropout layers_to_transform layers_pattern megatron_core "
    "qalora_group_size target_parameters ensure_weight_tying".split()
)
_VALUES = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    # The others change the base too.
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
}


# Its rank, its alpha, the matrices of the model that it adapts, and names of our A and B, each with
# a box of a stored tensor.
PeftAdapter = tuple[int, float, list[Param], list[tuple[str, Piece]]]


def read_adapter(path: str, model: ModelConfig) -> PeftAdapter:
    """Return rank, alpha and tensors of the peft adapter in ``path``; read settings and headers only.

    Returns:
        (rank, alpha, the model's parameters (``Param``) that are adapted, table). The table has an
        entry (name in our model of a factor A or B, ``Piece``) for each slice of a factor; the
        piece says where in which stored tensor the slice's numbers are.

    Raises:
        CheckpointError: the adapter cannot be read, is no plain LoRA, or has other tensors
            than adapters of this model.
    """
    folder = local_folder(path)
    try:
        stated = read_settings(folder, ADAPTER)
        if not stated:
            raise OSError("it is missing or empty")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: its {ADAPTER} cannot be read ({error})") from None
    patterns = [stated.pop(key, None) or {} for key in ("rank_pattern", "alpha_pattern")]
    odd = {
        key: value
        for key, value in stated.items()
        if (value not in _VALUES[key] if key in _VALUES else value and key not in _HARMLESS)
    }
    rank, alpha = stated.get("r"), stated.get("lora_alpha")
    if odd or type(rank) is not int or type(alpha) not in (int, float):
        raise CheckpointError(
            f"{path}: its {ADAPTER} has r={rank!r}, lora_alpha={alpha!r}, {odd}, and only plain LoRA is read. {_MERGE}"
        )
    with open_adapter(folder) as file:
        stored = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}
    # A second parameter of a module is stored below ``base_layer``: shapes tell the two apart.
    plain = {(key.replace(".base_layer", ""), shape) for key, shape in stored.items()}
    keys, names = family_of(model).keys, adapter_names(model)
    if keys.table or not any(".experts.0." in key for key in stored):
        keys = keys.in_memory
    there, tensors = [], {}
    for param in model_params(model):
        pair = adapters(param, rank) if param.spec.lora else []
        meta = {each.name: torch.empty(each.shape, device="meta") for each in pair}
        boxes = {(piece.key, piece.shape) for _, piece in adapter_table(meta, keys, names)}
        if boxes and boxes <= plain:
            there.append(param)
            tensors |= meta
    table = adapter_table(tensors, keys, names)
    joined = joined_modules(table, rank)
    if patterns != [{name: n * each for name, n in joined.items()} for each in (rank, alpha)]:
        raise CheckpointError(
            f"{path}: its {ADAPTER} has rank_pattern={patterns[0]}, alpha_pattern={patterns[1]}, and only one rank and "
            f"alpha for all matrices are read. {_MERGE}"
        )
    if left := {piece.key for _, piece in table} ^ stored.keys():
        raise CheckpointError(
            f"{path}: {WEIGHTS_FILE} has other tensors than adapters of rank {rank} of this model: "
            f"{listed(sorted(left))}. {_MERGE}"
        )
    return rank, alpha, there, table


def check_adapter(config: Config) -> None:
    """Check that training can continue the adapter ``lora.path``, or merge it if ``lora.rank`` is 0.

    Raises:
        ConfigError: rank (unless it is 0), alpha or targets of ``lora`` are not the adapter's.
        CheckpointError: the adapter cannot be read or is no plain LoRA for this model.
    """
    lora, model = config.lora, config.model
    assert lora.path is not None
    rank, alpha, params, _ = read_adapter(lora.path, model)
    ours = [param for param in model_params(model) if is_target(param, lora)]
    if lora.rank and (ours, lora.rank, lora.alpha) != (params, rank, alpha):
        targets = ",".join(sorted({str(param.spec.lora) for param in params}))
        rule = f"the adapter {lora.path} has {len(params)} matrices, and lora.targets takes {len(ours)}, "
        rule += "or rank or alpha differs"
        remedy = f"Set lora.rank={rank} lora.alpha={alpha} lora.targets=[{targets}] to train it further, "
        remedy += "or lora.rank=0 to merge it into the weights"
        raise ConfigError("lora.rank", lora.rank, rule, remedy)


@torch.no_grad()
def fill_from(parts: Parts, path: str, model: ModelConfig, merge: bool = False) -> str:
    """Fill this rank's adapters from a peft adapter, or merge it into the weights. Collective.

    Args:
        parts: this rank's pipeline stages by number.
        path: folder of the peft adapter.
        merge: True to add (alpha / rank) B A to each adapted weight; the stages need no adapters.

    Returns:
        A sentence for the user: rank, alpha and number of matrices, and if they were merged.

    Raises:
        CheckpointError, on every rank: the adapter cannot be read, is no plain LoRA for this model,
            or has numbers that are not finite.
    """

    def fill() -> str:
        rank, alpha, params, table = read_adapter(path, model)
        pieces: dict[str, list[Piece]] = {}
        for name, piece in table:
            pieces.setdefault(name, []).append(piece)
        by_name = {name: p for part in parts.values() for name, p in part.named_parameters()}
        with open_adapter(local_folder(path)) as file:
            _check_blocks(file, table)
            for param in params:
                if (weight := by_name.get(param.name)) is None:
                    continue
                whole = {
                    each.name: _whole(file, pieces[each.name], each.shape).to(weight.device)
                    for each in adapters(param, rank)
                }
                if merge:
                    factors = added_product(weight, *whole.values(), alpha / rank)
                    total = local_shard(weight).to(factors[1].dtype, copy=True)
                    add_low_rank(total, *factors)
                    local_shard(weight).copy_(total)
                    continue
                for name, numbers in whole.items():
                    local = local_shard(by_name[name])
                    spans = zip(global_offset(by_name[name]), local.shape, strict=True)
                    local.copy_(numbers[tuple(slice(first, first + n) for first, n in spans)])
        use = "merged into the weights" if merge else "trained further"
        return f"the adapter {path} (rank {rank}, alpha {alpha:g}, {len(params)} matrices) is {use}"

    return Ranks().all(fill)[0]


def _check_blocks(file: Any, table: list[tuple[str, Piece]]) -> None:
    """Check that stored LoRA factors are zero wherever no adapter of our model has numbers.

    In peft gate and up may be one module with one B. Here they have an adapter each, so only two
    blocks of B may be nonzero: gate's rows in the columns of gate's ranks, and up's rows in the
    columns of up's ranks.

    Args:
        file: open safetensors file.
        table: (name of one of our factors A or B, piece) for each slice of the factor; the piece
            says which slice of which stored tensor has its numbers.

    Raises:
        CheckpointError: a stored tensor has a nonzero number elsewhere.
    """
    read: dict[str, list[Piece]] = {}
    for _, piece in table:
        read.setdefault(piece.key, []).append(piece)
    for key, pieces in read.items():
        if sum(prod(piece.size) for piece in pieces) < prod(pieces[0].shape):
            rest = file.get_tensor(key).clone()
            for piece in pieces:
                piece.within(rest).zero_()
            if rest.any():
                raise CheckpointError(
                    f"{key} mixes gate and up, which have an adapter each here. {_MERGE}"
                )


def _whole(file: Any, pieces: list[Piece], shape: tuple[int, ...]) -> Tensor:
    """Return a whole factor A or B of our adapters in float64, joined from stored tensors.

    Args:
        file: open safetensors file.
        pieces: slices of the factor, each with the stored tensor that has its numbers.
        shape: shape of the factor.

    Raises:
        CheckpointError: numbers are not finite or not floats, or two stored copies differ.
    """
    made = torch.full(shape, torch.nan, dtype=torch.float64)
    for piece in pieces:
        stored = file.get_tensor(piece.key)
        numbers, place = piece.within(stored.double()), made[piece.box]
        plain = stored.is_floating_point() and stored.itemsize > 1 and is_finite(numbers)
        if not plain or not (place.isnan().all() or torch.equal(place, numbers)):
            raise CheckpointError(
                f"{piece.key} is {stored.dtype} or not finite, or gate and up of an expert have an A each. {_MERGE}"
            )
        made[piece.box] = numbers
    return made


def from_peft(model: CausalLM, folder: Path, lora: LoraConfig) -> None:
    """Fill the adapters of a whole model from a directory that ``to_peft`` wrote. Collective.

    Raises:
        CheckpointError: the adapters were trained on another checkpoint than that of ``model``, or
            with other settings than ``lora``, or cannot be read.
    """
    with open_adapter(folder) as file:
        written = (file.metadata() or {}).get("belongs")
    belongs = belongs_to(model.config, lora, Ranks(alone=True))
    if written != belongs:
        raise CheckpointError(
            f"{folder / WEIGHTS_FILE} belongs to {written}, and the run has {belongs}. Use what it was trained with"
        )
    fill_from({0: model}, str(folder), model.config)
