"""Model family for any ``transformers`` class: configuration rules, configuration, checkpoint keys.

``automoe.config.plugins`` finds the family by this module's name ``FAMILY``, as in plugins.

transformers' conversion mapping says which tensors of a published checkpoint make up a parameter.
This module runs the mapping in reverse on meta tensors: each published tensor then is a view, which
shows what slice of which parameter it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from automoe.classes.build import (
    build_causal_lm,
    class_params,
    decoder_layers,
    experts_modules,
    head_of,
    is_tied,
    refused,
)
from automoe.classes.expert_parallel import ExpertParallel
from automoe.classes.model import TransformersModel, computes_in_float32
from automoe.config import rule_engine
from automoe.config.hub import local_folder
from automoe.config.mesh_shape import MeshShape
from automoe.config.rule_engine import Row, Scope
from automoe.config.rules_model import sharded_expert_rows
from automoe.config.schema import AttentionConfig, Config, ModelConfig
from automoe.errors import ConfigError
from automoe.hf.families.as_transformers import number_of
from automoe.hf.families.family import Family
from automoe.hf.keys import FUSED, KeyMap, Piece, whole
from automoe.hf.wrapper import HFConfig, names_in
from automoe.model.params import Param
from automoe.parallel.parallelize import build_decoder, parameter_dtype

_TOP_K = "num_experts_per_tok num_experts_per_token moe_topk moe_top_k moe_k top_k_experts".split()
_Pieces = dict[str, tuple[Piece, ...]]
# Keys that describe the source's files; a written config.json does not have them.
_OF_FILES = "auto_map dtype torch_dtype quantization_config transformers_version".split()
# Settings and axes that automoe's decoder alone computes.
_CLASS_TIER = rule_engine.table("""
mesh.pp > 1; mesh.cp > 1; mesh.tp > 1; mesh.etp > 1; moe.gate != default; moe.dispatch_dtype != default;
    moe.router_jitter != default; moe.router_dtype != default; moe.capacity_factor != default;
    moe.record_routing != default; moe.replay_routing != default; train.fp8 != default; train.compile != default;
    kernels.attention != default; kernels.rope != default; kernels.loss != default; kernels.norm != default;
    lora.base != default; optim.algorithm != default; optim.master_weights != default; optim.qk_clip != default;
    model.rope.extends != default; moe.experts != grouped_mm|loop|triton;
    parallel.recompute and parallel.recompute != full |
    | {model.architecture} has no native family: its class of transformers computes it, with ep, ep_shard, dp_shard
    and their replicas; native families (docs/huggingface.md) have every axis and kernel
