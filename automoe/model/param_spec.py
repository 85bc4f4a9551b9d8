"""``ParamSpec``, a row of the table of parameters, and ``Param``, a tensor of that row. No torch.

``automoe.model.params`` has the rows of automoe's decoder. A model that other code computes has a
table of its own (``automoe.config.tier``).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from operator import attrgetter
from typing import Any

from automoe.config.schema import ModelConfig

PARTS = (
    "embedding",
    "attention",
    "dense_ffn",
    "routed_experts",
    "latent",
    "shared_experts",
    "router",
    "residual",
    "norms",
    "head",
    "mtp",
)
# These are places of a layer (``ParamSpec.place``). Attention itself follows the place SCORES.
NUM_PLACES, SCORES = 9, 3


@dataclass(frozen=True)
class ParamSpec:
    """One row of the table of parameters: a parameter of a layer, or embedding, final norm, head.

    Attributes:
        name: name of the parameter within its module; in ``SPECS`` within its layer.
        shape: one word for each dim: a sum of products of sizes, such as ``N*D`` (``sizes_of``).
        place: order in which a token passes the parameters of a layer; parameters of one place do
            not depend on each other. 0: first norm, and what joins an MTP module's inputs.
            1: projections of the first norm's output. 2: norms, convolution and decays.
            3: projections of latents, sinks. 4: norm of the heads' output. 5: output projection.
            6: second norm. 7: router and projections into FFNs. 8: projections out of FFNs.
        kind: ``matrix``: tokens are multiplied by it; ``conv``: a convolution over a few positions;
            ``vector``: added or compared; ``norm``: scales of a norm; ``buffer``: not trained.
        tp: the dim that tensor parallelism shards; None: every rank keeps the whole tensor.
        etp: the dim that expert tensor parallelism shards. Ranks that share the width of an expert
            add up their outputs, so each of them adds its own columns of down_proj_bias.
        fsdp: the dim that FSDP shards. For experts it is the dim of rows, because row shards of a
            matrix are contiguous in a HuggingFace file, and dim 0 already belongs to the ep axis.
        fp8: whether ``train.fp8`` multiplies by it in 8 bits.
        lora: its name in ``lora.targets``; None: it gets no adapter.
        detached: whether no gradient passes from its products to their inputs.
        hf: its key below ``model.layers.N.`` in published files, if that differs from its name;
            gate and up have one key each. A family lists its other spellings
            (``automoe.hf.keys``).
        when: key of ``ModelConfig`` that must be set for a module to have this parameter, or, after
            ``not``, must not be set.
        part: component for counting parameters, of ``PARTS``, such as ``router``; filled in from
            the submodule that has the parameter.
        group: name in ``lora.targets`` of all matrices of that submodule; filled in from it too.
    """

    name: str
    shape: str
    place: int = 0
    kind: str = "matrix"
    tp: int | None = None
    etp: int | None = None
    fsdp: int = 0
    fp8: bool = False
    lora: str | None = None
    detached: bool = False
    hf: str = ""
    when: str = ""
    part: str = ""
    group: str = ""

    @property
    def decays(self) -> bool:
        """Whether weight decay applies: not to biases, norms and similar vectors."""
        return self.kind in ("matrix", "conv")

    @property
    def wide(self) -> bool:
        """Whether the tensor is stored and multiplied in at least float32, whatever ``train.dtype`` is."""
        return self.part in ("router", "residual")

    @property
    def orthogonalized(self) -> bool:
        """Whether Muon updates the tensor: a layer's matrix of more than one row."""
        in_layer = self.part not in ("embedding", "head")
        return self.kind == "matrix" and in_layer and self.shape.split()[-2] != "1"

    def is_in(self, model: ModelConfig) -> bool:
        """Return whether the modules of ``model`` have this parameter (condition ``when``)."""
        key = self.when.removeprefix("not ")
        return not key or bool(attrgetter(key)(model)) == (key == self.when)

    @property
    def per_kv_head(self) -> bool:
        """Whether the parameter is of a projection to key or value heads (there may be fewer than tp ranks)."""
        return "G" in self.shape


