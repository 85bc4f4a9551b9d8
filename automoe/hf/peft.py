"""Adapters in the format of ``peft``: adapter_config.json and adapter_model.safetensors.

Adapters of routed experts can be stored in two layouts, both exact at rank r. ``published`` has one adapter for each
matrix as published checkpoints of the family store it, mostly one per expert and projection; gate and up then have the
same factor A. ``fused`` has one for each tensor that stacks all experts, as in transformers 5: lora_A [E r, I] and lora_B
[O, r E]. Beside vision or audio, names are those of transformers' whole class. E experts, I in and O out features, r rank.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from automoe.comm.agreement import Ranks
from automoe.config.hub import id_and_commit, local_folder
from automoe.config.rules_model import NO_MODULES
from automoe.config.schema import LoraConfig, ModelConfig
from automoe.errors import CheckpointError, ConfigError, import_backend, listed, without
from automoe.hf.families.registry import family_of, read_hf_config
from automoe.hf.folder import new_folder
from automoe.hf.headers import ADAPTER
from automoe.hf.identity import checkpoint_identity
from automoe.hf.keys import KeyMap, Piece, one_by_one, whole
from automoe.hf.shards import Parts, as_parts, config_of, stage_ranks
from automoe.hf.transformers_models import stated_config, weightless
from automoe.hf.wrapper import ALONE, Names, is_wrapper, names_in_class, text_config
from automoe.interop.torch_private import full_tensor
from automoe.model.causal_lm import CausalLM
from automoe.model.params import model_params
from automoe.storage.foreign import open_inside

WEIGHTS_FILE = "adapter_model.safetensors"
Tensors = dict[str, Tensor]  # by name
LAYOUTS = ("auto", "published", "fused")
# peft 0.21 cannot stack per-expert adapters of these families, or does not know their names.
_FUSED_ALONE = "qwen2_moe qwen3_5_moe_text granitemoe granitemoeshared deepseek_v4".split()
_TOLERANCE = 1e-5  # relative to the delta that an adapter adds to a matrix
_PREFIX = "base_model.model."
_WEIGHTS = {"13": "gate_up_proj", "2": "down_proj", "": "weight"}  # by suffix of the adapter's name
# Group of a matrix by a part of its module's name; the first part that occurs decides.
_GROUPS = {"attn.": "attention", ".experts": "experts", "shared": "shared_experts", "": "mlp"}


@without("kernels", "bitsandbytes")
def to_peft(
    model: Parts | CausalLM,
    path: str | Path,
    lora: LoraConfig,
    *,
    layout: str = "auto",
    overwrite: bool = False,
    averaged: bool = False,
) -> str:
    """Write the adapters of ``model`` as a peft directory, and verify it by loading. Collective.

    The base is the checkpoint at ``model.hf_path``.

    Args:
        model: the model, or this rank's pipeline stages of it; not changed.
        layout: adapters of routed experts: ``published`` (laid out as the family's files: mostly one per expert and
            projection), ``fused`` (one for all experts of a tensor), ``auto`` (published if peft loads it, else fused).
        overwrite: replace an existing directory.
        averaged: True if the weights are averages (``optim.ema_decay``).

    Returns:
        A sentence for the user: the directory, and what is in it.

    Raises:
        BackendError: peft is not installed.
        ConfigError: the layout is unknown or peft cannot load it, or the model started from random weights, has new
            rows of the vocabulary, or has modules for multi-token prediction.
        CheckpointError, on every rank: the model has no adapter, the directory exists or cannot be written, or peft
            loads something else.
    """
    from safetensors.torch import save  # save_file raises no OSError for a full disk

    parts = as_parts(model)
    path = Path(path).expanduser().absolute()
    ranks = Ranks()
    config = config_of(parts)
    if layout not in LAYOUTS:
        raise ConfigError("layout", layout, f"must be one of {', '.join(LAYOUTS)}", "Use auto")
    if config.num_mtp_layers:
        raise ConfigError(
            "model.num_mtp_layers", config.num_mtp_layers, NO_MODULES, "Export it merged"
        )
    if config.hf_path is None or config.random_weights:
        rule = (
            "an adapter belongs to the weights of a checkpoint, and these began as random numbers"
        )
        raise ConfigError("model.hf_path", config.hf_path, rule, "Export the merged model")
    known = text_config(read_hf_config(config.hf_path)).get("vocab_size", config.vocab_size)
    if known < config.vocab_size or config.new_rows == "pieces":
        rule = f"{config.hf_path} has {known} rows, and an adapter does not hold the new ones"
        raise ConfigError("model.vocab_size", config.vocab_size, rule, "Export it merged")
    import_backend(
        "peft",
        "an adapter is written and checked with it",
        "Install peft>=0.19, or set lora.export=merged",
    )
    keys = family_of(config).keys
    targets = set(lora.targets)
    gate_up = "experts.gate_up_proj" in targets
    unread = ""
    if config.family in _FUSED_ALONE:
        unread = f"of a {config.family} model"
    # peft 0.21 loads per-expert adapters of gate and up as if an adapter of down wrapped them.
    elif gate_up and not keys.fused and not {"experts", "experts.down_proj"} & targets:
        unread = "of experts.gate_up_proj without down_proj"
    if _in_wrapper(config):
        unread = "of a checkpoint with vision or audio"
    elif keys.table:
        unread = "of a class without a native family"
    if unread and layout == "published":
        raise ConfigError(
            "layout", layout, f"peft cannot load such an adapter {unread}", "Use fused"
        )
    if unread or layout == "fused":
        keys = keys.in_memory
    with new_folder(path, overwrite, ranks) as folder:
        tensors = gathered_adapters(parts)
        if not any(ranks.all(lambda: bool(tensors))):
            raise CheckpointError(
                "there is no adapter in these weights: a merged export has none. Name a run's checkpoint"
            )
        belongs = belongs_to(config, lora, ranks)

        first = _first_holder(parts)

        def write_stage() -> None:
            if ranks.rank == first:
                contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
                (folder / f"stage-{first}.safetensors").write_bytes(save(contiguous))

        ranks.all(write_stage)
        said = ranks.lead(lambda: _finish(folder, config, lora, keys, belongs))
    text = f"{path}: an {'averaged ' * averaged}adapter of {said}"
    if lora.base != "nf4":
        return text
    return (
        f"{text}; it was trained beside the base in NF4 (lora.base), and peft adds it to the checkpoint's own "
        "numbers, which are different: for the logits that were trained, export merged"
    )


@contextmanager
def open_adapter(folder: Path) -> Iterator[Any]:
    """Yield the open safetensors file of a peft adapter; ``CheckpointError`` if it is unreadable."""
    from safetensors import SafetensorError, safe_open

    try:
        os.close(open_inside(folder, WEIGHTS_FILE))  # safe_open would wait at a FIFO
        with safe_open(folder / WEIGHTS_FILE, "pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{folder / WEIGHTS_FILE} cannot be read ({error}). Copy it again, or train again"
        ) from None


def belongs_to(config: ModelConfig, lora: LoraConfig, ranks: Ranks) -> str:
    """Return text that identifies an adapter's base weights and LoRA settings.

    The text is saved with the adapter, and loading compares it. Collective over ``ranks``.
    """
    return f"{checkpoint_identity(str(config.hf_path), ranks)} {lora}"


def gathered_adapters(parts: Parts) -> Tensors:
    """Return the full LoRA factors A and B of this rank's stages, on the CPU, by name. Collective."""
    return {
        name: full_tensor(p.detach()).cpu()
        for part in parts.values()
        for name, p in part.named_parameters()
        if ".lora." in name
    }