""")
_OWN_CODE = rule_engine.table("""
parallel.expert_wgrad != autograd | | the experts of a class of transformers use its own products
""")


@dataclass(frozen=True)
class ClassFamily(Family):
    """Model family for any class of ``transformers`` that automoe has no native family for.

    A native family declares its configuration, checkpoint keys and rules; here they are derived
    from the class.
    """

    resizable = False
    repeats_routing = False
    expert_style = ExpertParallel
    build = staticmethod(TransformersModel)
    computes_in_float32 = staticmethod(computes_in_float32)

    def of(self, model: ModelConfig) -> Family:
        path = str(model.hf_path)
        keys = _layouts(path, (local_folder(path) / "config.json").read_bytes())
        return replace(self, architecture=model.architecture, keys=keys)

    def read_config(self, hf: HFConfig, path: str) -> ModelConfig:
        """Return the trainer's model configuration, derived from the ``transformers`` class.

        Args:
            hf: content of ``config.json`` in ``path``.
            path: checkpoint folder or Hub id.

        Raises:
            ConfigError: the trainer cannot use the class; the message says why.
        """
        model = build_causal_lm(path)
        text = model.config.get_text_config(decoder=True)
        layers = decoder_layers(model)
        experts = list(experts_modules(model).values())
        per_layer = [sum(module in experts for module in layer.modules()) for layer in layers]
        numbers = {module.num_experts for module in experts}
        if not layers or sum(per_layer) != len(experts) or max(per_layer) > 1 or len(numbers) > 1:
            counts = sorted(set(per_layer))
            problem = (
                f"{len(layers)} layers with {counts} experts modules of {sorted(numbers)} experts"
            )
            raise refused(path, f"{problem}; layers hold one each, with equal numbers")
        names = model.state_dict(keep_vars=True).items()
        if len({id(tensor) for _, tensor in names}) < len(names) - is_tied(model):
            raise refused(path, "modules share parameters")
        odd = [name for name, x in names if not (x.is_floating_point() or x.dtype == torch.int64)]
        if odd:
            raise refused(path, f"{odd[0]} holds neither fractions nor int64")
        head = model.get_output_embeddings()
        config = ModelConfig(
            family="transformers",
            architecture=type(model).__name__,
            hf_path=path,
            vocab_size=head_of(model, path).rows,
            hidden_size=head.in_features,
            num_layers=len(layers),
            first_k_dense=len(layers) - len(experts),
            tie_embeddings=is_tied(model),
            intermediate_size=number_of(text, "intermediate_size") or 1,
            attention=AttentionConfig(num_heads=1, num_kv_heads=1),
        )
        heads = number_of(text, "num_attention_heads")
        if heads:  # for counts of FLOPs
            dim = number_of(text, "head_dim") or head.in_features // heads
            config.attention = AttentionConfig(num_heads=heads, num_kv_heads=heads, head_dim=dim)
        if experts:
            top_k = next(filter(None, (number_of(text, key) for key in _TOP_K)), None)
            if top_k is None:
                problem = f"none of {', '.join(_TOP_K)} says how many experts a token has"
                raise refused(path, problem)
            if top_k > min(numbers):
                raise refused(path, f"a token chooses {top_k} experts of {min(numbers)}")
            widths = [size for p in experts[0].parameters() for size in p.shape[1:]]
            config.num_experts = numbers.pop()
            config.num_experts_per_token = top_k
            config.moe_intermediate_size = min(
                (size for size in widths if size != head.in_features), default=head.in_features
            )
        return config

    def write_config(self, config: ModelConfig, base: HFConfig | None = None) -> HFConfig:
        """Return the ``config.json`` for an export, which has the text model alone.

        Its keys are those of ``base``, without the ones that describe the source's files, such as
        ``quantization_config``; ``architectures`` and ``tie_word_embeddings`` are of ``config``.

        Args:
            base: ``config.json`` to start from; that of the checkpoint's text model if None, or if
                it has another ``model_type``.

        Raises:
            ConfigError: weights were initialised at random, and the text model of a multimodal
                model has no class of its own to be exported as.
        """
        whole = build_causal_lm(str(config.hf_path)).config
        text = whole.get_text_config(decoder=True)
        if config.random_weights and text is not whole:
            raise ConfigError(
                "model.random_weights",
                True,
                f"an export would be the text model of {config.architecture}, which has no class of its own",
                "Set checkpoint.export_hf=false, or model.random_weights=false",
            )
        if base is None or base.get("model_type") != text.model_type:
            base = text.to_dict()
        settings = {key: value for key, value in base.items() if key not in _OF_FILES}
        tied = {"tie_word_embeddings": config.tie_embeddings}
        return settings | {"architectures": [config.architecture]} | tied

    # fmt: off
    def rows(self, config: Config, shape: MeshShape) -> Iterator[Row]:
        model = config.model
        yield ("model.hf_path", model.hf_path is None, "model.family=transformers takes the class from a config.json",
               "Set model.hf_path to a folder with one")
        see = Scope(config, shape)
        yield from rule_engine.refused(see, _CLASS_TIER)
        if model.num_moe_layers:
            yield from sharded_expert_rows(config, shape)
            yield from rule_engine.refused(see, _OWN_CODE)

    def adapter_rows(self, config: Config, params: list[Param]) -> Iterator[Row]:
        architecture = config.model.architecture
        if "experts" in config.lora.targets:
            left = [  # stacks of experts that get no adapter
                param.name for param in params
                if param.part in ("routed_experts", "dense_ffn") and param.multiplies and param.spec.lora is None
                and (len(param.shape) == 3 or "expert" in param.name)
            ]
            yield ("lora.targets", bool(left), f"{architecture} has experts {', '.join(left[:2])}; adapters "
                   "are only for stacks gate_up_proj and down_proj [experts, outputs, inputs]",
                   "Set lora.targets=[attention,mlp,shared_experts]")
    # fmt: on

    def check(self, config: Config) -> None:
        build_decoder(config.model, config.moe, parameter_dtype(config))

    def params(self, model: ModelConfig, buffers: bool) -> list[Param]:
        table = class_params(str(model.hf_path))
        return [param for param in table if buffers or param.spec.kind != "buffer"]

    def layer_bytes(self, config: Config, ep: int, expert_rows: float) -> Any:
        from automoe.classes.activations import class_layers  # takes long to import

        return class_layers(config, ep, expert_rows)


class _View(Tensor):
    """Meta tensor that is a view of a parameter; its strides and offset tell which elements it covers.

    transformers slices, reshapes and concatenates it to make a published tensor. A result that
    cannot be a view has an attribute ``origin``: the view from which it was made by interleaving
    rows (``origin`` has one dim more), or by appending rows that are in no parameter.
    """

    def contiguous(self, *_, **__) -> Tensor:
        return self

    def reshape(self, *shape: Any) -> Any:
        try:
            return self.view(*shape)
        except RuntimeError:
            out = super().reshape(*shape)
            out.origin = self  # type: ignore[attr-defined]
            return out

    def flatten(self, first: int = 0, last: int = -1) -> Tensor:
        return self.reshape(*self.shape[:first], -1, *self.shape[last:][1:])

    def __getitem__(self, index: Any) -> Any:
        places = index[1] if isinstance(index, tuple) and len(index) == 2 else None
        if isinstance(places, list) and len(places) == 2:
            index = index[0], slice(places[0], places[1] + 1, places[1] - places[0])
        return super().__getitem__(index)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        out = super().__torch_function__(func, types, args, kwargs or {})
        if func is torch.cat:
            out.origin = args[0][0]
        return out


@cache
def _layouts(path: str, stated: bytes) -> KeyMap:
    """Return how tensors of published checkpoint files map to parameters of a ``transformers`` class.

    The ``layouts`` of the result are all ways in which files may name tensors: as published, as
    transformers writes them, with the prefixes of a multimodal wrapper, or by the class's own
    parameter names.

    Args:
        path: checkpoint folder or Hub id, whose config.json names the class.
        stated: content of config.json; not read, it makes the function's cache distinguish
            configurations.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    model = build_causal_lm(path)
    tensors = {param.name: torch.empty(param.shape, device="meta") for param in class_params(path)}
    integers = [name for name, x in model.state_dict().items() if x.dtype == torch.int64]
    transforms = get_model_conversion_mapping(model, add_legacy=False)
    tables = []
    for with_prefixes in (False, True):
        if with_prefixes:
            model._weight_conversions = transforms
        tables.append(_published(model, tensors))
    by_name = {name: (whole(name, tuple(tensor.shape)),) for name, tensor in tensors.items()}
    keys = [
        piece.key
        for table in (*tables, by_name)
        for pieces in (table or {}).values()
        for piece in pieces
    ]
    unread = tuple(  # such a pattern is for tensors that the class does not have
        pattern
        for pattern in model._keys_to_ignore_on_load_unexpected or ()
        if not any(re.search(pattern, key) for key in keys)
    )
    layouts = []
    for table in (*tables, by_name):
        if table is not None:
            plain = names_in(
                Path(), {}, [piece.key for pieces in table.values() for piece in pieces]
            )
            named = _renamed(table, lambda key, plain=plain: plain.plain(key) or key)
            of_ids = tuple(piece.key for name in integers for piece in named[name])
            layouts.append(KeyMap(table=named, unread=unread, integers=of_ids))
    return replace(layouts[0], layouts=tuple(layouts))