@dataclass(frozen=True)
class Param:
    """One tensor of a model: a row of the table of parameters with its concrete shape.

    Attributes:
        name: global name in the model.
        spec: the row of the table.
        layer: number of its decoder layer; None: embedding, final norm or head.
        trained: whether the optimizer updates it.
        kv_heads: number of key and value heads, for a projection to keys or values; else None.
        packed: numbers per block if ``lora.base`` quantizes the tensor, whose ``shape`` then ends
            in blocks and bytes; else 0.
    """

    name: str
    shape: tuple[int, ...]
    spec: ParamSpec
    layer: int | None = None
    kv_heads: int | None = None
    trained: bool = True
    packed: int = 0

    @property
    def part(self) -> str:
        """Component of the model that has the tensor: one of ``PARTS``, such as "attention"."""
        return self.spec.part

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def bytes_each(self, size: int) -> int:
        """Return the bytes per entry of ``shape``: 1 for a quantized tensor, else ``size``.

        Args:
            size: bytes per number of the dtype in which other tensors are stored.
        """
        return 1 if self.packed else size

    @property
    def expert(self) -> bool:
        """Whether the moe mesh shards the tensor: over ep and ep_shard, not dp_shard and cp."""
        return self.part == "routed_experts"

    @property
    def whole_over_etp(self) -> bool:
        """Whether this is an expert's tensor that every rank of expert tensor parallelism holds whole.

        An example is an adapter's matrix without a dim of the expert's width.
        """
        return self.expert and self.spec.etp is None

    @property
    def multiplies(self) -> bool:
        """Whether tokens are multiplied by the tensor as a matrix."""
        return self.spec.kind == "matrix"

    def tp_dim(self, tp: int) -> int | None:
        """Return the dim that ``tp`` ranks shard; None if each keeps the whole tensor."""
        whole = tp == 1 or (self.kv_heads is not None and self.kv_heads < tp)
        return None if whole else self.spec.tp


# What a row's kind says of it. Colwise: a tp rank has some output features; rowwise: some input
# features, and outputs are summed. Experts are stacked, and dim 2 is an expert's width.
_KINDS: dict[str, dict[str, Any]] = {
    "matrix": {},
    "linear": {"fp8": True},
    "colwise": {"fp8": True, "tp": 0},
    "rowwise": {"fp8": True, "tp": 1},
    "experts": {"fp8": True, "etp": 2},
    "conv": {"kind": "conv"},
    "vector": {"kind": "vector"},
    "norm": {"kind": "norm"},
    "buffer": {"kind": "buffer"},
}


def parse_rows(table: str) -> tuple[ParamSpec, ...]:
    """Parse a table with a parameter per line: ``name | shape | place | kind KEY=VALUE ...``.

    These are fields of ``ParamSpec``, but ``kind`` is a word such as colwise, which stands for the
    fields that ``_KINDS`` lists, and ``unless`` is a negated ``when``. Keys in ``hf`` are separated
    by commas, and EXPERT in a key stands for ``mlp.experts.{expert}``. Linear, colwise and rowwise
    matrices may get LoRA adapters; ``lora`` is then their name without ".weight".
    """
    specs = []
    for row in table.strip().splitlines():
        name, shape, place, facts = (cell.strip() for cell in row.split("|"))
        kind, *more = facts.split()
        columns = _KINDS[kind] | dict(fact.split("=") for fact in more)
        for axis in {"tp", "etp", "fsdp"} & columns.keys():
            columns[axis] = int(columns[axis])
        if "unless" in columns:
            columns["when"] = f"not {columns.pop('unless')}"
        if "hf" in columns:
            hf = columns["hf"].replace("EXPERT", "mlp.experts.{expert}")
            columns["hf"] = hf.replace(",", " ")
        if kind in ("linear", "colwise", "rowwise"):
            columns["lora"] = name.removesuffix(".weight")
        specs.append(ParamSpec(name, shape, int(place), **columns))
    return tuple(specs)
