"""Map between tensors of a HuggingFace checkpoint and tensors of the model. Needs no torch.

Both are cut into boxes (rectangular slices), and each box of one has an equal box in the other. Checkpoints of the
families differ from our model in names, above all of the feed-forward, and in the split of routed experts: published files
have one tensor per expert and projection, transformers 5 two. Shapes: E experts, I their width, L that of their input.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import chain
from math import prod
from typing import Any, Literal, NamedTuple, get_args

from automoe.config.facts import BLOCK
from automoe.config.schema import ModelConfig
from automoe.errors import ConfigError
from automoe.model.params import SPECS, model_params

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
INDEX_FILE = "model.safetensors.index.json"  # tensor -> file
FP8_BLOCK = (BLOCK, BLOCK)  # rows and columns under one scale
GROUP = 32  # numbers of a row that share a scale in MXFP4 and INT4; they take 16 bytes
# Settings of compressed-tensors for the weights of a Kimi checkpoint.
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
WrittenEncoding = Literal["plain", "fp8", "mxfp4", "int4"]
# Rules that turn codes and scales into numbers (``automoe.hf.schemes``).
Encoding = WrittenEncoding | Literal["float8", "int8", "int8_packed", "mxfp4_rows", "nvfp4"]
SCALE_SUFFIX = "_scale_inv"  # follows a block-FP8 tensor's name in the name of its scales
ROUTER, SHARED_GATE = "mlp.router.weight", "mlp.shared_experts.output_gate.weight"
GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
_LAYER = re.compile(r"(layers\.(\d+)\.)(.+)")
# Block-FP8 does not quantize these matrices of an indexer and of a multi-token prediction module.
_INDEX_WEIGHTS = "self_attn.indexer.weights_proj"
_MTP_KEPT = ("eh_proj", "embed_tokens", "shared_head.head")

Shape = tuple[int, ...]  # of a tensor or a box, or a place in it


class Piece(NamedTuple):  # a large checkpoint has 100,000 of them: a NamedTuple is quick to make
    """Box (rectangular slice) of one of our model's tensors, and the box that stores its numbers.

    The second box is in a HuggingFace tensor. ``KeyMap.pieces`` makes pieces; reading and writing
    of checkpoints copy between the two boxes.

    Attributes:
        key: name of the HuggingFace tensor.
        shape: full shape of the HuggingFace tensor.
        start, size: the box in our tensor.
        dims: for each dim of the HuggingFace tensor, the dims of our tensor that are flattened into
            it. If there are several, boxes span all but the first. The box has size 1 on dims of
            our tensor that are in no entry.
        offset: start of the box in the HuggingFace tensor.
        file: shape in the file if it differs from ``shape``, else (). Rows of several of our
            tensors may alternate in a file; ``shape`` then joins one row of each to a long row.
    """

    key: str
    shape: Shape
    start: Shape
    size: Shape
    dims: tuple[Shape, ...]
    offset: Shape
    file: Shape = ()

    def overlap(
        self, start: Shape, size: Shape
    ) -> tuple[tuple[slice, ...], tuple[int | slice, ...]] | None:
        """Return the overlap of this piece's box in our model's tensor with a slice of it, such as a rank's shard.

        Args:
            start: index of the slice's first element in our tensor.
            size: shape of the slice.

        Returns:
            (index of the overlap in the HuggingFace tensor, its index in the slice), or None if
            there is no overlap. ``from_stored`` and ``in_stored_order`` convert between the two
            layouts.
        """
        begins, ends = [], []
        for begin, width, first, count in zip(self.start, self.size, start, size, strict=True):
            begins.append(begin if begin > first else first)
            ends.append(min(begin + width, first + count))
            if begins[-1] >= ends[-1]:
                return None
        source = []
        target: list[int | slice] = [begin - at for begin, at in zip(begins, start, strict=True)]
        for dims, at in zip(self.dims, self.offset, strict=True):
            unit = 1
            for dim in dims[1:]:
                assert ends[dim] - begins[dim] == self.size[dim], (
                    "a dim that files keep whole is cut"
                )
                unit *= self.size[dim]
            outer = dims[0]
            first = at + (begins[outer] - self.start[outer]) * unit
            source.append(slice(first, first + (ends[outer] - begins[outer]) * unit))
            for dim in dims:
                target[dim] = slice(begins[dim] - start[dim], ends[dim] - start[dim])
        return tuple(source), tuple(target)

    @property
    def box(self) -> tuple[int | slice, ...]:
        """Index that selects this box (a slice of one of our model's tensors) in that full tensor.

        It is an integer on dims that the HuggingFace tensor does not have, else a slice.
        """
        stored = {*chain.from_iterable(self.dims)}
        pairs = enumerate(zip(self.start, self.size, strict=True))
        return tuple(slice(at, at + n) if dim in stored else at for dim, (at, n) in pairs)

    @property
    def order(self) -> list[int]:
        """Argument of ``permute`` that brings our tensor, without dims absent from ``dims``, to the stored order."""
        dims = [*chain.from_iterable(self.dims)]
        return [sorted(dims).index(dim) for dim in dims]

    def in_stored_order(self, tensor: Any) -> Any:
        """Return a view of ``tensor`` with its dims in the order of the HuggingFace tensor.

        Dims that the HuggingFace tensor merges stay separate.

        Args:
            tensor: slice of the model's tensor that this piece describes, without the dims that the
                HuggingFace tensor does not have.
        """
        dims = [*chain.from_iterable(self.dims)]
        if dims == sorted(dims):
            return tensor
        packed = range(len(dims), tensor.dim())  # blocks and bytes instead of columns
        return tensor.permute(*self.order, *packed)

    def from_stored(self, tensor: Any) -> Any:
        """Return a view of ``tensor``, a slice of the HuggingFace tensor, with our tensor's dims in their order.

        Merged dims are split. The view lacks our dims that are in no entry of ``dims``, such as that of experts.
        """
        sizes = []
        for (_, *inner), width in zip(self.dims, tensor.shape, strict=True):
            units = [self.size[dim] for dim in inner]
            sizes += [width // prod(units), *units]
        order = self.order
        return tensor.view(sizes).permute([order.index(dim) for dim in range(len(order))])

    def within(self, stored: Any) -> Any:
        """Return a view of the part of the HuggingFace tensor ``stored`` that this piece describes.

        The view has our tensor's dims in their order, without those that ``stored`` lacks: if each
        expert has a HuggingFace tensor of its own, the dim of experts is missing.
        """
        overlap = self.overlap(self.start, self.size)
        assert overlap is not None
        return self.from_stored(stored[overlap[0]])


def whole(key: str, shape: Shape, dims: tuple[Shape, ...] | None = None) -> Piece:
    """Describe a tensor of our model that is stored whole as the HuggingFace tensor ``key``.

    Args:
        shape: shape of our tensor.
        dims: for each dim of the HuggingFace tensor, the dims of our tensor that are flattened into
            it, such as ((0, 1), (2,)); default: the same dims.
    """
    dims = dims or tuple((dim,) for dim in range(len(shape)))
    full = tuple(prod(shape[dim] for dim in group) for group in dims)
    return Piece(key, full, (0,) * len(shape), shape, dims, (0,) * len(dims))


def one_by_one(
    keys: list[str], shape: Shape, experts: Iterable[int], parts: int = 1
) -> Iterator[Piece]:
    """Yield the slices of a stacked expert tensor that files store as one matrix per expert.

    Args:
        keys: stored names with ``{expert}``: those of gate and up (a matrix each), or that of down.
        shape: full shape of our stacked tensor, [E, 2, I, H] or [E, H, I].
        experts: numbers of the experts to yield.
        parts: number of experts that a stored FFN is cut into, for a mixture made of a dense model:
            each has some rows of gate and up, and some columns of down.
    """
    outer, size = len(shape) - 2, shape[-2:]
    cut = len(keys) % 2
    full = tuple(width * parts if dim == cut else width for dim, width in enumerate(size))
    box, dims = (1,) * outer + size, ((outer,), (outer + 1,))
    for expert in experts:
        at = expert % parts * size[cut]
        offset = (0, at) if cut else (at, 0)
        for half, key in enumerate(keys):
            key = key.replace("{expert}", str(expert))
            yield Piece(key, full, (expert, half)[:outer] + (0, 0), box, dims, offset)


@dataclass(frozen=True)
class KeyMap:
    """Layout of a checkpoint: which HuggingFace tensors hold each tensor of our model.

    Attributes:
        rows: our name below ``layers.N.`` -> the stored name below ``model.layers.N.``, where it is not
            the default (``model.params.SPECS``). ``{expert}`` stands for an expert's number; gate and up may have two
            names; an empty name means that files lack the tensor. Dims of the stored tensor may follow in letters
            (E experts, I their width, L of their input): ``[E 2*I L]`` has gates before ups, ``[E L I*2]`` alternates.
            ``[1/2]``: our tensor is the second half of its rows. ``[1 E]``: it is one row of a matrix.
        ffn_parts: number of experts that each dense FFN is cut into when a dense checkpoint becomes
            a mixture: expert e gets part e mod ``ffn_parts``. 0 for other checkpoints.
        router_std, router_seed: standard deviation and seed of the routers' random weights in it.
        table: slices by our name, which replace ``rows`` for a class without a native family.
        layouts: layouts of files, if not as ``rows`` says; the last is transformers' in memory.
        unread, integers: regular expressions of tensors to skip; ends of names of int64 ones.
        renames: (old, new) parts of names, replaced in this order in every name that ``rows`` gives.
        layers_together: how many of our layers are one of the files'; {half}: place among them.
    """

    rows: Mapping[str, str] = field(default_factory=dict)
    ffn_parts: int = 0
    router_std: float = 0.0
    router_seed: int = 0
    table: Mapping[str, tuple[Piece, ...]] = field(default_factory=dict)
    layouts: tuple[KeyMap, ...] = ()
    unread: tuple[str, ...] = ()
    integers: tuple[str, ...] = ()
    renames: tuple[tuple[str, str], ...] = ()
    layers_together: int = 1

    def renamed(self, key: str) -> str:
        """Return the name in files of the tensor that transformers calls ``key``."""
        key = reduce(lambda key, pair: key.replace(*pair), self.renames, key)
        if self.layers_together > 1 and (layer := re.search(r"\d+", key)):
            pair, half = divmod(int(layer[0]), self.layers_together)
            key = key.replace(layer[0], str(pair), 1).replace("{half}", str(half))
        return key

    def row(self, name: str) -> str:
        """Return the stored name of our layer tensor ``name``, such as ``mlp.gate.weight``.

        The result may have two names (gate and up), and dims as in ``rows``: ``mlp.experts.down_proj [E I L]``.
        """
        spec = SPECS.get(name)
        return self.rows.get(name, spec.hf if spec and spec.hf else name)

    @property
    def fused(self) -> bool:
        """True if all experts of a layer share the tensors of gate and up projections."""
        return " [E" in self.row(GATE_UP)

    @property
    def transposed(self) -> bool:
        """True if matrices of experts are stored with rows and columns exchanged (GPT-OSS)."""
        return " [E L" in self.row(GATE_UP)

    def fitting(self, keys: Collection[str]) -> KeyMap:
        """Return the variant of this layout that fits files with tensors of the names ``keys``.

        The names tell whether experts are stored one by one, fused as in transformers 5, or stacked
        as mlx-lm does.
        """
        for layout in self.layouts:
            stored = [piece.key for pieces in layout.table.values() for piece in pieces]
            if stored and all(key in keys for key in stored):
                return layout
        fused = self.in_memory.row(GATE_UP).partition(" ")[0]
        if any(key.endswith(f".{fused}") for key in keys):
            return self.in_memory
        if any(".switch_mlp." in key for key in keys):
            return self.stacked
        for layout in self.layouts:
            if layout.renames and layout.renamed(EMBEDDING) in keys:
                return layout
        return self.per_expert if keys else self

    @property
    def stacked(self) -> KeyMap:
        """Layout of the same family as mlx-lm 0.32 saves it.

        Gate projections of all experts are one tensor, and so are up and down projections.
        """
        stack = self.per_expert.row(DOWN).partition(".")[0] + ".switch_mlp"
        rows = {GATE_UP: f"{stack}.gate_proj.weight {stack}.up_proj.weight [E I L]"}
        return replace(
            self, rows={**self.per_expert.rows, **rows, DOWN: f"{stack}.down_proj.weight"}
        )

    @property
    def per_expert(self) -> KeyMap:
        """Layout of the same family with a tensor for every expert and matrix.

        ``transformers`` saves this layout even if published files have fused experts; block-FP8 always has it.
        """
        rows = {name: row for name, row in self.rows.items() if row != FUSED.rows.get(name)}
        return replace(self, rows=rows)

    @property
    def in_memory(self) -> KeyMap:
        """Layout of the same family in transformers 5, where a layer's experts are fused.

        ``save_pretrained(save_original_format=False)`` writes this layout too.
        """
        return self.layouts[-1] if self.layouts else replace(self, rows={**self.rows, **FUSED.rows})

    def pieces(self, name: str, shape: Shape, experts: range | None = None) -> Sequence[Piece]:
        """Return the slices of stored tensors that hold our tensor ``name``: by expert, gate before up.

        Args:
            shape: full shape of our tensor.
            experts: numbers of the experts that are needed; slices of others may be left out. None:
                all.
        """
        if self.table:
            return self.table[name]
        slices = self._pieces(name, shape, experts)
        if self.renames:
            slices = [piece._replace(key=self.renamed(piece.key)) for piece in slices]
        return slices

    def _pieces(self, name: str, shape: Shape, experts: range | None) -> Sequence[Piece]:
        match = _LAYER.fullmatch(name)
        if match is None:
            return [whole(name if name.startswith("lm_head.") else f"model.{name}", shape)]
        layer, _, name = match.groups()
        row, _, dims = self.row(name).partition(" [")
        keys = [f"model.{layer}{key}" for key in row.split()]
        if "{" in row or (self.ffn_parts and keys and name in (GATE_UP, DOWN)):
            return [*one_by_one(keys, shape, experts or range(shape[0]), self.ffn_parts or 1)]
        if "/" in dims:
            at, parts = map(int, dims[:-1].split("/"))
            rows, *rest = shape
            piece = whole(keys[0], shape)
            return [
                piece._replace(shape=(parts * rows, *rest), offset=(at * rows, *[0] * len(rest)))
            ]
        if dims == "1 E]":
            return [whole(keys[0], shape)._replace(file=(1, *shape))]
        letters = SPECS[name].shape.split() if dims else []
        order = [tuple(map(letters.index, dim.split("*"))) for dim in dims[:-1].split()]
        pieces = [whole(key, shape, tuple(order)) for key in keys]
        if (1, 2) not in order and len(keys) < 2:
            return pieces
        # Ranks have a part of I, which lies in two places of a tensor, or in two tensors.
        step = shape[2] if len(keys) == 1 else 0
        size, cut = (shape[0], 1, *shape[2:]), ((0,), (2,), (3,))
        return [
            pieces[i % len(keys)]._replace(
                start=(0, i, 0, 0), size=size, dims=cut, offset=(0, i * step, 0)
            )
            for i in (0, 1)
        ]


_ROUTER_ROWS = {name: SPECS[name].hf for name in (ROUTER, "mlp.router.expert_bias")}
# Names of routers and routed experts in the models of transformers 5, the same for every family.
FUSED = KeyMap(_ROUTER_ROWS | {GATE_UP: f"{GATE_UP} [E 2*I L]", DOWN: DOWN})


def mtp_copies(config: ModelConfig) -> dict[str, str]:
    """Return the tensors that files repeat for each module for multi-token prediction.

    Modules share embedding and head with the model, and published layouts repeat both. The result
    maps the name of a copy, such as ``layers.61.embed_tokens.weight``, to the name of the original.
    """
    embedding = "embed_tokens.weight"
    originals = {
        embedding: embedding,
        "shared_head.head.weight": embedding if config.tie_embeddings else "lm_head.weight",
    }
    modules = config.all_layers[config.num_layers :]
    return {f"layers.{layer}.{copy}": name for layer in modules for copy, name in originals.items()}


def our_tensors(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    """Yield name and full shape of each tensor of our model in a checkpoint, buffers included.

    If files repeat embedding and head for modules for multi-token prediction, the copies are
    yielded too.
    """
    yield from ((param.name, param.shape) for param in model_params(config, buffers=True))
    for name in mtp_copies(config):
        yield name, (config.vocab_size, config.hidden_size)


def hf_tensors(config: ModelConfig, keys: KeyMap) -> dict[str, Shape]:
    """Return name and shape of every tensor of a checkpoint of ``config`` in layout ``keys``."""
    tensors = {}
    alike = {}  # names below a layer and shapes, which are made once for equal layers
    for name, shape in our_tensors(config):
        layer = None if keys.table else _LAYER.fullmatch(name)
        prefix, kind = "", (name, shape)
        if layer is not None:
            half = int(layer[2]) % keys.layers_together
            prefix, kind = keys.renamed(f"model.{layer[1]}"), (layer[3], shape, half)
        if kind not in alike:
            pieces = keys.pieces(name, shape)
            alike[kind] = [
                (piece.key.removeprefix(prefix), piece.file or piece.shape) for piece in pieces
            ]
        tensors |= {prefix + key: full for key, full in alike[kind]}
    return tensors


def is_quantized(name: str, piece: Piece, keys: KeyMap, encoding: Encoding) -> bool:
    """Return True if checkpoints in ``encoding`` store codes and scales for this slice of a tensor.

    MXFP4 and INT4 quantize routed experts. Block-FP8 quantizes the matrices of layers, except
    routers, the output gate of shared experts, the weights of an indexer's heads and the input
    projection of a module for multi-token prediction. It leaves the embedding, the head and their copies alone.

    Args:
        name: name of our tensor.
        piece: the slice, and the HuggingFace tensor that stores it.
        keys: layout of the checkpoint.
    """
    if encoding != "fp8":
        return encoding != "plain" and name.endswith((GATE_UP, DOWN))
    matrix = len(piece.shape) == 2 and piece.key.endswith(".weight")
    plain = [f"{name}.weight" for name in (_INDEX_WEIGHTS, *_MTP_KEPT)]
    plain += [keys.row(ROUTER), keys.row(SHARED_GATE)]
    return piece.key.startswith("model.layers.") and matrix and not piece.key.endswith((*plain,))


def quantization_config(
    config: ModelConfig, keys: KeyMap, encoding: Encoding
) -> dict[str, Any] | None:
    """Return the ``quantization_config`` of a checkpoint in ``encoding``; None for ``plain``.

    It has the form of DeepSeek-V3's (``fp8``), GPT-OSS' (``mxfp4``) or Kimi-K2-Thinking's (``int4``).

    Raises:
        ConfigError: the family has no checkpoints in ``encoding``, ``mxfp4`` or ``int4`` finds no experts, or
            their rows are no multiple of the numbers that share a scale.
    """
    if encoding == "plain":
        return None
    if encoding == "fp8":
        return _fp8_config(config, keys)
    name = encoding.upper()
    publisher = {"mxfp4": "gpt_oss", "int4": "deepseek_v3"}.get(encoding)
    if publisher is None:
        kinds = ", ".join(get_args(WrittenEncoding))
        raise ConfigError("encoding", encoding, f"must be one of {kinds}", "Use plain")
    if not config.num_moe_layers:
        rule = f"{name} stores experts, and no layer has any"
        raise ConfigError("model.family", config.family, rule, "Export it in bfloat16")
    if config.family != publisher:
        raise ConfigError(
            "model.family",
            config.family,
            f"{name} is written in the format of published {publisher} files, which no other family has",
            "Export it in bfloat16",
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
        plain = "model.layers.*.self_attn model.layers.*.mlp.router model.embed_tokens lm_head"
        return {"quant_method": "mxfp4", "modules_to_not_convert": plain.split()}
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
    if keys.fused or keys.renames:
        form = "all experts of a layer in one tensor" if keys.fused else "codes or names of its own"
        raise ConfigError(
            "model.family",
            config.family,
            f"block-FP8 stores matrices, and this family stores {form}",
            "Export it in bfloat16",
        )
    plain = [
        piece.key.removesuffix(".weight")
        for name, shape in our_tensors(config)
        for piece in keys.pieces(name, shape, range(1))
        if len(piece.shape) == 2
        and piece.key.startswith("model.layers.")
        and not is_quantized(name, piece, keys, "fp8")
    ]
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(FP8_BLOCK),
        "modules_to_not_convert": ["lm_head", *plain],
    }