def _first_holder(parts: Parts) -> int:
    """Return the lowest rank that holds the same pipeline stages as this rank."""
    return stage_ranks(p for part in parts.values() for p in part.parameters())[0]


def adapter_tensors(model: Parts | CausalLM, fused: bool = False) -> dict[str, torch.Tensor]:
    """Return the adapters of all stages on every rank, on the CPU, under peft's names. Collective.

    The names and values are those that ``to_peft`` writes to adapter_model.safetensors.

    Args:
        fused: one adapter for all experts of a tensor; else one per expert and projection.
    """
    parts = as_parts(model)
    config, ranks = config_of(parts), Ranks()
    tensors = gathered_adapters(parts)
    first = _first_holder(parts)
    everyone = ranks.all(lambda: tensors if ranks.rank == first else {})
    ours = {name: tensor for theirs in everyone for name, tensor in theirs.items()}
    keys = family_of(config).keys
    keys = keys.in_memory if fused or keys.renames else keys
    return _stored(ours, keys, adapter_names(config))


def _stored(ours: dict[str, torch.Tensor], keys: KeyMap, names: Names) -> dict[str, torch.Tensor]:
    stored = {}
    for name, piece in adapter_table(ours, keys, names):
        _put(ours[name], piece, stored)
    return stored


def _adapters(tensors: Tensors) -> Iterator[tuple[str, str, Tensor, Tensor]]:
    """Yield (module name, suffix, A, B) of each LoRA adapter in ``tensors``, which are named as in our model.

    The suffix is 13 for gate and up of routed experts, 2 for down, and empty for others.
    """
    for name, a in tensors.items():
        module, is_a, suffix = name.rpartition(".lora.A")
        if is_a:
            yield module, suffix, a, tensors[f"{module}.lora.B{suffix}"]