def _renamed(table: _Pieces, rename: Callable[[str], str]) -> _Pieces:
    return {
        name: tuple(piece._replace(key=rename(piece.key)) for piece in pieces)
        for name, pieces in table.items()
    }


def _published(model: nn.Module, tensors: dict[str, Tensor]) -> _Pieces | None:
    """Return parameter name -> the slices of it that published files hold, with their keys.

    The result is None if transformers' conversion cannot be reverted, a published tensor is not
    made of slices of one parameter, or the slices of a parameter lack some of its elements.

    Args:
        tensors: the model's parameters and buffers by name, on meta.
    """
    from transformers.core_model_loading import revert_weight_conversion

    views = {name: tensor.as_subclass(_View) for name, tensor in tensors.items()}
    try:
        stored = revert_weight_conversion(model, views)
    except NotImplementedError:  # an operation that cannot be reverted
        return None
    of_storage = {id(owner.untyped_storage()): name for name, owner in tensors.items()}
    table = {name: [] for name in tensors}
    for key, view in stored.items():
        origin = getattr(view, "origin", view)
        name = of_storage.get(id(origin.untyped_storage()))
        pieces = [None] if name is None else _pieces(key, view, tensors[name])
        if None in pieces:
            return None
        table[name].extend(pieces)
    whole = all(
        sum(torch.Size(piece.size).numel() for piece in pieces) == tensors[name].numel()
        for name, pieces in table.items()
    )
    return {name: tuple(pieces) for name, pieces in table.items()} if whole else None


