"""Mapping between HuggingFace tensors and slices of this project's tensors. Needs no torch.

Checkpoints of the families differ from our model only in the names of the feed-forward and in the
split of routed experts: published files have one tensor per expert and projection, transformers 5
keeps a layer's experts in two tensors. Shapes: E experts, I expert width, H hidden size.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, get_args

from automoe.config.facts import BLOCK
from automoe.config.schema import ModelConfig, has_indexer
from automoe.errors import ConfigError
from automoe.model.params import SPECS, model_params

INDEX_FILE = "model.safetensors.index.json"  # tensor -> file
FP8_BLOCK = (BLOCK, BLOCK)  # rows and columns under one scale
GROUP = 32  # numbers of a row that share a scale in MXFP4 and INT4; they take 16 bytes
# Settings of compressed-tensors for the weights of a Kimi checkpoint.
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
Encoding = Literal["plain", "fp8", "mxfp4", "int4"]  # rules that turn codes and scales into numbers
SCALE_SUFFIX = "_scale_inv"  # follows a block-FP8 tensor's name in the name of its scales
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
# Block-FP8 does not quantize these matrices of an indexer and of a multi-token prediction module.
_INDEX_WEIGHTS = "self_attn.indexer.weights_proj"
_MTP_KEPT = ("eh_proj", "embed_tokens", "shared_head.head")


def _published(name: str, tensor: int = 0) -> str:
    """Return a HuggingFace key of the parameter ``mlp.<name>``, relative to its layer."""
    return SPECS[f"mlp.{name}"].hf.split()[tensor]


@dataclass(frozen=True)
class KeyMap:
    """Layout of a checkpoint: names below ``model.layers.N.``, and how experts are stored.

    ``{expert}`` in a name stands for the expert's number. The defaults are the column ``hf`` of
    ``automoe.model.params``; a family overrides the names that it spells differently.

    With ``fused``, ``gate`` and ``up`` name one tensor [E, 2I, H], gates first. With ``transposed``
    as well (GPT-OSS), that tensor is [E, H, 2I] with gates and ups interleaved, ``down`` is [E, I,
    H], and biases follow the same order. With ``ffn_parts`` the checkpoint is dense: expert e is
    part e mod ``ffn_parts`` of the layer's FFN, and routers are drawn (``automoe.hf.upcycle``) with
    the standard deviation ``router_std`` from ``router_seed``.

    For a class of transformers ``table`` replaces all of these: it gives the pieces of each of our
    tensors. ``layouts`` lists the layouts that files may have, if they cannot be derived; the last
    one is the layout of the parameters in memory. ``unread`` lists regular expressions of stored
    tensors to skip.
    """

    router: str = _published("router.weight")
    expert_bias: str = _published("router.expert_bias")
    gate: str = _published("experts.gate_up_proj", 0)
    up: str = _published("experts.gate_up_proj", 1)
    down: str = _published("experts.down_proj")
    shared_experts: str = "mlp.shared_experts"  # name of the module
    shared_gate: str = _published("shared_experts.output_gate.weight")
    router_bias: str = _published("router.bias")
    gate_up_bias: str = _published("experts.gate_up_proj_bias")  # used only with ``transposed``
    down_bias: str = _published("experts.down_proj_bias")
    fused: bool = False
    transposed: bool = False
    ffn_parts: int = 0
    router_std: float = 0.0
    router_seed: int = 0
    table: Mapping[str, tuple[Piece, ...]] = field(default_factory=dict)
    layouts: tuple[KeyMap, ...] = ()
    unread: tuple[str, ...] = ()

    def fitting(self, keys: Collection[str]) -> KeyMap:
        """Return the layout of the files that hold the tensors ``keys``."""
        for layout in self.layouts:
            stored = [piece.key for pieces in layout.table.values() for piece in pieces]
            if stored and all(key in keys for key in stored):
                return layout
        if any(key.endswith(f".{FUSED.gate}") for key in keys):
            return self.in_memory
        return self.per_expert if keys else self

    @property
    def per_expert(self) -> KeyMap:
        """Key map of the same family with a tensor for every expert and matrix.

        ``transformers`` saves families that are published fused in this layout, and block-FP8 is
        stored in it.
        """
        if not self.fused or self.transposed:
            return self
        one = KeyMap()
        return replace(self, gate=one.gate, up=one.up, down=one.down, fused=False)

    @property
    def in_memory(self) -> KeyMap:
        """Key map of the same family in transformers 5's own layout.

        ``save_pretrained(save_original_format=False)`` writes this layout too.
        """
        if self.layouts:
            return self.layouts[-1]
        if self.transposed or self.table:
            return self
        names = {
            name: getattr(FUSED, name)
            for name in ("router", "expert_bias", "gate", "up", "down", "fused")
        }
        return replace(self, **names)

    def expert_of(self, key: str) -> int | None:
        """Return the number of the routed expert that ``key`` belongs to; None for other tensors.

        Call this only for layouts that are not fused.
        """
        for name in () if self.ffn_parts else (self.gate, self.up, self.down):
            if match := re.search(re.escape(name).replace(r"\{expert\}", r"(\d+)") + "$", key):
                return int(match[1])
        return None


# Names of routers and routed experts in the models of transformers 5, the same for every family.
FUSED = KeyMap(
    gate="mlp.experts.gate_up_proj",
    up="mlp.experts.gate_up_proj",
    down="mlp.experts.down_proj",
    fused=True,
)


class Piece(NamedTuple):  # a large checkpoint has 100,000 of them: a NamedTuple is quick to make
    """Part of one of our tensors that is stored in one HuggingFace tensor or in a slice of it.

    Attributes:
        key: name of the HuggingFace tensor.
        shape: full shape of the HuggingFace tensor.
        select: for each dim of our tensor, the index of this piece, or None if the HuggingFace
            tensor has that dim too (a common dim).
        offset: start of each common dim in the HuggingFace tensor.
        size: extent of each common dim.
        order: permutation of the common dims in the HuggingFace tensor; empty for our order. With a
            permutation, every dim of ours is common, and the piece is the whole HuggingFace tensor.
        origin: start of each common dim in our tensor; empty: the piece begins at 0 and spans it.
        merged: True if the last two dims in that order are one dim of the HuggingFace tensor. The
            very last one is never sharded.
    """

    key: str
    shape: tuple[int, ...]
    select: tuple[int | None, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]
    order: tuple[int, ...] = ()
    merged: bool = False
    origin: tuple[int, ...] = ()

    def overlap(
        self, start: tuple[int, ...], extent: tuple[int, ...]
    ) -> tuple[tuple[slice, ...], tuple[int | slice, ...]] | None:
        """Return the intersection of a shard of our tensor with this piece.

        ``from_stored`` and ``to_stored`` convert between the two results' layouts.

        Args:
            start, extent: first index and size of the shard on every dim of our tensor.

        Returns:
            (slices of the HuggingFace tensor, index into the shard), or None if the two do not
            overlap.
        """
        source: list[slice] = []
        target: list[int | slice] = []
        for at, first, count in zip(self.select, start, extent, strict=True):
            if at is None and self.origin:
                own = self.origin[len(source)]
                begin = max(first, own)
                end = min(first + count, own + self.size[len(source)])
                if begin >= end:
                    return None
                source.append(slice(begin - own, end - own))
                target.append(slice(begin - first, end - first))
            elif at is None:
                begin = self.offset[len(source)] + first
                source.append(slice(begin, begin + count))
                target.append(slice(0, count))
            elif first <= at < first + count:
                target.append(at - first)
            else:
                return None
        if self.order:
            source = [source[dim] for dim in self.order]
        if self.merged:
            width = self.size[self.order[-1]]
            assert source.pop() == slice(0, width), (
                "a dim that the checkpoint keeps together is cut"
            )
            source[-1] = slice(source[-1].start * width, source[-1].stop * width)
        return tuple(source), tuple(target)

    def from_stored(self, tensor: Any) -> Any:
        """Return a view of a slice of the HuggingFace tensor (a torch tensor) in our layout."""
        if not self.order:
            return tensor
        if self.merged:
            tensor = tensor.unflatten(-1, (-1, self.size[self.order[-1]]))
        return tensor.permute([self.order.index(dim) for dim in range(len(self.order))])

    def in_stored_order(self, tensor: Any) -> Any:
        """Return a view of a slice of our tensor, dims in HuggingFace order but not merged."""
        return tensor.permute(self.order) if self.order else tensor

    def to_stored(self, tensor: Any) -> Any:
        """Return a slice of our tensor in the layout of the HuggingFace tensor."""
        tensor = self.in_stored_order(tensor)
        return tensor.flatten(-2) if self.merged else tensor


def hf_pieces(
    name: str, shape: tuple[int, ...], keys: KeyMap, experts: range | None = None
) -> list[Piece]:
    """Return the HuggingFace tensors, in order, that make up our tensor ``name`` of ``shape``.

    Args:
        experts: return the tensors of these experts only, if each expert has tensors of its own.
    """

    def whole(key: str, *order: int, merged: bool = False) -> list[Piece]:
        stored = [shape[dim] for dim in order or range(len(shape))]
        if merged:
            stored[-2:] = [stored[-2] * stored[-1]]
        return [
            Piece(key, tuple(stored), (None,) * len(shape), (0,) * len(shape), shape, order, merged)
        ]

    if keys.table:
        pieces = keys.table[name]
        if experts is None or pieces[0].select[0] is None:
            return list(pieces)
        return [piece for piece in pieces if piece.select[0] in experts]
    match = _LAYER.fullmatch(name)
    if match is None:
        return whole(name if name.startswith("lm_head.") else f"model.{name}")
    prefix = f"model.layers.{match[1]}."
    rest = match[2]
    if keys.ffn_parts and rest.startswith("mlp.router."):
        return []
    renamed = {
        "mlp.router.weight": keys.router,
        "mlp.router.expert_bias": keys.expert_bias,
        "mlp.router.bias": keys.router_bias,
        "mlp.experts.down_proj_bias": keys.down_bias,
        "mlp.shared_experts.output_gate.weight": keys.shared_gate,
    }
    if rest in renamed:
        return whole(prefix + renamed[rest])
    if rest == "mlp.experts.gate_up_proj_bias":
        return whole(prefix + keys.gate_up_bias, 0, 2, 1, merged=True)
    if rest.startswith("mlp.shared_experts."):
        return whole(prefix + rest.replace("mlp.shared_experts", keys.shared_experts, 1))
    if rest not in ("mlp.experts.gate_up_proj", "mlp.experts.down_proj"):
        return whole(prefix + rest)
    gate_up = rest == "mlp.experts.gate_up_proj"
    if keys.transposed:
        order = (0, 3, 2, 1) if gate_up else (0, 2, 1)
        return whole(prefix + (keys.gate if gate_up else keys.down), *order, merged=gate_up)
    part = shape[-2:]
    if keys.fused:
        if not gate_up:
            return whole(prefix + keys.down)
        half = (shape[0], *part)
        fused = (shape[0], 2 * part[0], part[1])
        return [
            Piece(prefix + keys.gate, fused, (None, i, None, None), (0, i * part[0], 0), half)
            for i in (0, 1)
        ]
    # A dense FFN is cut by rows of gate and up, and by columns of the down projection.
    cut = 0 if gate_up else 1
    full = list(part)
    full[cut] *= keys.ffn_parts or 1
    pieces = []
    for expert in experts or range(shape[0]):
        offset = [0, 0]
        offset[cut] = expert % (keys.ffn_parts or 1) * part[cut]
        for i, key in enumerate((keys.gate, keys.up) if gate_up else (keys.down,)):
            select = (expert, i, None, None) if gate_up else (expert, None, None)
            stored = prefix + key.format(expert=expert)
            pieces.append(Piece(stored, tuple(full), select, tuple(offset), part))
    return pieces


def mtp_copies(config: ModelConfig) -> dict[str, str]:
    """Return the tensors that files repeat for each module for multi-token prediction.

    Modules share embedding and head with the model, and published layouts repeat both. The result
    maps the name of a copy, such as ``layers.61.embed_tokens.weight``, to the name of the original.
    """
    embedding = "embed_tokens.weight"
    own = {
        embedding: embedding,
        "shared_head.head.weight": embedding if config.tie_embeddings else "lm_head.weight",
    }
    modules = config.all_layers[config.num_layers :]
    return {f"layers.{layer}.{copy}": name for layer in modules for copy, name in own.items()}


def our_tensors(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and full shape of every tensor that a checkpoint holds.

    Buffers are included, and so are ``mtp_copies``.
    """
    yield from ((param.name, param.shape) for param in model_params(config, buffers=True))
    for name in mtp_copies(config):
        yield name, (config.vocab_size, config.hidden_size)