def _in_wrapper(config: ModelConfig) -> bool:
    return is_wrapper(read_hf_config(str(config.hf_path)))


def _weightless(config: ModelConfig) -> Any:
    """Return transformers' model of the checkpoint at ``config.hf_path``, on the meta device."""
    return weightless(stated_config(local_folder(str(config.hf_path))), whole=True)


def adapter_names(config: ModelConfig) -> Names:
    """Return a map whose ``stored`` turns a text model's parameter name into that of the class which peft adapts."""
    return names_in_class(_weightless(config)) if _in_wrapper(config) else ALONE


def _pieces(module: str, suffix: str, tensor: Tensor, keys: KeyMap) -> Sequence[Piece]:
    """Return pieces that divide ``tensor``, LoRA's B or B A, among the HuggingFace weights that it changes.

    A piece names a slice of ``tensor``, and the slice of a HuggingFace weight that this part of B A is added to.

    Args:
        module, suffix: name of our module with the adapter; 13 for its gate and up (routed experts), 2 for down, or "".
        tensor: only its shape is used: that of our weight, but the last dim may differ (B: the rank).
        keys: layout of the HuggingFace weights.
    """
    name, shape = f"{module}.{_WEIGHTS[suffix]}", tuple(tensor.shape)
    # A class in memory stores each parameter as it is.
    return [whole(keys.table[name][0].key, shape)] if keys.table else keys.pieces(name, shape)