def _pieces(key: str, view: Tensor, tensor: Tensor) -> list[Piece | None]:
    """Return the slices of the parameter ``tensor`` that a published tensor (one in files) holds.

    A ``Piece`` says which slice, and where in the published tensor. There are several if their rows
    alternate; None stands for a part of the published tensor that is no slice of ``tensor``.

    Args:
        key: key of the published tensor in the checkpoint.
        view: the published tensor, as transformers' conversion made it from ``tensor``.
        tensor: the parameter, on meta.
    """
    origin = getattr(view, "origin", view)
    if origin.dim() == view.dim():  # rows may be appended
        piece = _piece(key, origin, tensor) if origin.shape[1:] == view.shape[1:] else None
        return [piece and piece._replace(shape=tuple(view.shape))]
    pairs = zip(origin.shape, view.shape, strict=False)
    dim = 1 + next(dim for dim, (size, other) in enumerate(pairs) if size != other)
    if dim >= view.dim() or origin.flatten(dim - 1, dim).shape != view.shape:
        return [None]
    pieces: list[Piece | None] = []
    for turn, part in enumerate(origin.unbind(dim)):
        full, offset = [*part.shape], [0] * part.dim()
        offset[dim] = turn * full[dim]
        full[dim] *= origin.shape[dim]
        piece = _piece(key, part, tensor)
        taken = dict(shape=tuple(full), offset=tuple(offset), file=tuple(view.shape))
        pieces.append(piece and piece._replace(**taken))
    return pieces


def _piece(key: str, view: Tensor, tensor: Tensor) -> Piece | None:
    """Return which slice of ``tensor`` a published tensor (one in files) is; None if it is not a slice.

    Args:
        key: key of the published tensor in the checkpoint.
        view: the published tensor, as transformers' conversion made it from ``tensor``.
        tensor: the parameter, on meta.
    """
    at = view.storage_offset()
    start = []
    size = []
    dims = {}  # of the view -> of the tensor
    for axis, (length, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        first, at = divmod(at, stride) if stride else (0, at)
        same = (
            dim
            for dim in range(view.dim())
            if dim not in dims and view.stride(dim) == stride and view.shape[dim] <= length
        )
        dim = next(same, None)
        start.append(first)
        size.append(1 if dim is None else view.shape[dim])
        if dim is not None:
            dims[dim] = (axis,)
    if len(dims) < view.dim():
        return None
    order = tuple(dims[dim] for dim in range(view.dim()))
    return Piece(key, tuple(view.shape), tuple(start), tuple(size), order, (0,) * view.dim())


# ``check_holds`` expects no tensor per expert.
FAMILY = ClassFamily("transformers", "", {}, {}, keys=FUSED)