def hf_tensors(config: ModelConfig, keys: KeyMap) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor of a checkpoint of ``config`` in layout ``keys``."""
    return {
        piece.key: piece.shape
        for name, shape in our_tensors(config)
        for piece in hf_pieces(name, shape, keys)
    }


def is_quantized(key: str, shape: Sequence[int], keys: KeyMap, encoding: Encoding) -> bool:
    """Return True if checkpoints in ``encoding`` store codes and scales of the tensor ``key``.

    MXFP4 and INT4 quantize routed experts. Block-FP8 quantizes the matrices of layers, except
    routers, gates, the weights of an indexer's heads and the input projection of a module for
    multi-token prediction. It leaves the embedding, the head and their copies alone.
    """
    if encoding == "plain":
        return False
    if encoding != "fp8":
        fused = keys.fused and key.endswith((keys.gate, keys.down))
        return fused or (not keys.fused and keys.expert_of(key) is not None)
    kept = (
        keys.router,
        keys.shared_gate,
        f"{_INDEX_WEIGHTS}.weight",
        *(f"{name}.weight" for name in _MTP_KEPT),
    )
    return (
        key.startswith("model.layers.")
        and len(shape) == 2
        and key.endswith(".weight")
        and not key.endswith(kept)
    )


def quantization_config(
    config: ModelConfig, keys: KeyMap, encoding: Encoding
) -> dict[str, Any] | None:
    """Return the ``quantization_config`` of a checkpoint in ``encoding``; None for ``plain``.

    It has the form of DeepSeek-V3's (``fp8``), GPT-OSS' (``mxfp4``) or Kimi-K2-Thinking's
    (``int4``).

    Raises:
        ConfigError: the family has no checkpoints in ``encoding``, or the rows of its experts are
            no multiple of ``GROUP``.
    """
    if encoding == "plain":
        return None
    if encoding == "fp8":
        return _fp8_config(config, keys)
    name = encoding.upper()
    publisher = {"mxfp4": "gpt_oss", "int4": "deepseek_v3"}.get(encoding)
    if publisher is None:
        kinds = ", ".join(get_args(Encoding))
        raise ConfigError("encoding", encoding, f"must be one of {kinds}", "Use plain")
    if not config.num_moe_layers:
        rule = f"{name} stores experts, and no layer has any"
        raise ConfigError("model.family", config.family, rule, "Export it in bfloat16")
    if config.family != publisher:
        raise ConfigError(
            "model.family",
            config.family,
            f"{name} is written in the format of published {publisher} files, which no other family has",
            "Export it in block-FP8 or bfloat16",
        )
    for key in ("hidden_size", "moe_intermediate_size"):
        if left := (size := getattr(config, key)) % GROUP:
            raise ConfigError(
                f"model.{key}",
                size,
                f"{name} has one scale per {GROUP} numbers of an expert's row: {size} % {GROUP} = {left}",
                "Export it in bfloat16",
            )
    if encoding == "mxfp4":
        kept = [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ]
        return {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    kinds = ["self_attn", "shared_experts", r"mlp\.(gate|up|gate_up|down)_proj"]
    kinds += [*_MTP_KEPT] if config.num_mtp_layers else []
    group = {"targets": ["Linear"], "weights": INT4 | {"actorder": None, "dynamic": False}}
    group |= {"input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", *(f"re:.*{kind}.*" for kind in kinds)],
    }


def _fp8_config(config: ModelConfig, keys: KeyMap) -> dict[str, Any]:
    keys = keys.per_expert
    if keys.fused:
        raise ConfigError(
            "model.family",
            config.family,
            "block-FP8 stores matrices, and this family stores all experts of a layer in one tensor",
            "Export it in bfloat16",
        )
    layers = config.all_layers[config.first_k_dense :]
    names = [keys.router] + ([keys.shared_gate] if config.shared_expert_gate else [])
    kept = [
        f"model.layers.{layer}.{name.removesuffix('.weight')}"
        for layer in layers
        for name in (*names, *(_MTP_KEPT if layer >= config.num_layers else ()))
    ]
    kept += [
        f"model.layers.{layer}.{_INDEX_WEIGHTS}"
        for layer in config.all_layers
        if has_indexer(config.attention, layer)
    ]
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(FP8_BLOCK),
        "modules_to_not_convert": ["lm_head", *kept],
    }