def adapter_table(tensors: Tensors, keys: KeyMap, names: Names) -> list[tuple[str, Piece]]:
    """Return (our name of A or B, piece) for each slice of our factors that peft's file stores.

    A piece describes the slice, and the slice of a tensor of adapter_model.safetensors that stores it.

    Args:
        tensors: LoRA factors A and B by our names; only names and shapes are used.
        keys: layout of the weights that get adapters: one tensor per expert, or fused experts.
        names: map of the weights' names to those in transformers' class (``adapter_names``).
    """
    table = []
    for module, suffix, a, b in _adapters(tensors):
        # If two parameters of a module have adapters, peft wraps the second around the first.
        both = {f"{module}.lora.A2", f"{module}.lora.A13"} <= tensors.keys()
        last = b.dim() - 1
        for of_b in _pieces(module, suffix, b, keys):
            key = names.stored(of_b.key).removesuffix(".weight")
            of_a = whole("", tuple(a.shape))
            if suffix and (0,) in of_b.dims:
                key = key.rpartition(".")[0] + ".base_layer" * (both and suffix == "13")
                of_a = whole("", tuple(a.shape), ((0, 1), (2,)))
                at = next(i for i, dims in enumerate(of_b.dims) if not {0, last} & {*dims})
                of_b = of_b._replace(
                    shape=(of_b.shape[at], len(b) * b.shape[last]),
                    dims=(of_b.dims[at], (last, 0)),
                    offset=(of_b.offset[at], 0),
                )
            elif suffix:
                [of_a] = one_by_one([""], tuple(a.shape), of_b.start[:1])
            elif (parts := of_b.shape[0] // len(b)) > 1:  # gates and ups: ranks one after the other
                at = of_b.offset[0] // len(b)
                of_a = of_a._replace(shape=(parts * len(a), a.shape[1]), offset=(at * len(a), 0))
                of_b = of_b._replace(
                    shape=(of_b.shape[0], parts * len(a)), offset=(of_b.offset[0], at * len(a))
                )
            for kind, piece in (("A", of_a), ("B", of_b)):
                piece = piece._replace(key=f"{_PREFIX}{key}.lora_{kind}.weight")
                table.append((f"{module}.lora.{kind}{suffix}", piece))
    return table


def joined_modules(table: list[tuple[str, Piece]], rank: int) -> dict[str, int]:
    """Return {peft module: number of our matrices that it holds}, for modules of several, such as gate and up.

    Keys are names of peft's ``rank_pattern``, e.g. ``shared_mlp.input_linear``. ``table`` is a result of
    ``adapter_table``, ``rank`` the LoRA rank of each of our matrices.
    """
    joined = [piece for name, piece in table if name.endswith(".lora.B") and piece.shape[1] > rank]
    return {".".join(piece.key.split(".")[-4:-2]): piece.shape[1] // rank for piece in joined}


def _put(tensor: Tensor, piece: Piece, stored: Tensors) -> None:
    """Copy a slice of our ``tensor`` into the HuggingFace tensor that stores it.

    Args:
        piece: the slice, and name and shape of the HuggingFace tensor.
        stored: HuggingFace tensors by name; a missing one is added, of zeros.
    """
    place = stored.setdefault(piece.key, tensor.new_zeros(piece.shape))
    piece.within(place).copy_(tensor[piece.box])


def _finish(folder: Path, config: ModelConfig, lora: LoraConfig, keys: KeyMap, belongs: str) -> str:
    """Join the stages' files to adapter_model.safetensors, write adapter_config.json, and check both with peft.

    Args:
        folder: directory that holds the pipeline stages' files; they are removed.
        keys: layout of the weights that get adapters.
        belongs: text that identifies base weights and settings, written to the file's metadata.

    Returns:
        A phrase: numbers of values written, and of adapted matrices by kind, such as attention.
    """
    from peft import LoraConfig as PeftConfig
    from safetensors.torch import load_file, save

    ours = {}
    for file in sorted(folder.glob("stage-*.safetensors")):
        ours |= load_file(file)
        file.unlink()
    names = adapter_names(config)
    stored = _stored(ours, keys, names)
    content = save(stored, metadata={"format": "pt", "belongs": belongs})
    (folder / WEIGHTS_FILE).write_bytes(content)
    # Dense and shared FFNs of MoE families are listed as parameters: as modules, their plain names
    # may stand for experts' matrices in peft, which would then leave these FFNs out.
    modules = set()
    parameters = set()
    joined = joined_modules(adapter_table(ours, keys, names), lora.rank)
    groups = {param.name: param.spec.group for param in model_params(config)}
    for module, suffix, _, b in _adapters(ours):
        matrices = [names.stored(piece.key) for piece in _pieces(module, suffix, b, keys)]
        apart = ".".join(matrices[0].split(".")[-3:-1]) not in joined
        # Whole names, since other modules of the class may have the same last name.
        if keys.table or names != ALONE or config.attention.kind == "compressed":
            if groups[f"{module}.{_WEIGHTS[suffix]}"] == "attention":
                modules |= {key.removesuffix(".weight") for key in matrices}
            else:
                parameters |= {*matrices}
            continue
        matrices = [key.split(".", 3)[3] for key in matrices]
        in_ffn_of_moe = matrices[0].startswith("mlp") and not family_of(config).dense
        if keys.fused if suffix else in_ffn_of_moe and apart:
            parameters.add(matrices[0])
        else:
            modules |= {key.removesuffix(".weight").rpartition(".")[2] for key in matrices}
    path = str(config.hf_path)
    base, commit = id_and_commit(path) or (str(local_folder(path).absolute()), None)
    peft_config = PeftConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        rank_pattern={name: parts * lora.rank for name, parts in joined.items()},
        alpha_pattern={name: parts * lora.alpha for name, parts in joined.items()},
        lora_dropout=0.0,  # dropout is for training only, and peft has none for parameters
        target_modules=sorted(modules),
        target_parameters=sorted(parameters) or None,
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        revision=commit,
        inference_mode=True,
    )
    peft_config.save_pretrained(folder)
    # safetensors makes its file readable by the owner alone; the others obey the umask.
    shutil.copymode(folder / ADAPTER, folder / WEIGHTS_FILE)
    groups = verify_peft(folder, config, lora, ours)
    counts = ", ".join(f"{count} of {group}" for group, count in groups.items())
    numbers = sum(tensor.numel() for tensor in ours.values())
    return f"{numbers:,} numbers, as peft loads it ({counts})"


def verify_peft(
    folder: Path, config: ModelConfig, lora: LoraConfig, ours: Tensors
) -> dict[str, int]:
    """Compare the delta that peft adds to each matrix with ``ours``, without reading base weights.

    Args:
        ours: whole LoRA factors A and B by their names in the model.

    Returns:
        Number of adapted matrices by kind, such as attention; a tensor of experts counts as one.

    Raises:
        CheckpointError: names the first difference: peft leaves a matrix out, adapts one that the model does not, or
            adds other numbers.
    """
    keys = family_of(config).keys.in_memory
    # name of the parameter in transformers' model -> its adapters
    wanted = defaultdict(list)
    for adapter in _adapters(ours):
        module, suffix, _, b = adapter
        wanted[_pieces(module, suffix, b, keys)[0].key].append(adapter)
    groups = Counter()
    for key, layer in _loaded(folder, config):
        if key not in wanted:
            raise CheckpointError(f"{folder}: peft adapts {key}, and this model does not")
        adapters = wanted.pop(key)
        module, suffix, *_ = adapters[0]
        groups[next(group for part, group in _GROUPS.items() if part in module)] += len(adapters)
        pairs = zip(_theirs(layer), _mine(adapters, keys), strict=True)
        for expert, (theirs, mine) in enumerate(pairs):
            mine = mine * (lora.alpha / lora.rank)
            if theirs.shape != mine.shape or not (theirs - mine).norm() <= _TOLERANCE * mine.norm():
                raise CheckpointError(
                    f"{folder}: peft adds different numbers to {key} (matrix {expert}) than {module}.lora.A{suffix}"
                )
    if wanted:
        raise CheckpointError(
            f"{folder}: peft leaves out {len(wanted)} of the adapted matrices: {listed(wanted)}"
        )
    return groups


def _loaded(folder: Path, config: ModelConfig) -> Iterator[tuple[str, Any]]:
    """Yield (name in the text model, peft's layer) of each parameter that the adapter adapts.

    No weights are read. Raises ``CheckpointError`` if peft does not load ``folder``.
    """
    from peft import PeftModel
    from peft.tuners.lora.layer import LoraLayer, ParamWrapper

    model = _weightless(config)
    names = names_in_class(model)
    # peft loads adapters onto the device of the weights, of which it reads only the shapes. An
    # expanded scalar on the CPU takes no memory.
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            empty = torch.zeros(()).expand(parameter.shape)
            module.register_parameter(name, torch.nn.Parameter(empty, requires_grad=False))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            adapted = PeftModel.from_pretrained(model, str(folder))
        except (ValueError, RuntimeError) as error:
            raise CheckpointError(f"{folder} does not load in peft: {error}") from error
    if left := [
        str(warning.message) for warning in caught if "adapter keys" in str(warning.message)
    ]:
        raise CheckpointError(f"{folder}: peft says: {left[0][:400]}")
    for name, module in adapted.get_base_model().named_modules():
        if isinstance(module, LoraLayer):
            last = module.parameter_name if isinstance(module, ParamWrapper) else "weight"
            key = f"{name.replace('.base_layer', '')}.{last}"
            yield names.plain(key) or key, module


def _theirs(module: Any) -> Iterator[Tensor]:
    """Yield scale B A of peft's LoRA layer ``module``: one matrix, or one per expert if its parameter stacks experts."""
    from peft.tuners.lora.layer import ParamWrapper

    if isinstance(module, ParamWrapper) and module.num_experts > 1:
        left, right, scaling = module.get_delta_factors("default")
        yield from (scaling * (matrix @ other) for matrix, other in zip(left, right, strict=True))
    else:
        scaling = module.scaling["default"]
        yield scaling * (module.lora_B["default"].weight @ module.lora_A["default"].weight)


def _mine(adapters: list[tuple[str, str, Tensor, Tensor]], keys: KeyMap) -> Iterator[Tensor]:
    """Yield B A of our adapters, without its scale: one matrix per expert, in transformers' layout.

    Args:
        adapters: results of ``_adapters`` (module name, suffix, A, B) for one parameter of transformers.
        keys: layout of the parameters in transformers.
    """
    module, suffix, a, b = adapters[0]
    if not suffix:
        stored = {}
        for name, _, each_a, each_b in adapters:
            delta = each_b.float() @ each_a.float()
            [piece] = _pieces(name, suffix, delta, keys)
            _put(delta, piece, stored)
        yield from stored.values()
        return
    for each_a, each_b in zip(a.float(), b.float(), strict=True):
        delta = (each_b @ each_a)[None]
        stored = {}
        for piece in _pieces(module, suffix, delta, keys):
            _put(delta, piece, stored)
        yield stored[piece.key][0]
